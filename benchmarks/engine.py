"""The engine against transformers' GlmMoeDsaForCausalLM: prefill, decode, and both against the machine's floor.

    python -m benchmarks.engine [--presets tiny small] [--dtypes float32 bfloat16] [--contexts 512 2048 8192]

    arm            what is timed                                            what is left out
    engine         glm_runtime.Engine, streamed: a request's first token    nothing: queues, tokenizer and detokenizer
                   (prefill), then the gaps between tokens (decode)         processes are in both figures
    transformers   the module alone, use_cache, eager: its prefill in       server, sampling, detokenizing
                   pieces of --piece tokens, then one token at a time

Both run on --threads threads, one request at a time, in turn, on the same random prompt. Floor of one forward pass over
rows at positions p (active weights W = all but the embedding; k routed experts of a layer):

    projections    max(2 * W * rows / gemm,                                  bytes(W, all experts if prefill) / copy)
    index, a full layer   max(2 * index_heads * 128 * sum(p + 1) / gemm,     context * 128 values / copy)
                                                                             rows that see <= topk keys score nothing
    attention, a layer    max(2 * heads * (576 + 512) * selected / gemm,     selected * 576 values / copy)
                                                                             selected = sum of min(p + 1, topk)
    LM head        one row a request

The parts depend on each other, so they add up. A prefill is the sum of its chunks. gemm and copy are measured before
each context's rounds (``measure_floor``).
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.common import Ask, Floor, Report, measure_floor, median, parser

CHUNK = 2048  # the engine's chunked prefill size
PREFILL_ASKS = {2048: 3.0, 8192: 5.0}
DECODE_ASKS = {512: 3.0, 8192: 10.0}
FLOOR_ASK = 2.5
FLOOR_CONTEXT = 8192
MEMORY_FROM, MEMORY_TO = 2048, 8192
MEMORY_ASK_MB = 64.0  # one head's float32 scores of a chunk over 8,192 keys; all 32 heads take 2 GiB


# ---- the floor ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Work:
    """What one forward pass cannot avoid. FLOP and bytes of each of its parts."""

    flop: dict[str, float]
    moved: dict[str, float]

    def seconds(self, floor: Floor, bf16: bool) -> float:
        """Least time: the parts follow one another."""
        return sum(floor.seconds(self.flop[part], self.moved[part], bf16) for part in self.flop)


def weights(config: dict[str, Any]) -> tuple[float, float, float]:
    """(active, resident, head) values: touched by one row, held by the decoder layers, and of the LM head."""
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    latent, rope = config["kv_lora_rank"], config["qk_rope_head_dim"]
    attention = hidden * config["q_lora_rank"]
    attention += config["q_lora_rank"] * heads * (config["qk_nope_head_dim"] + rope)
    attention += hidden * (latent + rope) + heads * latent * (config["qk_nope_head_dim"] + config["v_head_dim"])
    attention += heads * config["v_head_dim"] * hidden
    index = config["index_n_heads"] * (config["q_lora_rank"] * config["index_head_dim"] + hidden)
    index += hidden * config["index_head_dim"]
    expert = 3 * hidden * config["moe_intermediate_size"]
    layers, full = config["num_hidden_layers"], config["indexer_types"].count("full")
    dense = config["mlp_layer_types"].count("dense")
    shared = layers * attention + full * index + dense * 3 * hidden * config["intermediate_size"]
    shared += (layers - dense) * (hidden * config["n_routed_experts"] + config["n_shared_experts"] * expert)
    active = shared + (layers - dense) * config["num_experts_per_tok"] * expert
    resident = shared + (layers - dense) * config["n_routed_experts"] * expert
    return active, resident, hidden * config["vocab_size"]


def work(config: dict[str, Any], first: int, last: int, value_bytes: int) -> Work:
    """The pass over rows at positions first .. last - 1; its last row goes through the LM head."""
    active, resident, head = weights(config)
    rows, topk = last - first, config["index_topk"]
    layers, full = config["num_hidden_layers"], config["indexer_types"].count("full")
    scored = sum(p + 1 for p in range(max(first, topk), last))
    selected = sum(min(p + 1, topk) for p in range(first, last))
    dim, latent = config["index_head_dim"], config["kv_lora_rank"]
    row = latent + config["qk_rope_head_dim"]
    return Work(
        flop={
            "projections": 2.0 * active * rows + 2.0 * head,
            "index": 2.0 * config["index_n_heads"] * dim * scored * full,
            "attention": 2.0 * config["num_attention_heads"] * (row + latent) * selected * layers,
        },
        moved={
            "projections": ((active if rows == 1 else resident) + head) * value_bytes,
            "index": (last * dim * value_bytes * full) if scored else 0.0,
            "attention": selected * row * value_bytes * layers,
        },
    )


def prefill_floor(config: dict[str, Any], tokens: int, floor: Floor, bf16: bool) -> float:
    """Seconds of a prefill of ``tokens`` tokens in chunks of CHUNK."""
    pieces = [(start, min(start + CHUNK, tokens)) for start in range(0, tokens, CHUNK)]
    return sum(work(config, a, b, 2 if bf16 else 4).seconds(floor, bf16) for a, b in pieces)


def decode_floor(config: dict[str, Any], context: int, floor: Floor, bf16: bool) -> float:
    """Seconds of one decode step of one request."""
    return work(config, context, context + 1, 2 if bf16 else 4).seconds(floor, bf16)


# ---- the arms ----------------------------------------------------------------------------------------------------


@dataclass
class Sample:
    """Seconds of one arm at one context: a prefill per round, all decode steps of all rounds."""

    prefill: list[float] = field(default_factory=list)
    decode: list[float] = field(default_factory=list)


class EngineArm:
    """A running ``glm_runtime.Engine``."""

    def __init__(self, folder: Path, dtype: str, threads: int, tokens: int) -> None:
        import psutil

        import glm_runtime

        self.engine = glm_runtime.Engine(
            model_path=str(folder),
            dtype=dtype,
            max_total_tokens=tokens,
            chunked_prefill_size=CHUNK,
            cpu_threads=threads,
        )
        children = psutil.Process().children(recursive=True)
        self.scheduler = next(child for child in children if "scheduler" in " ".join([child.name(), *child.cmdline()]))

    def run(self, prompt: list[int], new_tokens: int) -> tuple[float, list[float]]:
        """Seconds to the first token, and of each further one."""
        sampling = {"temperature": 0, "max_new_tokens": new_tokens, "ignore_eos": True}
        stamps = [time.perf_counter()]
        seen = 0
        for answer in self.engine.generate(input_ids=prompt, sampling_params=sampling, stream=True):
            count = answer["meta_info"]["completion_tokens"]
            # NOTE: a late reader may find several tokens in one answer; their steps share the time between answers.
            now = time.perf_counter()
            stamps += [stamps[-1] + (now - stamps[-1]) * (i + 1) / (count - seen) for i in range(count - seen)]
            seen = count
        steps = [after - before for before, after in pairwise(stamps)]
        return steps[0], steps[1:]

    def peak_mb(self) -> float:
        """Largest resident size of the scheduler process so far, MiB."""
        for line in Path(f"/proc/{self.scheduler.pid}/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) / 1024
        raise RuntimeError(f"/proc/{self.scheduler.pid}/status has no VmHWM")

    def close(self) -> None:
        """End its processes."""
        self.engine.shutdown()


class TransformersArm:
    """transformers' module, alone in this process."""

    def __init__(self, folder: Path, dtype: str, piece: int) -> None:
        import torch
        from transformers import GlmMoeDsaForCausalLM
        from transformers.utils import logging

        logging.set_verbosity_error()  # it reports the NextN layer's weights, which it does not use
        self.piece = piece
        self.model = GlmMoeDsaForCausalLM.from_pretrained(
            folder, dtype=getattr(torch, dtype), attn_implementation="eager"
        ).eval()

    def run(self, prompt: list[int], new_tokens: int) -> tuple[float, list[float]]:
        """Seconds of the prefill, and of each decode step; greedy, only the last row goes through the LM head."""
        import torch
        from transformers import DynamicCache

        with torch.inference_mode():
            ids = torch.tensor([prompt])
            stamps = [time.perf_counter()]
            cache = DynamicCache(config=self.model.config)
            for start in range(0, len(prompt), self.piece):
                logits = self.model(
                    ids[:, start : start + self.piece], past_key_values=cache, use_cache=True, logits_to_keep=1
                ).logits
            token = logits[:, -1:].argmax(-1)
            stamps.append(time.perf_counter())
            for _ in range(new_tokens - 1):
                token = self.model(token, past_key_values=cache, use_cache=True, logits_to_keep=1).logits.argmax(-1)
                int(token)
                stamps.append(time.perf_counter())
        steps = [after - before for before, after in pairwise(stamps)]
        return steps[0], steps[1:]


