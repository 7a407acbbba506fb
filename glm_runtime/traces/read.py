"""A trace file, by kind or by its first line; FILE.gz is unpacked on the way."""

from __future__ import annotations

import gzip
import io
import json
import os
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import chain

from glm_runtime.traces import azure, mooncake, record
from glm_runtime.traces.request import Request, TraceError, by_arrival

KINDS = ("azure", "mooncake", "record")


def read(path: str | os.PathLike[str], kind: str | None = None) -> list[Request]:
    """Requests of a trace in order of arrival.

    Args:
        kind: one of KINDS; None: by the first line.

    Raises:
        TraceError: naming the file, and the row where one is bad. Also for a file that is not there or holds nothing.
    """
    if kind is not None and kind not in KINDS:
        raise TraceError(path, None, f"kind {kind!r} is unknown, known: {', '.join(KINDS)}")
    with _lines(path) as lines:
        first = next(lines, "")
        found = _parser(path, first, kind)(path, chain([first], lines))
    if not found:
        raise TraceError(path, None, "no requests in it")
    return by_arrival(found)


def _parser(path: object, first: str, kind: str | None) -> Callable[[object, Iterator[str]], list[Request]]:
    csv = not first.lstrip("\ufeff ").startswith("{")
    if kind is None:
        if csv:
            if azure.block_size_of(first.lstrip("\ufeff")) is None:
                raise TraceError(
                    path, 1, f"{first.strip()[:60]!r} is the first line of no known kind; name it with --trace-kind"
                )
            return azure.parse
        try:
            head = json.loads(first)
        except (ValueError, RecursionError):
            head = {}
        return record.parse if isinstance(head, dict) and "format" in head else mooncake.parse
    if kind == "mooncake":
        return (lambda p, lines: azure.parse(p, lines, need_blocks=True)) if csv else mooncake.parse
    return azure.parse if kind == "azure" else record.parse


@contextmanager
def _lines(path: str | os.PathLike[str]) -> Iterator[Iterator[str]]:
    try:
        with open(path, "rb") as raw:
            packed = raw.read(2) == b"\x1f\x8b"
            raw.seek(0)
            with gzip.open(raw, "rt", encoding="utf-8") if packed else io.TextIOWrapper(raw, "utf-8") as text:
                yield iter(text)
    except (OSError, EOFError, zlib.error) as error:
        raise TraceError(path, None, getattr(error, "strerror", None) or str(error)) from None
    except UnicodeDecodeError:
        raise TraceError(path, None, "no UTF-8 text") from None
