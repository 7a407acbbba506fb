"""A port is held by one launch of a machine, and free again when that one is gone."""

from __future__ import annotations

import subprocess
import sys

import pytest

from glm_runtime import ports

HOLDER = "import sys; from glm_runtime import ports; print(ports.hold(int(sys.argv[1])), flush=True); sys.stdin.read()"

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="ports are held on Linux only")


def holder(port: int) -> subprocess.Popen[str]:
    """Another process that holds `port`, if it can."""
    return subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(port)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


def test_one_holds_it() -> None:
    port = ports.inner()
    assert ports.LOW <= port <= ports.HIGH
    assert ports.hold(port), "held twice by one process is held"
    others = [holder(port) for _ in range(2)]
    try:
        for other in others:
            assert other.stdout is not None
            assert other.stdout.readline() == "False\n"
        ports.release()
        third = holder(port)
        others.append(third)
        assert third.stdout is not None
        assert third.stdout.readline() == "True\n"
        assert not ports.hold(port)
        third.kill()
        third.wait()
        assert ports.hold(port), "the kernel gives it back"
    finally:
        ports.release()
        for other in others:
            other.kill()
            other.communicate()
