"""The prompts that every equality test asks with: fixed, of printable tokens, none a prefix of another.

lengths    1  2  15 | 63 64 65 | 100 500 1500 | 6000      below, around and beyond one page and index_topk (both 64)
"""

from __future__ import annotations

import functools
import random

from glm_runtime.model.tokenizer import printable

LENGTHS = (1, 2, 15, 63, 64, 65, 100, 500, 1500, 6000)
NEW = 32  # tokens generated after each
CROWD = (10, 60, 64, 100, 129, 200, 300, 400)  # eight requests side by side
CROWD_NEW = 256


@functools.cache
def prompt(length: int, series: str = "equality") -> list[int]:
    """`length` token ids, the same in every run; another `series` gives other ids."""
    draw = random.Random(f"{series}/{length}")
    words = printable()
    return [draw.choice(words) for _ in range(length)]


def crowd() -> list[list[int]]:
    """The eight prompts of the batch-invariance tests."""
    return [prompt(length, "crowd") for length in CROWD]