@contextmanager
def torch_threads(threads: int) -> Iterator[None]:
    """torch on ``threads`` threads in this process."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def prompt_of(tokens: int, seed: int) -> list[int]:
    """Random byte tokens; a new seed shares no page with an older prompt."""
    generator = random.Random(seed)
    return [generator.randrange(32, 250) for _ in range(tokens)]


def compare(
    ours: EngineArm, theirs: TransformersArm, context: int, new_tokens: int, rounds: int, limit_s: float, seed: int
) -> tuple[Sample, Sample]:
    """Both arms in turn at one context; no further round begins after ``limit_s`` seconds."""
    a, b = Sample(), Sample()
    begin = time.perf_counter()
    for index in range(rounds):
        prompt = prompt_of(context, seed + index)
        turn: list[tuple[EngineArm | TransformersArm, Sample]] = [(ours, a), (theirs, b)]
        for arm, sample in turn if index % 2 == 0 else reversed(turn):
            prefill, decode = arm.run(prompt, new_tokens)
            sample.prefill.append(prefill)
            sample.decode += decode
        if time.perf_counter() - begin > limit_s:
            break
    return a, b


# ---- the program -------------------------------------------------------------------------------------------------


def options() -> argparse.Namespace:
    """The command line; --quick narrows what was not given."""
    made = parser(__doc__.splitlines()[0] if __doc__ else "")
    made.add_argument("--presets", nargs="+", choices=("tiny", "small"))
    made.add_argument("--dtypes", nargs="+", choices=("float32", "bfloat16"))
    made.add_argument("--contexts", nargs="+", type=int)
    made.add_argument("--piece", type=int, default=1024, help="prefill piece of transformers (default 1024)")
    made.add_argument("--rounds", type=int, default=5, help="rounds a context (default 5)")
    made.add_argument("--limit", type=float, default=60.0, help="seconds after which a context takes no new round")
    found = made.parse_args()
    found.presets = found.presets or (["tiny"] if found.quick else ["tiny", "small"])
    found.dtypes = found.dtypes or (["float32"] if found.quick else ["float32", "bfloat16"])
    found.contexts = sorted(found.contexts or ([512, 2048] if found.quick else [512, 2048, 8192]))
    if found.contexts[0] < 1:
        made.error(f"--contexts {found.contexts[0]}: at least 1 is needed")
    for name in ("piece", "rounds"):
        if getattr(found, name) < 1:
            made.error(f"--{name} {getattr(found, name)}: at least 1 is needed")
    if found.quick:
        found.rounds, found.limit = min(found.rounds, 3), min(found.limit, 6.0)
    return found


def case(report: Report, preset: str, dtype: str) -> None:
    """One model in one dtype: every context, then its memory."""
    from glm_runtime.model import ensure

    chosen = report.options
    name, bf16 = f"{preset} {dtype}", dtype == "bfloat16"
    folder = ensure(preset)
    config = json.loads((folder / "config.json").read_text())
    new_tokens = 9 if chosen.quick else 17
    longest = max(chosen.contexts) + new_tokens
    if longest > config["max_position_embeddings"]:
        raise SystemExit(f"--contexts {max(chosen.contexts)}: the model ends at {config['max_position_embeddings']}")
    theirs = TransformersArm(folder, dtype, chosen.piece)
    ours = EngineArm(folder, dtype, chosen.threads, tokens=(longest // 64 + 2) * 64 * 2)
    try:
        for arm in (ours, theirs):
            arm.run(prompt_of(100, 1), 4)
        empty = median([ours.run(prompt_of(1, 2 + i), 1)[0] for i in range(5)])
        report.figure(f"{name} empty_request_ms", empty * 1e3)
        peaks: dict[int, float] = {}
        for context in chosen.contexts:
            floor = measure_floor(chosen.threads)  # NOTE: beside the rounds it is held against: the machine drifts
            a, b = compare(ours, theirs, context, new_tokens, chosen.rounds, chosen.limit, seed=context)
            peaks[context] = ours.peak_mb()
            show(report, name, context, a, b, config, floor, bf16)
        if MEMORY_FROM in peaks and MEMORY_TO in peaks:
            memory(report, name, peaks, config, 2 if bf16 else 4)
    finally:
        ours.close()
        del theirs
        gc.collect()


def show(
    report: Report, name: str, context: int, a: Sample, b: Sample, config: dict[str, Any], floor: Floor, bf16: bool
) -> None:
    """Print and keep the figures of one context, and hold them against the asks."""
    prefill, decode = median(a.prefill), median(a.decode)
    figures = {
        "prefill_tokens_s": context / prefill,
        "prefill_transformers_tokens_s": context / median(b.prefill),
        "prefill_ratio": median(b.prefill) / prefill,
        "prefill_over_floor": prefill / prefill_floor(config, context, floor, bf16),
        "decode_ms": decode * 1e3,
        "decode_transformers_ms": median(b.decode) * 1e3,
        "decode_ratio": median(b.decode) / decode,
        "decode_over_floor": decode / decode_floor(config, context, floor, bf16),
    }
    rounds = len(a.prefill)
    report.figure(f"{name} {context}", {**figures, "rounds": rounds, "floor": asdict(floor)})
    print(
        f"{name} {context:>5}: copy {floor.copy_gb_s:.1f} GB/s, float32 {floor.gemm_f32_gflop_s:.0f} and bf16 "
        f"{floor.gemm_bf16_gflop_s:.0f} GFLOP/s\n"
        f"{name} {context:>5}: prefill {figures['prefill_tokens_s']:>8,.0f} tokens/s "
        f"(transformers {figures['prefill_transformers_tokens_s']:,.0f}: {figures['prefill_ratio']:.2f}x; "
        f"{figures['prefill_over_floor']:.1f}x the floor), decode {figures['decode_ms']:.2f} ms "
        f"(transformers {figures['decode_transformers_ms']:.1f}: {figures['decode_ratio']:.2f}x; "
        f"{figures['decode_over_floor']:.1f}x the floor), {rounds} rounds",
        flush=True,
    )
    if context in PREFILL_ASKS:
        report.ask(Ask(f"{name} prefill {context}", figures["prefill_ratio"], PREFILL_ASKS[context], ">=", "x"))
    if context in DECODE_ASKS:
        report.ask(Ask(f"{name} decode {context}", figures["decode_ratio"], DECODE_ASKS[context], ">=", "x"))
    if context == FLOOR_CONTEXT:
        for phase in ("prefill", "decode"):
            report.ask(
                Ask(f"{name} {phase} {context} over floor", figures[f"{phase}_over_floor"], FLOOR_ASK, "<=", "x")
            )


def memory(report: Report, name: str, peaks: dict[int, float], config: dict[str, Any], value_bytes: int) -> None:
    """The scheduler's peak at MEMORY_TO over that at MEMORY_FROM, less the cache rows that became resident."""
    full = config["indexer_types"].count("full")
    values = config["num_hidden_layers"] * (config["kv_lora_rank"] + config["qk_rope_head_dim"])
    row = (values + full * config["index_head_dim"]) * value_bytes
    # NOTE: each round's prompt has fresh pages until the pool is full, so up to the whole pool becomes resident.
    cache_mb = 2 * MEMORY_TO * row / 2**20
    growth = peaks[MEMORY_TO] - peaks[MEMORY_FROM]
    report.figure(f"{name} peak_mb", {str(context): peak for context, peak in peaks.items()})
    report.figure(f"{name} cache_mb", cache_mb)
    print(f"{name}: scheduler peak {peaks[MEMORY_FROM]:,.0f} MB at 2,048, {peaks[MEMORY_TO]:,.0f} MB at 8,192 tokens")
    report.ask(Ask(f"{name} memory growth beyond cache rows", growth - cache_mb, MEMORY_ASK_MB, "<=", " MB"))


def main() -> int:
    chosen = options()
    report = Report("engine", chosen)
    with torch_threads(chosen.threads):
        for preset in chosen.presets:
            for dtype in chosen.dtypes:
                case(report, preset, dtype)
    return report.finish()


if __name__ == "__main__":
    raise SystemExit(main())
