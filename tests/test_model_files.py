"""A torn or foreign model folder is told apart from a whole one, by name of what is wrong."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from glm_runtime import model_files
from glm_runtime.config import ConfigError
from glm_runtime.model import ensure
from glm_runtime.model_shapes import mismatch


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A copy of the embedded model that a test may damage."""
    return Path(shutil.copytree(ensure("tiny"), tmp_path / "model"))


def check(model: Path, load_format: str | None = None) -> None:
    """Both checks, as a launch does them."""
    model_files.check(str(model), load_format)


def weights(model: Path) -> Path:
    """Its only weight file."""
    (file,) = model.glob("*.safetensors")
    return file


def test_the_embedded_model_is_whole(model: Path) -> None:
    check(model)


@pytest.mark.parametrize("kept", [0, 5, 8, 1000, -1, -1000])
def test_a_cut_weight_file(model: Path, kept: int) -> None:
    file = weights(model)
    content = file.read_bytes()
    file.write_bytes(content[:kept])
    with pytest.raises(ConfigError, match=f"--model-path .*{file.name} (is cut off|is damaged)"):
        check(model)
    check(model, "dummy")


def test_a_weight_file_of_noise(model: Path) -> None:
    weights(model).write_bytes(bytes(range(256)) * 64)
    with pytest.raises(ConfigError, match="cut off or no safetensors"):
        check(model)


def test_a_damaged_header(model: Path) -> None:
    file = weights(model)
    content = bytearray(file.read_bytes())
    content[8:12] = b"oops"
    file.write_bytes(content)
    with pytest.raises(ConfigError, match="damaged header"):
        check(model)


def test_bytes_appended(model: Path) -> None:
    with weights(model).open("ab") as stream:
        stream.write(b"more")
    with pytest.raises(ConfigError, match="is damaged"):
        check(model)


def test_no_weights(model: Path) -> None:
    weights(model).unlink()
    with pytest.raises(ConfigError, match="no weights there"):
        check(model)


def test_a_missing_shard(model: Path) -> None:
    file = weights(model)
    shard = model / "model-00001-of-00002.safetensors"
    file.rename(shard)
    index = {"weight_map": {"a": shard.name, "b": "model-00002-of-00002.safetensors"}}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ConfigError, match=r"model-00002-of-00002.safetensors is missing \(1 of 2 files\)"):
        check(model)
    (model / "model.safetensors.index.json").write_text("{")
    with pytest.raises(ConfigError, match=r"index.json does not read"):
        check(model)


def test_no_tokenizer(model: Path) -> None:
    for name in model_files.TOKENIZERS:
        (model / name).unlink(missing_ok=True)
    with pytest.raises(ConfigError, match="no tokenizer"):
        check(model)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"architectures": ["GlmMoeDsaForCausalLM"]', "\x00"])
def test_a_torn_config(model: Path, text: str) -> None:
    (model / "config.json").write_text(text)
    with pytest.raises(ConfigError, match=r"config\.json (does not read|is no JSON object)"):
        check(model)


@pytest.mark.parametrize("key", model_files.KEYS)
@pytest.mark.parametrize("value", [None, 0, "many", True])
def test_a_key_that_attention_stands_on(model: Path, key: str, value: Any) -> None:
    config = model_files.read_config(str(model))
    config[key] = value
    with pytest.raises(ConfigError, match=f"config.json (lacks|has .* for) {key}"):
        model_files.check_config(str(model), config)


@pytest.mark.parametrize("found", [["LlamaForCausalLM"], [], None, "GlmMoeDsaForCausalLM", ["DeepseekV32ForCausalLM"]])
def test_another_architecture(model: Path, found: Any) -> None:
    config = model_files.read_config(str(model)) | {"architectures": found}
    with pytest.raises(ConfigError, match="GLM-MoE-DSA"):
        model_files.check_config(str(model), config)


def test_a_hub_id_is_told_from_a_folder(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert model_files.is_hub_id("owner/name")
    assert not model_files.is_hub_id("/owner/name")
    assert not model_files.is_hub_id("./owner/name")
    monkeypatch.chdir(model.parent.parent)
    assert not model_files.is_hub_id(f"{model.parent.name}/model")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"moe_intermediate_size": 256}, r"mlp\.experts\.0\.gate_proj\.weight has shape \[128, 256\].*\[256, 256\]"),
        ({"num_attention_heads": 2}, r"q_b_proj\.weight has shape"),
        ({"num_hidden_layers": 10, "indexer_types": None, "mlp_layer_types": None}, r"model\.layers\.9\..* is missing"),
        ({"n_routed_experts": 9}, r"mlp\.gate\.weight has shape|experts\.8\..* is missing"),
        ({"indexer_types": ["full"] * 8}, r"model\.layers\.3\.self_attn\.indexer\.wq_b\.weight is missing"),
        ({"indexer_types": ["full"]}, r"does not describe the layers"),
        ({"intermediate_size": None}, r"does not describe the layers \(TypeError|KeyError"),
    ],
)
def test_weights_that_the_config_does_not_describe(model: Path, change: dict[str, Any], words: str) -> None:
    file = model / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with pytest.raises(ConfigError, match=words):
        check(model)


def test_packed_weights_are_not_compared_by_shape(model: Path) -> None:
    config = model_files.read_config(str(model))
    found = model_files.check_safetensors(str(model), weights(model))
    assert mismatch(config, found) is None
    packed = found | {"model.layers.0.self_attn.o_proj.weight": ("F8_E4M3", (1, 1))}
    assert mismatch(config, packed) is None
    assert mismatch(config, found | {"model.norm.weight": ("BF16", (1,))}) is not None
