"""What the slots have done since start, for GET /policy; one set of names on CPU and GPU.

rows       query rows, once a step        work       chunks, gathers and the like, once a layer
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(slots=True)
class IndexerCounters:
    """Of a `qchunk` indexer. `dense_rows` stays None where the attention backend counts them."""

    dense_rows: int | None = None
    paged_rows: int = 0
    gathered_rows: int = 0
    sharded_rows: int = 0
    chunks: int = 0
    gathers: int = 0
    key_slices: int = 0

    def facts(self) -> dict[str, Any]:
        """Rows by the way they took, and the work, as plain JSON values."""
        rows = {"paged": self.paged_rows, "gathered": self.gathered_rows, "sharded": self.sharded_rows}
        if self.dense_rows is not None:
            rows["dense"] = self.dense_rows
        work = {"chunks": self.chunks, "gathers": self.gathers, "key_slices": self.key_slices}
        return {"indexer_rows": rows, "indexer_work": work}


@dataclass(slots=True)
class PrefillCounters:
    """Of a `workspace` prefill slot."""

    paged_rows: int = 0
    gathered_rows: int = 0
    gathers: int = 0
    workspace_rows: int = 0

    def facts(self) -> dict[str, Any]:
        """Rows by the way they took, and the work, as plain JSON values."""
        return {
            "prefill_rows": {"paged": self.paged_rows, "gathered": self.gathered_rows},
            "prefill_work": {"gathers": self.gathers, "workspace_rows": self.workspace_rows},
        }
