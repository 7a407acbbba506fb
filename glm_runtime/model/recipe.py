"""What a built model is: a frozen recipe, its presets, and the hash that names its cache folder."""

import dataclasses
import hashlib
import json
from dataclasses import dataclass

REVISION = 5  # raised whenever the same recipe would give other bytes
DTYPES = ("float32", "bfloat16")


class RecipeError(ValueError):
    """A recipe field that cannot be honoured; the text names the field."""


@dataclass(frozen=True)
class Recipe:
    """Every number a checkpoint depends on. Sizes are counts of elements, `index_topk` counts cached tokens."""

    layers: int = 8
    hidden: int = 256
    heads: int = 4
    nope_dim: int = 64
    rope_dim: int = 64
    v_dim: int = 64
    q_lora: int = 128
    kv_lora: int = 512
    dense_inter: int = 512
    moe_inter: int = 128
    experts: int = 8
    experts_per_token: int = 2
    index_heads: int = 32
    index_dim: int = 128
    index_topk: int = 64
    context: int = 32768
    dtype: str = "float32"
    seed: int = 20

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise RecipeError(f"dtype: {self.dtype!r} is not one of {', '.join(DTYPES)}")
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.name not in ("dtype", "seed") and value < 1:
                raise RecipeError(f"{field.name}: must be at least 1, got {value}")
        if not 2 <= self.layers <= 1024:
            raise RecipeError(f"layers: must be 2 to 1024 (one dense, one or more MoE), got {self.layers}")
        if self.heads % 2:
            raise RecipeError(f"heads: must be even (tensor parallel 2), got {self.heads}")
        if self.experts_per_token > self.experts:
            raise RecipeError(f"experts_per_token: {self.experts_per_token} exceeds experts {self.experts}")
        if self.hidden % 256:
            raise RecipeError(f"hidden: must be a multiple of 256, got {self.hidden}")
        if 2 * self.moe_inter < self.hidden:
            raise RecipeError(f"moe_inter: must be at least hidden / 2 = {self.hidden // 2}, got {self.moe_inter}")
        if self.rope_dim + self.nope_dim != self.index_dim:
            raise RecipeError(f"index_dim: must be rope_dim + nope_dim = {self.rope_dim + self.nope_dim}")
        if self.kv_lora <= self.nope_dim:
            raise RecipeError(f"kv_lora: must exceed nope_dim {self.nope_dim}, got {self.kv_lora}")
        if self.index_heads % 4:
            raise RecipeError(f"index_heads: must be a multiple of 4, got {self.index_heads}")

    def digest(self) -> str:
        """12 hex digits that name this recipe and the builder's revision."""
        text = json.dumps([REVISION, dataclasses.asdict(self)], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:12]


PRESETS: dict[str, Recipe] = {
    "tiny": Recipe(),
    "small": Recipe(
        layers=12,
        hidden=512,
        heads=8,
        q_lora=256,
        dense_inter=1024,
        moe_inter=256,
        experts=16,
        experts_per_token=4,
        index_topk=256,
    ),
}


def preset(name: str) -> Recipe:
    """The recipe of preset `name`; an unknown one raises RecipeError listing the known."""
    if name not in PRESETS:
        raise RecipeError(f"preset: {name!r} is not one of {', '.join(PRESETS)}")
    return PRESETS[name]
