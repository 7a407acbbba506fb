"""The registry, with third parties as real distributions on the import path."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from policies import registry
from policies.base import STOCK, PolicyError, SlotImpl

Install = Callable[..., str]

RECENT = """
from policies.base import STOCK, Policy, SlotImpl

def install(server_args):
    server_args.append("installed")

policy = Policy(
    "recent", "3.1", "newest first", {**STOCK, "scheduler": "newest"},
    brings=(SlotImpl("scheduler", "newest", __name__ + ":install", "newest first", knobs={"window": 4}),),
)

def make():
    return policy
"""


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Puts a distribution on the import path: module text, and its entry points in the policy group."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def put(dist: str, module: str, text: str, **points: str) -> str:
        (tmp_path / f"{module}.py").write_text(text)
        info = tmp_path / f"{dist.replace('-', '_')}-1.5.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {dist}\nVersion: 1.5\n")
        lines = [f"{name} = {module}:{attr}" for name, attr in points.items()]
        (info / "entry_points.txt").write_text(f"[{registry.GROUP}]\n" + "\n".join(lines) + "\n")
        monkeypatch.delitem(sys.modules, module, raising=False)
        return module

    return put


def refused(call: Callable[[], object]) -> str:
    """The one line of the PolicyError that ``call`` ends with."""
    with pytest.raises(PolicyError) as caught:
        call()
    text = str(caught.value)
    assert "\n" not in text
    return text


def test_the_stock_policy_resolves_to_stock_slots() -> None:
    policy = registry.resolve("sglang")
    assert policy.slots == dict(STOCK)
    assert policy.provider.startswith("glm-runtime")
    assert policy.impl("scheduler").load() is None
    assert policy.knobs()["indexer_scratch_mb"] == 64
    assert [impl.slot for impl in policy.brings] == list(policy.slots)


def test_one_slot_is_exchanged_and_none_keeps_the_policys_own() -> None:
    policy = registry.resolve("sglang", {"context_parallel": "zigzag", "indexer": None})
    assert policy.slots == {**STOCK, "context_parallel": "zigzag"}
    assert policy.impl("context_parallel").name == "zigzag"


def test_unknown_names_list_the_known() -> None:
    assert re.search(r"--policy stock: unknown policy, known: .*\bsglang\b", refused(lambda: registry.resolve("stock")))
    text = refused(lambda: registry.resolve("sglang", {"context_parallel": "middle"}))
    assert text.startswith("--cp-split middle: unknown, known: head-tail, interleave, zigzag")
    assert "unknown slot 'kv'" in refused(lambda: registry.resolve("sglang", {"kv": "paged"}))
    assert "unknown slot 'kv'" in refused(lambda: registry.known_slots("kv"))


def test_every_built_in_slot_resolves_and_is_known() -> None:
    for impl in registry.BUILT_IN_SLOTS:
        assert registry.resolve("sglang", {impl.slot: impl.name}).slots[impl.slot] == impl.name
        assert impl.name in registry.known_slots(impl.slot)


@pytest.mark.parametrize("attr", ["policy", "make"])
def test_a_third_party_policy_with_its_own_scheduler(install: Install, attr: str) -> None:
    install("recent-policy", "recent_module", RECENT, recent=attr)
    policy = registry.resolve("recent")
    assert policy.provider == "recent-policy 1.5"
    assert policy.slots == {**STOCK, "scheduler": "newest"}
    assert policy.describe()["implementations"]["scheduler"] == {
        "name": "newest",
        "target": "recent_module:install",
        "provider": "recent-policy 1.5",
    }
    assert policy.knobs()["window"] == 4
    calls: list[str] = []
    policy.impl("scheduler").load()(calls)
    assert calls == ["installed"]
    assert policy.impl("indexer").provider.startswith("glm-runtime")


def test_a_brought_slot_serves_under_another_policy(install: Install) -> None:
    install("recent-policy", "recent_module", RECENT, recent="policy")
    assert registry.known_slots("scheduler")[-1] == "newest"
    policy = registry.resolve("sglang", {"scheduler": "newest"})
    assert policy.name == "sglang"
    assert policy.impl("scheduler").provider == "recent-policy 1.5"
    assert "window" in policy.knobs()


def test_a_third_party_is_not_imported_unless_needed(install: Install) -> None:
    module = install("recent-policy", "recent_module", RECENT, recent="policy")
    registry.resolve("sglang", {"context_parallel": "zigzag"})
    assert module not in sys.modules
    registry.resolve("recent")
    assert module in sys.modules


def test_a_name_claimed_by_a_third_party_and_us_names_both(install: Install) -> None:
    install("impostor", "impostor_module", RECENT, sglang="policy")
    text = refused(lambda: registry.resolve("sglang"))
    assert re.fullmatch(
        r"--policy sglang: the name is claimed by glm-runtime\S*( \S+)? and impostor 1\.5; uninstall one of them", text
    )
    listed = next(entry for entry in registry.list_policies() if entry.source.name == "sglang")
    assert listed.policy is None
    assert listed.problem == text


def test_a_name_claimed_by_two_third_parties_names_both(install: Install) -> None:
    install("one", "one_module", RECENT, recent="policy")
    install("two", "two_module", RECENT, recent="policy")
    assert "claimed by one 1.5 and two 1.5" in refused(lambda: registry.resolve("recent"))
    assert registry.resolve("sglang").name == "sglang"


def test_a_slot_claimed_twice_names_both(install: Install) -> None:
    install("one", "one_module", RECENT, recent="policy")
    install("two", "two_module", RECENT.replace('"recent"', '"later"'), later="policy")
    text = refused(lambda: registry.resolve("sglang", {"scheduler": "newest"}))
    assert re.search("--scheduler newest: the name is claimed by (one|two) 1.5 and (one|two) 1.5", text)
    assert registry.resolve("later").impl("scheduler").provider == "two 1.5"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("import no_such_module_at_all", "does not load: ModuleNotFoundError"),
        ("def policy(): raise RuntimeError('out of luck')", "does not load: RuntimeError: out of luck"),
        ("raise ImportError('two\\nlines')", "does not load: ImportError: two lines"),
        ("other = 1", "does not load: AttributeError"),
        ("policy = 1", "is a int, not a policies.base.Policy"),
        (RECENT.replace('"recent"', '"late"'), "calls itself 'late'"),
        (RECENT.replace('"newest"', '"sglang"'), "brings scheduler 'sglang', which glm-runtime"),
        (RECENT.replace('"scheduler": "newest"', '"scheduler": ""'), "does not load: PolicyError"),
    ],
)
def test_a_broken_third_party_is_refused_when_selected_and_listed_with_its_reason(
    install: Install, text: str, reason: str
) -> None:
    install("recent-policy", "recent_module", text, recent="policy")
    line = refused(lambda: registry.resolve("recent"))
    assert line.startswith("--policy recent: entry point recent_module:policy of recent-policy 1.5 ")
    assert reason in line
    assert registry.resolve("sglang").name == "sglang"
    shown = registry.format_list()
    assert f"recent  BROKEN: {line}" in shown
    assert "sglang 1.0" in shown
    assert "not searched, broken: recent" in refused(lambda: registry.resolve("sglang", {"scheduler": "newest"}))


def test_the_list_names_policies_slots_and_providers(install: Install) -> None:
    install("recent-policy", "recent_module", RECENT, recent="policy")
    shown = registry.format_list()
    assert "recent 3.1 (recent-policy 1.5): newest first" in shown
    assert "--scheduler newest  --indexer ragged  --prefill-kv paged  --cp-split interleave" in shown
    assert "newest (recent-policy 1.5): newest first" in shown


def test_a_slot_that_the_policy_brings_wins_over_no_other_place() -> None:
    mine = SlotImpl("scheduler", "mine")
    assert registry.slot_named("scheduler", "mine", [mine]) is mine
    assert registry.slot_named("scheduler", "sglang", [mine]).provider.startswith("glm-runtime")
