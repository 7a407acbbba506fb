"""The request function, against an HTTP server that streams what SGLang's does, and what it does when that fails."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from glm_runtime.ab.asks import Ask
from glm_runtime.ab.client import Played, play

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
SEEN: list[dict[str, Any]] = []


@asynccontextmanager
async def serving(handler: Handler) -> AsyncIterator[str]:
    app = web.Application()
    app.router.add_post("/generate", handler)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield "http://127.0.0.1:" + str(runner.addresses[0][1])
    finally:
        await runner.cleanup()


def event(tokens: list[int], total: int, finish: str | None = None, **meta: Any) -> dict[str, Any]:
    reason = None if finish is None else {"type": finish, "message": "thrown out"}
    facts = {"completion_tokens": total, "prompt_tokens": 3, "finish_reason": reason, "num_retractions": 0}
    return {"text": "x", "output_ids": tokens, "meta_info": facts | meta}


def streaming(events: list[dict[str, Any]], pause: float = 0.0) -> Handler:
    async def handler(request: web.Request) -> web.StreamResponse:
        SEEN.append(await request.json())
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for one in events:
            await response.write(b"data: " + json.dumps(one).encode() + b"\n\n")
            await asyncio.sleep(pause)
        await response.write(b"data: [DONE]\n\n")
        return response

    return handler


def played(handler: Handler, asks: list[Ask] | None = None, **more: Any) -> Played:
    async def main() -> Played:
        async with serving(handler) as url:
            return await play(url, asks or [Ask(0.0, (1, 2, 3), 4)], "t", **more)

    SEEN.clear()
    return asyncio.run(main())


def test_tokens_times_and_logprobs() -> None:
    logprobs = {
        "output_token_logprobs": [[-0.1, 7, None], [-0.2, 8, None], [-0.3, 9, None], [-0.4, 9, None]],
        "output_top_logprobs": [[[-0.1, 7, None], [-3.0, 1, None]]] * 4,
        "cached_tokens": 64,
    }
    events = [event([7], 1), event([7, 8, 9], 3), event([7, 8, 9, 9], 4, "length", **logprobs)]
    (output,) = played(streaming(events, pause=0.05)).outputs
    assert output.success and output.token_ids == [7, 8, 9, 9] and output.output_len == 4
    assert output.logprobs == [-0.1, -0.2, -0.3, -0.4] and output.top[0] == [(-0.1, 7), (-3.0, 1)]
    assert len(output.itl) == 3 and output.itl[0] == output.itl[1]  # two tokens of one event share its time
    assert sum(output.itl) == pytest.approx(output.latency - output.ttft)
    assert output.cached_tokens == 64
    body = SEEN[0]
    assert body["rid"] == "t-0" and body["input_ids"] == [1, 2, 3] and body["return_logprob"]
    assert body["sampling_params"] == {"temperature": 0.0, "max_new_tokens": 4, "ignore_eos": True}


def test_events_that_carry_new_tokens_only() -> None:
    events = [event([7], 1), event([8, 9], 3), event([9], 4, "length")]
    (output,) = played(streaming(events), logprobs=False).outputs
    assert output.token_ids == [7, 8, 9, 9]
    assert "return_logprob" not in SEEN[0]


@pytest.mark.parametrize(
    ("events", "word"),
    [
        ([event([7], 1), event([7], 1, "abort")], "thrown out"),
        ([event([7], 1), {"error": {"message": "the scheduler is gone"}}], "the scheduler is gone"),
        ([], "without an event"),
        ([event([], 0, "stop")], "no token came"),
    ],
)
def test_answers_that_are_none(events: list[dict[str, Any]], word: str) -> None:
    (output,) = played(streaming(events)).outputs
    assert not output.success and word in output.error


def test_a_refusal_and_a_server_that_is_not_there() -> None:
    async def refuse(request: web.Request) -> web.StreamResponse:
        return web.json_response({"error": {"message": "input_ids: too long"}}, status=400)

    (output,) = played(refuse).outputs
    assert (output.success, output.error) == (False, "400: input_ids: too long")
    (gone,) = asyncio.run(play("http://127.0.0.1:9", [Ask(0.0, (1,), 1)], "t")).outputs
    assert not gone.success and aiohttp.ClientConnectorError.__name__ in gone.error


def test_arrivals_order_and_how_many_at_once() -> None:
    asks = [Ask(0.2, (3,), 1), Ask(0.0, (1,), 1), Ask(0.1, "two", 1)]
    ticks: list[int] = []
    found = played(streaming([event([5], 1, "length")], pause=0.05), asks, tick=lambda: ticks.append(1))
    starts = [output.start_time - found.start for output in found.outputs]
    late = [start - ask.at for start, ask in zip(starts, asks, strict=True)]
    assert min(late) > -0.005 and max(late) < 1.0
    assert [body.get("input_ids", body.get("text")) for body in SEEN] == [[1], "two", [3]] and len(ticks) == 3
    together = [Ask(0.0, (place,), 1) for place in range(3)]
    found = played(streaming([event([5], 1, "length")], pause=0.1), together, max_concurrency=1)
    assert found.seconds > 0.29
