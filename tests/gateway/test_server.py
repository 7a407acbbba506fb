"""The gateway's socket, sessions and limits, with plain pyzmq peers: answers, aborts, hostile, slow and dead ones."""

from __future__ import annotations

import pickle
import socket as sockets
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
import zmq.auth

from glm_runtime.gateway.keys import keygen
from glm_runtime.gateway.protocol import TAG
from glm_runtime.gateway.session import STRIKES
from tests.gateway.scripted import ScriptedEngine, dealer, hear, letters, say, serving, until


def generate(id: str, tokens: int = 8, stream: bool = True, text: str = "x") -> dict[str, Any]:
    return {"type": "generate", "id": id, "text": text, "stream": stream, "sampling_params": {"max_new_tokens": tokens}}


def terminal(peer: zmq.Socket[bytes], id: str) -> tuple[str, dict[str, Any]]:
    """Text of the deltas of a request, and its terminal message."""
    text = ""
    while True:
        message = hear(peer)
        if message["id"] == id and message["type"] == "delta":
            text += message["text"]
        elif message["id"] == id:
            return text, message


def test_stream_and_whole() -> None:
    with serving() as gateway, dealer(gateway.endpoint) as peer:
        say(peer, **generate("a", 30))
        text, done = terminal(peer, "a")
        assert (done["type"], text, done["text"]) == ("done", letters(30), letters(30))
        assert done["output_ids"] == list(range(30))
        say(peer, **generate("a", 30, stream=False))
        assert terminal(peer, "a") == ("", done | {"meta_info": {"completion_tokens": 29}})


def test_every_verb_is_answered_under_its_id() -> None:
    with serving() as gateway, dealer(gateway.endpoint) as peer:
        say(peer, type="hello", id="h")
        hello = hear(peer)
        assert (hello["id"], hello["version"], hello["model"]) == ("h", 1, "scripted")
        assert hello["limits"]["max_requests"] == 512
        for verb, answer in (("ping", "pong"), ("stats", "stats"), ("policy", "policy")):
            say(peer, type=verb, id=verb)
            heard = hear(peer)
            assert (heard["type"], heard["id"]) == (answer, verb)
        assert heard["policy"] == {"policy": "scripted"}


def test_msgpack_after_the_hello() -> None:
    pack, unpack = msgspec.msgpack.encode, msgspec.msgpack.decode
    with serving() as gateway, dealer(gateway.endpoint) as peer:
        peer.send_multipart([TAG, pack({"type": "ping", "id": "early"})])
        assert hear(peer)["code"] == "malformed"
        say(peer, type="hello", id="h", encoding="msgpack", batch=True)
        assert hear(peer)["encoding"] == "msgpack"
        peer.send_multipart([TAG, pack(generate("a", 5))])
        messages: list[Any] = []
        while not messages or messages[-1]["type"] != "done":
            made = unpack(peer.recv_multipart()[1])
            messages += made if isinstance(made, list) else [made]
        assert "".join(m["text"] for m in messages[:-1]) == letters(5)
        say(peer, type="ping", id="json still")  # JSON is understood on every connection
        assert unpack(peer.recv_multipart()[1])["type"] == "pong"


def test_two_clients_may_use_one_id() -> None:
    with serving() as gateway, dealer(gateway.endpoint) as one, dealer(gateway.endpoint) as two:
        say(one, **generate("same", 40))
        say(two, **generate("same", 200))
        assert hear(two)["type"] == "delta"
        say(two, type="abort", id="q", target="same")
        assert terminal(two, "same")[1]["type"] == "aborted"
        assert terminal(one, "same")[0] == letters(40)
        assert len(set(gateway.engine.rids)) == len(gateway.engine.rids) == 2


def test_ids_inside_are_prefix_free() -> None:
    with serving() as gateway, dealer(gateway.endpoint) as peer:
        for i in range(40):
            say(peer, **generate(f"{i}", 1))
        for i in range(40):
            terminal(peer, f"{i}")
        rids = gateway.engine.rids
        assert not [(a, b) for a in rids for b in rids if a is not b and b.startswith(a)]


