"""Runs every golden set found in a folder against our functions.

    python -m tests.golden DIR [--set NAME]...

DIR holds files ``<set>_<part>.json`` of the form ``{name, source, schema, cases: [{id, ...}, ...]}``; several files of
one set count together. The code of set ``NAME`` is ``tests/golden/sets/NAME.py`` with

    def check(case: dict[str, Any]) -> str | None     # None: passed, else one line that says what differed

An exception counts as a failed case. Output: a line per set, ``NAME: N passed, M failed`` or ``NAME: not built``; the
first failures of a set go to stderr. Exit code 0 when all passed; 1 on any failed case, a set named by ``--set`` that
DIR does not hold or that is not built, a missing or empty DIR, or a file that is not a golden file.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

Case = dict[str, Any]
Check = Callable[[Case], str | None]

SETS_PACKAGE = "tests.golden.sets"
SHOWN_FAILURES = 5
REASON_WIDTH = 300


class GoldenError(Exception):
    """Bad input: the text is the one line that the user sees."""


def read_file(path: Path) -> tuple[str, list[Case]]:
    """Set name and cases of one file. Raises GoldenError naming the file and the field that is wrong."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise GoldenError(f"{path}: not readable as JSON: {error}") from None
    if not isinstance(data, dict):
        raise GoldenError(f"{path}: a golden file is an object with name and cases, this is a {type(data).__name__}")
    name, cases = data.get("name"), data.get("cases")
    if not isinstance(name, str) or not name.isidentifier():
        raise GoldenError(f"{path}: field 'name' is {name!r}, wanted the name of a set")
    if not (path.stem == name or path.stem.startswith(f"{name}_")):
        raise GoldenError(f"{path}: field 'name' is {name!r}, but the file name does not start with '{name}_'")
    if not isinstance(cases, list) or not all(isinstance(case, dict) for case in cases):
        raise GoldenError(f"{path}: field 'cases' is not a list of objects")
    if not cases:
        raise GoldenError(f"{path}: field 'cases' is empty")
    return name, cases


def read_folder(folder: Path) -> dict[str, list[Case]]:
    """Cases by set name, in name order. Raises GoldenError when the folder is missing or holds no golden file."""
    if not folder.is_dir():
        raise GoldenError(f"{folder}: no such folder")
    paths = sorted(folder.glob("*_*.json"))
    if not paths:
        raise GoldenError(f"{folder}: holds no file <set>_*.json")
    cases_of: dict[str, list[Case]] = {}
    for path in paths:
        name, cases = read_file(path)
        cases_of.setdefault(name, []).extend(cases)
    return dict(sorted(cases_of.items()))


def load_check(name: str) -> Check | None:
    """The set's ``check``, or None where its module does not exist. An error inside the module is not hidden."""
    module_name = f"{SETS_PACKAGE}.{name}"
    if importlib.util.find_spec(module_name) is None:
        return None
    check = getattr(importlib.import_module(module_name), "check", None)
    if not callable(check):
        raise GoldenError(f"{module_name}: has no function check(case)")
    return check  # type: ignore[no-any-return]


def failures(check: Check, cases: Iterable[Case]) -> list[tuple[str, str]]:
    """(case id, reason) of every case that did not pass."""
    failed: list[tuple[str, str]] = []
    for index, case in enumerate(cases):
        reason: str | None
        try:
            reason = check(case)
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
        if reason is not None:
            failed.append((str(case.get("id", f"#{index}")), reason))
    return failed


def run_set(name: str, cases: list[Case]) -> bool | None:
    """Runs one set and prints its line. True: passed, False: failed, None: not built."""
    try:
        check = load_check(name)
    except Exception as error:
        print(f"{name}: 0 passed, {len(cases)} failed", flush=True)
        print(f"  {name}: its module does not load: {type(error).__name__}: {error}", file=sys.stderr)
        return False
    if check is None:
        print(f"{name}: not built", flush=True)
        return None
    failed = failures(check, cases)
    print(f"{name}: {len(cases) - len(failed)} passed, {len(failed)} failed", flush=True)
    for case_id, reason in failed[:SHOWN_FAILURES]:
        line = " ".join(reason.split()) or "failed without a reason"
        print(f"  {name}[{case_id}]: {line[:REASON_WIDTH]}", file=sys.stderr)
    if len(failed) > SHOWN_FAILURES:
        print(f"  {name}: and {len(failed) - SHOWN_FAILURES} more", file=sys.stderr)
    return not failed


def main(argv: list[str] | None = None) -> int:
    """Entry point; returns the exit code (2 for bad usage, by argparse)."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.golden", description="Run golden sets against our functions."
    )
    parser.add_argument("folder", type=Path, metavar="DIR", help="folder with files <set>_*.json")
    parser.add_argument("--set", dest="names", action="append", metavar="NAME", help="only this set (may be repeated)")
    args = parser.parse_args(argv)
    try:
        cases_of = read_folder(args.folder)
        if args.names:
            unknown = [name for name in args.names if name not in cases_of]
            if unknown:
                known = ", ".join(cases_of)
                raise GoldenError(f"--set {unknown[0]}: unknown set; {args.folder} holds: {known}")
            cases_of = {name: cases_of[name] for name in dict.fromkeys(args.names)}
    except GoldenError as error:
        print(f"golden: {error}", file=sys.stderr)
        return 1
    results = [run_set(name, cases) for name, cases in cases_of.items()]
    if False in results:
        return 1
    if args.names and None in results:
        print("golden: a set named by --set is not built", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
