"""The golden runner, on made-up sets in a temporary folder."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.golden import __main__ as runner

DOUBLE = """
def check(case):
    if case["x"] < 0:
        raise ValueError(f"negative x {case['x']}")
    return None if case["y"] == 2 * case["x"] else f"wanted {2 * case['x']}, got {case['y']}"
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder for golden files, beside a package of made-up sets: ``double`` works, ``broken`` does not load."""
    package = f"made_up_sets_{tmp_path.name}"
    (tmp_path / package).mkdir()
    (tmp_path / package / "__init__.py").write_text("")
    (tmp_path / package / "double.py").write_text(DOUBLE)
    (tmp_path / package / "broken.py").write_text("import no_such_module_at_all\n")
    (tmp_path / package / "hollow.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(runner, "SETS_PACKAGE", package)
    golden = tmp_path / "golden"
    golden.mkdir()
    return golden


def write(folder: Path, name: str, cases: list[dict[str, Any]], part: str = "open") -> Path:
    path = folder / f"{name}_{part}.json"
    path.write_text(json.dumps({"name": name, "source": "made up", "schema": {}, "cases": cases}))
    return path


def test_passing_files_of_one_set_are_summed(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(folder, "double", [{"id": "a", "x": 1, "y": 2}], "open")
    write(folder, "double", [{"id": "b", "x": 2, "y": 4}, {"id": "c", "x": 0, "y": 0}], "hidden")
    assert runner.main([str(folder)]) == 0
    assert capsys.readouterr().out == "double: 3 passed, 0 failed\n"


def test_failed_and_raising_cases_are_counted_and_named(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cases = [{"id": "good", "x": 1, "y": 2}, {"id": "bad", "x": 1, "y": 3}, {"id": "raises", "x": -1, "y": 0}, {"y": 1}]
    write(folder, "double", cases)
    assert runner.main([str(folder)]) == 1
    captured = capsys.readouterr()
    assert captured.out == "double: 1 passed, 3 failed\n"
    assert "double[bad]: wanted 2, got 3" in captured.err
    assert "double[raises]: ValueError: negative x -1" in captured.err
    assert "double[#3]: KeyError" in captured.err


def test_only_the_first_failures_are_shown(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(folder, "double", [{"id": f"case{i}", "x": 1, "y": 0} for i in range(20)])
    assert runner.main([str(folder)]) == 1
    captured = capsys.readouterr()
    assert captured.out == "double: 0 passed, 20 failed\n"
    assert captured.err.count("double[case") == runner.SHOWN_FAILURES
    assert f"and {20 - runner.SHOWN_FAILURES} more" in captured.err


def test_a_set_without_code_is_not_built(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(folder, "double", [{"id": "a", "x": 1, "y": 2}])
    write(folder, "unwritten", [{"id": "a"}])
    assert runner.main([str(folder)]) == 0
    assert capsys.readouterr().out == "double: 1 passed, 0 failed\nunwritten: not built\n"
    assert runner.main([str(folder), "--set", "unwritten"]) == 1
    assert capsys.readouterr().out == "unwritten: not built\n"
    assert runner.main([str(folder), "--set", "double"]) == 0


def test_only_named_sets_run(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(folder, "double", [{"id": "a", "x": 1, "y": 2}])
    write(folder, "broken", [{"id": "a"}])
    assert runner.main([str(folder), "--set", "double", "--set", "double"]) == 0
    assert capsys.readouterr().out == "double: 1 passed, 0 failed\n"


def test_an_unknown_set_lists_the_known(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(folder, "double", [{"id": "a", "x": 1, "y": 2}])
    assert runner.main([str(folder), "--set", "treble"]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "--set treble: unknown set" in captured.err
    assert "double" in captured.err


@pytest.mark.parametrize(
    ("name", "words"), [("broken", "does not load: ModuleNotFoundError"), ("hollow", "has no function check")]
)
def test_a_set_whose_module_is_wrong_fails(
    folder: Path, capsys: pytest.CaptureFixture[str], name: str, words: str
) -> None:
    write(folder, name, [{"id": "a"}, {"id": "b"}])
    assert runner.main([str(folder)]) == 1
    captured = capsys.readouterr()
    assert captured.out == f"{name}: 0 passed, 2 failed\n"
    assert words in captured.err


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "not readable as JSON"),
        ("[]", "this is a list"),
        ('{"cases": [{}]}', "field 'name' is None"),
        ('{"name": "treble", "cases": [{}]}', "does not start with 'treble_'"),
        ('{"name": "double"}', "field 'cases' is not a list"),
        ('{"name": "double", "cases": [1]}', "field 'cases' is not a list of objects"),
        ('{"name": "double", "cases": []}', "field 'cases' is empty"),
    ],
)
def test_a_wrong_file_is_named(folder: Path, capsys: pytest.CaptureFixture[str], text: str, words: str) -> None:
    path = folder / "double_open.json"
    path.write_text(text)
    assert runner.main([str(folder)]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert str(path) in captured.err
    assert words in captured.err


def test_a_missing_or_empty_folder_fails(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert runner.main([str(folder)]) == 1
    assert "holds no file" in capsys.readouterr().err
    assert runner.main([str(folder / "absent")]) == 1
    assert "no such folder" in capsys.readouterr().err


def test_the_command_itself(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.golden", str(tmp_path / "absent")]
    done = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr.startswith("golden: ")
    assert "Traceback" not in done.stderr
