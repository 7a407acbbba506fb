"""Cost of scheduling: the ledger's core alone, and SGLang's Scheduler with the ledger against SGLang's own.

python -m benchmarks.scheduling [--quick] [--json FILE]

core       schedule() and update() of the ledger, no model, no SGLang (benchmarks/ledger_core.py)
scheduler  two processes, stock and ledger, each with SGLang's real Scheduler and its overlap loop, take turns;
           64, then 256 requests decode. Timed in every step, microseconds:
           next batch   get_next_batch_to_run(): what the ask is about
           result       process_batch_result(): the ledger folds its results there
           all          the step without the forward pass
           The model's forward is replaced by constant logits, nothing is sent to a detokenizer; allocation,
           attention metadata, sampling, result processing and streaming stay as they are.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from array import array
from collections.abc import Callable
from typing import Any

from benchmarks import ledger_core
from benchmarks.common import Ask, Report, median, parser, quantile, ratio

SCHEDULERS = ("sglang", "ledger")
SIZES = (64, 256)
PROMPT = 30
PAGE = 64
TOKENS = 100_000  # all that 256 requests reach in the longer form
ROUND = 32  # steps
PARTS = ("next batch", "result", "all")
ASK_RATIO = 1.0


# ---- the process of one scheduler --------------------------------------------------------------------------------


def make_scheduler(scheduler: str) -> Any:
    """SGLang's Scheduler in this process, as its own child process makes it, over the embedded tiny model."""
    from glm_runtime import prepare
    from glm_runtime.cli import Options
    from glm_runtime.model import ensure

    ours: dict[str, Any] = {"policy": "sglang", "scheduler": scheduler}
    if scheduler == "ledger":
        ours["max_num_seqs"] = max(SIZES)
    request = prepare.request_for(Options.of(ours), "cpu", 1, usage="engine")
    prepare.set_environment(request, 1)
    prepare.load_plugins()
    from sglang.srt.managers import scheduler as module
    from sglang.srt.runtime_context import SpawnRanks, publish
    from sglang.srt.server_args import PortArgs, ServerArgs

    from glm_runtime import model_files

    path = str(ensure("tiny"))
    arguments = ServerArgs(
        model_path=path,
        device="cpu",
        dtype="bfloat16",
        max_total_tokens=TOKENS,
        max_running_requests=max(SIZES),
        schedule_conservativeness=0.01 if scheduler == "sglang" else 1.0,
        log_level="error",
    )
    prepare.fit(arguments, request, model_files.read_config(path))
    ports = PortArgs.init_new(arguments)
    publish(arguments, role="scheduler", ranks=SpawnRanks(world_rank=0, dp_rank=None, gpu_id=0))
    return module.Scheduler(arguments, ports)


def stub(scheduler: Any) -> None:
    """Constant logits instead of the model, no messages to other processes."""
    import torch
    from sglang.srt.layers.logits_processor import LogitsProcessorOutput

    vocabulary = scheduler.model_config.vocab_size
    logits = torch.zeros(max(SIZES), vocabulary)
    logits[:, 65] = 1.0

    def forward(input_ids: Any, positions: Any, forward_batch: Any, *rest: Any, **more: Any) -> Any:
        return LogitsProcessorOutput(next_token_logits=logits[: forward_batch.batch_size].clone())

    scheduler.tp_worker.model_runner.model.forward = forward
    for channel in (scheduler.ipc_channels.send_to_detokenizer, scheduler.ipc_channels.send_to_tokenizer):
        channel.send_output = lambda *message: None


