"""What the slots have done since start, for GET /policy; one set of names on CPU and GPU.

rows       query rows, once a step        work       chunks, gathers and the like, once a layer
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(slots=True)
class IndexerCounters:
    """Of a `qchunk` indexer. Who takes the dense branch counts its rows: on CPU the attention backend."""

    paged_rows: int = 0
    gathered_rows: int = 0
    sharded_rows: int = 0
    chunks: int = 0
    gathers: int = 0
    key_slices: int = 0

    def facts(self) -> dict[str, Any]:
        """Rows by the way they took, and the work, as plain JSON values."""
        return {
            "indexer_rows": {"paged": self.paged_rows, "gathered": self.gathered_rows, "sharded": self.sharded_rows},
            "indexer_work": {"chunks": self.chunks, "gathers": self.gathers, "key_slices": self.key_slices},
        }


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
