"""The clients against a gateway with a scripted engine: answers, leaving early, time limits, broken connections."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from glm_runtime.client import Aborted, AsyncClient, Client, Lost, Refused, TooLate
from glm_runtime.client.wire import generate
from glm_runtime.gateway.keys import keygen
from tests.gateway.scripted import Running, ScriptedEngine, letters, serving, until
from tests.servers import REPO, free_port


@pytest.fixture
def gateway() -> Iterator[Running]:
    with serving(ScriptedEngine(0.005)) as gateway:
        yield gateway


def test_fields_go_where_they_belong() -> None:
    assert generate("a", True, {"n": 2, "priority": 1}) == {
        "type": "generate",
        "stream": True,
        "text": "a",
        "priority": 1,
        "sampling_params": {"n": 2},
    }
    assert generate([1, 2], False, {"sampling_params": {"n": 2}, "stop": "x"})["sampling_params"] == {
        "n": 2,
        "stop": "x",
    }
    assert generate([{"role": "user"}], False, {})["messages"] == [{"role": "user"}]
    assert generate([], False, {})["input_ids"] == []


@pytest.mark.parametrize("encoding", ["json", "msgpack"])
def test_answers(gateway: Running, encoding: str) -> None:
    with Client(gateway.endpoint, encoding=encoding) as client:  # type: ignore[arg-type]
        assert client.hello()["encoding"] == encoding
        assert client.ping() < 5
        assert client.policy() == {"policy": "scripted"}
        assert client.generate("x", max_new_tokens=9).text == letters(9)
        stream = client.stream("x", max_new_tokens=9)
        assert "".join(delta.text for delta in stream) == letters(9)
        assert stream.result is not None and stream.result.output_ids == list(range(9))
        assert list(stream) == []
        results = client.batch(["x"] * 30, max_new_tokens=3)
        assert [result.text for result in results] == [letters(3)] * 30
        assert client.stats()["requests"]["done"] == 32
        with pytest.raises(Refused) as raised:
            client.generate("refuse me")
        assert (raised.value.code, raised.value.field, raised.value.bound) == ("bad_request", "text", "another")
        with pytest.raises(Refused, match="exactly one of"):
            client.generate("x", input_ids=[1])


def test_two_streams_in_turns(gateway: Running) -> None:
    with Client(gateway.endpoint) as client:
        one, two = client.stream("x", max_new_tokens=12), client.stream("x", max_new_tokens=20)
        heard = ["", ""]
        for _ in range(3):
            heard[0] += next(one).text
            heard[1] += next(two).text
        heard[1] += "".join(delta.text for delta in two)
        heard[0] += "".join(delta.text for delta in one)
        assert heard == [letters(12), letters(20)]


def test_leaving_a_loop_aborts(gateway: Running) -> None:
    with Client(gateway.endpoint) as client:
        for _ in client.stream("x", max_new_tokens=5000):
            break
        with client.stream("x", max_new_tokens=5000) as stream:
            next(stream)
        until(lambda: gateway.engine.stopped_early == 2)
        assert client.stats()["requests"]["aborted"] == 2
        held = client.stream("x", max_new_tokens=5000)
        next(held)
    until(lambda: not gateway.engine.running)  # closing the client aborts what it has open


def test_no_progress() -> None:
    with serving(ScriptedEngine(0.01)) as gateway, Client(gateway.endpoint, timeout=0.3, heartbeat=0.1) as client:
        begin = time.monotonic()
        with pytest.raises(TooLate, match="no progress"):
            client.generate("x", max_new_tokens=5000)
        assert time.monotonic() - begin < 20
        until(lambda: not gateway.engine.running)
        assert client.stream("x", max_new_tokens=100) is not None
        text = "".join(delta.text for delta in client.stream("x", max_new_tokens=100))  # slow, but it moves
        assert text == letters(100)


def test_no_server() -> None:
    with Client(f"tcp://127.0.0.1:{free_port()}", lost_after=0.5, heartbeat=0.1) as client:
        begin = time.monotonic()
        with pytest.raises(Lost, match="no sign of the server"):
            client.generate("x")
        assert 0.4 < time.monotonic() - begin < 20


@pytest.mark.parametrize("encoding", ["json", "msgpack"])
def test_a_restarted_server(encoding: str) -> None:
    """What had not begun is asked again, what was half here is lost, and the client goes on."""
    endpoint = f"tcp://127.0.0.1:{free_port()}"
    client = Client(endpoint, heartbeat=0.1, encoding=encoding)  # type: ignore[arg-type]
    with serving(ScriptedEngine(0.01), endpoint) as gateway:
        half = client.stream("x", max_new_tokens=5000)
        next(half)
        waiting = client.stream("x", max_new_tokens=5000)
        until(lambda: len(gateway.engine.running) == 2)
        gateway.loop.call_soon_threadsafe(silence, gateway)
        time.sleep(0.05)
    with serving(ScriptedEngine(0.0), endpoint):
        assert next(waiting).text
        with pytest.raises(Lost):
            list(half)
        assert client.generate("x", max_new_tokens=4).text == letters(4)
    client.close()


def silence(gateway: Running) -> None:
    """As a server that is killed: its requests get no terminal message."""
    for session in gateway.gateway.sessions.values():
        session.blocked = True
        session.outbox.clear()


def test_the_client_comes_before_the_server() -> None:
    endpoint = f"tcp://127.0.0.1:{free_port()}"
    with Client(endpoint, encoding="msgpack") as client:
        stream = client.stream("x", max_new_tokens=5)
        with serving(endpoint=endpoint):
            assert "".join(delta.text for delta in stream) == letters(5)


def test_a_server_that_ends_says_so(gateway: Running) -> None:
    with Client(gateway.endpoint) as client:
        stream = client.stream("x", max_new_tokens=5000)
        next(stream)
        gateway.stop()
        with pytest.raises(Refused) as raised:
            list(stream)
        assert raised.value.code == "shutting_down"


def test_asyncio(gateway: Running) -> None:
    async def main() -> None:
        async with AsyncClient(gateway.endpoint, encoding="msgpack") as client, AsyncClient(gateway.endpoint) as other:
            assert (await client.hello())["model"] == "scripted"
            assert await client.policy() == {"policy": "scripted"}
            results = await client.batch(["x"] * 50, max_new_tokens=5)
            assert [result.text for result in results] == [letters(5)] * 50
            stream = client.stream("x", max_new_tokens=9)
            assert "".join([delta.text async for delta in stream]) == letters(9)
            assert stream.result is not None and stream.result.text == letters(9)
            async for _ in client.stream("x", max_new_tokens=5000):
                break
            task = asyncio.create_task(client.generate("x", max_new_tokens=5000))
            await asyncio.sleep(0.1)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            with pytest.raises(Refused):
                await client.generate("refuse me")
            while (await other.stats())["in_flight"]:
                await asyncio.sleep(0.01)
            assert (await other.stats())["requests"]["aborted"] == 2
            client.timeout = 0.2
            with pytest.raises(TooLate):
                await client.generate("x", max_new_tokens=5000)
            waiting = asyncio.create_task(other.generate("x", max_new_tokens=5000))
            await asyncio.sleep(0.05)
            other.close()
            with pytest.raises(Lost):
                await waiting

    asyncio.run(main())
    until(lambda: not gateway.engine.running)


def test_an_abort_from_elsewhere(gateway: Running) -> None:
    with Client(gateway.endpoint) as client:
        stream = client.stream("x", max_new_tokens=5000)
        next(stream)
        client._wire._out({"type": "abort", "id": "q", "target": "1"})
        with pytest.raises(Aborted, match="by its client"):
            list(stream)


def test_curve(tmp_path: Path) -> None:
    for name in ("server", "client"):
        keygen(tmp_path, name)
    secret = str(tmp_path / "client.key_secret")
    with serving(secret_key_file=str(tmp_path / "server.key_secret"), authorized_keys=str(tmp_path)) as gateway:
        with Client(gateway.endpoint, key_file=secret, server_key=str(tmp_path / "server.key")) as client:
            assert client.generate("x", max_new_tokens=3).text == letters(3)
        with Client(gateway.endpoint, lost_after=0.4, heartbeat=0.1) as stranger, pytest.raises(Lost):
            stranger.ping()
    with pytest.raises(ValueError, match="go together"):
        Client(key_file=secret)


def test_the_command_line(gateway: Running) -> None:
    command = [sys.executable, "-m", "glm_runtime.client", "--endpoint", gateway.endpoint]
    run = subprocess.run([*command, "x", "--max-new-tokens", "5"], capture_output=True, text=True, cwd=REPO, check=True)
    assert (run.stdout, run.stderr) == (letters(5) + "\n", "")
    run = subprocess.run([*command, "refuse me"], capture_output=True, text=True, cwd=REPO, check=False)
    assert (run.returncode, run.stderr) == (1, "glm_runtime: error: text: refused\n")
    imported = "import glm_runtime.client, sys; print(sorted({'torch', 'sglang'} & set(sys.modules)))"
    run = subprocess.run([sys.executable, "-c", imported], capture_output=True, text=True, cwd=REPO, check=True)
    assert run.stdout == "[]\n"


def test_a_client_may_think_between_deltas() -> None:
    """The blocking client says nothing while its caller is busy; the stream goes on all the same."""
    with serving(ScriptedEngine(0.002), heartbeat_s=0.1) as gateway, Client(gateway.endpoint, heartbeat=0.05) as client:
        text = ""
        for place, delta in enumerate(client.stream("x", max_new_tokens=40)):
            text += delta.text
            if place in (0, 3):
                time.sleep(0.6)
        assert text == letters(40)
