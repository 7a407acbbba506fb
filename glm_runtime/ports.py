"""Ports that a launch takes long before anything listens on them.

    probe, then bind        between the two another server may take the port: two launches at once both "find" it free
    hold a name per port    a socket in Linux's abstract namespace, bound for as long as this process lives; the kernel
                            gives it back however the process ends. Two launches of ours never hold one port.

Elsewhere than on Linux nothing is held; the probe remains.
"""

from __future__ import annotations

import random
import socket
import sys

LOW, HIGH = 22000, 29999  # below the ephemeral ports, as SGLang's own choice
TRIES = 64

_held: dict[int, socket.socket] = {}


def hold(port: int) -> bool:
    """Take `port` among the launches of this machine; False where another one has it."""
    if sys.platform != "linux" or port in _held:
        return True
    name = socket.socket(socket.AF_UNIX)
    try:
        name.bind(f"\0glm-runtime-port-{port}")
    except OSError:
        name.close()
        return False
    _held[port] = name
    return True


def inner() -> int:
    """A free port for SGLang's processes to meet on, held from now on."""
    for port in random.sample(range(LOW, HIGH + 1), TRIES):
        with socket.socket() as probe:
            try:
                probe.bind(("0.0.0.0", port))
            except OSError:
                continue
        if hold(port):
            return port
    raise OSError(f"no free port between {LOW} and {HIGH}")


def release() -> None:
    """Give all of them back."""
    while _held:
        _held.popitem()[1].close()
