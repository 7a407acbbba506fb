"""Servers of a comparison: who is alive when, how they end. A small program takes the launcher's place."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import psutil
import pytest

from glm_runtime.ab import servers
from glm_runtime.ab.arms import Arm
from glm_runtime.ab.fleet import Fleet, Keep
from glm_runtime.ab.servers import Server, ServerFailed
from glm_runtime.config import ConfigError

PROGRAM = """
import http.server, json, subprocess, sys
flags = sys.argv[1:]
if "--refuse" in flags:
    sys.exit(print("glm_runtime: error: --refuse cannot be", file=sys.stderr) or 2)
if "--fail" in flags:
    sys.exit(print("glm_runtime: error: out of memory", file=sys.stderr) or 1)
value = lambda name: flags[flags.index(name) + 1]
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
heard = []
open(value("--step-log"), "w").write(json.dumps({"at": 5.0}) + "\\n" + json.dumps({"at": 9.0}) + "\\n")
class Handler(http.server.BaseHTTPRequestHandler):
    def answer(self):
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0)).decode()
        if body: heard.append(json.loads(body))
        self.send_response(409 if heard and heard[-1] == {"scheduler": "sglang"} and "--stuck" in flags else 200)
        self.end_headers()
        self.wfile.write(json.dumps({"flags": flags, "child": child.pid, "heard": heard}).encode())
    do_GET = do_POST = answer
    def log_message(self, *_): pass
http.server.HTTPServer(("127.0.0.1", int(value("--port"))), Handler).serve_forever()
"""
A, B = Arm("a", ("--policy", "sglang")), Arm("b", ("--policy", "vllm-ledger"))


@pytest.fixture(autouse=True)
def program(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(servers, "COMMAND", (sys.executable, "-c", PROGRAM))


def pids(server: Server) -> list[int]:
    assert server._process is not None
    return [server._process.pid, server.get("/x")["child"]]


def dead(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True


@pytest.mark.parametrize(("keep", "starts"), [("one", 4), ("all", 2)])
def test_who_is_alive(tmp_path: Path, keep: Keep, starts: int) -> None:
    seen: dict[int, str] = {}
    children: list[int] = []
    with Fleet([A, B], tmp_path, 30, keep) as fleet:
        for _ in range(2):
            for arm in (A, B):
                with fleet.of(arm) as server:
                    assert server.get("/x")["flags"][1] == arm.flags[1]
                    own, child = pids(server)
                    if keep == "one":
                        assert all(dead(pid) for pid in seen)
                    seen[own] = arm.name
                    children.append(child)
    assert len(seen) == starts
    assert all(map(dead, [*seen, *children]))


def test_one_server_is_told_which_scheduler(tmp_path: Path) -> None:
    arms = [Arm("s", ("--scheduler", "sglang")), Arm("l", ("--scheduler", "ledger"))]
    with Fleet(arms, tmp_path, 30, "live") as fleet:
        found = []
        for arm in (*arms, *arms):
            with fleet.of(arm) as server:
                found.append(pids(server)[0])
        answer = server.get("/x")
    assert len(set(found)) == 1
    assert [one["scheduler"] for one in answer["heard"]] == ["sglang", "ledger"] * 2
    assert answer["flags"][:3] == ["--scheduler", "ledger", "--allow-policy-switch"]


def test_a_switch_that_is_not_made(tmp_path: Path) -> None:
    arms = [Arm("s", ("--stuck", "--scheduler", "sglang")), Arm("l", ("--stuck", "--scheduler", "ledger"))]
    with (
        Fleet(arms, tmp_path, 30, "live") as fleet,
        pytest.raises(ServerFailed, match="arm s: POST /policy answered 409"),
        fleet.of(arms[0]),
    ):
        pass


def test_a_refusal_and_a_failure_are_told_apart(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="arm r: --refuse cannot be"), Server(Arm("r", ("--refuse",)), tmp_path, 30):
        pass
    with (
        pytest.raises(ServerFailed, match=r"arm f: .* code 1: out of memory"),
        Server(Arm("f", ("--fail",)), tmp_path, 30),
    ):
        pass


def test_an_end_in_the_middle_leaves_nobody(tmp_path: Path) -> None:
    left: list[int] = []
    with pytest.raises(ValueError, match="boom"), Fleet([A, B], tmp_path, 30, "all") as fleet:
        for arm in (A, B):
            with fleet.of(arm) as server:
                left += pids(server)
        raise ValueError("boom")
    assert len(left) == 4 and all(map(dead, left))


def test_steps_since_and_a_server_that_ended(tmp_path: Path) -> None:
    with Server(A, tmp_path, 30) as server:
        assert server.steps(6.0) == [{"at": 9.0}]
        server.alive()
        psutil.Process(pids(server)[0]).kill()
        assert server._process is not None
        server._process.wait(10)
        with pytest.raises(ServerFailed, match="the server ended"):
            server.alive()
    assert json.loads((tmp_path / "steps" / "a.jsonl").read_text().splitlines()[0]) == {"at": 5.0}
