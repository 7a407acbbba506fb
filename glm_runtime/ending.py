"""How a launch ends: one line for the operator, an exit code, nobody left behind.

    child fails ──its last error record──> <failures>/<pid>        launcher: ends the children, reads the earliest file,
         └──────────SIGQUIT──────────────────────────────────────>   prints `glm_runtime: error: ...`, exits with 1
    launcher is killed ──kernel (PR_SET_PDEATHSIG)──> child killed  also while the child is still importing

The child's traceback stays in the log; the last line on standard error is ours.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import logging
import os
import signal
import sys
import tempfile
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import psutil

# SGLang's child processes report their end through these loggers, inside the `except` that caught the reason.
CHILD_LOGGERS = (
    "sglang.srt.managers.scheduler",
    "sglang.srt.managers.detokenizer_manager",
    "sglang.srt.managers.data_parallel_controller",
)
LINE_LIMIT = 600
PR_SET_PDEATHSIG = 1
RESOURCE_TRACKER = "multiprocessing.resource_tracker"


class ChildFailed(RuntimeError):
    """A child process ended while the server was starting; the text is its reason."""


def one_line(text: object) -> str:
    """`text` on one line, cut at `LINE_LIMIT` characters."""
    line = " ".join(str(text).split())
    return line if len(line) <= LINE_LIMIT else line[: LINE_LIMIT - 4] + " ..."


def describe(error: BaseException) -> str:
    """Type and text of an exception on one line; the type is left out where the text speaks for itself."""
    text = one_line(error)
    if not text:
        return type(error).__name__
    plain = isinstance(error, ValueError | RuntimeError | OSError | AssertionError)
    return text if plain else f"{type(error).__name__}: {text}"


def fail(text: object, code: int = 2) -> NoReturn:
    """One line on standard error, then exit."""
    sys.stdout.flush()
    print(f"glm_runtime: error: {one_line(text)}", file=sys.stderr, flush=True)
    raise SystemExit(code)


def leave(code: object) -> NoReturn:
    """End this process now, children being gone already. `code` as `sys.exit` takes it: None, a number, or a text.

    NOTE: the usual end of a failed start can wait for ever: what SGLang had made is torn down, and a ZMQ context waits
    in its destructor until its sockets' last messages have reached peers that are no more.
    """
    if code is not None and not isinstance(code, int):
        print(code, file=sys.stderr)
        code = 1
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # a reader that has gone
            stream.flush()
    os._exit(code or 0)


def die_with_parent() -> None:
    """Ask the kernel to end this process when its parent ends, however it ends. Linux; elsewhere nothing is done."""
    if sys.platform != "linux":
        return
    parent = os.getppid()
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before the request was in place
        os._exit(1)


def failures_folder() -> str:
    """A new folder for the reasons of children; its path travels in RuntimeConfig."""
    return tempfile.mkdtemp(prefix="glm-runtime-")


class ReasonFilter(logging.Filter):
    """Writes down the exception behind an error record; lets every record pass."""

    def __init__(self, folder: str) -> None:
        super().__init__()
        self.folder = folder

    def filter(self, record: logging.LogRecord) -> bool:
        error = sys.exc_info()[1]
        if record.levelno >= logging.ERROR and error is not None:
            leave_reason(self.folder, describe(error))
        return True


def leave_reason(folder: str, reason: str) -> None:
    """Write down why this child process ends; its first reason stands."""
    file = Path(folder) / str(os.getpid())
    if file.parent.is_dir() and not file.exists():
        file.write_text(reason)


def report_reasons(folder: str) -> None:
    """In a child process: leave the reason of a failure in `folder`."""
    for name in CHILD_LOGGERS:
        logging.getLogger(name).addFilter(ReasonFilter(folder))


def first_reason(folder: str) -> str | None:
    """The reason that a child wrote down first, or None."""
    path = Path(folder)
    files = [file for file in path.iterdir() if file.is_file()] if path.is_dir() else []
    return min(files, key=lambda file: file.stat().st_mtime_ns).read_text() if files else None


def discard(folder: str) -> None:
    """Remove the folder of reasons."""
    path = Path(folder)
    if path.is_dir():
        for file in path.iterdir():
            file.unlink(missing_ok=True)
        path.rmdir()


def resource_tracker_pid() -> int | None:
    """Python's own helper among our children: it ends by itself, and complains loudly when it is killed."""
    for child in psutil.Process().children():
        try:
            if any(RESOURCE_TRACKER in part for part in child.cmdline()):
                return int(child.pid)
        except psutil.NoSuchProcess:
            continue
    return None


