"""Writes a model folder, and keeps built ones in the user's cache.

    ensure(preset)   cache/<preset>-<digest>/ there and whole -> its path
                     else build into cache/.<preset>-<digest>.<random>/, then one rename

A folder is whole when `complete.json` names every file with its size; it is written last. Of two processes that ask at
once one builds, under the cache's lock, and the other waits and takes what was built.
"""

import contextlib
import fcntl
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from glm_runtime.model import config, tokenizer, weights
from glm_runtime.model.recipe import Recipe, preset

_MARK = "complete.json"


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def build(recipe: Recipe, out: Path) -> Path:
    """Writes the model of `recipe` into folder `out` (made if absent; same-named files are replaced); returns `out`.

    Raises OSError where the folder cannot be written.
    """
    out.mkdir(parents=True, exist_ok=True)
    (out / _MARK).unlink(missing_ok=True)
    dtype = {"float32": torch.float32, "bfloat16": torch.bfloat16}[recipe.dtype]
    kept_float = "e_score_correction_bias"  # float32 in published checkpoints of either dtype
    tensors = {
        name: torch.from_numpy(np.ascontiguousarray(array)).to(torch.float32 if name.endswith(kept_float) else dtype)
        for name, array in weights.tensors(recipe)
    }
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    _write_json(out / "config.json", config.model_config(recipe))
    _write_json(out / "generation_config.json", config.generation_config())
    (out / "tokenizer.json").write_text(tokenizer.build().to_str(pretty=True) + "\n", encoding="utf-8")
    _write_json(out / "tokenizer_config.json", tokenizer.tokenizer_config(recipe.context))
    (out / "chat_template.jinja").write_text(tokenizer.chat_template(), encoding="utf-8")
    sizes = {path.name: path.stat().st_size for path in sorted(out.iterdir()) if path.is_file()}
    _write_json(out / _MARK, {"recipe": recipe.digest(), "files": sizes})
    return out


def is_whole(folder: Path, recipe: Recipe) -> bool:
    """True when `folder` holds every file of the model of `recipe` at its full size."""
    try:
        mark = json.loads((folder / _MARK).read_text(encoding="utf-8"))
        sizes: dict[str, int] = mark["files"]
        return mark["recipe"] == recipe.digest() and all(
            (folder / name).stat().st_size == size for name, size in sizes.items()
        )
    except (OSError, ValueError, KeyError, TypeError):
        return False


def cache_root() -> Path:
    """$XDG_CACHE_HOME/glm_runtime, or ~/.cache/glm_runtime."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "glm_runtime"


@contextlib.contextmanager
def _alone(root: Path) -> Iterator[None]:
    """Holds the cache's lock file; a process that dies lets go of it."""
    with open(root / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def ensure_recipe(recipe: Recipe, label: str) -> Path:
    """The cached folder of `recipe`, built on first use; safe when several processes ask at once."""
    root = cache_root()
    final = root / f"{label}-{recipe.digest()}"
    if is_whole(final, recipe):
        return final
    root.mkdir(parents=True, exist_ok=True)
    with _alone(root):
        if is_whole(final, recipe):
            return final
        work = Path(tempfile.mkdtemp(prefix=f".{final.name}.", dir=root))
        try:
            build(recipe, work)
            work.chmod(0o755)
            shutil.rmtree(final, ignore_errors=True)  # a torn one
            work.rename(final)
        finally:
            shutil.rmtree(work, ignore_errors=True)
    return final


def ensure(preset_name: str = "tiny") -> Path:
    """The folder of preset `preset_name` in the user's cache, built on first use (seconds, no download).

    Raises RecipeError for an unknown preset, OSError where the cache cannot be written.
    """
    return ensure_recipe(preset(preset_name), preset_name)
