"""How a launch ends: reasons of children, one line, nobody left behind."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import time
from multiprocessing import resource_tracker
from pathlib import Path

import psutil
import pytest

from glm_runtime import ending
from glm_runtime.config import ConfigError, RuntimeConfig
from glm_runtime.launch_server import usage_errors

SLEEPER = "import time; time.sleep(60)"
# A parent that starts a child which asks to die with it, tells the child's pid, and waits.
FAMILY = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c",
    "from glm_runtime.ending import die_with_parent; die_with_parent(); print('asked', flush=True); "
    "import time; time.sleep(60)"], stdout=subprocess.PIPE, text=True)
child.stdout.readline()
print(child.pid, flush=True)
time.sleep(60)
"""


def test_the_reason_is_the_exception_behind_the_record() -> None:
    folder = ending.failures_folder()
    logger = logging.getLogger("tests.ending.child")
    logger.addFilter(ending.ReasonFilter(folder))
    logger.error("nothing was raised")
    assert ending.first_reason(folder) is None
    try:
        raise KeyError("first")
    except KeyError:
        logger.warning("not an error")
        assert ending.first_reason(folder) is None
        logger.error("it failed")
    try:
        raise ValueError("second")
    except ValueError:
        logger.error("it failed again")
    assert ending.first_reason(folder) == "KeyError: 'first'"
    ending.discard(folder)
    assert not Path(folder).exists()
    assert ending.first_reason(folder) is None
    ending.discard(folder)


def test_the_earliest_of_several_processes() -> None:
    folder = ending.failures_folder()
    for moment, (pid, text) in enumerate([("7", "later"), ("3", "first"), ("5", "last")]):
        file = Path(folder) / pid
        file.write_text(text)
        os.utime(file, ns=((moment + 1) % 3, (moment + 1) % 3))
    assert ending.first_reason(folder) == "last"
    ending.discard(folder)


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (ValueError("two\n  lines"), "two lines"),
        (KeyError("name"), "KeyError: 'name'"),
        (AssertionError(), "AssertionError"),
        (ending.ChildFailed("why"), "why"),
        (TypeError("x"), "TypeError: x"),
    ],
)
def test_one_line(error: BaseException, text: str) -> None:
    assert ending.describe(error) == text
    assert len(ending.one_line("word " * 1000)) == ending.LINE_LIMIT


def test_fail(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as raised:
        ending.fail("two\nlines", code=3)
    assert raised.value.code == 3
    assert capsys.readouterr().err == "glm_runtime: error: two lines\n"


def test_children_end_but_not_pythons_tracker() -> None:
    resource_tracker.ensure_running()
    tracker = ending.resource_tracker_pid()
    assert tracker is not None
    child = subprocess.Popen([sys.executable, "-c", SLEEPER])
    ending.end_children()
    assert not psutil.pid_exists(child.pid)
    child.wait(5)
    assert psutil.pid_exists(tracker)
    assert ending.resource_tracker_pid() == tracker


def test_a_child_failure_is_raised_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    folder = ending.failures_folder()
    RuntimeConfig(policy="sglang", slots={}, device="cpu", failures=folder).publish()
    with pytest.raises(ending.ChildFailed, match="in the log above"):
        ending.on_child_failure(signal.SIGQUIT, None)
    ending.leave_reason(folder, "no memory for weights")
    with pytest.raises(ending.ChildFailed, match="no memory for weights"):
        ending.on_child_failure(signal.SIGQUIT, None)
    RuntimeConfig.retract()
    assert not Path(folder).exists()


@pytest.mark.skipif(sys.platform != "linux", reason="PR_SET_PDEATHSIG is Linux's")
def test_a_child_dies_with_its_killed_parent() -> None:
    parent = subprocess.Popen([sys.executable, "-c", FAMILY], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    assert psutil.pid_exists(pid)
    parent.kill()
    parent.wait(5)
    parent.stdout.close()
    end = time.monotonic() + 5
    while time.monotonic() < end and psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        time.sleep(0.05)
    assert not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def test_only_the_reason_of_a_usage_error_remains(capsys: pytest.CaptureFixture[str]) -> None:
    import argparse

    parser = argparse.ArgumentParser()
    parser.add_argument("--size", type=int)
    with pytest.raises(ConfigError, match=r"^argument --size: invalid int value: 'x'$"), usage_errors():
        parser.parse_args(["--size", "x"])
    assert capsys.readouterr().err == ""
    with usage_errors():
        print("a warning", file=sys.stderr)
        assert parser.parse_args(["--size", "3"]).size == 3
    assert capsys.readouterr().err == "a warning\n"
    with pytest.raises(SystemExit), usage_errors():
        parser.parse_args(["--help"])


@pytest.mark.parametrize(("code", "ends", "said"), [("None", 0, ""), ("3", 3, ""), ("'why'", 1, "why\n")])
def test_leave_ends_as_sys_exit_does(code: str, ends: int, said: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", f"from glm_runtime import ending; print('out'); ending.leave({code})"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stdout, done.stderr) == (ends, "out\n", said)