def test_abort_is_exact_and_final() -> None:
    with serving(ScriptedEngine(0.01)) as gateway, dealer(gateway.endpoint) as peer:
        for id in ("r", "r1", "r10"):
            say(peer, **generate(id, 30))
        until(lambda: len(gateway.engine.running) == 3)
        say(peer, type="abort", id="q", target="r1")
        heard: list[dict[str, Any]] = []
        while sum(message["type"] == "done" for message in heard) < 2:
            heard.append(hear(peer))
        assert [(m["target"], m["found"]) for m in heard if m["type"] == "abort"] == [("r1", True)]
        of_r1 = [m["type"] for m in heard if m["id"] == "r1"]
        assert of_r1.count("aborted") == 1 and of_r1[-1] == "aborted"
        assert {m["id"] for m in heard if m["type"] == "done"} == {"r", "r10"}
        until(lambda: gateway.engine.stopped_early == 1)
        say(peer, type="abort", id="late", target="r1")
        assert hear(peer) == {"type": "abort", "id": "late", "target": "r1", "found": False}


def test_an_abort_before_the_first_token_yields_none() -> None:
    with serving(ScriptedEngine(0.2)) as gateway, dealer(gateway.endpoint) as peer:
        say(peer, **generate("a", 5))
        say(peer, type="abort", id="q", target="a")
        assert hear(peer)["type"] == "abort"
        aborted = hear(peer)
        assert (aborted["type"], aborted["completion_tokens"]) == ("aborted", 0)
        assert not peer.poll(600)


def test_errors_of_the_engine_end_their_request_only() -> None:
    with serving(ScriptedEngine(0.005)) as gateway, dealer(gateway.endpoint) as peer:
        say(peer, **generate("good", 20))
        say(peer, **generate("bad", 5, text="refuse me"))
        say(peer, **generate("worse", 5, text="break"))
        refusal = terminal(peer, "bad")[1]
        assert (refusal["code"], refusal["field"], refusal["value"], refusal["bound"]) == (
            "bad_request",
            "text",
            "refuse me",
            "another",
        )
        assert terminal(peer, "worse")[1]["code"] == "internal"
        say(peer, **generate("next", 1))
        assert terminal(peer, "next")[1]["type"] == "done"


def test_an_id_in_flight_is_not_taken_twice() -> None:
    with serving(ScriptedEngine(0.01)) as gateway, dealer(gateway.endpoint) as peer:
        say(peer, **generate("a", 20))
        say(peer, **generate("a", 3))
        heard = []
        while not heard or heard[-1]["type"] != "done":
            heard.append(hear(peer))
        assert [(m["id"], m["code"]) for m in heard if m["type"] == "error"] == [(None, "duplicate_id")]
        assert heard[-1]["text"] == letters(20)
        say(peer, **generate("a", 3))
        assert terminal(peer, "a")[0] == letters(3)


@pytest.mark.parametrize(
    ("frames", "code"),
    [
        ([], "malformed"),
        ([TAG], "malformed"),
        ([b"", b"{}"], "version"),
        ([b"glm/2", b"{}"], "version"),
        ([TAG, b"{}", b"{}"], "malformed"),
        ([TAG, b""], "malformed"),
        ([TAG, b"\x80\x04]"], "malformed"),
        ([TAG, b"[1]"], "malformed"),
        ([TAG, b"[" * 100_000], "malformed"),
        ([TAG, b'{"type": "generate", "id": "\xff"}'], "malformed"),
        ([TAG, b'{"type": "nonsense", "id": "a"}'], "bad_request"),
        ([TAG, b'{"type": "ping"}'], "bad_request"),
        ([TAG, b'{"type": "ping", "id": ""}'], "bad_request"),
        ([TAG, b'{"type": "ping", "id": "a", "more": 1}'], "bad_request"),
    ],
)
def test_malformed_frames_are_answered_and_counted(shared_gateway: Any, frames: list[bytes], code: str) -> None:
    with dealer(shared_gateway.endpoint) as peer:
        before = shared_gateway.stats()["refused"].get(code, 0)
        peer.send_multipart(frames or [b""])
        answer = hear(peer)
        assert (answer["type"], answer["id"], answer["code"]) == ("error", None, code)
        assert shared_gateway.stats()["refused"][code] == before + 1
        say(peer, type="ping", id="alive")
        assert hear(peer)["type"] == "pong"


