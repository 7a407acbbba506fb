"""R27 (vllm#44550, TensorRT-LLM#15295): GLM-5 with some pair of weight and cache dtypes answers nonsense.

Every cache dtype that SGLang's command line takes is either served and measured against float32 (cells of
`tests/equality/test_cache_dtypes.py`, and of `tests/slots` for the gathered slots) or refused at start by name.
"""

from __future__ import annotations

import argparse
from types import SimpleNamespace
from typing import Any

import pytest

from glm_runtime.config import ConfigError
from glm_runtime.refuse import CPU_RULES, cache_kind, cpu_flags
from tests.equality.stage import FLAGS

MEASURED = {"auto": "auto", "bf16": "bfloat16", "bfloat16": "bfloat16", "fp8_e4m3": "fp8_e4m3"}


def choices() -> list[str]:
    """What --kv-cache-dtype of the installed SGLang takes."""
    from sglang.srt.server_args import ServerArgs

    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    (action,) = [a for a in parser._actions if "--kv-cache-dtype" in a.option_strings]
    assert action.choices
    return [str(choice) for choice in action.choices]


def arguments(**changes: Any) -> SimpleNamespace:
    """Raw arguments with a fine value for every rule."""
    candidates = (None, False, 1, "auto", "none", "sgl-kernel", 64)
    fine = {rule.field: next(value for value in candidates if rule.fine(value)) for rule in CPU_RULES}
    return SimpleNamespace(**fine | {"dtype": "auto"} | changes)


def test_every_cell_is_measured_or_refused() -> None:
    cells = {(flags["dtype"], flags.get("kv_cache_dtype", "auto")) for flags in FLAGS.values()}
    asked = choices()
    assert set(MEASURED) <= set(asked)
    for choice in asked:
        if choice in MEASURED:
            cpu_flags(arguments(kv_cache_dtype=choice))
            assert {("float32", MEASURED[choice]), ("bfloat16", MEASURED[choice])} <= cells
        else:
            with pytest.raises(ConfigError, match=f"--kv-cache-dtype {choice} cannot be honoured"):
                cpu_flags(arguments(kv_cache_dtype=choice))


@pytest.mark.parametrize(("dtype", "kind"), [("float32", "float32"), ("bfloat16", "bfloat16"), ("float16", "bfloat16")])
def test_auto_follows_the_checkpoint(dtype: str, kind: str) -> None:
    assert cache_kind(arguments(kv_cache_dtype="auto"), {"dtype": dtype}) == kind


@pytest.mark.parametrize("quantization", ["fp8", "w8a8_fp8", "modelopt_fp4"])
def test_quantised_weights_are_refused(quantization: str) -> None:
    with pytest.raises(ConfigError, match=f"--quantization {quantization}"):
        cpu_flags(arguments(quantization=quantization))
