"""What --decode-context-parallel-size excludes, what SGLang is told, and the memory of a rank's share."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from glm_runtime import decode_ranks, memory
from glm_runtime.config import ConfigError, RuntimeConfig
from parallel.flags import ParallelFlags
from policies.registry import resolve

CONFIG = {"num_hidden_layers": 78, "indexer_types": ["full"] * 21 + ["shared"] * 57}


def request(dcp: int, run: int = 1, pcp: int = 1, device: str = "cpu", **slots: str) -> RuntimeConfig:
    policy = resolve("sglang", slots)
    knobs = dict(ParallelFlags(pcp, dcp, run if run > 1 else None).knobs())
    return RuntimeConfig(policy="sglang", slots=dict(policy.slots), device=device, knobs=knobs)


def given(**changes: Any) -> Any:
    return SimpleNamespace(**({"page_size": None, "chunked_prefill_size": None, "dcp_size": 1} | changes))


@pytest.mark.parametrize(
    ("server_args", "asked", "words"),
    [
        (
            given(page_size=64),
            request(2, 64),
            "--page-size 64: .* 128 tokens .*--decode-context-parallel-size 2.*lower",
        ),
        (given(chunked_prefill_size=128), request(4, 64), "--chunked-prefill-size 128: .* 256 tokens .* a multiple"),
        (given(dcp_size=4), request(2, device="accelerator"), "--decode-context-parallel-size 2 and --dcp-size 4"),
        (given(), request(2, pcp=2, device="accelerator"), "--prefill-context-parallel-size 2 .* GPU .* to 1"),
        (given(), request(2, device="accelerator", scheduler="ledger"), "-size 2 with --scheduler ledger .* sglang"),
        (given(), request(2, device="accelerator", indexer="qchunk"), "--indexer qchunk .* add --indexer ragged"),
        (given(dcp_size=2), request(1, device="accelerator", scheduler="ledger"), "-size 2 with --scheduler ledger"),
        (given(), request(2, pcp=2), "--prefill-kv paged .*--prefill-context-parallel-size 2 .*--prefill-kv workspace"),
        (given(), request(2, 8, device="accelerator"), "--cp-kv-cache-interleave-size 8 .* CPU only .* --device cpu"),
    ],
)
def test_a_refusal_names_the_flags_and_the_way_out(server_args: Any, asked: RuntimeConfig, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        decode_ranks.check(server_args, asked)


def test_a_slot_that_reads_a_whole_cache_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from attention import paged

    monkeypatch.delattr(paged, "READS_SHARDS")
    with pytest.raises(ConfigError, match=r"--prefill-kv paged .* --decode-context-parallel-size 2 .* workspace"):
        decode_ranks.check(given(), request(2))
    decode_ranks.check(given(), request(2, prefill_kv="workspace"))
    decode_ranks.check(given(), request(1))


def test_what_sglang_is_told() -> None:
    for asked, want in [
        (request(1), given()),
        (request(2), given(page_size=64)),
        (request(2, 64), given(page_size=128)),
        (request(2, device="accelerator"), given(dcp_size=2)),
    ]:
        told = given()
        decode_ranks.check(told, asked)
        decode_ranks.fit(told, asked)
        assert told == want


def test_a_rank_holds_its_share_of_the_latent_rows() -> None:
    """GLM-5.x: 78 layers of 1,152 B in bf16, 21 of them with index keys of 256 B."""
    assert memory.token_bytes(CONFIG, "bfloat16") == 78 * 1152 + 21 * 256
    assert memory.token_bytes(CONFIG, "bfloat16", 8) == 78 * 1152 // 8 + 21 * 256
    assert memory.token_bytes(CONFIG, "fp8_e4m3", 8) == 78 * 656 // 8 + 21 * 132
    more = memory.pool_tokens(2**36, CONFIG, "bfloat16", 8, 512) / memory.pool_tokens(2**36, CONFIG, "bfloat16")
    assert memory.pool_tokens(2**36, CONFIG, "bfloat16", 8, 512) % 512 == 0
    assert 5.6 < more < 5.8
