"""`python -m glm_runtime.guard.compiler`: tries grammars in a process of its own.

    stdin   [name, text] as one JSON line      name: json_schema, regex, ebnf, structural_tag
    stdout  {"error": null | reason}           first of all {"error": null}: ready

A grammar that crashes or never ends takes this process along, not the server. It is compiled by xgrammar against the
256 bytes instead of the model's vocabulary, and has to allow a first byte or an end: a schema that only refers to
itself allows nothing.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any


def tried(xgrammar: Any, compiler: Any, name: str, text: str) -> str | None:
    """Why a grammar cannot be used; None where it can."""
    from glm_runtime.guard.grammar import ANY_JSON

    compile_one = {
        "json_schema": compiler.compile_json_schema,
        "regex": compiler.compile_regex,
        "ebnf": compiler.compile_grammar,
        "structural_tag": compiler.compile_structural_tag,
    }[name]
    try:
        any_json = name == "json_schema" and text == ANY_JSON
        grammar = compiler.compile_builtin_json_grammar() if any_json else compile_one(text)
        matcher = xgrammar.GrammarMatcher(grammar)
        mask = xgrammar.allocate_token_bitmask(1, BYTES + 1)
        matcher.fill_next_token_bitmask(mask)
    except Exception as error:
        # NOTE: xgrammar puts its own source file and line in front.
        return " ".join(str(error).split("] ", 1)[-1].split(": ", 1)[-1].split()) or type(error).__name__
    return None if any(mask[0].tolist()) else "no text at all fits it"


BYTES = 256


def main() -> None:
    """Answer until standard input ends."""
    from glm_runtime import ending

    ending.die_with_parent()
    answers = os.fdopen(os.dup(1), "w")
    quiet = os.open(os.devnull, os.O_WRONLY)
    os.dup2(quiet, 1)
    os.dup2(quiet, 2)  # xgrammar's warnings
    import xgrammar

    info = xgrammar.TokenizerInfo(
        [bytes([i]) for i in range(BYTES)] + [b"</s>"],
        xgrammar.VocabType.RAW,
        vocab_size=BYTES + 1,
        stop_token_ids=[BYTES],
    )
    compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)
    print(json.dumps({"error": None}), file=answers, flush=True)
    for line in sys.stdin:
        name, text = json.loads(line)
        print(json.dumps({"error": tried(xgrammar, compiler, name, text)}), file=answers, flush=True)


if __name__ == "__main__":
    main()
