"""The socket of a client."""

from __future__ import annotations

import os

import zmq

from glm_runtime.gateway.keys import load_public, load_secret

LINGER_MS = 500
RECONNECT_MS = (20, 1000)


def dealer(endpoint: str, key_file: str | None, server_key: str | None) -> zmq.Socket[bytes]:
    """A DEALER that connects, and connects again whenever the connection breaks.

    Args:
        key_file: the client's NAME.key_secret; server_key: the server's NAME.key, or the key's 40 characters. Both or
            neither.

    Raises:
        ValueError: one of the two is missing; glm_runtime.config.ConfigError: a file does not read.
    """
    if (key_file is None) != (server_key is None):
        raise ValueError("key_file and server_key go together")
    made: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
    made.setsockopt(zmq.LINGER, LINGER_MS)
    made.setsockopt(zmq.RECONNECT_IVL, RECONNECT_MS[0])
    made.setsockopt(zmq.RECONNECT_IVL_MAX, RECONNECT_MS[1])
    made.setsockopt(zmq.HEARTBEAT_IVL, 5000)
    made.setsockopt(zmq.IPV6, int("[" in endpoint))
    if key_file is not None and server_key is not None:
        made.curve_publickey, made.curve_secretkey = load_secret(key_file, "key_file")
        made.curve_serverkey = (
            load_public(server_key, "server_key") if os.path.exists(server_key) else server_key.encode()
        )
    made.connect(endpoint)
    return made
