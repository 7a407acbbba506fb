"""SGLang's own scheduling, modelled: prefill-first batches, one chunked prompt, retraction.

    plan   join the last batch's finished prompts ─> a prefill batch if one forms ─> else every running request decodes
    adder  the chunked prompt first, then the line in order, while  rem_input, rem_chunk, KV budget  last

    KV budget   free + evictable - sum over running (outputs to come x ratio) - what this batch takes
    ratio       1 for ignore_eos; else 0.7 falling to 0.098 over 600 decode steps, set anew by a retraction
    retraction  no page for the next decode: fewest outputs first, then the longest prompt, to the end of the line

Running requests are kept by a clock: each gains one token a decode step, so a step costs what its ends cost.
Source: SGLang 0.5.23 srt/managers/scheduler.py, schedule_policy.py, mem_cache/prefill_budget.py; policy fcfs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from glm_runtime.simulate.req import Req, Rows
from glm_runtime.simulate.shape import Plan, Shape
from glm_runtime.simulate.tree import PrefixTree

CLIP_NEW_TOKENS = 4096
INIT_RATIO = 0.7
LEAST_RATIO = 0.14  # of the initial one
DECAY_STEPS = 600
RETRACT_STEPS = 20


@dataclass(frozen=True)
class StockConfig:
    """SGLang's flags, under its names. `chunked_prefill_size` None: prompts are not cut."""

    chunked_prefill_size: int | None = 8192
    max_prefill_tokens: int = 16384
    max_running_requests: int = 1024
    enable_mixed_chunk: bool = False
    prefill_decode_interval: int = 0
    prefill_decode_interval_min_bs: int = 0
    schedule_conservativeness: float = 1.0
    ignore_eos: bool = True

    def __post_init__(self) -> None:
        for name, least in (
            ("max_prefill_tokens", 1),
            ("max_running_requests", 1),
            ("prefill_decode_interval", 0),
            ("prefill_decode_interval_min_bs", 0),
        ):
            if getattr(self, name) < least:
                raise ValueError(f"{name} must be at least {least}, not {getattr(self, name)}")
        if not 0 <= self.schedule_conservativeness < math.inf:
            raise ValueError(
                f"--schedule-conservativeness {self.schedule_conservativeness}: a number of at least 0 is needed"
            )
        if self.chunked_prefill_size is not None and self.chunked_prefill_size < 1:
            raise ValueError(f"chunked_prefill_size must be at least 1, not {self.chunked_prefill_size}")


@dataclass(slots=True)
class _Inside:
    """Of a plan: prompts that end in it, and decodes whose last token is in it."""

    prompts: list[Req]
    last: list[Req]


