"""Greedy tokens and logprobs of transformers' own GlmMoeDsaForCausalLM: what every equality test compares with.

    prompt --> prefill in pieces of CHUNK tokens over one cache --> argmax, one token at a time
    answer --> kept as JSON under the cache folder, keyed by model, dtype, prompt and transformers version

Nothing of ours computes here. One thing is pinned that transformers leaves open: TIES. `torch.topk` does not say which
of two equal index scores it keeps at the cut. The rule of this project is the lowest position, so the indexer's one
call of `Tensor.topk` is answered by `lowest_first`, which keeps the same scores and settles equal ones so.
"""

import functools
import hashlib
import json
import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import transformers
from transformers.models.glm_moe_dsa.modeling_glm_moe_dsa import GlmMoeDsaForCausalLM, GlmMoeDsaIndexer

from glm_runtime.model.build import cache_root

CHUNK = 256  # prefill piece: index scores take 32 heads x CHUNK x context float32
_REVISION = 1


@dataclass(frozen=True)
class Answer:
    """One greedy run. Lists have one entry a generated token, `prompt_logprobs` one a prompt token but the first."""

    tokens: list[int]
    logprobs: list[float]  # natural log, of the chosen token
    gaps: list[float]  # largest minus second largest logit
    prompt_logprobs: list[float]


def lowest_first(scores: torch.Tensor, k: int, dim: int = -1) -> SimpleNamespace:
    """Positions of the `k` largest of the last dimension, ascending; equal scores at the cut go to the lowest position.

    `scores` [..., n]; `.indices` int64 [..., k]. Stands in for `Tensor.topk` inside the indexer.
    """
    if dim not in (-1, scores.dim() - 1):
        raise ValueError(f"dim: only the last dimension, got {dim}")
    cut = torch.topk(scores, k, dim=-1).values[..., -1:]
    above = scores > cut
    level = scores == cut
    room = k - above.sum(dim=-1, keepdim=True)
    keep = above | (level & (level.cumsum(dim=-1) <= room))
    return SimpleNamespace(indices=keep.nonzero()[:, -1].view(*scores.shape[:-1], k))


class LowestFirstIndexer(GlmMoeDsaIndexer):
    """transformers' indexer with the tie rule."""

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        with mock.patch.object(torch.Tensor, "topk", lowest_first):
            return super().forward(*args, **kwargs)


class QuietForCausalLM(GlmMoeDsaForCausalLM):
    """transformers' model, without its list of the multi-token-prediction tensors that it does not use."""

    _keys_to_ignore_on_load_unexpected = [r"model\.layers\.\d+\..*"]  # noqa: RUF012


@functools.lru_cache(maxsize=2)
def load(folder: Path, dtype: str = "float32") -> GlmMoeDsaForCausalLM:
    """transformers' model of `folder` in `dtype` ("float32" or "bfloat16"), eager attention, the tie rule in force."""
    model = QuietForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype), attn_implementation="eager")
    for layer in model.model.layers:
        if layer.self_attn.indexer is not None:
            layer.self_attn.indexer.__class__ = LowestFirstIndexer
    return model.eval()


def _prefill(model: GlmMoeDsaForCausalLM, tokens: Sequence[int]) -> tuple[Any, torch.Tensor, list[float]]:
    """Returns the cache, the last logits [vocab] and the logprob of each token but the first."""
    cache = transformers.DynamicCache(config=model.config)
    ids = torch.tensor([list(tokens)])
    logprobs: list[float] = []
    last = torch.empty(0)
    for start in range(0, len(tokens), CHUNK):
        piece = ids[:, start : start + CHUNK]
        logits = model(piece, past_key_values=cache, use_cache=True).logits[0].float()
        follow = ids[0, start + 1 : start + piece.shape[1] + 1]
        scored = logits[: len(follow)].log_softmax(-1).gather(-1, follow[:, None])[:, 0]
        logprobs += scored.tolist()
        last = logits[-1]
    return cache, last, logprobs


@torch.inference_mode()
def run(model: GlmMoeDsaForCausalLM, prompt: Sequence[int], new_tokens: int) -> Answer:
    """Greedy generation of `new_tokens` tokens (no stop token ends it) by a model of `load`, nothing cached."""
    cache, last, prompt_logprobs = _prefill(model, prompt)
    tokens: list[int] = []
    logprobs: list[float] = []
    gaps: list[float] = []
    for step in range(new_tokens):
        first, second = last.topk(2).values.tolist()
        token = int(last.argmax())
        tokens.append(token)
        gaps.append(first - second)
        logprobs.append(float(last.log_softmax(-1)[token]))
        if step + 1 < new_tokens:
            last = model(torch.tensor([[token]]), past_key_values=cache, use_cache=True).logits[0, -1].float()
    return Answer(tokens, logprobs, gaps, prompt_logprobs)


@functools.lru_cache(maxsize=8)
def _identity(folder: Path) -> str:
    digest = hashlib.sha256((folder / "config.json").read_bytes())
    with open(folder / "model.safetensors", "rb") as file:
        while block := file.read(1 << 24):
            digest.update(block)
    return digest.hexdigest()


def _entry(folder: Path, dtype: str, prompt: Sequence[int]) -> Path:
    key = json.dumps([_REVISION, _identity(folder), dtype, transformers.__version__, list(prompt)])
    return cache_root() / "oracle" / f"{hashlib.sha256(key.encode()).hexdigest()[:32]}.json"


def _store(path: Path, answer: Answer) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent)
    with os.fdopen(handle, "w") as file:
        json.dump(answer.__dict__, file)
    os.replace(name, path)


def greedy(folder: Path, prompt: Sequence[int], new_tokens: int = 32, dtype: str = "float32") -> Answer:
    """The greedy answer of the model in `folder` to token ids `prompt`; read from disk where it was asked before."""
    path = _entry(folder, dtype, prompt)
    if path.exists():
        kept = Answer(**json.loads(path.read_text()))
        if len(kept.tokens) >= new_tokens:
            cut = slice(new_tokens)
            return Answer(kept.tokens[cut], kept.logprobs[cut], kept.gaps[cut], kept.prompt_logprobs)
    answer = run(load(folder, dtype), prompt, new_tokens)
    _store(path, answer)
    return answer


def score(folder: Path, tokens: Sequence[int], dtype: str = "float32") -> list[float]:
    """Logprob of every token of `tokens` but the first under the model in `folder`: for comparing cache dtypes."""
    return greedy(folder, tokens, 1, dtype).prompt_logprobs
