"""Endpoints, flags and keys, before any model is loaded."""

from __future__ import annotations

import os
import socket
import stat
import threading
from pathlib import Path
from typing import Any

import pytest

from glm_runtime import launch_server
from glm_runtime.cli import Options, once, split
from glm_runtime.config import ConfigError
from glm_runtime.gateway.__main__ import main
from glm_runtime.gateway.flags import from_values, settings_of
from glm_runtime.gateway.keys import authorized, keygen, load_public, load_secret
from glm_runtime.gateway.listen import Listener, listen_all, parse
from tests.servers import free_port, launch


@pytest.mark.parametrize(
    ("text", "public"),
    [
        ("tcp://127.0.0.1:5557", False),
        ("tcp://127.9.9.9:1", False),
        ("tcp://localhost:0", False),
        ("tcp://[::1]:5557", False),
        ("ipc:///tmp/x", False),
        ("ipc://@name", False),
        ("tcp://*:5557", True),
        ("tcp://0.0.0.0:5557", True),
        ("tcp://[::]:5557", True),
        ("tcp://10.0.0.1:5557", True),
        ("tcp://[2001:db8::1]:5557", True),
    ],
)
def test_r65_what_is_public(text: str, public: bool) -> None:
    """R65 (LightLLM#1413): loopback and ipc are open to this machine only; all else needs keys or a flag."""
    assert parse(text).public is public
    flags = from_values({"zmq_endpoint": [text]})
    if public:
        with pytest.raises(ConfigError, match=r"can be reached from other machines.*--zmq-insecure"):
            settings_of(flags)
        assert settings_of(from_values({"zmq_endpoint": [text], "zmq_insecure": True})) is not None
    else:
        settings = settings_of(flags)
        assert settings is not None and settings.endpoints == (parse(text),)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "tcp://",
        "tcp://x:1",
        "tcp://eth0:1",
        "tcp://127.0.0.1",
        "tcp://127.0.0.1:70000",
        "tcp://:1",
        "udp://1.1.1.1:1",
    ]
    + ["ipc://", "ipc://@", "ipc://" + "x" * 108, "inproc://x", "127.0.0.1:5557", "tcp://127.0.0.1:-1"],
)
def test_a_bad_endpoint_is_named(text: str) -> None:
    with pytest.raises(ConfigError, match="--zmq-endpoint") as raised:
        parse(text)
    assert "\n" not in str(raised.value)


def test_a_taken_port_is_named() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"--zmq-endpoint tcp://127\.0\.0\.1:{port} cannot be bound"):
            listen_all([parse("tcp://127.0.0.1:0"), parse(f"tcp://127.0.0.1:{port}")])


def test_the_real_port_is_told() -> None:
    listeners = listen_all([parse("tcp://127.0.0.1:0"), parse("tcp://127.0.0.1:0")])
    try:
        ports = {listener.endpoint.port for listener in listeners}
        assert len(ports) == 2 and 0 not in ports
    finally:
        for listener in listeners:
            listener.close()


def test_ipc_files(tmp_path: Path) -> None:
    path = tmp_path / "socket"
    (first,) = listen_all([parse(f"ipc://{path}")])
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    with pytest.raises(ConfigError, match="taken by a running server"):
        listen_all([parse(f"ipc://{path}")])
    os.close(first.hand_over())  # as a server that was killed leaves it
    assert path.exists()
    (second,) = listen_all([parse(f"ipc://{path}")])
    first.close()
    assert path.exists(), "the file of the second was taken away by the first"
    second.close()
    assert not path.exists()
    path.write_text("precious")
    with pytest.raises(ConfigError, match="no socket"):
        listen_all([parse(f"ipc://{path}")])
    assert path.read_text() == "precious"
    with pytest.raises(ConfigError, match="cannot be bound"):
        listen_all([parse(f"ipc://{tmp_path}/nowhere/socket")])


