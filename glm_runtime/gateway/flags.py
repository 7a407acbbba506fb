"""Flags of the gateway. Pure.

| flag                        | default | meaning                                                                  |
|-----------------------------|---------|--------------------------------------------------------------------------|
| --zmq-endpoint (repeatable) | none    | where to listen; without it there is no gateway                          |
| --zmq-curve-secret-key-file | none    | the server's key: every endpoint but ipc files then speaks CURVE         |
| --zmq-authorized-keys       | none    | folder of the public keys that may talk to it                            |
| --zmq-insecure              | off     | a public endpoint without keys                                           |
| --zmq-max-message-mb        | 8       | one message of a client                                                  |
| --zmq-max-requests          | 512     | requests in flight a client                                              |
| --zmq-max-clients           | 1024    | clients at once                                                          |
| --zmq-client-buffer-mb      | 8       | answers that wait for a client that does not read                        |
| --zmq-heartbeat-s           | 5       | silence after which a connection is asked; three of them, and it is gone |

A flag that has nothing to act on ends the launch.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from glm_runtime.config import ConfigError
from glm_runtime.gateway import keys
from glm_runtime.gateway.listen import Endpoint, parse

GONE_AFTER = 3  # heartbeats without a sign


@dataclass(frozen=True)
class GatewayFlags:
    """Values of the gateway's flags; None: not given."""

    zmq_endpoint: tuple[str, ...] | None = None
    zmq_curve_secret_key_file: str | None = None
    zmq_authorized_keys: str | None = None
    zmq_insecure: bool | None = None
    zmq_max_message_mb: int | None = None
    zmq_max_requests: int | None = None
    zmq_max_clients: int | None = None
    zmq_client_buffer_mb: int | None = None
    zmq_heartbeat_s: float | None = None

    def given(self) -> list[str]:
        """Names of the fields that the operator set."""
        return [field.name for field in fields(self) if getattr(self, field.name) is not None]


@dataclass(frozen=True)
class Settings:
    """What a gateway runs by.

    Attributes:
        endpoints: where it listens.
        secret_key_file, authorized_keys: CURVE; both or neither.
        max_message: bytes of one message. client_buffer: bytes of answers that may wait for one client.
        max_requests: in flight, a client. max_clients: at once. heartbeat_s: seconds.
    """

    endpoints: tuple[Endpoint, ...]
    secret_key_file: str | None = None
    authorized_keys: str | None = None
    max_message: int = 8 << 20
    client_buffer: int = 8 << 20
    max_requests: int = 512
    max_clients: int = 1024
    heartbeat_s: float = 5.0

    def limits(self) -> dict[str, Any]:
        """As `hello` tells them."""
        return {
            "max_message_bytes": self.max_message,
            "max_requests": self.max_requests,
            "client_buffer_bytes": self.client_buffer,
            "heartbeat_s": self.heartbeat_s,
        }


def flag_of(name: str) -> str:
    """Command-line form of a field."""
    return "--" + name.replace("_", "-")


def from_values(values: Mapping[str, Any]) -> GatewayFlags:
    """Flags from parsed values or keyword arguments (None: not given). Raises ConfigError naming the flag."""
    given = {f.name: values[f.name] for f in fields(GatewayFlags) if values.get(f.name) is not None}
    for name in ("zmq_max_message_mb", "zmq_max_requests", "zmq_max_clients", "zmq_client_buffer_mb"):
        value = given.get(name)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or not 0 < value < 2**20):
            raise ConfigError(f"{flag_of(name)} {value}: a whole number from 1 to {2**20 - 1} is needed")
    beat = given.get("zmq_heartbeat_s")
    if beat is not None and (isinstance(beat, bool) or not isinstance(beat, int | float) or not 0.1 <= beat <= 600):
        raise ConfigError(f"--zmq-heartbeat-s {beat}: 0.1 to 600 seconds are possible")
    if "zmq_endpoint" in given:
        asked = given["zmq_endpoint"]
        given["zmq_endpoint"] = (asked,) if isinstance(asked, str) else tuple(asked)
    return GatewayFlags(**given)


