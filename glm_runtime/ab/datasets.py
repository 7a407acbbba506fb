"""SGLang's benchmark datasets as workloads: `--workload "random-ids --num-prompts 16 --random-input-len 256"`.

Names, flags and defaults are those of `python -m sglang.benchmark.serving`; rows come from its own registry.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import random
from collections.abc import Mapping
from typing import Any

from glm_runtime.ab.asks import Ask, Workload, in_order
from glm_runtime.ab.mixes import Parser

# Text for a text model, one turn a request; the others need images, chat rounds, or a pickle of SGLang's own.
NAMES = ("random", "random-ids", "sharegpt", "custom", "generated-shared-prefix", "longbench_v2")
DEFAULTS: Mapping[str, Any] = {
    "num_prompts": 64,
    "dataset_path": "",
    "sharegpt_output_len": None,
    "sharegpt_context_len": None,
    "prompt_suffix": "",
    "apply_chat_template": False,
    "random_input_len": 1024,
    "random_output_len": 128,
    "random_range_ratio": 0.0,
    "gsp_num_groups": 8,
    "gsp_prompts_per_group": 8,
    "gsp_system_prompt_len": 512,
    "gsp_question_len": 64,
    "gsp_output_len": 64,
    "gsp_range_ratio": 1.0,
    "request_rate": float("inf"),
}


def make(name: str, words: list[str], tokenizer: Any, seed: int) -> Workload:
    """Asks of a dataset; arrivals by a Poisson process of --request-rate, all at once by default.

    Raises ValueError naming the flag, or the dataset that does not load.
    """
    import numpy as np
    from sglang.benchmark.datasets import get_dataset

    values = _flags(name, words)
    rate = values.request_rate
    if not rate > 0:
        raise ValueError(f"--workload {name}: --request-rate {rate} is not above 0")
    values.dataset_name, values.seed, values.tokenize_prompt = name, seed, name == "random-ids"
    values.gsp_fast_prepare = True  # NOTE: else SGLang keeps and reads the prompts as a pickle in the home folder
    random.seed(seed)
    np.random.seed(seed)
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            rows = get_dataset(values, tokenizer)
    except (OSError, AssertionError, ValueError, KeyError) as error:
        raise ValueError(f"--workload {name} does not load: {' '.join(str(error).split()) or type(error)}") from None
    gaps = np.random.default_rng(seed).exponential(1 / rate, len(rows)) if rate < float("inf") else np.zeros(len(rows))
    asks = []
    for row, at in zip(rows, np.cumsum(gaps), strict=True):
        ids = isinstance(row.prompt, list) and all(isinstance(token, int) for token in row.prompt)
        if not ids and not isinstance(row.prompt, str):
            raise ValueError(f"--workload {name}: a row is neither text nor token ids")
        if ids:
            asks.append(Ask(float(at), tuple(row.prompt), int(row.output_len)))
        else:  # SGLang does not count the tokens of every dataset's prompts
            asks.append(Ask(float(at), row.prompt, int(row.output_len), "", len(tokenizer.encode(row.prompt))))
    return Workload(" ".join([name, *words]), f"SGLang's dataset {name}", in_order(asks))


def _flags(name: str, words: list[str]) -> argparse.Namespace:
    parser = Parser(prog=f"--workload {name}", add_help=False, allow_abbrev=False)
    for flag, default in DEFAULTS.items():
        option = f"--{flag.replace('_', '-')}"
        if isinstance(default, bool):
            parser.add_argument(option, action="store_true")
        else:
            kind = int if flag in ("sharegpt_output_len", "sharegpt_context_len") else type(default)
            parser.add_argument(option, type=kind, default=default)
    return parser.parse_args(words)
