"""The load: SGLang's benchmark client as a library, with a request function that keeps token ids and logprobs.

    asks ─> DatasetRow ─> serving.get_request (arrivals) ─> one POST /generate a request ─> Output ─> serving's metrics

`sglang.benchmark.serving` gives arrivals, result types and metrics. Its own request functions keep text only, and count
a token only once it has text; equality needs the ids, so one function of that interface is here.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import orjson
from sglang.benchmark.datasets import DatasetRow
from sglang.benchmark.serving import RequestFuncInput, RequestFuncOutput, get_auth_headers, get_request

from glm_runtime.ab.asks import Ask

READ_BUFFER = 10 << 20  # bytes: a late event repeats all tokens and logprobs so far
TOP = 2  # most likely tokens of each position that are kept: the other arm's choice is among them at a near tie


@dataclass
class Output(RequestFuncOutput):
    """What came back of one request.

    Attributes:
        token_ids: output tokens.
        logprobs: of each of them; empty where not asked for.
        top: for each position the most likely tokens as (logprob, id).
        token_times: seconds (time.perf_counter) at which each token was there.
        retractions: times that the scheduler sent it back to the line.
        finish: SGLang's finish reason.
    """

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    top: list[list[tuple[float, int]]] = field(default_factory=list)
    token_times: list[float] = field(default_factory=list)
    retractions: int = 0
    finish: str = ""


async def generate(session: aiohttp.ClientSession, request: RequestFuncInput) -> Output:
    """One streamed POST /generate. Failures come back as `error`, never as an exception."""
    said = "text" if isinstance(request.prompt, str) else "input_ids"
    body = {
        said: request.prompt,
        "sampling_params": {"temperature": 0.0, "max_new_tokens": request.output_len, "ignore_eos": True},
        "stream": True,
        **request.extra_request_body,
    }
    output = Output(prompt_len=request.prompt_len, output_len=request.output_len)
    output.start_time = time.perf_counter()
    try:
        async with session.post(request.api_url, data=orjson.dumps(body)) as response:
            if response.status != 200:
                output.error = f"{response.status}: {_message(await response.read())}"
                return output
            last: dict[str, Any] = {}
            async for line in response.content:
                if not line.startswith(b"data: ") or line.startswith(b"data: [DONE]"):
                    continue
                last = orjson.loads(line[6:])
                if "error" in last:
                    output.error = _message(line[6:])
                    return output
                _note(output, last, time.perf_counter())
            _finish(output, last)
    except (TimeoutError, aiohttp.ClientError, OSError, ValueError) as error:
        output.error = f"{type(error).__name__}: {error}"
    return output


def _message(raw: bytes) -> str:
    """Text of an error answer."""
    try:
        said = orjson.loads(raw)["error"]
        return str(said["message"] if isinstance(said, dict) else said)
    except (ValueError, KeyError, TypeError):
        return " ".join(raw.decode(errors="replace").split())[:200]


def _note(output: Output, event: dict[str, Any], now: float) -> None:
    """An event of the stream: tokens so far (or, with --incremental-streaming-output, the new ones)."""
    ids = event.get("output_ids") or []
    total = int(event["meta_info"]["completion_tokens"])
    output.token_ids = list(ids) if len(ids) == total else output.token_ids + list(ids)
    new = len(output.token_ids) - len(output.token_times)
    if new <= 0:
        return
    if not output.token_times:
        output.ttft = now - output.start_time
    else:
        # As SGLang's client: tokens that came together share the time since the last event.
        output.itl += [(now - output.token_times[-1]) / new] * new
    output.token_times += [now] * new


def _finish(output: Output, last: dict[str, Any]) -> None:
    """The last event: logprobs, what the scheduler says, and whether it is an answer at all."""
    if not last:
        output.error = "the stream ended without an event"
        return
    meta = last["meta_info"]
    reason = meta.get("finish_reason") or {}
    output.finish = str(reason.get("type", ""))
    output.generated_text = last.get("text") or ""
    output.latency = (output.token_times or [time.perf_counter()])[-1] - output.start_time
    output.output_len = len(output.token_ids)
    output.prompt_len = int(meta.get("prompt_tokens") or output.prompt_len)
    output.cached_tokens = int(meta.get("cached_tokens") or 0)
    output.retractions = int(meta.get("num_retractions") or 0)
    output.logprobs = [float(entry[0]) for entry in meta.get("output_token_logprobs") or []]
    output.top = [[(float(e[0]), int(e[1])) for e in entry or []] for entry in meta.get("output_top_logprobs") or []]
    if output.finish == "abort":
        output.error = str(reason.get("message") or "aborted")
        return
    output.success = bool(output.token_ids)
    if not output.success:
        output.error = "no token came"


@dataclass
class Played:
    """One playing of a workload.

    Attributes:
        start: time.perf_counter() when the first request was due.
        seconds: until the last answer was there.
        outputs: one for each ask, in its order.
    """

    start: float
    seconds: float
    outputs: list[Output]


async def play(
    url: str,
    asks: Sequence[Ask],
    label: str,
    logprobs: bool = True,
    max_concurrency: int | None = None,
    tick: Callable[[], None] | None = None,
) -> Played:
    """Send every ask at its time and collect the answers.

    Args:
        url: of the server.
        label: begins every request id: `label-0`, `label-1`, ...
        logprobs: ask for logprobs and the top tokens of every position.
        max_concurrency: requests at once; further ones wait here, and their clock starts when they are sent.
        tick: called when an answer is complete.
    """
    rows = [
        DatasetRow(
            prompt=ask.prompt if isinstance(ask.prompt, str) else list(ask.prompt),
            prompt_len=ask.prompt_tokens,
            output_len=ask.new,
            timestamp=ask.at * 1e3,
            extra_request_body={"rid": f"{label}-{index}"} | (_LOGPROBS if logprobs else {}),
        )
        for index, ask in enumerate(asks)
    ]
    place = {id(row): index for index, row in enumerate(rows)}
    gate = asyncio.Semaphore(max_concurrency or len(rows))
    answers: dict[int, Output] = {}

    async def one(session: aiohttp.ClientSession, row: DatasetRow) -> None:
        request = RequestFuncInput(
            prompt=row.prompt,
            api_url=f"{url}/generate",
            prompt_len=row.prompt_len,
            output_len=row.output_len,
            model="",
            lora_name="",
            image_data=None,
            extra_request_body=row.extra_request_body,
        )
        async with gate:
            answers[place[id(row)]] = await generate(session, request)
        if tick is not None:
            tick()

    async with aiohttp.ClientSession(
        timeout=aiohttp.ClientTimeout(total=None),
        connector=aiohttp.TCPConnector(limit=0),
        headers={"Content-Type": "application/json", **get_auth_headers()},
        read_bufsize=READ_BUFFER,
    ) as session:
        tasks = []
        start = time.perf_counter()
        arrivals = get_request(list(rows), float("inf"), use_trace_timestamps=True)
        with contextlib.redirect_stdout(io.StringIO()):  # it says that it follows time stamps
            first = await anext(arrivals)
        tasks.append(asyncio.create_task(one(session, first)))
        async for row in arrivals:
            tasks.append(asyncio.create_task(one(session, row)))
        await asyncio.gather(*tasks)
    return Played(start, time.perf_counter() - start, [answers[index] for index in range(len(rows))])


_LOGPROBS = {"return_logprob": True, "top_logprobs_num": TOP, "return_text_in_logprobs": False}
