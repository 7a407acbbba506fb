"""Endpoints of the gateway: read, judged public or not, and bound before anything else is started.

    tcp://127.0.0.1:5557   tcp://[::1]:5557   tcp://*:0   ipc:///path   ipc://@name   (port 0: any free one)

The kernel's socket is bound and listens while the model still loads, so a taken address ends the launch at once and a
client that comes early waits; ZeroMQ takes the descriptor over later (ZMQ_USE_FD).
"""

from __future__ import annotations

import fcntl
import ipaddress
import os
import socket
import stat
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from glm_runtime.errors import ConfigError

BACKLOG = 128
PATH_LIMIT = 107  # bytes of a Unix socket's path
EVERYWHERE = ("*", "0.0.0.0", "::")


@dataclass(frozen=True)
class Endpoint:
    """One address to listen on.

    Attributes:
        scheme: "tcp" or "ipc".
        host: address, "*" for all of them; the path for ipc, beginning with "@" where it is an abstract name.
        port: TCP port, 0 for any; 0 for ipc.
    """

    scheme: str
    host: str
    port: int = 0

    @property
    def text(self) -> str:
        """As ZeroMQ writes it."""
        if self.scheme == "ipc":
            return f"ipc://{self.host}"
        return f"tcp://[{self.host}]:{self.port}" if ":" in self.host else f"tcp://{self.host}:{self.port}"

    @property
    def own(self) -> bool:
        """Whether the file's permissions keep everybody but this user away."""
        return self.scheme == "ipc" and not self.host.startswith("@")

    @property
    def public(self) -> bool:
        """Whether another machine can reach it."""
        if self.scheme == "ipc" or self.host == "localhost":
            return False
        try:
            return not ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return True


def parse(text: str) -> Endpoint:
    """An endpoint. Raises ConfigError naming --zmq-endpoint."""

    def refuse(why: str) -> ConfigError:
        return ConfigError(f"--zmq-endpoint {text}: {why}")

    scheme, found, rest = text.partition("://")
    if not found or scheme not in ("tcp", "ipc"):
        raise refuse("tcp://HOST:PORT or ipc://PATH is needed")
    if scheme == "ipc":
        if not rest.removeprefix("@"):
            raise refuse("a path is needed after ipc://")
        if len(os.fsencode(rest)) > PATH_LIMIT:
            raise refuse(f"the path is longer than {PATH_LIMIT} bytes")
        return Endpoint("ipc", rest)
    host, found, port = rest.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not found or not host or not port.isdecimal() or int(port) > 65535:
        raise refuse("tcp://HOST:PORT is needed, PORT from 0 (any free one) to 65535")
    if host not in ("*", "localhost"):
        try:
            ipaddress.ip_address(host)
        except ValueError:
            raise refuse("HOST is an IP address, localhost, or * for all addresses") from None
    return Endpoint("tcp", host, int(port))


class Listener:
    """A bound, listening socket of one endpoint; `endpoint` has the real port."""

    def __init__(self, endpoint: Endpoint, bound: socket.socket) -> None:
        self.endpoint, self._socket = endpoint, bound
        self._made = _file(endpoint.host) if endpoint.own else None

    def hand_over(self) -> int:
        """The file descriptor; whoever gets it closes it."""
        return self._socket.detach()

    def close(self) -> None:
        """Close what was not handed over, and remove the ipc file if it is still ours."""
        self._socket.close()
        if self._made is not None:
            with suppress(FileNotFoundError):
                if _file(self.endpoint.host) == self._made:
                    os.unlink(self.endpoint.host)


def _file(path: str) -> tuple[int, int, int]:
    """What tells a file from a later one of the same name: inode numbers are used again."""
    facts = os.stat(path)
    return facts.st_dev, facts.st_ino, facts.st_ctime_ns


def listen_all(endpoints: Sequence[Endpoint]) -> list[Listener]:
    """Bind them all or none. Raises ConfigError naming the endpoint that cannot be bound."""
    listeners: list[Listener] = []
    try:
        for endpoint in endpoints:
            listeners.append(_listen_ipc(endpoint) if endpoint.scheme == "ipc" else _listen_tcp(endpoint))
    except BaseException:
        for listener in listeners:
            listener.close()
        raise
    return listeners


def _refusal(endpoint: Endpoint, error: OSError) -> ConfigError:
    return ConfigError(f"--zmq-endpoint {endpoint.text} cannot be bound ({error.strerror}); choose another")


def _listen_tcp(endpoint: Endpoint) -> Listener:
    host = {"*": "0.0.0.0", "localhost": "127.0.0.1"}.get(endpoint.host, endpoint.host)
    made = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind((host, endpoint.port))
        made.listen(BACKLOG)
    except OSError as error:
        made.close()
        raise _refusal(endpoint, error) from None
    return Listener(Endpoint("tcp", host, made.getsockname()[1]), made)


def _listen_ipc(endpoint: Endpoint) -> Listener:
    made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        if endpoint.host.startswith("@"):
            made.bind("\0" + endpoint.host[1:])
        else:
            _bind_path(made, endpoint)
        made.listen(BACKLOG)
    except OSError as error:
        made.close()
        raise _refusal(endpoint, error) from None
    except BaseException:
        made.close()
        raise
    return Listener(endpoint, made)


def _bind_path(made: socket.socket, endpoint: Endpoint) -> None:
    """Bind a path, for this user only; a file that no server listens on any more is taken away first.

    The folder is locked meanwhile: of two servers that find the same old file, one binds and the other is refused.
    """
    path = Path(endpoint.host)
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        with suppress(FileNotFoundError):
            if not stat.S_ISSOCK(os.lstat(path).st_mode):
                raise ConfigError(f"--zmq-endpoint {endpoint.text}: the file there is no socket; remove it yourself")
            if _answers(path):
                raise ConfigError(f"--zmq-endpoint {endpoint.text} is taken by a running server; choose another")
            os.unlink(path)
        made.bind(os.fspath(path))
        # NOTE: before listen(): until then nobody can connect, so there is no moment at which others could.
        os.chmod(path, 0o600)
        made.listen(BACKLOG)
    finally:
        os.close(folder)


def _answers(path: Path) -> bool:
    """Whether somebody listens on a socket file."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1)
        try:
            probe.connect(os.fspath(path))
        except ConnectionRefusedError:
            return False
        except OSError:  # a full line of waiting peers, or not ours to ask: somebody has it
            return True
    return True
