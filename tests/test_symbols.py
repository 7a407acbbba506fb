"""The start-up check of SGLang's symbols: green here, and one line where something moved."""

from __future__ import annotations

import ast
from dataclasses import fields
from importlib import metadata
from pathlib import Path

import pytest

from glm_runtime import symbols, symbols_gpu
from glm_runtime.config import ConfigError
from glm_runtime.symbols import SYMBOLS, WANTED, Symbol, check, found_parameters

REPO = Path(__file__).resolve().parent.parent


def test_the_installed_sglang_is_as_wanted() -> None:
    assert metadata.version("sglang") == WANTED
    check()


def test_what_the_gpu_slots_call_is_as_wanted() -> None:
    """FlashMLA and sgl-kernel by their sources: they cannot be imported without a GPU."""
    symbols_gpu.check_gpu()
    found = {symbol.path: symbols_gpu.source_parameters(symbol.path) for symbol in symbols_gpu.SOURCES}
    assert all(found[symbol.path] == symbol.parameters for symbol in symbols_gpu.SOURCES)
    assert symbols_gpu.source_parameters("sgl_kernel.top_k.nowhere") is None
    assert symbols_gpu.source_parameters("no_such_package.x") is None


def test_a_moved_source_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(symbols_gpu, "SOURCES", (Symbol("sgl_kernel.top_k.fast_topk_v2", ("score", "k")),))
    with pytest.raises(ConfigError, match=r"fast_topk_v2 takes \(score, lengths, topk, row_starts\).*\(score, k\)"):
        symbols_gpu.check_gpu()


def test_the_fields_that_the_gpu_backend_reads() -> None:
    from sglang.srt.layers.attention.dsa.dsa_indexer_metadata import DSAIndexerMetadata
    from sglang.srt.layers.attention.dsa_backend import DSAMetadata

    assert {"indexer_seq_lens_cpu", "dsa_extend_seq_lens_list", "real_page_table"} <= {
        f.name for f in fields(DSAMetadata)
    }
    assert "force_unfused_topk" in {f.name for f in fields(DSAIndexerMetadata)}


def test_a_missing_symbol() -> None:
    with pytest.raises(ConfigError, match=rf"json\.nowhere is missing in sglang {WANTED}, wanted is {WANTED}"):
        check((Symbol("json.nowhere"),))
    with pytest.raises(ConfigError, match=r"no_such_module\.x is missing .*ModuleNotFoundError"):
        check((Symbol("no_such_module.x"),))


def test_other_parameters() -> None:
    with pytest.raises(
        ConfigError, match=r"json\.dumps takes \(obj, .*\) in sglang .*, wanted is \(obj, indent\)"
    ) as error:
        check((Symbol("json.dumps", ("obj", "indent")),))
    assert "\n" not in str(error.value)


def test_another_version_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata, "version", lambda name: "9.9.9")
    with pytest.raises(ConfigError, match=rf"sglang 9\.9\.9, wanted is {WANTED}"):
        check((Symbol("json.nowhere"),))


def test_no_sglang(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", absent)
    with pytest.raises(ConfigError, match=rf"sglang is not installed; glm_runtime needs sglang=={WANTED}"):
        check()


def test_parameters_as_written() -> None:
    assert found_parameters(symbols.check) == ("symbols",)
    assert found_parameters(Symbol.__eq__) is not None


def test_every_hook_target_is_checked() -> None:
    """The targets in hooks.py are in the table, so that a hook never meets a function it does not know."""
    tree = ast.parse((REPO / "glm_runtime" / "hooks.py").read_text())
    targets = [
        node.value.value
        for node in tree.body
        if isinstance(node, ast.Assign)
        and isinstance(node.value, ast.Constant)
        and str(node.value.value).startswith("sglang.")
    ]
    assert len(targets) >= 7
    known = {symbol.path for symbol in SYMBOLS if symbol.parameters is not None}
    assert set(targets) <= known
