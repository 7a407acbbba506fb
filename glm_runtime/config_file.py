"""`--config FILE.yaml`: SGLang's own format, with our keys beside SGLang's.

FILE.yaml ── our keys ──> flags in front of the command line (which therefore wins)
          └─ the rest ──> a file of SGLang's keys only, for SGLang's own reader
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from glm_runtime.cli import add_arguments
from glm_runtime.config import ConfigError


def path_in(argv: Sequence[str]) -> tuple[str | None, list[str]]:
    """The file named by --config, and `argv` without it. Raises ConfigError where it is named twice or not at all."""
    rest: list[str] = []
    found: list[str] = []
    arguments = iter(argv)
    for argument in arguments:
        name, equals, value = argument.partition("=")
        if name != "--config":
            rest.append(argument)
            continue
        value = value if equals else next(arguments, "")
        if not value or (not equals and value.startswith("--")):
            raise ConfigError("--config: no file named after it")
        found.append(value)
    if len(found) > 1:
        raise ConfigError(f"--config is given {len(found)} times; one file only")
    return (found[0] if found else None), rest


def read(path: str) -> dict[str, Any]:
    """Keys of the file with "-" in place of "_". Raises ConfigError naming --config."""
    import yaml

    if Path(path).suffix.lower() not in (".yaml", ".yml"):
        raise ConfigError(f"--config {path}: a .yaml file is wanted")
    try:
        content = yaml.safe_load(Path(path).read_text())
    except FileNotFoundError:
        raise ConfigError(f"--config {path}: no such file") from None
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"--config {path} does not read: {error}") from None
    if content is None:
        return {}
    if not isinstance(content, dict) or not all(isinstance(key, str) for key in content):
        raise ConfigError(f"--config {path}: flags and their values are wanted (name: value)")
    keys = [key.replace("_", "-") for key in content]
    for key in keys:
        if keys.count(key) > 1:
            raise ConfigError(f"--config {path}: {key} is given twice")
    return dict(zip(keys, content.values(), strict=True))


def our_flags(path: str, content: dict[str, Any]) -> list[str]:
    """Take our keys out of `content`; the flags that they stand for."""
    parser = argparse.ArgumentParser(add_help=False)
    add_arguments(parser)
    flags: list[str] = []
    for action in parser._actions:
        name = action.option_strings[0].removeprefix("--")
        if name not in content:
            continue
        value = content.pop(name)
        if action.nargs == 0:
            if not isinstance(value, bool):
                raise ConfigError(f"--config {path}: {name} is true or false, not {value!r}")
            if isinstance(action, argparse.BooleanOptionalAction):
                flags += [f"--{name}" if value else f"--no-{name}"]
            else:
                flags += [f"--{name}"] if value else []
        elif isinstance(action, argparse._AppendAction) and isinstance(value, list):
            flags += [part for item in value for part in (f"--{name}", str(item))]
        elif isinstance(value, str | int | float) and not isinstance(value, bool):
            flags += [f"--{name}", str(value)]
        else:
            raise ConfigError(f"--config {path}: {name} takes one value, not {value!r}")
    return flags


def text_of(content: dict[str, Any], *names: str) -> str | None:
    """Value of the first of `names` in the file as a command line would give it."""
    for name in names:
        if content.get(name) is not None:
            return str(content[name])
    return None


def write_rest(content: dict[str, Any]) -> str:
    """A file with SGLang's keys, for SGLang's reader; the caller deletes it."""
    import yaml

    with tempfile.NamedTemporaryFile("w", prefix="glm-runtime-", suffix=".yaml", delete=False) as file:
        yaml.safe_dump(content, file, sort_keys=False)
    return file.name
