"""Grammars are tried in a process of their own, for so long and no longer."""

from __future__ import annotations

from collections.abc import Iterator

import psutil
import pytest

from glm_runtime.guard.compilers import Compiler

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def compiler() -> Iterator[Compiler]:
    compiler = Compiler()
    yield compiler
    compiler.stop()


def ask(compiler: Compiler, name: str, text: str, limit_s: float = 60.0) -> str | None:
    assert compiler.try_lock(wait=True)
    return compiler.ask(name, text, limit_s)


def test_answers(compiler: Compiler) -> None:
    assert ask(compiler, "json_schema", '{"type": "object"}') is None
    assert ask(compiler, "json_schema", "$$ANY$$") is None
    assert ask(compiler, "regex", "[a-z]{3}") is None
    assert "parenthesis" in str(ask(compiler, "regex", "("))
    assert "no text" in str(ask(compiler, "json_schema", '{"$ref": "#"}'))
    assert "no text" in str(ask(compiler, "ebnf", "root ::= root"))


def test_time_is_up_and_the_next_one_is_served(compiler: Compiler) -> None:
    assert ask(compiler, "regex", "a") is None
    process = compiler._process
    assert process is not None
    # A process that does not answer: the limit is what ends the wait, whatever the reason.
    psutil.Process(process.pid).suspend()
    assert "within 0.2 s" in str(ask(compiler, "regex", "b", 0.2))
    assert process.poll() is not None
    assert ask(compiler, "regex", "b") is None


def test_a_crash_is_the_grammars_fault(compiler: Compiler) -> None:
    assert ask(compiler, "regex", "a") is None
    process = compiler._process
    assert process is not None
    process.kill()
    process.wait()
    assert ask(compiler, "regex", "a") is None, "a process lost between two grammars is started anew"
