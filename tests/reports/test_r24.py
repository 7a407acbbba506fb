"""R24 (vllm#46506): a model whose layers share another layer's top-k starts, and shared layers use its indices."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from glm_runtime.memory import full_layers, token_bytes
from glm_runtime.model import PRESETS, ensure
from glm_runtime.model_files import read_config
from tests.server.conftest import Keeper

pytestmark = pytest.mark.server


@pytest.fixture(scope="module")
def config() -> dict[str, Any]:
    """The embedded model's config.json."""
    assert "tiny" in PRESETS
    return read_config(str(Path(ensure("tiny"))))


def test_the_embedded_model_shares(config: dict[str, Any]) -> None:
    types = config["indexer_types"]
    assert types[:3] == ["full", "full", "full"]
    assert "shared" in types[3:]
    assert full_layers(config) < config["num_hidden_layers"]


def test_it_starts_and_looks_beyond_the_top_k(keeper: Keeper, config: dict[str, Any]) -> None:
    """A prompt longer than index_topk, so that every shared layer really needs the ids of a full one."""
    server = keeper.get("--policy", "sglang", "--enable-metrics")
    prompt = [5 + (7 * i) % 200 for i in range(4 * config["index_topk"])]
    first = server.generate(prompt, 16)
    assert len(first) == 16
    assert server.generate(prompt, 16) == first


def test_shared_layers_keep_no_index_keys(config: dict[str, Any]) -> None:
    every = {**config, "indexer_types": ["full"] * config["num_hidden_layers"]}
    saved = token_bytes(every, "float32") - token_bytes(config, "float32")
    assert saved == (config["num_hidden_layers"] - full_layers(config)) * 512