def settings_of(flags: GatewayFlags) -> Settings | None:
    """What to run by; None without --zmq-endpoint. Raises ConfigError naming the flags that cannot both hold."""
    if not flags.zmq_endpoint:
        for name in flags.given():
            raise ConfigError(f"{flag_of(name)} has nothing to act on without --zmq-endpoint")
        return None
    endpoints = tuple(parse(text) for text in flags.zmq_endpoint)
    for place, endpoint in enumerate(endpoints):
        if endpoint in endpoints[:place] and (endpoint.scheme == "ipc" or endpoint.port):
            raise ConfigError(f"--zmq-endpoint {endpoint.text} is given twice")
    secret, folder = flags.zmq_curve_secret_key_file, flags.zmq_authorized_keys
    if (secret is None) != (folder is None):
        missing = "--zmq-authorized-keys" if folder is None else "--zmq-curve-secret-key-file"
        raise ConfigError(f"--zmq-curve-secret-key-file and --zmq-authorized-keys go together; {missing} is missing")
    if secret is not None and folder is not None:
        if flags.zmq_insecure:
            raise ConfigError("--zmq-insecure contradicts --zmq-curve-secret-key-file; drop one of the two")
        keys.load_secret(secret, "--zmq-curve-secret-key-file")
        keys.authorized(folder, "--zmq-authorized-keys")
    public = [endpoint for endpoint in endpoints if endpoint.public]
    if public and secret is None and not flags.zmq_insecure:
        raise ConfigError(
            f"--zmq-endpoint {public[0].text} can be reached from other machines: give "
            "--zmq-curve-secret-key-file and --zmq-authorized-keys (python -m glm_runtime.gateway keygen makes keys), "
            "or --zmq-insecure"
        )
    if flags.zmq_insecure and not public:
        raise ConfigError("--zmq-insecure has nothing to act on: no --zmq-endpoint can be reached from other machines")
    default = Settings(endpoints)
    return Settings(
        endpoints,
        secret,
        folder,
        (flags.zmq_max_message_mb or default.max_message >> 20) << 20,
        (flags.zmq_client_buffer_mb or default.client_buffer >> 20) << 20,
        flags.zmq_max_requests or default.max_requests,
        flags.zmq_max_clients or default.max_clients,
        flags.zmq_heartbeat_s or default.heartbeat_s,
    )


def _seconds(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise argparse.ArgumentTypeError(f"{text} is no number of seconds")
    return value


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the gateway's flags to `parser`."""
    group = parser.add_argument_group("glm_runtime, ZMQ gateway (docs/zmq-protocol.md)")

    def add(flag: str, text: str, metavar: str, type_: Any = str, **more: Any) -> None:
        group.add_argument(flag, type=type_, default=None, help=text, metavar=metavar, **more)

    add("--zmq-endpoint", "listen for ZMQ clients there; repeatable", "tcp://HOST:PORT", action="append")
    add("--zmq-curve-secret-key-file", "the server's CURVE key; all endpoints but ipc files then demand CURVE", "FILE")
    add("--zmq-authorized-keys", "folder of the public keys that may talk to the server", "DIR")
    group.add_argument(
        "--zmq-insecure",
        action="store_true",
        default=None,
        help="let a --zmq-endpoint be reached from other machines without keys",
    )
    add("--zmq-max-message-mb", "size of one message of a client (default 8)", "MIB", int)
    add("--zmq-max-requests", "requests in flight a client (default 512)", "N", int)
    add("--zmq-max-clients", "clients at once (default 1024)", "N", int)
    add("--zmq-client-buffer-mb", "answers that may wait for a client that does not read (default 8)", "MIB", int)
    add(
        "--zmq-heartbeat-s",
        "seconds between heartbeats; a connection silent for three is gone (default 5)",
        "S",
        _seconds,
    )