class Clock:
    """Times of the parts of each step, read in the scheduler's own loop."""

    def __init__(self, scheduler: Any) -> None:
        self.times: dict[str, list[float]] = {part: [] for part in PARTS}
        self._step: dict[str, float] = {}
        for part, name in (("next batch", "get_next_batch_to_run"), ("result", "process_batch_result")):
            self._wrap(scheduler, part, name)
        self._model = 0.0
        runner = scheduler.tp_worker.model_runner
        runner.model.forward = self._timed(runner.model.forward)
        self._begun = time.perf_counter()

    def _timed(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            result = call(*args, **kwargs)
            self._model += time.perf_counter() - start
            return result

        return timed

    def _wrap(self, scheduler: Any, part: str, name: str) -> None:
        inner = getattr(scheduler, name)

        def timed(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            result = inner(*args, **kwargs)
            self._step[part] = self._step.get(part, 0.0) + time.perf_counter() - start
            return result

        setattr(scheduler, name, timed)

    def turn(self) -> None:
        """A step has ended."""
        now = time.perf_counter()
        self._step["all"] = now - self._begun - self._model
        for part, series in self.times.items():
            series.append(self._step.get(part, 0.0) * 1e6)
        self._step = {}
        self.restart()

    def restart(self) -> None:
        """A step begins."""
        self._model = 0.0
        self._begun = time.perf_counter()

    def take(self) -> dict[str, list[float]]:
        """Times since the last call."""
        taken, self.times = self.times, {part: [] for part in PARTS}
        return taken


class Child:
    """Runs the loop; between two rounds it waits for a line on standard input: {"add": requests} or {"steps": n}."""

    def __init__(self, scheduler: str, calls: Any, answers: Any) -> None:
        self.scheduler = make_scheduler(scheduler)
        stub(self.scheduler)
        self.clock = Clock(self.scheduler)
        self.calls, self.answers = calls, answers
        self.left = 0
        self.timing = False
        self.requests = 0
        self.scheduler.ingest_requests = self.between

    def say(self, content: Any) -> None:
        self.answers.write(json.dumps(content) + "\n")
        self.answers.flush()

    def run(self) -> None:
        """Until standard input ends."""
        self.say({"class": type(self.scheduler).__name__})
        self.scheduler.run_event_loop()

    def between(self) -> None:
        """In place of SGLang's intake, at the start of every turn of its loop."""
        if self.timing:
            self.clock.turn()
        if self.left > 0:
            self.left -= 1
            return
        if self.requests:
            batch = self.scheduler.running_batch
            self.say({"running": len(batch.reqs), "times": self.clock.take()})
        line = self.calls.readline()
        if not line:
            self.scheduler.gracefully_exit = True
            return
        call = json.loads(line)
        for _ in range(call.get("add", 0)):
            self.add()
        self.left = call["steps"] - 1
        self.timing = call["timing"]
        self.clock.restart()

    def add(self) -> None:
        """One request that never ends within the run; prompts end at different places of a page."""
        from sglang.srt.managers.io_struct import TokenizedGenerateReqInput
        from sglang.srt.sampling.sampling_params import SamplingParams

        number = self.requests
        self.requests += 1
        sampling = SamplingParams(temperature=0.0, max_new_tokens=1000, ignore_eos=True)
        sampling.normalize(None)
        self.scheduler.handle_generate_request(
            TokenizedGenerateReqInput(
                rid=f"r{number}",
                input_text="",
                input_ids=array("q", [20 + number % 200, *range(30, 30 + PROMPT + number % PAGE)]),
                input_embeds=None,
                mm_inputs=None,
                token_type_ids=None,
                sampling_params=sampling,
                return_logprob=False,
                logprob_start_len=-1,
                top_logprobs_num=0,
                token_ids_logprob=None,
                stream=False,
            )
        )


# ---- the comparison ----------------------------------------------------------------------------------------------


class Arm:
    """The parent's end of a child."""

    def __init__(self, scheduler: str) -> None:
        command = [sys.executable, "-m", "benchmarks.scheduling", "--child", scheduler]
        # Stock admits by what requests may still write, the ledger by their prompts; here both shall run all of them.
        environment = dict(os.environ) | {"OMP_NUM_THREADS": "1", "SGLANG_CLIP_MAX_NEW_TOKENS_ESTIMATION": "16"}
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=environment,
        )

    def hear(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the scheduler process ended with code {self._process.wait(30)}")
        return dict(json.loads(line))

    def call(self, steps: int, add: int = 0, timing: bool = True) -> dict[str, Any]:
        """Run so many steps; the answer of the child."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"steps": steps, "add": add, "timing": timing}) + "\n")
        self._process.stdin.flush()
        return self.hear()

    def end(self) -> None:
        """Close its input and wait."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()


def compare(report: Report, rounds: int, steps: int) -> None:
    """Both schedulers in turn, at each size."""
    arms: dict[str, Arm] = {}
    try:
        arms = {scheduler: Arm(scheduler) for scheduler in SCHEDULERS}
        report.figure("schedulers", {scheduler: arm.hear()["class"] for scheduler, arm in arms.items()})
        have = 0
        for size in SIZES:
            for arm in arms.values():
                arm.call(PAGE, add=size - have, timing=False)
            have = size
            times: dict[str, dict[str, list[float]]] = {
                scheduler: {part: [] for part in PARTS} for scheduler in SCHEDULERS
            }
            for turn in range(rounds):
                for scheduler in SCHEDULERS if turn % 2 == 0 else reversed(SCHEDULERS):
                    answer = arms[scheduler].call(steps)
                    if answer["running"] != size:
                        raise RuntimeError(f"{scheduler}: {answer['running']} of {size} requests run")
                    for part, series in answer["times"].items():
                        times[scheduler][part] += series
            tell(report, size, times)
    finally:
        for arm in arms.values():
            arm.end()


def tell(report: Report, size: int, times: dict[str, dict[str, list[float]]]) -> None:
    """Figures and the ask of one size."""
    for part in PARTS:
        of_part = {scheduler: times[scheduler][part] for scheduler in SCHEDULERS}
        figures = {
            scheduler: {"median_us": median(series), "p99_us": quantile(series, 0.99), "steps": len(series)}
            for scheduler, series in of_part.items()
        }
        report.figure(f"{size} decodes / {part}", figures)
        told = [
            f"{scheduler} {row['median_us']:7.0f} us (p99 {row['p99_us']:6.0f})" for scheduler, row in figures.items()
        ]
        print(f"{size:4} decodes  {part:10}  {'  '.join(told)}")
        if part == "next batch":
            share = ratio(of_part, "ledger", "sglang")
            report.ask(Ask(f"get_next_batch_to_run, {size} decodes, ledger / stock", share, ASK_RATIO, "<=", "x"))


def core(report: Report, steps: int) -> None:
    """Decision time of the core at the sizes of its ask."""
    for running, waiting in ledger_core.SIZES:
        for prefills in (False, True) if running > 1 else (False,):
            arm = ledger_core.Arm(running, waiting, prefills=prefills)
            figures = ledger_core.measure(arm, steps)
            report.figure(f"core {arm.name}", figures)
            print(f"core {arm.name:32} {figures['step_us']:7.1f} us a step (p99 {figures['p99_us']:.0f})")
            bound = ledger_core.ASKS.get((running, waiting))
            if bound is not None:
                report.ask(Ask(f"core, {arm.name}", figures["step_us"], bound, "<=", " us"))


def main() -> int:
    """The comparison, or one of its children."""
    options: argparse.ArgumentParser = parser("cost of scheduling, ledger against stock")
    options.add_argument("--child", choices=SCHEDULERS, help=argparse.SUPPRESS)
    chosen = options.parse_args()
    if chosen.child:
        answers = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)
        Child(chosen.child, sys.stdin, answers).run()
        return 0
    report = Report("scheduling", chosen)
    core(report, 2 * PAGE if chosen.quick else 16 * PAGE)
    compare(report, rounds=3 if chosen.quick else 6, steps=ROUND)
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