def end_children(wait_s: float = 10.0) -> None:
    """Kill every descendant of this process but Python's resource tracker, and wait until they are gone."""
    tracker = resource_tracker_pid()
    children = [child for child in psutil.Process().children(recursive=True) if child.pid != tracker]
    for child in children:
        try:
            child.kill()
        except psutil.NoSuchProcess:
            continue
    psutil.wait_procs(children, timeout=wait_s)


def on_child_failure(number: int, frame: FrameType | None) -> None:
    """SIGQUIT while starting: a child has failed. Raises ChildFailed with its reason in the main thread."""
    from glm_runtime import config

    # NOTE: SGLang's half-made ZMQ sockets would wait for their dead peers when collected; at exit they do not.
    gc.disable()
    end_children()
    request = config.asked()
    reason = first_reason(request.failures) if request is not None else None
    raise ChildFailed(reason or "a child process failed while starting; its reason is in the log above")


class QuietSigquit(logging.Filter):
    """Drops SGLang's ERROR record that merely says that a SIGQUIT handler was given: here it always is."""

    def filter(self, record: logging.LogRecord) -> bool:
        return "custom SIGQUIT handler" not in record.getMessage()


def catch_child_failures(server_args: Any) -> None:
    """Give SGLang our SIGQUIT handler, unless the operator's code gave its own."""
    if server_args.custom_sigquit_handler is None:
        logging.getLogger("sglang.srt.entrypoints.engine").addFilter(QuietSigquit())
        server_args.custom_sigquit_handler = on_child_failure


def lost(watchdog: Any, folder: str | None) -> str:
    """Which of the server's processes has failed, and how, as far as it can be told; "" otherwise.

    Args:
        watchdog: SGLang's, which knows the processes and their names. folder: of reasons, named by process id.
    """
    said = []
    for process, name in zip(getattr(watchdog, "_processes", ()), getattr(watchdog, "_names", ()), strict=False):
        code = process.exitcode
        left = folder is not None and (Path(folder) / str(process.pid)).is_file()
        if code is None and not left:
            continue
        how = "failed" if code is None or left else f"ended with code {code}"
        if code is not None and code < 0 and not left:
            how = f"was killed by {signal.Signals(-code).name}"
        said.append(f"{name} (pid {process.pid}) {how}")
    return ", ".join(said)


def running_handler(base: type) -> type:
    """SGLang's signal handler class, ending a running server with our line and code instead of SIGKILL on itself."""

    class EndingSignalHandler(base):  # type: ignore[misc]
        def sigterm_handler(self, signum: Any = None, frame: Any = None) -> None:
            if not self.tokenizer_manager.gracefully_exit:
                super().sigterm_handler(signum, frame)
                return
            print("glm_runtime: SIGTERM came twice: ended at once", file=sys.stderr, flush=True)
            end_children()
            os._exit(128 + signal.SIGTERM)

        def running_phase_sigquit_handler(self, signum: Any = None, frame: Any = None) -> None:
            from glm_runtime import config

            manager = self.tokenizer_manager
            if manager._subprocess_watchdog is not None:
                manager._subprocess_watchdog.stop()
            manager.dump_requests_before_crash()
            request = config.asked()
            who = lost(manager._subprocess_watchdog, request.failures if request is not None else None)
            end_children()
            reason = None
            if request is not None:
                reason = first_reason(request.failures)
                discard(request.failures)
            line = f"{who or 'a process of the server failed'} while serving: {reason or 'it left no reason'}"
            print(f"glm_runtime: error: {one_line(line)}", file=sys.stderr, flush=True)
            # NOTE: called from the event loop, where an exception would only be logged.
            os._exit(1)

    return EndingSignalHandler
