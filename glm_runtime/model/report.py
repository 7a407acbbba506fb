"""Measured figures of a built model: how far apart its two best logits lie, under transformers in float32."""

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from glm_runtime.model import rng

PROMPTS = (1, 2, 15, 63, 64, 65, 100, 500, 1500)
NEW_TOKENS = 32


def prompt(count: int, stream: int = 0) -> list[int]:
    """`count` token ids below 256 (bytes), the same for the same arguments."""
    return (rng.bits(1, f"prompt/{stream}/{count}", count) % 256).astype(int).tolist()


@torch.inference_mode()
def gaps(folder: Path) -> tuple[list[float], list[list[int]]]:
    """Top-1 minus top-2 logit of every generated position over all PROMPTS, and the tokens generated for each."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    found: list[float] = []
    texts: list[list[int]] = []
    for count in PROMPTS:
        ids = torch.tensor([prompt(count)])
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=NEW_TOKENS,
            min_new_tokens=NEW_TOKENS,
            do_sample=False,
            output_logits=True,
            return_dict_in_generate=True,
        )
        best = torch.stack([step[0] for step in out.logits]).float().topk(2).values
        found += (best[:, 0] - best[:, 1]).tolist()
        texts.append(out.sequences[0, count:].tolist())
    return found, texts


def report(folder: Path) -> None:
    """Prints median and 1st percentile of the gaps, and the variety of the generated tokens."""
    found, texts = gaps(folder)
    values = torch.tensor(found)
    print(f"model {folder.name}: {len(found)} generated positions, prompts of {', '.join(map(str, PROMPTS))} tokens")
    print(f"top-1/top-2 logit gap: median {values.median():.3f}, 1st percentile {values.quantile(0.01):.3f}")
    distinct = sum(len(set(text)) for text in texts) / len(texts)
    print(f"distinct tokens in {NEW_TOKENS} generated: {distinct:.1f} on average")
