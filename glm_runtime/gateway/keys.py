"""CURVE keys of the gateway, in ZeroMQ's certificate files.

    keygen FOLDER server client...   NAME.key (public) and NAME.key_secret (secret, readable by its owner only)

The server has one secret file and a folder of the public keys that may talk to it; a client has its own secret file
and the server's public key.
"""

from __future__ import annotations

import os
from pathlib import Path

from glm_runtime.errors import ConfigError

PUBLIC, SECRET = ".key", ".key_secret"


def keygen(folder: Path, name: str) -> tuple[Path, Path]:
    """Make a pair of keys. Raises ConfigError where one of that name exists; returns (public file, secret file)."""
    from zmq.auth import create_certificates

    if not name or name != Path(name).name or name.startswith("."):
        raise ConfigError(f"{name!r} is no name for a key")
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    for suffix in (PUBLIC, SECRET):
        if (folder / (name + suffix)).exists():
            raise ConfigError(f"{folder / (name + suffix)} exists already; keys are never overwritten")
    before = os.umask(0o077)
    try:
        create_certificates(folder, name)
    finally:
        os.umask(before)
    (folder / (name + PUBLIC)).chmod(0o644)
    return folder / (name + PUBLIC), folder / (name + SECRET)


def load_secret(file: str, flag: str) -> tuple[bytes, bytes]:
    """(public, secret) of a .key_secret file. Raises ConfigError naming `flag`."""
    public, secret = _load(Path(file), flag)
    if secret is None:
        raise ConfigError(f"{flag} {file} holds no secret key; give the {SECRET} file")
    return public, secret


def load_public(file: str, flag: str) -> bytes:
    """The public key of a .key file. Raises ConfigError naming `flag`."""
    return _load(Path(file), flag)[0]


def authorized(folder: str, flag: str) -> int:
    """How many public keys a folder holds. Raises ConfigError naming `flag` where there is none, or a bad one."""
    path = Path(folder)
    if not path.is_dir():
        raise ConfigError(f"{flag} {folder}: there is no such folder")
    files = sorted(path.glob(f"*{PUBLIC}"))
    if not files:
        raise ConfigError(f"{flag} {folder} holds no public key (NAME{PUBLIC}), so nobody could talk to the server")
    for file in files:
        _load(file, flag)
    return len(files)


def _load(file: Path, flag: str) -> tuple[bytes, bytes | None]:
    from zmq.auth import load_certificate

    try:
        public, secret = load_certificate(file)
    except OSError as error:
        raise ConfigError(f"{flag} {file}: {error.strerror or error}") from None
    except ValueError as error:
        raise ConfigError(f"{flag} {file} is no key file: {error}") from None
    return public, secret
