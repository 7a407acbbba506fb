"""python -m glm_runtime.plan: see the package."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence

import attention.flags
import policies.ledger.flags
from glm_runtime.plan.devices import parse
from glm_runtime.plan.report import as_json, sections, text
from glm_runtime.plan.setup import KV_KINDS, SPLITS, WEIGHT_BYTES, Setup
from glm_runtime.plan.shapes import KNOWN, PlanError, model
from parallel.limits import Sizes


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(
        prog="python -m glm_runtime.plan",
        description="Steps, indexer chunks, memory, rank balance, traffic and predicted times of a launch.",
    )
    add = made.add_argument
    add("--model", required=True, metavar="NAME|PATH", help=f"{', '.join(KNOWN)}, a preset, or a config.json")
    add("--gpus", required=True, metavar="8xH200", help="H100, H200, B200, or CPU (measured here)")
    add("--tp-size", "--tp", type=int, default=1, metavar="N")
    add("--prefill-context-parallel-size", "-pcp", type=int, default=1, metavar="N")
    add("--decode-context-parallel-size", "-dcp", type=int, default=1, metavar="N")
    add("--cp-kv-cache-interleave-size", type=int, default=1, metavar="N")
    add("--cp-split", choices=SPLITS, default="head-tail")
    add("--dp-size", "--dp", type=int, default=1, metavar="N")
    add("--ep-size", "--ep", type=int, default=1, metavar="N", help="1, or all ranks that share the experts")
    add("--context", type=int, required=True, metavar="TOKENS", help="the prompt")
    add("--output", type=int, default=1, metavar="TOKENS")
    add("--cached-prefix", type=int, default=0, metavar="TOKENS", help="of the prompt, found in the prefix cache")
    add("--decodes", type=int, default=0, metavar="N", help="requests that decode meanwhile")
    add("--decode-context", type=int, default=4096, metavar="TOKENS", help="of each of them (default 4096)")
    add("--max-model-len", "--context-length", type=int, metavar="TOKENS", help="positions; default: the model's")
    add("--kv-cache-dtype", choices=KV_KINDS, help="default bfloat16; float32 on CPU")
    add("--weights", choices=tuple(WEIGHT_BYTES), help="default fp8; float32 on CPU")
    add("--indexer", choices=("qchunk", "ragged"), default="qchunk")
    add("--prefill-kv", choices=("workspace", "paged"), default="workspace")
    add("--mem-fraction-static", type=float, default=0.9, metavar="F", help="share of a device's memory (default 0.9)")
    add("--budgets", metavar="N,N,...", help="compare these values of --max-num-batched-tokens")
    add("--no-advice", action="store_true", help="leave out the search for the best knob")
    add("--json", action="store_true", help="JSON instead of text")
    policies.ledger.flags.add_arguments(made)
    attention.flags.add_arguments(made)
    return made


def setup(values: argparse.Namespace) -> Setup:
    """The launch that the flags describe. PlanError or a FlagError for what cannot be."""
    named = model(values.model)
    count, device = parse(values.gpus)
    sizes = Sizes(
        tp=values.tp_size,
        pcp=values.prefill_context_parallel_size,
        dcp=values.decode_context_parallel_size,
        dp=values.dp_size,
        interleave=values.cp_kv_cache_interleave_size,
    )
    plain = "float32" if device.is_cpu else "bfloat16"
    return Setup(
        model=named,
        device=device,
        devices=count,
        sizes=sizes,
        ep=values.ep_size,
        context=values.context,
        output=values.output,
        cached=values.cached_prefix,
        decodes=values.decodes,
        decode_context=values.decode_context if values.decodes else 0,
        max_model_len=values.max_model_len,
        ledger=policies.ledger.flags.from_values(vars(values)),
        attention=attention.flags.from_values(vars(values)),
        qchunk=values.indexer == "qchunk",
        workspace=values.prefill_kv == "workspace",
        split=values.cp_split,
        kv=values.kv_cache_dtype or plain,
        weights=values.weights or ("float32" if device.is_cpu else "fp8"),
        memory_share=values.mem_fraction_static,
    )


def budgets_of(given: str | None) -> list[int]:
    """Values of --budgets. PlanError where they are no numbers."""
    try:
        found = [int(part) for part in given.split(",")] if given else []
    except ValueError:
        found = [0]
    if any(value < 1 for value in found):
        raise PlanError(f"--budgets {given}: whole numbers of at least 1, separated by commas, are needed")
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the plan; 2 where it cannot be made."""
    values = parser().parse_args(arguments)
    try:
        parts = sections(setup(values), budgets_of(values.budgets), advise=not values.no_advice)
    except (PlanError, attention.flags.FlagError, policies.ledger.flags.FlagError) as error:
        print(f"glm_runtime.plan: error: {error}", file=sys.stderr)
        return 2
    print(json.dumps(as_json(parts), indent=1) if values.json else text(parts))
    return 0


if __name__ == "__main__":
    sys.exit(main())
