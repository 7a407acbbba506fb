"""One engine in a process of its own, driven by JSON lines.

    stdin   {"call": "generate", "asks": [...]} | {"call": "flush"} | {"call": "report"}      one line a call
            {"call": "rpc", "method": "...", "arguments": {...}}
    stdout  {"ready": true} once, then {"result": ...} | {"error": "..."}    one line an answer

    python -m tests.equality.worker '{"dtype": "float32", ...}'              keyword arguments of glm_runtime.Engine

A process of its own, because SGLang chooses its platform once, when it is imported. End of stdin ends the engine.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any, TextIO

Json = dict[str, Any]


class Crowd:
    """The asks of one call while they run: how many tokens each has got so far."""

    def __init__(self, asks: Sequence[Mapping[str, Any]]) -> None:
        self.asks = asks
        self.count = [0] * len(asks)
        self.moved = asyncio.Condition()

    async def reached(self, ask: int, tokens: int) -> None:
        """Return once `ask` has got at least `tokens` tokens."""
        async with self.moved:
            await self.moved.wait_for(lambda: self.count[ask] >= tokens)

    async def note(self, ask: int, tokens: int) -> None:
        """Ask number `ask` has `tokens` tokens now."""
        async with self.moved:
            self.count[ask] = tokens
            self.moved.notify_all()


async def _one(engine: Any, crowd: Crowd, number: int) -> Json:
    ask = crowd.asks[number]
    if ask.get("after"):
        await crowd.reached(*ask["after"])
    before = list(crowd.count)
    during: list[int] | None = None
    sampling = {"temperature": 0, "max_new_tokens": ask["new"], "ignore_eos": True}
    stream = await engine.async_generate(
        input_ids=ask["ids"],
        sampling_params=sampling,
        return_logprob=ask["start"] is not None,
        logprob_start_len=-1 if ask["start"] is None else ask["start"],
        stream=True,
    )
    last: Json = {}
    tokens: list[int] = []
    async for last in stream:
        tokens = list(last["output_ids"])
        if during is None:
            during = list(crowd.count)
        await crowd.note(number, len(tokens))
    meta = last["meta_info"]
    return {
        "tokens": tokens,
        "logprobs": [entry[0] for entry in meta.get("output_token_logprobs") or []],
        "prompt_logprobs": [entry[0] for entry in meta.get("input_token_logprobs") or []],
        "cached": meta["cached_tokens"],
        "finish": meta["finish_reason"]["type"],
        "before": before,
        "during": during,
    }


async def generate(engine: Any, asks: Sequence[Mapping[str, Any]]) -> list[Json]:
    """Run all asks at once; an ask with `after: [i, n]` is sent when ask i has got n tokens."""
    crowd = Crowd(asks)
    return list(await asyncio.gather(*(_one(engine, crowd, number) for number in range(len(asks)))))


def flush(engine: Any, limit_s: float = 60.0) -> bool:
    """Empty the prefix cache. SGLang refuses while a request runs, and one that has answered runs a step longer."""
    end = time.monotonic() + limit_s
    while not engine.flush_cache().success:
        if time.monotonic() > end:
            return False
        time.sleep(0.02)
    return True


def _answer(engine: Any, call: Json) -> Any:
    if call["call"] == "generate":
        return engine.loop.run_until_complete(generate(engine, call["asks"]))
    if call["call"] == "flush":
        return flush(engine)
    if call["call"] == "rpc":
        return engine.collective_rpc(call["method"], **call["arguments"])
    if call["call"] == "report":
        return [state["glm_runtime"] for state in engine.get_server_info()["internal_states"]]
    raise ValueError(f"call: {call['call']!r} is not generate, flush, rpc or report")


def serve(flags: Json, calls: TextIO, answers: TextIO) -> None:
    """Start the engine of `flags`, then answer one line a call until `calls` ends."""
    import glm_runtime

    def say(content: Json) -> None:
        answers.write(json.dumps(content) + "\n")
        answers.flush()

    try:
        engine = glm_runtime.Engine(**flags)
    except Exception as error:
        say({"error": f"{type(error).__name__}: {error}"})
        return
    say({"ready": True})
    try:
        for line in calls:
            try:
                say({"result": _answer(engine, json.loads(line))})
            except Exception as error:
                say({"error": f"{type(error).__name__}: {error}"})
    finally:
        engine.shutdown()


def main() -> None:
    """Serve the engine of the first argument. Answers get a descriptor of their own; what processes print is logged."""
    private = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    serve(json.loads(sys.argv[1]), sys.stdin, private)


if __name__ == "__main__":
    main()