@pytest.fixture(scope="module")
def shared_gateway() -> Any:
    with serving() as gateway:
        yield gateway


class Marker:
    """Unpickled, it would leave a file."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return (open, (self.path, "w"))


def test_r63_pickle_is_inert(tmp_path: Path) -> None:
    """R63 (CVE-2026-3059 and others): a pickle whose reduce would touch a file; it never appears."""
    marker = tmp_path / "marker"
    with serving() as gateway, dealer(gateway.endpoint) as peer:
        for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
            evil = pickle.dumps(Marker(str(marker)), protocol)
            for frames in ([evil], [TAG, evil], [evil, evil], [TAG, evil, evil]):
                peer.send_multipart(frames)
                assert hear(peer)["code"] in ("malformed", "version")
        assert not marker.exists()
        assert sum(gateway.stats()["refused"].values()) == 4 * (pickle.HIGHEST_PROTOCOL + 1)


def test_a_peer_that_sends_only_rubbish_is_not_read_any_more() -> None:
    with serving() as gateway, dealer(gateway.endpoint) as peer, dealer(gateway.endpoint) as good:
        for _ in range(STRIKES + 20):
            peer.send_multipart([b"rubbish"])
        codes = [hear(peer)["code"] for _ in range(STRIKES)]
        assert codes == ["malformed"] * (STRIKES - 1) + ["muted"]
        say(peer, type="ping", id="now")
        assert not peer.poll(200)
        assert gateway.stats()["discarded"] == 21
        say(good, type="ping", id="a")
        assert hear(good)["type"] == "pong"


def test_size_limit() -> None:
    with serving(max_message=1000) as gateway, dealer(gateway.endpoint) as peer:
        peer.send_multipart([TAG, b"x" * 1500])
        answer = hear(peer)
        assert (answer["code"], answer["value"], answer["bound"]) == ("too_large", 1500, 1000)
        peer.send_multipart([TAG, b"x" * 100_000])  # ZeroMQ closes the connection, and the peer opens another

        def back() -> bool:
            say(peer, type="ping", id="back")
            return bool(peer.poll(100))

        until(back)
        assert hear(peer)["type"] == "pong"


def test_a_chosen_routing_id_is_refused() -> None:
    with serving() as gateway:
        for _ in range(2):  # nobody can take another's name, nor keep it from him
            with zmq.Context() as context, context.socket(zmq.DEALER) as peer:
                peer.setsockopt(zmq.LINGER, 0)
                peer.setsockopt(zmq.IDENTITY, b"alice")
                peer.connect(gateway.endpoint)
                say(peer, type="ping", id="a")
                assert hear(peer)["code"] == "routing_id"


def test_requests_in_flight_are_bounded() -> None:
    with serving(ScriptedEngine(0.05), max_requests=3) as gateway, dealer(gateway.endpoint) as peer:
        for i in range(5):
            say(peer, **generate(f"{i}", 2, stream=False))
        refused = [hear(peer), hear(peer)]
        assert [(m["id"], m["code"], m["bound"]) for m in refused] == [("3", "overloaded", 3), ("4", "overloaded", 3)]
        assert sorted(hear(peer)["id"] for _ in range(3)) == ["0", "1", "2"]


def test_clients_are_bounded_and_places_come_free() -> None:
    with serving(max_clients=2) as gateway, dealer(gateway.endpoint) as one:
        say(one, type="ping", id="a")
        assert hear(one)["type"] == "pong"
        with dealer(gateway.endpoint) as two:
            say(two, type="ping", id="a")
            assert hear(two)["type"] == "pong"
            with dealer(gateway.endpoint) as three:
                say(three, type="ping", id="a")
                assert hear(three)["code"] == "overloaded"
        until(lambda: gateway.stats()["clients"] == 1)
        with dealer(gateway.endpoint) as four:
            say(four, type="ping", id="a")
            assert hear(four)["type"] == "pong"


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("endpoint", ["tcp://127.0.0.1:0", "ipc"])
def test_r42_a_vanished_client_is_aborted_at_once(stream: bool, endpoint: str, tmp_path: Path) -> None:
    """R42: the socket closes and nothing of it runs any more, streaming or not; steps are counted in test_live.py."""
    if endpoint == "ipc":
        endpoint = f"ipc://{tmp_path}/socket"
    with serving(ScriptedEngine(0.02), endpoint) as gateway:
        with dealer(gateway.endpoint) as peer:
            for i in range(5):
                say(peer, **generate(f"{i}", 1000, stream))
            until(lambda: len(gateway.engine.running) == 5)
            if stream:
                assert hear(peer)["type"] == "delta"
        until(lambda: not gateway.engine.running, 5)  # of 20 s that they would run
        until(lambda: gateway.stats()["clients"] == 0)
        stats = gateway.stats()
        assert (stats["vanished"], stats["requests"]["aborted"], stats["in_flight"]) == (1, 5, 0)


def test_a_client_that_broke_its_promise_is_aborted() -> None:
    with serving(ScriptedEngine(0.05)) as gateway, dealer(gateway.endpoint) as peer:
        say(peer, type="hello", id="h", heartbeat_s=0.1)
        assert hear(peer)["type"] == "hello"
        say(peer, **generate("a", 1000, stream=False))
        assert "no sign of its client" in terminal(peer, "a")[1]["reason"]
        say(peer, **generate("b", 6, stream=False))  # 0.3 s: kept alive by pings
        for i in range(6):
            time.sleep(0.05)
            say(peer, type="ping", id=f"{i}")
        assert terminal(peer, "b")[1]["type"] == "done"


def test_a_slow_reader_gets_everything_in_fewer_messages() -> None:
    """Its deltas join while they wait; the text is whole, and others are not held up."""
    engine = ScriptedEngine(0.0)
    engine.padding = 2000
    tight = {"RCVHWM": 1, "RCVBUF": 4096}
    with (
        serving(engine, client_buffer=64 << 20) as gateway,
        dealer(gateway.endpoint, **tight) as slow,
        dealer(gateway.endpoint) as quick,
    ):
        say(slow, **generate("slow", 1500))
        until(lambda: gateway.stats()["waiting_bytes"] > 1 << 20)
        say(quick, type="ping", id="q")
        begin = time.monotonic()
        assert hear(quick)["type"] == "pong"
        assert time.monotonic() - begin < 5
        deltas, text = 0, ""
        while (message := hear(slow))["type"] == "delta":
            deltas += 1
            text += message["text"]
        assert message["type"] == "done"
        assert text == message["text"] and len(text) == 1500 * 2001
        assert deltas < 1500


def test_a_reader_that_never_reads_is_told_so() -> None:
    engine = ScriptedEngine(0.0)
    engine.padding = 5000
    with serving(engine, client_buffer=1 << 20) as gateway, dealer(gateway.endpoint, RCVHWM=1, RCVBUF=4096) as slow:
        say(slow, **generate("slow", 10_000))
        until(lambda: engine.stopped_early == 1, 30)
        for _ in range(50):  # what it says now is discarded, and it will hear so
            say(slow, type="ping", id="p")
        until(lambda: gateway.stats()["discarded"] == 50)
        text, end = terminal(slow, "slow")
        assert end["code"] == "client_too_slow" and end["bound"] == 1 << 20
        assert text.replace(".", "") == letters(text.count(".") // 5000)
        notice = hear(slow)
        assert (notice["id"], notice["code"], notice["value"]) == (None, "overloaded", 50)
        say(slow, type="ping", id="again")
        assert hear(slow)["type"] == "pong"


def test_a_flood_of_questions_starves_nobody() -> None:
    with serving() as gateway, dealer(gateway.endpoint, SNDHWM=0, RCVHWM=0) as loud, dealer(gateway.endpoint) as quiet:
        for i in range(4_000):
            say(loud, type="ping", id=f"{i}")
        begin = time.monotonic()
        say(quiet, **generate("a", 10))
        assert terminal(quiet, "a")[0] == letters(10)
        assert time.monotonic() - begin < 10
        for i in range(4_000):
            assert hear(loud)["id"] == f"{i}"


def test_other_protocols_on_the_port() -> None:
    with serving() as gateway, dealer(gateway.endpoint) as peer:
        host, port = gateway.endpoint.removeprefix("tcp://").split(":")
        for rubbish in (b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", b"\x00" * 64, b"\xff" + b"\x00" * 9 + b"\x7f" * 60):
            with sockets.create_connection((host, int(port))) as raw:
                raw.sendall(rubbish)
        say(peer, type="ping", id="a")
        assert hear(peer)["type"] == "pong"


def test_close_ends_every_request_with_an_error() -> None:
    with serving(ScriptedEngine(0.05)) as gateway, dealer(gateway.endpoint) as peer:
        say(peer, **generate("a", 1000))
        until(lambda: gateway.engine.running)
        gateway.stop()
        assert terminal(peer, "a")[1]["code"] == "shutting_down"


def test_a_draining_server_takes_nothing_new() -> None:
    engine = ScriptedEngine(0.01)
    with serving(engine) as gateway, dealer(gateway.endpoint) as peer:
        say(peer, **generate("old", 30))
        until(lambda: engine.running)
        engine.draining = True
        say(peer, **generate("new", 3))
        heard = [hear(peer)]
        while heard[-1]["type"] != "done":
            heard.append(hear(peer))
        assert [m["code"] for m in heard if m["id"] == "new"] == ["shutting_down"]
        assert heard[-1]["text"] == letters(30)


def test_curve(tmp_path: Path) -> None:
    """Only who has an authorised key is heard, a stranger and a peer without a key are not; an ipc file needs none."""
    for name in ("server", "friend", "stranger"):
        keygen(tmp_path / "keys", name)
    (tmp_path / "authorized").mkdir()
    (tmp_path / "authorized" / "friend.key").write_bytes((tmp_path / "keys" / "friend.key").read_bytes())
    keys = tmp_path / "keys"
    with serving(
        endpoint=f"tcp://127.0.0.1:0 ipc://{tmp_path}/own",
        secret_key_file=str(keys / "server.key_secret"),
        authorized_keys=str(tmp_path / "authorized"),
    ) as gateway:
        heard = {}
        for name in ("friend", "stranger", None):
            with zmq.Context() as context, context.socket(zmq.DEALER) as peer:
                peer.setsockopt(zmq.LINGER, 0)
                if name is not None:
                    public, secret = zmq.auth.load_certificate(keys / f"{name}.key_secret")
                    peer.curve_publickey, peer.curve_secretkey = public, secret
                    peer.curve_serverkey = zmq.auth.load_certificate(keys / "server.key")[0]
                peer.connect(gateway.endpoint)
                say(peer, type="ping", id="a")
                heard[name] = bool(peer.poll(2000 if name == "friend" else 500))
        assert heard == {"friend": True, "stranger": False, None: False}
        until(lambda: gateway.stats()["handshakes_refused"] >= 1)
        assert gateway.stats()["messages_in"] == 1
        with dealer(f"ipc://{tmp_path}/own") as peer:
            say(peer, type="ping", id="a")
            assert hear(peer)["type"] == "pong"


def test_bad_fields_end_their_request() -> None:
    with serving() as gateway, dealer(gateway.endpoint) as peer:
        say(peer, type="generate", id="a", input_ids=[1, 2], text="both")
        answer = hear(peer)
        assert (answer["id"], answer["code"], answer["field"]) == ("a", "bad_request", "text")
        say(peer, type="generate", id="b", text="x", priority="high")
        answer = hear(peer)
        assert (answer["id"], answer["field"]) == ("b", "priority")
        assert gateway.stats()["requests"]["error"] == 2
