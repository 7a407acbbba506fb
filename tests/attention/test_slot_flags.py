"""Flags of the attention slots: defaults by device, and a flag whose slot is not chosen is refused by name."""

from __future__ import annotations

from pathlib import Path

import pytest

from attention.flags import AttentionFlags, FlagError, from_values
from glm_runtime import config_file, prepare
from glm_runtime.cli import Options, split
from glm_runtime.config import ConfigError
from glm_runtime.prepare import request_for

STOCK = {"indexer": "ragged", "prefill_kv": "paged"}
BOTH = {"indexer": "qchunk", "prefill_kv": "workspace"}


def test_defaults() -> None:
    assert AttentionFlags().knobs(STOCK, "cpu", 1) == {}
    assert AttentionFlags().knobs(BOTH, "cpu", 2) == {
        "sparse_indexer_max_logits_mb": 64,
        "indexer_strict_cap": True,
        "indexer_tp_shard_min_rows": None,
        "sparse_mla_prefill_workspace_factor": None,
    }
    assert AttentionFlags().knobs(BOTH, "accelerator", 2)["sparse_indexer_max_logits_mb"] == 512
    only = AttentionFlags().knobs(STOCK | {"prefill_kv": "workspace"}, "cpu", 1)
    assert set(only) == {"sparse_mla_prefill_workspace_factor"}


@pytest.mark.parametrize(
    ("argv", "slots", "words"),
    [
        (["--sparse-indexer-max-logits-mb", "8"], ["--indexer", "ragged"], "--indexer qchunk; --indexer ragged"),
        (["--no-indexer-strict-cap"], [], "--indexer-strict-cap belongs to --indexer qchunk"),
        (["--indexer-strict-cap"], [], "--indexer-strict-cap belongs to --indexer qchunk"),
        (["--indexer-tp-shard-min-rows", "64"], [], "--indexer-tp-shard-min-rows belongs to --indexer qchunk"),
        (["--sparse-mla-prefill-workspace-factor", "3"], [], "--sparse-mla-prefill-workspace-factor belongs to"),
        (["--sparse-mla-prefill-workspace-factor", "1"], ["--prefill-kv", "workspace"], "at least 2"),
        (["--sparse-indexer-max-logits-mb", "0"], ["--indexer", "qchunk"], "at least 1"),
        (["--indexer-tp-shard-min-rows", "64"], ["--indexer", "qchunk"], "nothing to shard with --tp-size 1"),
    ],
)
def test_a_flag_that_cannot_be_honoured_ends_the_launch(argv: list[str], slots: list[str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        options, _, _ = split([*argv, *slots])
        request_for(options, "cpu", 1)


def test_the_request_carries_the_knobs() -> None:
    options, rest, _ = split(
        ["--policy", "vllm-ledger", "--sparse-indexer-max-logits-mb", "8", "--no-indexer-strict-cap"]
    )
    request = request_for(options, "cpu", 1)
    assert rest == []
    assert (request.slots["indexer"], request.slots["prefill_kv"]) == ("qchunk", "workspace")
    assert request.knobs["sparse_indexer_max_logits_mb"] == 8
    assert request.knobs["indexer_strict_cap"] is False


def test_the_slots_serve_on_a_gpu_too() -> None:
    request = request_for(Options(policy="vllm-ledger"), "accelerator", 1)
    assert (request.slots["indexer"], request.slots["prefill_kv"]) == ("qchunk", "workspace")
    assert request.knobs["sparse_indexer_max_logits_mb"] == 512


def test_a_slot_of_somebody_else_is_refused_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(prepare.GPU_SLOTS, "indexer", ("ragged",))
    with pytest.raises(ConfigError, match=r"--indexer qchunk works on CPU only; on a GPU choose --indexer ragged"):
        request_for(Options(policy="sglang", indexer="qchunk"), "accelerator", 1)


def test_in_a_config_file(tmp_path: Path) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text("indexer: qchunk\nindexer-strict-cap: false\nsparse_indexer_max_logits_mb: 3\n")
    content = config_file.read(str(file))
    options, rest, _ = split(config_file.our_flags(str(file), content))
    assert (rest, content) == ([], {})
    assert options.attention == AttentionFlags(sparse_indexer_max_logits_mb=3, indexer_strict_cap=False)


@pytest.mark.parametrize("values", [{"sparse_indexer_max_logits_mb": True}, {"indexer_strict_cap": "yes"}])
def test_keyword_arguments_are_checked(values: dict[str, object]) -> None:
    with pytest.raises(FlagError, match="--" + next(iter(values)).replace("_", "-")):
        from_values(values)
