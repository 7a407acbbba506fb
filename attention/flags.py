"""Flags of the attention slots: vLLM's names where they are vLLM's, our own beside them. Pure.

    command line, Engine keywords --> AttentionFlags --knobs()--> scheduler process --> QChunk, Workspace

| flag                                   | default                        | needs                                    |
|----------------------------------------|--------------------------------|------------------------------------------|
| --sparse-indexer-max-logits-mb         | 512; on CPU 64                 | --indexer qchunk                         |
| --indexer-strict-cap (ours)            | on                             | --indexer qchunk                         |
| --indexer-tp-shard-min-rows            | by the cost rule of each step  | --indexer qchunk, --tp-size 2 or more    |
| --sparse-mla-prefill-workspace-factor  | 5 up to 262,144 positions or 2 | --indexer qchunk or --prefill-kv workspace |

A flag whose slot is not chosen ends the launch.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from attention.indexer.split import DEFAULT_MAX_LOGITS_MB
from attention.workspace import LEAST_FACTOR

CPU_MAX_LOGITS_MB = 64
OWNERS: Mapping[str, tuple[tuple[str, str], ...]] = {
    "sparse_indexer_max_logits_mb": (("indexer", "qchunk"),),
    "indexer_strict_cap": (("indexer", "qchunk"),),
    "indexer_tp_shard_min_rows": (("indexer", "qchunk"),),
    "sparse_mla_prefill_workspace_factor": (("indexer", "qchunk"), ("prefill_kv", "workspace")),
}
SLOT_FLAGS: Mapping[str, str] = {"indexer": "--indexer", "prefill_kv": "--prefill-kv"}
_LEAST = {
    "sparse_indexer_max_logits_mb": 1,
    "sparse_mla_prefill_workspace_factor": LEAST_FACTOR,
    "indexer_tp_shard_min_rows": 1,
}


class FlagError(ValueError):
    """A flag that cannot be honoured; one line naming it."""


@dataclass(frozen=True)
class AttentionFlags:
    """Values of the attention slots' flags; None: not given."""

    sparse_indexer_max_logits_mb: int | None = None
    sparse_mla_prefill_workspace_factor: int | None = None
    indexer_strict_cap: bool | None = None
    indexer_tp_shard_min_rows: int | None = None

    def given(self) -> list[str]:
        """Names of the fields that the operator set."""
        return [field.name for field in fields(self) if getattr(self, field.name) is not None]

    def knobs(self, slots: Mapping[str, str], device: str, ranks: int) -> dict[str, Any]:
        """Settings of the chosen slots, defaults filled in; JSON values.

        Args:
            slots: slot -> implementation. device: "cpu" or anything else. ranks: tensor-parallel size.

        Raises:
            FlagError: a given flag belongs to an implementation that is not chosen, or has nothing to act on.
        """
        for name in self.given():
            if not _owned(name, slots):
                slot, owner = OWNERS[name][0]
                raise FlagError(
                    f"{flag_of(name)} belongs to {SLOT_FLAGS[slot]} {owner}; {SLOT_FLAGS[slot]} {slots[slot]} cannot "
                    f"honour it: use --policy vllm-ledger or {SLOT_FLAGS[slot]} {owner}"
                )
        if self.indexer_tp_shard_min_rows is not None and ranks == 1:
            raise FlagError(
                f"--indexer-tp-shard-min-rows {self.indexer_tp_shard_min_rows} has nothing to shard with --tp-size 1; "
                "raise it, or drop --indexer-tp-shard-min-rows"
            )
        cap = CPU_MAX_LOGITS_MB if device == "cpu" else DEFAULT_MAX_LOGITS_MB
        values = {
            "sparse_indexer_max_logits_mb": self.sparse_indexer_max_logits_mb or cap,
            "indexer_strict_cap": self.indexer_strict_cap is not False,
            "indexer_tp_shard_min_rows": self.indexer_tp_shard_min_rows,
            "sparse_mla_prefill_workspace_factor": self.sparse_mla_prefill_workspace_factor,
        }
        return {name: value for name, value in values.items() if _owned(name, slots)}


def _owned(name: str, slots: Mapping[str, str]) -> bool:
    return any(slots.get(slot) == owner for slot, owner in OWNERS[name])


def flag_of(name: str) -> str:
    """Command-line form of a field."""
    return "--" + name.replace("_", "-")


def from_values(values: Mapping[str, Any]) -> AttentionFlags:
    """Flags from parsed values or keyword arguments (None: not given). Raises FlagError naming the flag."""
    given = {f.name: values[f.name] for f in fields(AttentionFlags) if values.get(f.name) is not None}
    for name, least in _LEAST.items():
        value = given.get(name)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < least):
            raise FlagError(f"{flag_of(name)} {value}: a whole number of at least {least} is needed")
    strict = given.get("indexer_strict_cap")
    if strict is not None and not isinstance(strict, bool):
        raise FlagError(f"--indexer-strict-cap {strict!r}: true or false is needed")
    return AttentionFlags(**given)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the attention slots' flags to `parser`."""
    group = parser.add_argument_group(
        "glm_runtime, slots 'qchunk' and 'workspace' (names and defaults are vLLM's, unless marked)"
    )

    def add(flag: str, text: str, metavar: str) -> None:
        group.add_argument(flag, type=int, default=None, help=text, metavar=metavar)

    add("--sparse-indexer-max-logits-mb", "MiB of index scores at once (default 512; on CPU 64)", "MIB")
    add(
        "--sparse-mla-prefill-workspace-factor",
        "full-length contexts that the prefill workspace holds (default 5 up to 262,144 positions, else 2)",
        "N",
    )
    group.add_argument(
        "--indexer-strict-cap",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="[ours] keep the logits and workspace caps even for a single row (default on; off is vLLM's behaviour)",
    )
    add(
        "--indexer-tp-shard-min-rows",
        "prefill rows from which tensor-parallel ranks share the scoring (default [ours]: where it pays; vLLM: 65536)",
        "ROWS",
    )
