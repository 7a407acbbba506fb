"""`--record FILE`: who asked what when, as a trace that `ab` and `simulate` can play again.

    a request ends ─> one line: arrival, lengths, names of its prompt's blocks         format: traces/record.py

Written by the scheduler process, at the end of each request: only then is its length known. Lines are therefore in
order of ending; readers sort by arrival. What was said stays out, unless `--record-text` asks for it.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from typing import IO, Any

from glm_runtime.config import ConfigError
from glm_runtime.traces import block_names, header, row
from policies.steps import file_of_rank

# NOTE: the request that SGLang sends to itself before it serves; nobody asked for it.
WARM_UP, WARM_UP_IDS, WARM_UP_NEW = "The capital city of France is", [10, 11, 12], 8


def knobs(path: str | None, text: bool) -> dict[str, Any]:
    """The flags as knobs of a launch, none where nothing is recorded. Raises ConfigError naming the flag."""
    if path is None:
        if text:
            raise ConfigError("--record-text has nothing to write to: name a file with --record")
        return {}
    folder = os.path.dirname(path) or "."
    if not os.path.isdir(folder):
        raise ConfigError(f"--record {path}: there is no folder {folder}")
    if os.path.isdir(path) or (os.path.exists(path) and os.path.getsize(path)):
        raise ConfigError(f"--record {path} exists already; name a new file")
    return {"record": path, "record_text": text}


class Record:
    """The file of one scheduler process.

    Args:
        path: file to write; OSError where it cannot be opened.
        block_size: tokens a block, the server's page size.
        text: whether prompts are written as text.
        decode: token ids to text.
    """

    def __init__(self, path: str, block_size: int, text: bool, decode: Callable[[Any], str]) -> None:
        self._file: IO[str] = open(path, "w", buffering=1)  # noqa: SIM115
        self._block_size = block_size
        self._text = text
        self._decode = decode
        self._start = time.perf_counter()
        self._first = True
        self._write(header(block_size))

    def add(self, req: Any) -> None:
        """A request that has ended: SGLang's `Req`."""
        first, self._first = self._first, False
        prompt = list(req.origin_input_ids)
        if first and req.sampling_params.max_new_tokens == WARM_UP_NEW and self._warm_up(prompt):
            return
        text = self._decode(prompt) if self._text else None
        # Time in SGLang's time stats is time.perf_counter(), and made this process's clock on its way here.
        # NOTE: the scheduler reads its mail between steps only; the API server knows when a request really came.
        stats = req.time_stats
        arrival = max(0.0, (stats.created_time or stats.scheduler_recv_time) - self._start)
        produced = max(1, req.finished_len or len(req.output_ids))
        self._write(row(arrival, len(prompt), produced, block_names(prompt, self._block_size), req.rid, text))

    def _warm_up(self, prompt: list[int]) -> bool:
        return prompt == WARM_UP_IDS or (len(prompt) < 64 and WARM_UP in self._decode(prompt))

    def _write(self, line: dict[str, Any]) -> None:
        self._file.write(json.dumps(line) + "\n")


def send_arrival(state: dict[str, Any], stats: Any) -> dict[str, Any]:
    """An AFTER hook for `APIServerReqTimeStats.__getstate__`: the arrival goes to the scheduler, too.

    SGLang leaves its API server's times behind; the class that takes them up has the field.
    """
    return state | {"created_time": stats.created_time}


def hook(request_knobs: dict[str, Any]) -> Callable[..., None]:
    """A BEFORE hook for `SchedulerOutputStreamer.stream_output`."""
    records: dict[int, Record | None] = {}

    def stream_output(
        streamer: Any, reqs: list[Any], return_logprob: bool, skip_req: Any = None, *_: Any, **__: Any
    ) -> None:
        from sglang.srt.managers.utils import is_health_check_generate_req

        if id(streamer) not in records:
            records[id(streamer)] = _open(streamer, request_knobs)
        record = records[id(streamer)]
        if record is None:
            return
        for req in reqs:
            # SGLang streams a request's end once and marks it `finished_output` then.
            if req is skip_req or not req.finished() or req.finished_output or is_health_check_generate_req(req):
                continue
            record.add(req)

    return stream_output


def _open(streamer: Any, request_knobs: dict[str, Any]) -> Record | None:
    from sglang.srt.runtime_context import get_parallel

    parallel = get_parallel()
    path = file_of_rank(request_knobs["record"], parallel.tp_rank, parallel.dp_rank)
    if path is None:
        return None
    return Record(path, streamer.tree_cache.page_size, request_knobs["record_text"], _decoder(streamer.server_args))


def _decoder(server_args: Any) -> Callable[[Any], str]:
    """Token ids to text with the model's tokenizer, loaded when first needed."""
    made: list[Any] = []

    def decode(tokens: Any) -> str:
        if not made:
            from sglang.srt.utils.hf_transformers_utils import get_tokenizer

            made.append(
                get_tokenizer(
                    server_args.tokenizer_path or server_args.model_path,
                    tokenizer_mode=server_args.tokenizer_mode,
                    trust_remote_code=server_args.trust_remote_code,
                )
            )
        return str(made[0].decode(tokens))

    return decode
