"""What the arms really ran with, and where they differ: the first thing a reader of a comparison has to see. Pure.

Two policies compared at their defaults differ in more than the policy: one cuts prompts at 2,048 tokens, the other at
8,192; one mixes prefill and decode in a step, the other does not. Such settings go by different names in the arms, so
the first rows are put in common words; the rest are the arms' own, as their servers reported them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

# Of no meaning for a comparison: addresses, files, and what a server counts.
SKIPPED = frozenset(
    {
        "step_log",
        "record",
        "record_text",
        "step_totals",
        "port",
        "host",
        "nccl_port",
        "served_model_name",
        "startup_time_s",
        "launch_command",
    }
)
# Fields that SGLang's server reports beside its arguments.
NOT_ARGUMENTS = frozenset({"internal_states", "version", "status", "kv_events", "load", "glm_runtime"})


@dataclass(frozen=True)
class Setting:
    """One setting. `values`: of each arm, None where it has no such setting; `group`: where it comes from."""

    group: str
    name: str
    values: tuple[Any, ...]

    @property
    def differs(self) -> bool:
        """Whether not all arms are alike."""
        return any(value != self.values[0] for value in self.values)


def _ledger(policy: Mapping[str, Any]) -> bool:
    return bool(policy["slots"]["scheduler"] == "ledger")


def _rows(policy: Mapping[str, Any]) -> Any:
    knobs = policy["knobs"]
    if _ledger(policy):
        return knobs.get("max_num_scheduled_tokens") or knobs.get("max_num_batched_tokens")
    chunk = knobs.get("chunked_prefill_size")
    return chunk if chunk and chunk > 0 else knobs.get("max_prefill_tokens")


def _mixed(policy: Mapping[str, Any]) -> str:
    return "yes" if _ledger(policy) or policy["knobs"].get("enable_mixed_chunk") else "no: one or the other"


def _requests(policy: Mapping[str, Any]) -> Any:
    knobs = policy["knobs"]
    limits = [knobs.get("max_num_active_seqs") or knobs.get("max_num_seqs"), knobs.get("max_running_requests")]
    return min((limit for limit in limits if limit), default=None)


def _pause(policy: Mapping[str, Any], server: Mapping[str, Any]) -> str:
    if _ledger(policy):
        every = policy["knobs"].get("prefill_schedule_interval") or 1
        return "each step" if every == 1 else f"each {every} steps"
    between = server.get("prefill_decode_interval") or 0
    return "whenever one waits" if not between else f"after {between} decode steps"


COMMON: Sequence[tuple[str, Callable[[Mapping[str, Any], Mapping[str, Any]], Any]]] = (
    ("rows of a step, at most", lambda policy, server: _rows(policy)),
    ("prefill and decode in one step", lambda policy, server: _mixed(policy)),
    ("a prefill runs", _pause),
    ("running requests, at most", lambda policy, server: _requests(policy)),
    ("KV tokens", lambda policy, server: policy["knobs"].get("max_total_num_tokens")),
    ("KV cache type", lambda policy, server: policy["knobs"].get("kv_cache_dtype")),
    ("model type", lambda policy, server: server.get("dtype")),
    ("prefix cache", lambda policy, server: "off" if server.get("disable_radix_cache") else "on"),
    ("overlap schedule", lambda policy, server: "off" if policy["knobs"].get("disable_overlap_schedule") else "on"),
    ("tensor parallel", lambda policy, server: server.get("tp_size")),
    ("device", lambda policy, server: policy.get("device")),
)


def table(policies: Sequence[Mapping[str, Any]], servers: Sequence[Mapping[str, Any]]) -> list[Setting]:
    """All settings of the arms.

    Args:
        policies: GET /policy of each arm. servers: GET /server_info of each arm.

    Returns:
        The policy's slots, settings in common words, the policies' own knobs, and SGLang's arguments that differ.
    """
    found = [Setting("policy", "policy", tuple(policy["policy"] for policy in policies))]
    for slot in policies[0]["slots"]:
        found.append(Setting("policy", slot, tuple(policy["slots"].get(slot) for policy in policies)))
    for name, read in COMMON:
        values = tuple(read(policy, server) for policy, server in zip(policies, servers, strict=True))
        found.append(Setting("effective", name, values))
    knobs = [{k: v for k, v in policy["knobs"].items() if not isinstance(v, dict)} for policy in policies]
    names = dict.fromkeys(name for own in knobs for name in own if name not in SKIPPED)
    found += [Setting("knob", name, tuple(own.get(name) for own in knobs)) for name in names]
    arguments = dict.fromkeys(name for server in servers for name in server)
    for name in arguments:
        if name in names or name in SKIPPED or name in NOT_ARGUMENTS:
            continue
        values = tuple(server.get(name) for server in servers)
        setting = Setting("SGLang argument", name, values)
        if setting.differs and not any(isinstance(value, dict | list) for value in values):
            found.append(setting)
    return found


def differences(settings: Sequence[Setting]) -> list[Setting]:
    """Settings in which the arms differ."""
    return [setting for setting in settings if setting.differs]


def shown(value: Any) -> str:
    """A value for people."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    return str(value)