class _Adder:
    """One prefill batch in the making."""

    def __init__(self, side: StockSide, mixed: int) -> None:
        config = side.config
        self.side = side
        self.rem_input = config.max_prefill_tokens - mixed
        self.rem_chunk = None if config.chunked_prefill_size is None else config.chunked_prefill_size - mixed
        self.total_offset: float = mixed + side.promised()
        self.current_offset = mixed
        self.taken: list[tuple[Req, int]] = []
        self.chunked: Req | None = None

    def remaining(self) -> float:
        """Tokens that are neither in use nor spoken for."""
        tree = self.side.tree
        return (tree.free + tree.evictable) * tree.page - self.total_offset

    def state(self) -> str:
        """ "none" of the KV left, "other" budget spent, or "" to go on."""
        tree = self.side.tree
        if self.remaining() <= 0 or (tree.free + tree.evictable) * tree.page <= self.current_offset:
            return "none"
        return "other" if self.rem_input <= 0 or (self.rem_chunk is not None and self.rem_chunk <= 0) else ""

    def _charge(self, rows: int, new_tokens: int) -> None:
        page = self.side.tree.page
        rows = -(-rows // page) * page
        self.total_offset += rows + page + new_tokens
        self.current_offset += rows + page
        self.rem_input -= rows
        if self.rem_chunk is not None:
            self.rem_chunk -= rows

    def go_on(self, req: Req) -> Req | None:
        """The chunked prompt's next part; the request itself where it is still not through."""
        assert self.rem_chunk is not None
        room = min(self.rem_chunk, int(self.remaining()))
        room = room if room > 0 else self.rem_chunk
        left = req.prompt + req.known - req.computed
        rows = min(left, room)
        self.taken.append((req, rows))
        self._charge(rows, 0 if left > room else min(req.output, CLIP_NEW_TOKENS))
        return req if left > room else None

    def add(self, req: Req) -> str:
        """A request of the line, looked up before: "" to go on, else why the scan ends (it may be in all the same)."""
        tree = self.side.tree
        node = req.last_node
        assert node is not None
        left = req.prompt + req.known - req.prefix_len
        to_come = min(max(req.output - req.known, 0), CLIP_NEW_TOKENS)
        lock = tree.lock(node)
        paged = -(-left // tree.page) * tree.page
        verdict = ""
        rows, new_tokens = left, min(req.output, CLIP_NEW_TOKENS)
        if left + to_come + tree.page >= self.remaining():
            verdict = "none"
        elif self.rem_chunk is None and self.taken and paged >= self.rem_input:
            verdict = "other"
        elif self.rem_chunk is not None and paged > self.rem_chunk:
            end = (req.prefix_len + self.rem_chunk // tree.page * tree.page) // tree.page * tree.page
            rows, new_tokens = end - req.prefix_len, 0
            if rows <= 0:
                verdict = "other"
            else:
                self.chunked = req
        if verdict:
            tree.unlock(lock)
            return verdict
        req.lock = lock
        self.taken.append((req, rows))
        self._charge(rows, new_tokens)
        return self.state()


class StockSide:
    """Scheduler of one replica. `record`: fill in the plans' rows."""

    def __init__(self, config: StockConfig, tree: PrefixTree, topk: int, record: bool = False) -> None:
        self.config = config
        self.tree = tree
        self.rows = Rows(config.max_running_requests)
        self.line: list[Req] = []
        self.batch: dict[Req, None] = {}  # running requests, in SGLang's order
        self.preemptions = 0
        self.failed: list[Req] = []
        self._topk = topk
        self._record = record
        self._init = min(INIT_RATIO * config.schedule_conservativeness, 1.0)
        self._least = min(self._init * LEAST_RATIO, 1.0)
        self._ratio = self._init
        self._number = 0
        self._clock = 0
        self._context = 0  # sum of the running requests' computed tokens, less the clock for each
        self._decoded = 0  # number of the last step with decode rows
        self._residues = [0] * tree.page  # running requests by (computed - clock) modulo the page
        self._ends: dict[int, list[Req]] = {}  # clock -> who has its last token then
        self._fresh: list[Req] = []  # joined since the last decode
        self._joining: list[Req] = []  # prompts that ended in the last batch
        self._chunked: Req | None = None
        self._full = False
        self._defer = 0
        self._pending: Plan | None = None
        self._gone: list[Req] = []  # ended since the last plan

    @property
    def waiting(self) -> int:
        """Requests in line."""
        return len(self.line)

    @property
    def running(self) -> int:
        """Requests that hold KV."""
        return self.config.max_running_requests - self.rows.free

    def add(self, req: Req) -> None:
        """An arrival."""
        self.line.append(req)

    def idle(self) -> None:
        """Nothing to do: SGLang forgets what it learnt of output lengths."""
        self._ratio = self._init

    # Counters of running requests ------------------------------------------------------------------------------------

    def _outputs(self, req: Req) -> int:
        """Output tokens whose step was planned."""
        return req.base + self._clock - req.joined

    def _known(self, req: Req) -> int:
        """Output tokens whose result has come."""
        pending = self._pending
        if pending is None:
            return self._outputs(req)
        late = pending.shape.decode_rows > 0 or req in _inside(pending).prompts
        return self._outputs(req) - late

    def promised(self) -> float:
        """KV set aside for tokens that running requests may still bring."""
        if self._pending is None and not self.batch:
            return 0
        ratio = 1.0 if self.config.ignore_eos else self._ratio
        return sum(min(req.output - self._known(req), CLIP_NEW_TOKENS) for req in self.batch) * ratio

    def _join(self, req: Req) -> None:
        req.base, req.joined = req.known + 1, self._clock
        self.batch[req] = None
        self._fresh.append(req)
        self._context += req.prompt + req.known - self._clock
        self._residues[(req.prompt + req.known - self._clock) % self.tree.page] += 1
        self._ends.setdefault(self._clock + req.output - req.base, []).append(req)

    def _leave(self, req: Req) -> None:
        del self.batch[req]
        if req in self._fresh:
            self._fresh.remove(req)
        start = req.prompt + req.base - 1 - req.joined
        self._context -= start
        self._residues[start % self.tree.page] -= 1

    # One step --------------------------------------------------------------------------------------------------------

    def plan(self) -> Plan | None:
        """Decide the next step, and take its pages."""
        if self._chunked is not None:
            self._chunked.checkpoint(self.tree, self._chunked.computed)
        for req in self._joining:
            if not req.finished():
                self._join(req)
        self._joining = []
        for req in self._gone:
            if req in self.batch:
                self._leave(req)
                self._full = False
        self._gone = []
        deferred = self._defers()
        while deferred and not self.batch:  # SGLang's loop goes round until the interval has run out
            deferred = self._defers()
        made = None if deferred else self._prefill()
        if made is None and self.batch:
            made = self._decode()
        if made is not None:
            if made.mode != "decode" and self.config.prefill_decode_interval:
                self._defer = self.config.prefill_decode_interval
            self._pending = made
        return made

    def _defers(self) -> bool:
        if not self._defer:
            return False
        if len(self.batch) < self.config.prefill_decode_interval_min_bs:
            self._defer = 0
            return False
        self._defer -= 1
        return True

    def _seats(self, held: int = 0) -> int:
        return min(self.config.max_running_requests - len(self.batch), self.rows.free + held)

    def _prefill(self) -> Plan | None:
        """A prefill batch, None where none forms."""
        if not self.batch:
            self._full = False
        if (self._full or not self.line) and self._chunked is None:
            return None
        if self._seats() <= 0 and self._chunked is None:
            self._full = True
            return None
        adder = _Adder(self, len(self.batch) if self.config.enable_mixed_chunk else 0)
        if self._chunked is not None:
            self._chunked = adder.go_on(self._chunked)
        looked = 0
        for req in self.line:
            if adder.state() == "other":
                break
            if len(adder.taken) >= self._seats(sum(taken.holds_kv for taken, _ in adder.taken)):
                self._full = True
            if self._full:
                break
            req.init_next_round_input(self.tree)
            before = len(adder.taken)
            verdict = adder.add(req)
            looked += len(adder.taken) - before
            if verdict:
                if verdict == "none":
                    self._full = bool(adder.taken) or bool(self.batch)
                break
        del self.line[:looked]
        if not adder.taken:
            return None
        if adder.chunked is not None:
            self._chunked = adder.chunked
        return self._extend(adder)

    def _extend(self, adder: _Adder) -> Plan:
        tree = self.tree
        shape = Shape()
        inside = _Inside([], [])
        self._number += 1
        made = Plan(self._number, shape, "extend", inside=inside)
        tree.ensure(sum(rows for _, rows in adder.taken) + len(adder.taken) * tree.page)
        for req, rows in adder.taken:
            if not req.holds_kv:
                req.start(tree)
                self.rows.free -= 1
            shape.add_prompt(req.computed, rows, self._topk)
            req.computed += rows
            req.reach(tree, req.computed)
            if self._record:
                made.rows[req.index] = rows
            if req is not self._chunked:
                inside.prompts.append(req)
                made.singles.append((req, req.last_step if req.known else 0))
        if self.config.enable_mixed_chunk and self.batch:
            self._drop_ending()
            if self.batch and self._room_to_decode():
                # SGLang puts the decode rows behind the prompts, and joins all of them again in that order.
                self._advance(made)
                made.mode = "mixed"
        self._joining = inside.prompts
        for req in inside.prompts:
            req.last_step = self._number
        return made

    def _drop_ending(self) -> list[Req]:
        """Requests whose last token is in the step in flight leave the batch."""
        if self._pending is None:
            return []
        inside = _inside(self._pending)
        ending = [req for req in (*inside.last, *inside.prompts) if req in self.batch]
        ending = [req for req in ending if self._outputs(req) >= req.output]
        for req in ending:
            self._leave(req)
        if ending:
            self._full = False
        return ending

    def _room_to_decode(self) -> bool:
        """Whether the pages that the next decode needs are there, cached ones evicted for it."""
        need = self._residues[-self._clock % self.tree.page]
        if need > self.tree.free:
            self.tree.evict(need - self.tree.free)
        return need <= self.tree.free

    def _decode(self) -> Plan | None:
        """Every running request by one token; None where nobody is left, or the step in flight will make room."""
        before = len(self.batch)
        ending = self._drop_ending()
        if not self.batch:
            return None
        retracted = 0
        if not self._room_to_decode():
            if ending:
                return None
            retracted = self._retract()
        else:
            self._ratio = max(self._ratio - (self._init - self._least) / DECAY_STEPS, self._least)
        if len(self.batch) < before:
            self._full = False
        if not self.batch:
            return None
        self._number += 1
        made = Plan(self._number, Shape(), "decode", preempted=retracted, inside=_Inside([], []))
        self._advance(made)
        return made

    def _advance(self, made: Plan) -> None:
        """One token more for the whole batch."""
        need = self._residues[-self._clock % self.tree.page]
        count = len(self.batch)
        self.tree.ensure(count * self.tree.page)
        self.tree.take(need)
        self._clock += 1
        shape = made.shape
        shape.decode_rows = count
        shape.decode_context = self._context + count * self._clock
        shape.decode_chosen = min(shape.decode_context, count * self._topk)
        for req in self._fresh:
            made.singles.append((req, req.last_step))
        made.steady, made.steady_since = count - len(self._fresh), self._decoded
        self._fresh = []
        self._decoded = made.number
        inside = _inside(made)
        for req in self._ends.pop(self._clock, ()):
            if req in self.batch and self._outputs(req) == req.output:
                inside.last.append(req)
        if self._record:
            for req in self.batch:
                made.rows[req.index] = 1

    def _retract(self) -> int:
        """Send requests back to the line until a decode of the others fits."""
        order = sorted(self.batch, key=lambda req: (self._known(req), -req.prompt), reverse=True)
        count = 0
        while not count or not self._room_to_decode():
            if len(order) == 1:
                break
            req = order.pop()
            known = self._known(req)
            self._leave(req)
            self._give_back(req, known)
            self.line.append(req)
            req.preempted += 1
            count += 1
            short = len(order) * RETRACT_STEPS - self.tree.free * self.tree.page
            if short > 0:
                self.tree.evict(-(-short // self.tree.page))
        if len(order) <= 1 and not self._room_to_decode():
            req = order.pop()
            known = self._known(req)
            self._leave(req)
            self._give_back(req, known)
            self.failed.append(req)
        self.preemptions += count
        outputs = sum(self._known(req) for req in order)
        asked = sum(req.output for req in order)
        self._ratio = min(1.0, (outputs + RETRACT_STEPS * len(order)) / (asked + 1))
        return count

    def _give_back(self, req: Req, known: int) -> None:
        if self._pending is not None and known < self._outputs(req):
            self._pending.drop(req)
        computed = req.prompt + self._outputs(req) - 1
        req.held = -(-computed // self.tree.page)
        req.last_step = self._decoded
        req.known = known
        req.release(self.tree)
        self.rows.free += 1

    def settle(self, made: Plan) -> list[Req]:
        """The step's result; the requests that it ends."""
        inside = _inside(made)
        if self._pending is made:
            self._pending = None
        ended: list[Req] = []
        for req in inside.prompts:
            if not req.holds_kv:
                continue  # retracted while its step ran
            if req.known + 1 >= req.output:
                self._end(req, req.computed, ended)
            else:
                req.checkpoint(self.tree, req.prompt + req.known)
        for req in inside.last:
            if req.holds_kv:
                self._end(req, req.prompt + req.output - 1, ended)
        return ended

    def _end(self, req: Req, computed: int, ended: list[Req]) -> None:
        req.known = req.output
        req.computed = computed
        req.held = -(-computed // self.tree.page)
        req.end(self.tree)
        self.rows.free += 1
        self._gone.append(req)
        ended.append(req)

    def observe(self, made: Plan, seconds: float) -> None:
        """Nothing is learnt from a step's time."""

    def quiet(self, made: Plan) -> int:
        """See Side."""
        inside = _inside(made)
        busy = self.line or self._joining or self._gone or self._fresh or self._chunked is not None or self._record
        if busy or self._defer or inside.prompts or inside.last or made.singles or not self.batch:
            return 0
        ends = min((clock for clock in self._ends if clock > self._clock), default=self._clock + 1) - self._clock - 1
        steps = min(ends, self.tree.page)  # within one page of steps everybody needs one page at most
        room = self.tree.free + self.tree.evictable
        return steps if steps > 0 and self._pages(steps) <= room else 0

    def _pages(self, steps: int) -> int:
        return sum(self._residues[-clock % self.tree.page] for clock in range(self._clock, self._clock + steps))

    def skip(self, made: Plan, steps: int) -> None:
        """See Side."""
        self.tree.take(self._pages(steps - 1))
        self._clock += steps - 1
        self.tree.ensure(len(self.batch) * self.tree.page)
        self.tree.take(self._pages(1))
        self._clock += 1
        self._ratio = max(self._ratio - steps * (self._init - self._least) / DECAY_STEPS, self._least)
        self._number += steps
        self._decoded = self._number
        made.pass_by(steps)


def _inside(made: Plan) -> _Inside:
    inside = made.inside
    assert isinstance(inside, _Inside)
    return inside
