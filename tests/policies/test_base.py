"""Policy and SlotImpl: what they accept, refuse, load and report."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from policies.base import FLAGS, OFFERS, SLOTS, STOCK, Policy, PolicyError, SlotImpl, import_target
from policies.slots import BUILT_IN_SLOTS

REPO = Path(__file__).resolve().parents[2]


class Maker:
    """Stands in tests as a target that other processes could import."""

    @staticmethod
    def install(server_args: object) -> None:
        """A scheduler target."""


def test_every_slot_has_a_flag_an_offer_and_a_stock_filling_that_exists() -> None:
    assert set(FLAGS) == set(OFFERS) == set(STOCK) == set(SLOTS)
    known = {(impl.slot, impl.name) for impl in BUILT_IN_SLOTS}
    assert set(STOCK.items()) <= known


@pytest.mark.parametrize("name", ["", "Recent", "two words", "-dash", "a/b", None])
def test_a_name_has_to_be_typeable(name: Any) -> None:
    with pytest.raises(PolicyError, match="is no name"):
        Policy(name, "1", "")
    with pytest.raises(PolicyError, match="is no name"):
        SlotImpl("indexer", name)


def test_slots_have_to_be_the_four() -> None:
    with pytest.raises(PolicyError, match="unknown slot 'kv', known: scheduler, indexer, prefill_kv, context_parallel"):
        Policy("p", "1", "", {**STOCK, "kv": "paged"})
    with pytest.raises(PolicyError, match="slot 'indexer' is not filled"):
        Policy("p", "1", "", {slot: name for slot, name in STOCK.items() if slot != "indexer"})
    with pytest.raises(PolicyError, match="unknown slot 'kv'"):
        SlotImpl("kv", "paged")
    with pytest.raises(PolicyError, match="brings scheduler 'mine' twice"):
        Policy("p", "1", "", brings=(SlotImpl("scheduler", "mine"), SlotImpl("scheduler", "mine")))


def test_a_policy_keeps_no_hold_on_the_callers_mapping() -> None:
    slots = dict(STOCK)
    policy = Policy("p", "1", "", slots)
    slots["indexer"] = "changed"
    assert policy.slots["indexer"] == STOCK["indexer"]


def test_a_class_or_function_becomes_an_import_string() -> None:
    impl = SlotImpl("scheduler", "mine", Maker.install)
    assert impl.target == f"{Maker.__module__}:Maker.install"
    assert impl.load() is Maker.install
    assert import_target("json") is json


def test_a_target_that_no_other_process_could_import_is_refused() -> None:
    def local(server_args: object) -> None: ...

    for target in (lambda args: None, local):
        with pytest.raises(PolicyError, match="cannot be imported by name"):
            SlotImpl("scheduler", "mine", target)
    with pytest.raises(PolicyError, match="no class, function or"):
        SlotImpl("scheduler", "mine", 7)  # type: ignore[arg-type]


@pytest.mark.parametrize("target", ["", ":install", "json:", "json dumps", "json:a:b", "json..x", "1json"])
def test_a_target_string_has_to_be_an_import_string(target: str) -> None:
    with pytest.raises(PolicyError, match="is no 'module:attribute'"):
        SlotImpl("scheduler", "mine", target)


@pytest.mark.parametrize(
    ("slot", "target", "words"),
    [
        ("scheduler", "no_such_module_at_all:install", "--scheduler mine: .* does not load: ModuleNotFoundError"),
        ("scheduler", "json:no_such_name", "does not load: AttributeError"),
        ("scheduler", "json", "json is not callable"),
        ("indexer", "json", "--indexer mine: json has no function select"),
        ("prefill_kv", "json:dumps", "--prefill-kv mine: json:dumps has no function attend"),
        ("context_parallel", "json", "--cp-split mine: json is not callable"),
    ],
)
def test_loading_a_target_that_does_not_serve_names_flag_and_reason(slot: str, target: str, words: str) -> None:
    with pytest.raises(PolicyError, match=words):
        SlotImpl(slot, "mine", target).load()


def test_no_target_means_stock() -> None:
    assert SlotImpl("scheduler", "mine").load() is None


def test_the_description_is_plain_json_with_effective_knobs_over_defaults() -> None:
    brings = tuple(SlotImpl(slot, "mine", knobs={f"{slot}_knob": 1}, provider="somebody 1.0") for slot in SLOTS)
    policy = Policy("p", "2", "words", dict.fromkeys(SLOTS, "mine"), brings, "somebody 1.0")
    shown = policy.describe({"indexer_knob": 5, "page_size": 64})
    assert json.loads(json.dumps(shown)) == shown
    assert shown["slots"] == dict.fromkeys(SLOTS, "mine")
    assert shown["knobs"] == {
        "scheduler_knob": 1,
        "indexer_knob": 5,
        "prefill_kv_knob": 1,
        "context_parallel_knob": 1,
        "page_size": 64,
    }
    assert shown["implementations"]["indexer"] == {"name": "mine", "target": None, "provider": "somebody 1.0"}
    assert (shown["policy"], shown["version"], shown["provider"]) == ("p", "2", "somebody 1.0")


def test_an_unresolved_policy_says_so() -> None:
    with pytest.raises(PolicyError, match="is not resolved: scheduler is a name only"):
        Policy("p", "1", "").describe()


def test_the_registry_needs_neither_sglang_nor_torch() -> None:
    code = (
        "import sys, policies.registry as r; r.resolve('sglang').describe(); r.format_list();"
        "print(sorted(m for m in ('sglang', 'torch', 'numpy') if m in sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=REPO, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"
