"""Which engines the tests ask, one alive at a time, and what each has answered already.

stage.ask("chunked", asks) ─> same engine as before?  no: end that one, start this one
                           ─> asked before?           yes: the same replies, no second run
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tests import alone
from tests.equality.serving import Ask, Reply, Serving, StartError

# NOTE: room for all prompts side by side; chunks larger than any prompt, so that a prompt alone is one forward.
POOL = {"max_total_tokens": 12288, "chunked_prefill_size": 8192}
FLOAT32 = POOL | {"dtype": "float32"}
BFLOAT16 = POOL | {"dtype": "bfloat16"}

# In the order in which the tests run: each engine starts once.
FLAGS: dict[str, dict[str, Any]] = {
    "plain": FLOAT32,
    "chunked": FLOAT32 | {"chunked_prefill_size": 128, "disable_overlap_schedule": True},
    "mixed": FLOAT32 | {"chunked_prefill_size": 128, "enable_mixed_chunk": True},
    "tp2": FLOAT32 | {"tp_size": 2},
    "float32-bfloat16": FLOAT32 | {"kv_cache_dtype": "bfloat16"},
    "float32-fp8_e4m3": FLOAT32 | {"kv_cache_dtype": "fp8_e4m3"},
    "bfloat16-auto": BFLOAT16,
    "bfloat16-bfloat16": BFLOAT16 | {"kv_cache_dtype": "bfloat16"},
    "bfloat16-fp8_e4m3": BFLOAT16 | {"kv_cache_dtype": "fp8_e4m3"},
}


class Stage:
    """At most one engine: the one that was asked last."""

    def __init__(self) -> None:
        self._name = ""
        self._serving: Serving | None = None
        self._kept: dict[str, list[Reply]] = {}
        self._failed: dict[str, str] = {}

    def engine(self, name: str) -> Serving:
        """The engine of `FLAGS[name]` with an empty prefix cache; one that failed is not tried again."""
        if name in self._failed:
            raise StartError(self._failed[name])
        if self._serving is None or self._name != name:
            self.close()
        try:
            if self._serving is None:
                alone.take(self.close)
                self._serving, self._name = Serving(**FLAGS[name]), name
            return self._serving.fresh()
        except StartError as error:
            self._failed[name] = str(error)
            self.close()
            raise

    def together(self, name: str, asks: Sequence[Ask]) -> list[Reply]:
        """Replies to asks sent at once to an engine with an empty prefix cache."""
        key = f"{name} together {asks}"
        if key not in self._kept:
            self._kept[key] = self.engine(name).together(asks)
        return self._kept[key]

    def alone(self, name: str, ask: Ask) -> Reply:
        """Reply to one ask on an engine with an empty prefix cache and nothing else to do."""
        return self.together(name, [ask])[0]

    def close(self) -> None:
        """End the engine, if there is one."""
        if self._serving is not None:
            self._serving.close()
            self._serving = None
