"""The model's tokenizer and the token ids that prompts may be made of."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from glm_runtime.ab.arms import Arm, flag_name, split_flags
from glm_runtime.config import ConfigError


def path_of(arm: Arm) -> str:
    """Model path of an arm; the embedded tiny model's where none is given."""
    for words in split_flags(arm.flags):
        if flag_name(words) in ("--tokenizer-path", "--model-path", "--model"):
            found = words[0].partition("=")[2] or " ".join(words[1:])
            if found:
                return found
    from glm_runtime.prepare import default_model

    return default_model()


def tokenizer(path: str) -> Any:
    """The tokenizer, as SGLang's benchmark loads it. ConfigError where there is none."""
    from sglang.benchmark.utils import get_tokenizer

    try:
        return get_tokenizer(path)
    except Exception as error:  # transformers raises any kind
        raise ConfigError(f"the tokenizer of {path} does not load: {' '.join(str(error).split())[:200]}") from None


def vocabulary(path: str, special: Sequence[int], size: int) -> range:
    """The longest run of token ids below the model's vocabulary size that are not special.

    Args:
        special: ids of special tokens. size: tokens that the tokenizer knows.
    """
    config = Path(path) / "config.json"
    if config.exists():
        from glm_runtime.model_files import read_config

        size = min(size, int(read_config(path).get("vocab_size") or size))
    edges = [-1, *sorted(one for one in set(special) if 0 <= one < size), size]
    runs = [range(a + 1, b) for a, b in itertools.pairwise(edges)]
    return max(runs, key=len)
