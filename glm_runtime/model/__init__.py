"""The embedded GLM-MoE-DSA models: built from a recipe, the same bytes everywhere, never downloaded."""

from glm_runtime.model.build import build, ensure, ensure_recipe
from glm_runtime.model.recipe import PRESETS, Recipe, RecipeError, preset

__all__ = ["PRESETS", "Recipe", "RecipeError", "build", "ensure", "ensure_recipe", "preset"]
