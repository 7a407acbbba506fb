"""Every request that the scheduler dispatches has an answer for the case that its handler raises. No server."""

from __future__ import annotations

import asyncio
import inspect
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from glm_runtime.guard import Refusal, control

io_struct = pytest.importorskip("sglang.srt.managers.io_struct")
UNANSWERED = {"AbortReq", "CloseSessionReqInput", "FreezeGCReq", "ConfigureLoggingReq"} | {
    "PauseGenerationReqInput",
    "ContinueGenerationReqInput",
}


def kinds() -> list[str]:
    """Names of the types in the scheduler's table of handlers."""
    from sglang.srt.managers.scheduler import Scheduler

    source = inspect.getsource(Scheduler.init_request_dispatcher)
    found = re.findall(r"\(\s*(\w+Req(?:Input)?),", source)
    assert len(found) > 30
    return [name for name in found if not name.startswith(control.GENERATING)]


def asked(name: str) -> Any:
    """As much of a request as an answer is made of."""
    return type(name, (), {"http_worker_ipc": "ipc", "session_id": "s"})()


@pytest.mark.parametrize("name", kinds())
def test_each_request_has_its_answer(name: str) -> None:
    answer = control.failure(asked(name), "why \u00e9")
    if name in UNANSWERED:
        assert answer is None
        return
    sent = msgspec.msgpack.decode(msgspec.msgpack.encode(answer), type=type(answer))
    assert sent.rid == control.FAILED + "why \u00e9"
    assert not getattr(sent, "success", False)


def test_a_handler_that_raises_answers_and_the_caller_is_refused() -> None:
    def raises(request: Any) -> Any:
        raise KeyError("no\nsuch \ud800 thing")

    answer = control.apart(raises)(asked("ExpertDistributionReq"))
    assert type(answer) is io_struct.ExpertDistributionReqOutput
    msgspec.msgpack.encode(answer)

    async def original(communicator: Any, obj: Any) -> list[Any]:
        return [io_struct.ExpertDistributionReqOutput(rid=None), answer]

    with pytest.raises(Refusal, match=r"KeyError.*such"):
        asyncio.run(control.answered(original, None, None))


def test_requests_that_generate_are_left_alone() -> None:
    from sglang.utils import TypeBasedDispatcher

    def generate(request: Any) -> Any:
        raise ValueError("an error of the model")

    tokenized = type("TokenizedGenerateReqInput", (), {})
    scheduler = SimpleNamespace()

    def made(self: Any) -> None:
        self._request_dispatcher = TypeBasedDispatcher([(tokenized, generate), (io_struct.SlowDownReqInput, generate)])

    control.contained(made, scheduler)
    with pytest.raises(ValueError, match="of the model"):
        scheduler._request_dispatcher(tokenized())
    answer = scheduler._request_dispatcher(io_struct.SlowDownReqInput(forward_sleep_time=None))
    assert answer.rid == control.FAILED + "an error of the model"


def test_a_profile_goes_where_it_can_be_written(tmp_path: Path) -> None:
    control.writable(None)
    control.writable(str(tmp_path / "new" / "folder"))
    (tmp_path / "file").write_text("")
    for folder in ("/proc/nowhere", str(tmp_path / "file"), "a\0b"):
        with pytest.raises(Refusal) as refused:
            control.writable(folder)
        assert refused.value.field == "output_dir"
