"""Is this folder a whole GLM-MoE-DSA model? Asked before anything heavy is imported or started.

    folder ─> config.json: JSON, architecture, the keys attention stands on
           ─> tokenizer files
           ─> *.safetensors: | 8 bytes: header length | JSON header | data |   size = 8 + header + largest offset

A torn file is found by its size, a foreign one by names and shapes (`model_shapes.py`); values are not read.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from glm_runtime.config import ConfigError
from glm_runtime.model_shapes import Shape, mismatch

ARCHITECTURES = ("GlmMoeDsaForCausalLM",)
KEYS = (
    "num_hidden_layers",
    "hidden_size",
    "vocab_size",
    "num_attention_heads",
    "kv_lora_rank",
    "q_lora_rank",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "v_head_dim",
    "index_head_dim",
    "index_n_heads",
    "index_topk",
    "n_routed_experts",
    "num_experts_per_tok",
    "moe_intermediate_size",
    "max_position_embeddings",
)
TOKENIZERS = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json")
INDEX = "model.safetensors.index.json"
MAX_HEADER = 100_000_000


def _first_line(error: BaseException) -> str:
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0]


def is_hub_id(path: str) -> bool:
    """Whether `path` reads as owner/name and is no folder here."""
    return not Path(path).expanduser().exists() and not path.startswith(("/", ".", "~")) and path.count("/") == 1


def read_config(path: str) -> dict[str, Any]:
    """config.json of a model folder or hub id. Raises ConfigError naming --model-path."""
    folder = Path(path).expanduser()
    if is_hub_id(path):
        from transformers.utils import cached_file

        try:
            found = cached_file(path, "config.json")
        except Exception as error:  # the hub client raises many kinds; each means "not to be had"
            raise ConfigError(
                f"--model-path {path}: no such folder, and not to be had from the hub: {_first_line(error)}"
            ) from None
        file = Path(str(found))
    else:
        if not folder.exists():
            raise ConfigError(f"--model-path {path}: no such folder")
        if not folder.is_dir():
            raise ConfigError(f"--model-path {path}: a file, not a model folder")
        file = folder / "config.json"
    try:
        config = json.loads(file.read_text())
    except FileNotFoundError:
        raise ConfigError(f"--model-path {path}: no model folder, it has no config.json") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"--model-path {path}: config.json does not read: {_first_line(error)}") from None
    if not isinstance(config, dict):
        raise ConfigError(f"--model-path {path}: config.json is no JSON object")
    return config


def check_config(path: str, config: Mapping[str, Any]) -> None:
    """Refuse a model that the slots have no meaning for, and a config.json that lacks what attention stands on."""
    found = config.get("architectures") or ["none named"]
    if not isinstance(found, list) or not any(name in ARCHITECTURES for name in found):
        named = found[0] if isinstance(found, list) else found
        raise ConfigError(
            f"--model-path {path}: architecture {named} is not {' or '.join(ARCHITECTURES)}; glm_runtime serves "
            "GLM-MoE-DSA models only (SGLang itself serves the others: python -m sglang.launch_server)"
        )
    for key in KEYS:
        value = config.get(key)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            said = "lacks" if value is None else f"has {value!r} for"
            raise ConfigError(f"--model-path {path}: config.json {said} {key}, a positive whole number")


def check_safetensors(path: str, file: Path) -> dict[str, tuple[str, Shape]]:
    """Name -> (dtype, shape) of the tensors in one file. Raises ConfigError where it is cut off or foreign."""
    what = f"--model-path {path}: {file.name}"
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            header = stream.read(length) if size >= 8 and 2 <= length <= min(size - 8, MAX_HEADER) else b""
    except OSError as error:
        raise ConfigError(f"{what} does not read: {error.strerror}") from None
    if not header:
        raise ConfigError(f"{what} is cut off or no safetensors file ({size:,} bytes)")
    try:
        tensors = {name: entry for name, entry in json.loads(header).items() if name != "__metadata__"}
        end = max((int(entry["data_offsets"][1]) for entry in tensors.values()), default=0)
        found = {name: (str(entry["dtype"]), tuple(entry["shape"])) for name, entry in tensors.items()}
    except (ValueError, KeyError, TypeError, IndexError, AttributeError):
        raise ConfigError(f"{what} has a damaged header") from None
    if size != 8 + length + end:
        raise ConfigError(f"{what} is damaged: {size:,} bytes, its header tells of {8 + length + end:,}")
    return found


def check_folder(path: str, config: Mapping[str, Any], load_format: str | None = None) -> None:
    """Refuse a local model folder whose tokenizer or weights are missing or torn; a hub id is left to SGLang.

    Args:
        config: its config.json, for the names and shapes of the weights.
        load_format: SGLang's --load-format; weights are looked at for "auto" and "safetensors" only.
    """
    folder = Path(path).expanduser()
    if is_hub_id(path):
        return
    if not any((folder / name).is_file() for name in TOKENIZERS):
        raise ConfigError(f"--model-path {path}: no tokenizer there ({', '.join(TOKENIZERS)})")
    if load_format not in (None, "auto", "safetensors"):
        return
    index = folder / INDEX
    files = sorted(folder.glob("*.safetensors"))
    if index.is_file():
        try:
            wanted = {str(name) for name in json.loads(index.read_text())["weight_map"].values()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            raise ConfigError(f"--model-path {path}: {INDEX} does not read") from None
        missing = sorted(wanted - {file.name for file in files})
        if missing:
            raise ConfigError(f"--model-path {path}: {missing[0]} is missing ({len(missing)} of {len(wanted)} files)")
        files = [file for file in files if file.name in wanted]
    if not files:
        if load_format is None and any(folder.glob("*.bin")):
            return
        raise ConfigError(f"--model-path {path}: no weights there (*.safetensors)")
    found = {name: entry for file in files for name, entry in check_safetensors(path, file).items()}
    wrong = mismatch(config, found)
    if wrong is not None:
        raise ConfigError(f"--model-path {path}: {wrong}")


def override(text: str | None) -> dict[str, Any]:
    """SGLang's --json-model-override-args, which stand over config.json, as a mapping."""
    try:
        found = json.loads(text or "{}")
    except ValueError as error:
        raise ConfigError(f"--json-model-override-args does not read: {error}") from None
    if not isinstance(found, dict):
        raise ConfigError("--json-model-override-args is no JSON object")
    return found


def check(path: str, load_format: str | None = None, overrides: str | None = None) -> None:
    """All of the above: refuse a folder or hub id that cannot be served.

    Args:
        load_format, overrides: SGLang's --load-format and --json-model-override-args, None where not given.
    """
    config = read_config(path) | override(overrides)
    check_config(path, config)
    check_folder(path, config, load_format)