def test_r67_of_many_that_find_an_old_file_one_gets_it(tmp_path: Path) -> None:
    """R67: servers that start at once over a stale ipc file; one binds, the others say that it is taken."""
    for round in range(10):
        path = tmp_path / f"{round}"
        with socket.socket(socket.AF_UNIX) as old:
            old.bind(str(path))
        got: list[Listener] = []
        said: list[str] = []

        def start(path: Path = path, got: list[Listener] = got, said: list[str] = said) -> None:
            try:
                got += listen_all([parse(f"ipc://{path}")])
            except ConfigError as error:
                said.append(str(error))

        threads = [threading.Thread(target=start) for _ in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(got) == 1 and len(said) == 5 and all("taken" in text for text in said), said
        got[0].close()


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"zmq_insecure": True}, "--zmq-insecure has nothing to act on without --zmq-endpoint"),
        ({"zmq_max_requests": 5}, "--zmq-max-requests has nothing to act on"),
        ({"zmq_endpoint": ["ipc:///tmp/a"], "zmq_insecure": True}, "--zmq-insecure has nothing to act on"),
        ({"zmq_endpoint": ["ipc:///tmp/a", "ipc:///tmp/a"]}, "is given twice"),
        ({"zmq_endpoint": ["ipc:///tmp/a"], "zmq_authorized_keys": "x"}, "--zmq-curve-secret-key-file is missing"),
        ({"zmq_endpoint": ["ipc:///tmp/a"], "zmq_curve_secret_key_file": "x"}, "--zmq-authorized-keys is missing"),
    ],
)
def test_flags_that_cannot_hold(values: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        settings_of(from_values(values))


@pytest.mark.parametrize("name", ["zmq_max_requests", "zmq_max_clients", "zmq_max_message_mb", "zmq_client_buffer_mb"])
@pytest.mark.parametrize("value", [0, -1, 2**20, True, "x"])
def test_limits_have_bounds(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match="--" + name.replace("_", "-")):
        from_values({name: value})


def test_flags_on_the_command_line_and_in_a_file(tmp_path: Path) -> None:
    from glm_runtime import config_file

    argv = [
        "--zmq-endpoint",
        "ipc:///tmp/a",
        "--zmq-endpoint=tcp://127.0.0.1:1",
        "--zmq-heartbeat-s",
        "2",
        "--port",
        "3",
    ]
    once(argv)
    options, rest, _ = split(argv)
    assert rest == ["--port", "3"]
    settings = settings_of(options.gateway)
    assert settings is not None
    assert [endpoint.text for endpoint in settings.endpoints] == ["ipc:///tmp/a", "tcp://127.0.0.1:1"]
    assert (settings.heartbeat_s, settings.max_requests) == (2.0, 512)
    file = tmp_path / "serve.yaml"
    file.write_text("zmq-endpoint: [ipc:///tmp/a, 'tcp://127.0.0.1:1']\nzmq_heartbeat_s: 2.0\n")
    content = config_file.read(str(file))
    assert split(config_file.our_flags(str(file), content))[0].gateway == options.gateway
    assert content == {}
    assert settings_of(Options().gateway) is None


def test_keys(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["keygen", str(tmp_path), "server", "client"])
    assert capsys.readouterr().out.count("\n") == 4
    secret = tmp_path / "server.key_secret"
    assert stat.S_IMODE(secret.stat().st_mode) == 0o600
    public, private = load_secret(str(secret), "--flag")
    assert load_public(str(tmp_path / "server.key"), "--flag") == public != private
    assert authorized(str(tmp_path), "--flag") == 2
    before = secret.read_bytes()
    with pytest.raises(ConfigError, match="exists already"):
        keygen(tmp_path, "server")
    assert secret.read_bytes() == before
    with pytest.raises(ConfigError, match="no name"):
        keygen(tmp_path, "../up")


def test_bad_keys(tmp_path: Path) -> None:
    keygen(tmp_path, "server")
    empty = tmp_path / "empty"
    empty.mkdir()
    (tmp_path / "rubbish.key").write_text("rubbish")
    public = str(tmp_path / "server.key")
    for call, words in (
        (lambda: load_secret(public, "--f"), "holds no secret key"),
        (lambda: load_secret(str(tmp_path / "none"), "--f"), "--f .*none"),
        (lambda: authorized(str(empty), "--f"), "holds no public key"),
        (lambda: authorized(str(tmp_path / "none"), "--f"), "no such folder"),
        (lambda: authorized(str(tmp_path), "--f"), "rubbish.key is no key file"),
    ):
        with pytest.raises(ConfigError, match=words):
            call()


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--zmq-endpoint", "tcp://0.0.0.0:0"], "can be reached from other machines"),
        (["--zmq-endpoint", "nonsense"], "--zmq-endpoint nonsense"),
        (["--zmq-max-clients", "5"], "--zmq-max-clients has nothing to act on without --zmq-endpoint"),
        (["--zmq-max-clients", "many"], "--zmq-max-clients"),
        (["--zmq-endpoint"], "--zmq-endpoint"),
    ],
)
def test_r65_a_launch_is_refused_in_one_line(argv: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        launch_server.main([*argv, "--port", str(free_port())])
    said = capsys.readouterr().err
    assert stop.value.code == 2
    assert said.startswith("glm_runtime: error: ") and said.count("\n") == 1 and words in said


def test_a_launch_on_a_taken_endpoint_ends_at_once() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        endpoint = f"tcp://127.0.0.1:{other.getsockname()[1]}"
        run = launch("--zmq-endpoint", endpoint, "--port", str(free_port()))
    assert run.code == 2 and run.left == []
    (line,) = run.error_lines()
    assert endpoint in line and "cannot be bound" in line


def test_an_engine_has_no_gateway() -> None:
    import glm_runtime

    with pytest.raises(ConfigError, match="zmq_endpoint: the ZMQ gateway belongs to the server"):
        glm_runtime.Engine(zmq_endpoint="tcp://127.0.0.1:5557")
