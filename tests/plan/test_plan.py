"""The planner's command, its shapes, and that its counts are those of the parts that serve."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from attention.geometry import Geometry
from attention.indexer.qchunk import QChunk
from attention.workspace_slot import Workspace
from glm_runtime.memory import token_bytes as pool_bytes
from glm_runtime.model.config import model_config
from glm_runtime.model.recipe import PRESETS
from glm_runtime.plan.__main__ import main
from glm_runtime.plan.advice import trade
from glm_runtime.plan.cost import forecast, step_cost
from glm_runtime.plan.devices import GPUS
from glm_runtime.plan.setup import Setup
from glm_runtime.plan.shapes import model
from glm_runtime.plan.size import size, token_bytes, weight_bytes
from glm_runtime.plan.timeline import Step, timeline
from parallel.limits import Sizes
from policies.ledger.flags import LedgerFlags

FULL = {"glm-5": (78, 202_752), "glm-5.1": (78, 202_752), "glm-5.2": (21, 1 << 20), "glm-5.3": (21, 1 << 20)}


@pytest.mark.parametrize("name", FULL)
def test_shapes(name: str) -> None:
    found = model(name)
    assert (found.full_layers, found["max_position_embeddings"]) == FULL[name]
    # 744e9 are published for GLM-5; the later ones leave out the indexers of the shared layers.
    assert found.total_parameters / 1e9 == pytest.approx(744, abs=1)
    full = [i for i, kind in enumerate(found.config["indexer_types"]) if kind == "full"]
    assert full[:5] == ([0, 1, 2, 3, 4] if name in ("glm-5", "glm-5.1") else [0, 1, 2, 6, 10])


def test_any_config(tmp_path: Path) -> None:
    config = model_config(PRESETS["tiny"])
    (tmp_path / "config.json").write_text(json.dumps(config))
    by_path, by_name = model(str(tmp_path)), model("tiny")
    assert by_path.config == by_name.config and by_path.parameters == by_name.parameters
    for key in ("indexer_types", "index_topk_pattern"):
        del config[key]
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert model(str(tmp_path / "config.json")).config["indexer_types"] == by_name.config["indexer_types"]


CPU = replace(GPUS["H100"], name="CPU", is_cpu=True, head_block=1)


def tiny(**change: object) -> Setup:
    values: dict[str, object] = {
        "context": 6000,
        "decodes": 4,
        "decode_context": 300,
        "kv": "float32",
        "weights": "float32",
        "ledger": LedgerFlags(max_num_batched_tokens=512, max_num_seqs=16),
    }
    return Setup(model("tiny"), CPU, 1, **(values | change))  # type: ignore[arg-type]


def test_bytes_are_those_of_the_pool_and_of_the_slots() -> None:
    setup = tiny()
    found = size(setup)
    assert pool_bytes(setup.model.config, "fp8_e4m3") == token_bytes(tiny(kv="fp8_e4m3"))
    geometry = Geometry(
        max_model_len=setup.position_limit,
        max_requests=16,
        pool_tokens=found.capacity,
        topk=64,
        index_heads=32,
        index_dim=128,
        dtype=torch.bfloat16,
        index_kind="fp8",
        latent_kind="fp8_packed",
    )
    assert (found.index_rows, found.prefill_rows) == (QChunk(geometry).rows, Workspace(geometry).rows)
    assert weight_bytes(setup) == pytest.approx(4 * setup.model.total_parameters)


def test_parts_of_a_rank_add_up() -> None:
    whole = weight_bytes(Setup(model("glm-5.2"), GPUS["B200"], 1, weights="fp8"))
    cut = weight_bytes(Setup(model("glm-5.2"), GPUS["B200"], 8, Sizes(tp=8), weights="fp8"))
    parts = model("glm-5.2").parameters
    copied = parts["latent"] + parts["indexer"] + 2 * (parts["router"] + parts["norms"])
    assert 8 * cut == pytest.approx(whole + 7 * copied, rel=1e-6)


def test_decodes_take_their_rows_first() -> None:
    steps = timeline(tiny()).prefill
    assert all(508 - 508 // 16 <= step.rows <= 508 for step in steps[:-1])  # the page's end only where it is near
    assert all(step.decode_rows == 4 and step.tokens <= 512 for step in steps)
    assert [step.start for step in steps] == [sum(step.rows for step in steps[:i]) for i in range(len(steps))]
    assert steps[0].decode_context < steps[-1].decode_context


def test_dense_prompts_are_not_scored() -> None:
    cost = step_cost(tiny(), Step(1, 0, 64, 0, 0)).terms
    assert cost["scoring"] == cost["index keys"] == cost["workspace"] == 0 < cost["attention"]


def test_a_smaller_budget_shortens_the_stall_and_lengthens_the_wait() -> None:
    found = trade(tiny(), [128, 512, 2048])
    assert [row[1] for row in found] == sorted((row[1] for row in found), reverse=True)
    assert [row[3] for row in found] == sorted(row[3] for row in found)
    assert [row[2] for row in found] == sorted((row[2] for row in found), reverse=True)


def test_times_are_sums_of_terms() -> None:
    times = forecast(tiny(), timeline(tiny()))
    assert times.ttft == pytest.approx(sum(times.terms.values()))
    assert times.beside is not None and 0 < times.beside < times.stall <= times.ttft


ARGUMENTS = ["--model", "glm-5.3", "--gpus", "8xH200", "--tp", "8", "--context", "1048576"]


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*ARGUMENTS, "--max-num-batched-tokens", "16384", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["indexer"]["chunks_a_layer"]["value"] == 4217
    assert found["indexer"]["chunks_in_all"]["value"] == 88_557
    assert found["steps"]["first_decode_in_step"]["value"] == 65
    times = [figure for name, figure in found["predicted times"].items() if name != "notes"]
    assert times and all(figure["kind"] == "model" for figure in times)
    assert any("assumed" in note for note in found["predicted times"]["notes"])
    advice = found["what binds, and the knob to turn"]["notes"]
    assert any("logits cap" in note for note in advice) and any("best knob" in note for note in advice)
    assert any("65,536" in note for note in advice)  # what the shard's default would be


def test_the_text(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--model", "tiny", "--gpus", "2xCPU", "--tp", "2", "--context", "900", "--budgets", "64,256"]
    assert main([*arguments, "--decodes", "2", "--no-advice", "--steps"]) == 0
    out = capsys.readouterr().out
    assert "step 1  " in out
    assert "measured here" in out and "budget 64" in out
    predicted = out.split("predicted times\n")[1].split("\n\n")[0].splitlines()
    assert all("[model]" in line for line in predicted if not line.startswith("  - "))


@pytest.mark.parametrize(
    ("more", "text"),
    [
        (["--gpus", "8xH300"], "--gpus 8xH300"),
        (["--model", "nothing"], "--model nothing"),
        (["--tp", "4"], "make 4 ranks"),
        (["--max-model-len", "4096"], "--max-model-len 4096"),
        (["--watermark", "3"], "--watermark 3"),
        (["--sparse-indexer-max-logits-mb", "0"], "--sparse-indexer-max-logits-mb 0"),
        (["--max-num-batched-tokens", "16", "--max-num-seqs", "64"], "max_num_batched_tokens"),
        (["--ep", "3"], "--ep-size 3"),
        (["--context", "0"], "--context 0"),
        (["--budgets", "1,x"], "--budgets 1,x"),
        (["--context", "9" * 24], "too many to plan"),
        (["--context", "1048576", "--max-num-batched-tokens", "1"], "too many to plan"),
        (["--context", "1048576", "--decodes", "1000000"], "too many to plan"),
        (["--mem-fraction-static", "0"], "--mem-fraction-static 0"),
    ],
)
def test_what_cannot_be_planned(more: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*ARGUMENTS, *more]) == 2
    told = capsys.readouterr().err
    assert text in told and re.fullmatch(r"glm_runtime\.plan: error: [^\n]+\n", told)


@pytest.mark.parametrize("module", ["plan", "simulate"])
def test_only_pure_modules_are_loaded(module: str) -> None:
    heavy = ("sglang", "torch", "numba")
    code = f"import sys, glm_runtime.{module}.__main__; print([m for m in {heavy} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.stdout.strip(), done.returncode) == ("[]", 0), done.stderr
