"""`python -m glm_runtime.gateway keygen FOLDER NAME...`: CURVE keys for the gateway and its clients."""

from __future__ import annotations

import argparse
from pathlib import Path

from glm_runtime.ending import fail
from glm_runtime.errors import ConfigError
from glm_runtime.gateway.keys import keygen


def main(argv: list[str] | None = None) -> None:
    """Make the keys that were asked for and print their files."""
    parser = argparse.ArgumentParser(prog="python -m glm_runtime.gateway")
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("keygen", help="make CURVE keys: NAME.key is public, NAME.key_secret is not")
    command.add_argument("folder", type=Path)
    command.add_argument("name", nargs="+")
    given = parser.parse_args(argv)
    try:
        for name in given.name:
            public, secret = keygen(given.folder, name)
            print(f"{public}\n{secret}")
    except ConfigError as error:
        fail(error)
    except OSError as error:
        fail(f"{given.folder}: {error.strerror or error}")


if __name__ == "__main__":
    main()
