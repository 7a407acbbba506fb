"""The server's ledger on a simulated pool: the same core, the same KV port, the same order of events.

    plan      checkpoint what half-done prompts computed ─> begin_step ─> Ledger.schedule ─> pages for its rows
    settle    fold the result; ended requests give their KV to the tree, finished prompts their pages

Steady decodes are left to the ledger's clock; a calendar says when each has all its tokens. Source of the order:
policies/ledger/scheduler.py.
"""

from __future__ import annotations

from glm_runtime.simulate.req import Req, Rows
from glm_runtime.simulate.shape import Plan, Shape
from glm_runtime.simulate.tree import PrefixTree
from policies.ledger import Ledger, LedgerConfig, Request, Status, StepPlan
from policies.ledger.kv_tree import TreeKV
from policies.ledger.step_time import StepPacer


class LedgerSide:
    """Scheduler of one replica. `record`: fill in the plans' rows."""

    def __init__(
        self,
        config: LedgerConfig,
        tree: PrefixTree,
        topk: int,
        rows: int,
        pacer: StepPacer | None = None,
        record: bool = False,
    ) -> None:
        self.tree = tree
        self.rows = Rows(rows)
        self.kv = TreeKV(tree, tree, self.rows, tree.pages * tree.page, tree.page, config.watermark, self._release)
        self.ledger = Ledger(config, self.kv, pacer)
        self.pacer = pacer
        self.preemptions = 0
        self.failed: list[Req] = []
        self._topk = topk
        self._record = record
        self._number = 0  # of the last step that ran something
        self._half: list[Request] = []
        self._ends: dict[int, list[Request]] = {}  # step -> who could have its last token in it
        self._seen: dict[Request, tuple[int, int]] = {}  # step of the last look, tokens computed after it

    @property
    def waiting(self) -> int:
        """Requests in line."""
        return len(self.ledger.waiting)

    @property
    def running(self) -> int:
        """Requests that hold KV."""
        return len(self.ledger.running)

    def add(self, req: Req) -> None:
        """An arrival."""
        self.ledger.add(Request(str(req.index), req.prompt, req.output, arrival_time=req.arrival, handle=req))

    def idle(self) -> None:
        """Nothing to do."""

    def _release(self, req: Req) -> None:
        """A preempted request gives its KV back; what the tree has of it stays there."""
        req.release(self.tree)
        self.rows.free += 1
        req.preempted += 1

    def plan(self) -> Plan | None:
        """Decide the next step, and take its pages."""
        tree, ledger = self.tree, self.ledger
        for request in self._half:
            if request.status is Status.RUNNING:
                request.handle.checkpoint(tree, request.handle.computed)
        self._half = []
        self.kv.begin_step()
        step = ledger.schedule()
        for request, _ in step.failed:
            self.failed.append(request.handle)
        self.preemptions += len(step.preempted)
        for request in step.preempted:
            request.handle.known = request.num_output_tokens
            if self._seen.pop(request, None) is not None:
                request.handle.last_step = self._number
        if not step:
            return None
        self._number = step.number
        for request in step.admitted:
            self.rows.free -= 1
            request.handle.start(tree)
        shape = Shape()
        if step.extends:
            tree.ensure(step.prefill_tokens + len(step.extends) * tree.page)
        for request, rows in step.extends.items():
            req: Req = request.handle
            end = request.num_computed_tokens
            shape.add_prompt(end - rows, rows, self._topk)
            req.reach(tree, end)
            req.computed = end
        self._half = list(step.chunks)
        singles = list(step.singles)
        number = step.number
        sampled = len(step.tokens) - len(step.chunks)
        made = Plan(number, shape, "decode", preempted=len(step.preempted), inside=step)
        made.steady, made.steady_since = sampled - len(singles), number - 1
        steady = ledger.roster.steady
        shape.decode_rows = step.decode_rows
        tree.ensure(shape.decode_rows * tree.page)
        shape.decode_context = steady.context + steady.count * steady.scheduled
        for request in singles:
            made.singles.append((request.handle, self._look(request, number)))
            if request.steady is None:
                if request not in step.extends:
                    shape.decode_context += request.computed
            elif request in step.extends:
                shape.decode_context -= request.num_computed_tokens
            if request not in step.extends:
                request.handle.reach(tree, request.num_computed_tokens)
        shape.decode_chosen = min(shape.decode_context, shape.decode_rows * self._topk)
        if shape.chunks:
            made.mode = "decode" if step.decode_only else "mixed" if shape.decode_rows else "extend"
        if self._record:
            made.rows = {request.handle.index: rows for request, rows in step.tokens.items()}
        return made

    def _look(self, request: Request, number: int) -> int:
        """Step of the request's token before this one, 0 where there is none; and when to look for its last token."""
        computed = request.num_computed_tokens
        before = self._seen.get(request)
        self._seen[request] = number, computed
        outputs = computed + 1 - request.num_prompt_tokens  # its token of this step counted
        self._ends.setdefault(number + request.handle.output - outputs, []).append(request)
        if outputs <= 1:
            return 0
        if before is None:
            return int(request.handle.last_step)
        # Rows since then came one a step without a break, or somebody would have looked.
        since, then = before
        return since + max(0, computed - 1 - then)

    def settle(self, made: Plan) -> list[Req]:
        """The step's result; the requests that it ends."""
        step = made.inside
        assert isinstance(step, StepPlan)
        ledger, tree = self.ledger, self.tree
        # NOTE: SGLang throws the token of a request away that was preempted while its step ran.
        dropped = {request: 0 for request in step.singles if request.status is Status.PREEMPTED}
        due = self._ends.pop(made.number, [])
        ledger.update(step, dropped or None)
        ended: list[Req] = []
        for request in due:
            req: Req = request.handle
            if request.status is not Status.RUNNING:
                continue
            left = req.output - request.num_output_tokens
            if left > 0:
                self._ends.setdefault(made.number + left, []).append(request)
                continue
            req.known = request.num_output_tokens
            req.computed = request.num_tokens - 1
            req.end(tree)
            self.rows.free += 1
            ledger.finish(request)
            self._seen.pop(request, None)
            ended.append(req)
        if step.extends and made.mode != "decode":
            for request in step.extends:
                if request.status is Status.RUNNING and request not in step.chunks:
                    prompt_end = request.handle.computed
                    request.handle.checkpoint(tree, prompt_end)
        for request in dropped:
            made.drop(request.handle)
        return ended

    def observe(self, made: Plan, seconds: float) -> None:
        """The step took so long."""
        step = made.inside
        assert isinstance(step, StepPlan)
        if self.pacer is not None and step.load is not None:
            self.pacer.observe(step.load, seconds * 1e3)

    def quiet(self, made: Plan) -> int:
        """See Side."""
        alike = self.ledger.roster.steady.count == made.shape.decode_rows  # not so where somebody ended in it
        if made.singles or made.shape.prefill_rows or self._half or self._record or not alike:
            return 0
        flying = len(self.ledger.roster.in_flight)
        ends = min(self._ends, default=made.number + 1 + (1 << 20)) - made.number
        return max(0, min(self.ledger.quiet_steps(), ends - (0 if flying else 1)))

    def skip(self, made: Plan, steps: int) -> None:
        """See Side."""
        self.ledger.skip(steps)
        self._number += steps
        made.pass_by(steps)
