"""examples/third_party_policy, installed by pip into a folder of its own and used from there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from tests.servers import Server

REPO = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder that holds the installed example; pip works offline, with the build tools of this environment."""
    folder = tmp_path_factory.mktemp("example") / "site"
    source = folder.parent / "source"
    subprocess.run(["cp", "-r", str(REPO / "examples" / "third_party_policy"), str(source)], check=True)
    flags = ["--quiet", "--no-deps", "--no-build-isolation", "--no-index", "--target", str(folder)]
    command = [sys.executable, "-m", "pip", "install", *flags, str(source)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def python(place: Path, code: str) -> str:
    """Standard output of ``code`` in an interpreter that sees the installed example."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(place), str(REPO)])}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=place, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_installed_example_is_listed_and_resolved(place: Path) -> None:
    shown = python(place, "from policies.registry import format_list; print(format_list())")
    assert "newest-first 0.1 (newest-first-policy 0.1.0)" in shown
    assert "BROKEN" not in shown
    described = json.loads(
        python(place, "import json, policies.registry as r; print(json.dumps(r.resolve('newest-first').describe()))")
    )
    assert described["policy"] == "newest-first"
    assert described["implementations"]["scheduler"] == {
        "name": "newest-first",
        "target": "newest_first.queue:install",
        "provider": "newest-first-policy 0.1.0",
    }
    assert described["slots"]["indexer"] == "ragged"


def present(server: Server) -> int:
    """Requests that run or wait in the scheduler."""
    (load,) = server.get("/v1/loads")["loads"]
    return int(load["num_running_reqs"] + load["num_waiting_reqs"])


@pytest.mark.slow
@pytest.mark.server
def test_served_it_reports_itself_and_prefills_the_newest_first(place: Path) -> None:
    path = os.pathsep.join([str(place), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    with Server("--policy", "newest-first", "--max-running-requests", "1", env={"PYTHONPATH": path}) as server:
        shown = server.get("/policy")
        assert (shown["policy"], shown["version"]) == ("newest-first", "0.1")
        assert shown["slots"]["scheduler"] == "newest-first"
        assert shown["provider"] == "newest-first-policy 0.1.0"

        finished: list[str] = []

        def ask(name: str, tokens: int) -> None:
            server.generate([ord(name)] * 5, tokens)
            finished.append(name)

        threads = [threading.Thread(target=ask, args=("A", 800))]
        threads += [threading.Thread(target=ask, args=(name, 40)) for name in "BCD"]
        for count, thread in enumerate(threads, 1):  # B, C and D come in this order while A holds the only place
            thread.start()
            end = time.monotonic() + 60
            while present(server) < count and not finished:
                assert time.monotonic() < end, "the server does not count it"
                time.sleep(0.02)
        assert finished == [], "A ended before the others had arrived: give it more tokens"
        for thread in threads:
            thread.join(timeout=120)
        assert finished == ["A", "D", "C", "B"]
