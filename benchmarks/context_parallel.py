"""A prefill shared among ranks: time, balance and bytes against one rank.

    layer      one full layer's indexer and sparse MLA for all rows of a prompt: one rank with everything, then two
               ranks with head-tail's rows and with plain halves; a rank is a process on its own core, gloo between
    exchange   the two gathers of that layer
    engine     seconds to the first token of `glm_runtime.Engine` at -pcp 1 and 2, and what its ranks received

    speed-up = one rank's time / the slowest rank's        off the mean = slowest rank / mean of the ranks - 1, in
                                                           processor time of the one thread: neighbours do not count
    received = (P - 1) * L * 4 * (576 + 128) bytes a full layer, float32; L: rows of the longest rank

Preset small. Times of the arms are taken in turn; the ranks of an arm start together.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn

from attention import paged
from attention.batch import AttentionBatch
from attention.indexer import ragged
from attention.scratch import Scratch
from attention.sizes import INDEX_DIM, LATENT_DIM
from benchmarks.attention import batch_of, index_cache, latent_cache
from benchmarks.common import Ask, Report, median, parser
from glm_runtime.model.config import is_full
from glm_runtime.model.recipe import preset
from parallel.balance import halves_visits, head_tail_visits, imbalance
from parallel.head_tail import head_tail
from parallel.local import local_batch
from parallel.tables import Ints, gather_bytes

RANKS = 2
SMALL = preset("small")
ROW_BYTES = 4 * (LATENT_DIM + INDEX_DIM)


def part(whole: AttentionBatch, rows: Ints) -> AttentionBatch:
    """The rows `rows` of a batch as a batch of their own."""
    own = local_batch(rows, whole.query_start.numpy(), whole.seq_lens.numpy())
    starts, ends = (torch.from_numpy(value).to(torch.int32) for value in (own.query_start, own.seq_lens))
    return AttentionBatch(starts, ends, whole.page_table[torch.from_numpy(own.request)].contiguous())


def layer(whole: AttentionBatch, rows: Ints, seed: int) -> Callable[[], object]:
    """One full layer over `rows`: selection, then sparse MLA over what was selected."""
    generator = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    keys = int(whole.seq_lens.max())
    cache, latent, scratch = index_cache("float32", keys), latent_cache("float32", keys), Scratch(64 << 20)
    own, held = part(whole, rows), torch.from_numpy(rows)

    def made(*shape: int) -> torch.Tensor:
        return torch.randn((whole.rows, *shape), generator=generator).index_select(0, held)

    q, gates = made(SMALL.index_heads, SMALL.index_dim), made(SMALL.index_heads)
    nope, rope = made(SMALL.heads, SMALL.kv_lora), made(SMALL.heads, SMALL.rope_dim)

    def run() -> object:
        ids = ragged.select(own, q, gates, cache, SMALL.index_topk, scratch)
        return paged.attend(own, nope, rope, latent, ids, 0.05, scratch)

    return run


def _rank(rank: int, folder: str, tokens: int, rounds: int) -> None:
    """One rank: rank 0 also runs the arm of one rank, while the other waits."""
    torch.set_num_threads(1)
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS)
    whole = batch_of(tokens, tokens)
    split = head_tail([tokens], [0], [True], RANKS)
    arms = {
        "head-tail": layer(whole, split.rows(rank), 0),
        "halves": layer(whole, np.arange(rank * tokens // RANKS, (rank + 1) * tokens // RANKS), 0),
    }
    if rank == 0:
        arms["one"] = layer(whole, np.arange(tokens), 0)
    rows = split.dispatch_rows
    sent = [torch.randn(rows, width) for width in (LATENT_DIM, INDEX_DIM)]
    room = [torch.empty(rows * RANKS, width) for width in (LATENT_DIM, INDEX_DIM)]

    def exchange() -> None:
        for gathered, own in zip(room, sent, strict=True):
            dist.all_gather_single(gathered, own)

    names = ("one", "head-tail", "halves", "exchange")
    walls, works = ({name: list[float]() for name in names} for _ in range(2))
    for turn in range(rounds + 1):
        for name in names:
            call = exchange if name == "exchange" else arms.get(name)
            dist.barrier()
            start, begun = time.perf_counter(), time.thread_time()
            if call is not None:
                call()
            wall, work = time.perf_counter() - start, time.thread_time() - begun
            dist.barrier()
            if turn and call is not None:
                walls[name].append(wall)
                works[name].append(work)
    torch.save((walls, works), Path(folder) / f"rank{rank}.pt")
    dist.destroy_process_group()


def one_layer(report: Report, tokens: int, rounds: int) -> None:
    """Speed-up and balance of one full layer."""
    with tempfile.TemporaryDirectory() as folder:
        spawn(_rank, (folder, tokens, rounds), nprocs=RANKS)
        found = [torch.load(Path(folder) / f"rank{rank}.pt", weights_only=False) for rank in range(RANKS)]
    ranks, works = [walls for walls, _ in found], [work for _, work in found]
    one = median(ranks[0]["one"])
    slowest = {
        name: median([max(t) for t in zip(*(r[name] for r in ranks), strict=True)])
        for name in ranks[1]
        if ranks[1][name]
    }
    off = {
        name: max(median(r[name]) for r in works) / statistics.mean(median(r[name]) for r in works) - 1
        for name in ("head-tail", "halves")
    }
    visits = head_tail_visits(head_tail([tokens], [0], [True], RANKS)), halves_visits([tokens], [tokens], RANKS)
    counted = {name: imbalance(v) - 1 for name, v in zip(("head-tail", "halves"), visits, strict=True)}
    gains = {name: one / slowest[name] for name in ("head-tail", "halves")}
    work = {name: median(works[0]["one"]) / max(median(r[name]) for r in works) for name in gains}
    report.figure(
        "layer",
        {"tokens": tokens, "one_ms": 1e3 * one, "slowest_ms": {n: 1e3 * t for n, t in slowest.items()}}
        | {"speed_up": gains, "speed_up_processor_time": work, "off_the_mean": off, "visits_off_the_mean": counted},
    )
    print(f"one full layer, {tokens} tokens: one rank {1e3 * one:.0f} ms, exchange {1e3 * slowest['exchange']:.1f} ms")
    for name in gains:
        print(
            f"  {name:9s} slowest of {RANKS} ranks {1e3 * slowest[name]:8.0f} ms, {gains[name]:.2f}x, "
            f"{work[name]:.2f}x in processor time, "
            f"off the mean {100 * off[name]:.1f}% (by visits {100 * counted[name]:.1f}%)"
        )
    report.ask(Ask("indexer and sparse attention on two ranks over one", gains["head-tail"], 1.8, ">=", "x"))
    report.ask(Ask("head-tail's slowest rank off the mean", 100 * off["head-tail"], 5.0, "<=", "%"))


def _engine(ranks: int, tokens: int, rounds: int, answer: Any) -> None:
    import glm_runtime
    from glm_runtime.model import ensure

    flags: dict[str, Any] = {"prefill_context_parallel_size": ranks, "cp_split": "head-tail"} if ranks > 1 else {}
    engine = glm_runtime.Engine(
        model_path=str(ensure("small")),
        dtype="float32",
        max_total_tokens=(tokens // 64 + 2) * 64 * 2,
        context_length=tokens + 64,
        chunked_prefill_size=tokens,
        max_prefill_tokens=tokens,
        disable_radix_cache=True,
        cpu_threads=1,
        **flags,
    )
    try:
        draw, times = random.Random(0), []

        def traffic() -> dict[str, int]:
            state = engine.get_server_info()["internal_states"][0]["glm_runtime"]
            found: dict[str, int] = state["knobs"].get("context_parallel", {})
            return found

        before: dict[str, int] = {}
        for turn in range(rounds + 1):
            if turn == 1:
                before = traffic()
            prompt = [draw.randrange(32, 250) for _ in range(tokens)]
            start = time.perf_counter()
            engine.generate(input_ids=prompt, sampling_params={"temperature": 0, "max_new_tokens": 1})
            times.append(time.perf_counter() - start)
        after = traffic()
        answer.send((times[1:], {name: (after[name] - before[name]) // rounds for name in after}))
    finally:
        engine.shutdown()


def engines(report: Report, tokens: int, rounds: int) -> None:
    """The whole engine at one rank and at two, one after the other."""
    found = {}
    for ranks in (1, RANKS):
        ours, theirs = multiprocessing.get_context("spawn").Pipe()
        process = multiprocessing.get_context("spawn").Process(target=_engine, args=(ranks, tokens, rounds, theirs))
        process.start()
        theirs.close()
        found[ranks] = ours.recv()
        process.join()
    times = {ranks: times for ranks, (times, _) in found.items()}
    gain = median(times[1]) / median(times[RANKS])
    received = found[RANKS][1]
    rows = head_tail([tokens], [0], [True], RANKS).dispatch_rows
    full = sum(is_full(number) for number in range(SMALL.layers))
    formula = gather_bytes(-(-rows // RANKS) * RANKS, RANKS, 4) * (SMALL.layers * LATENT_DIM + full * INDEX_DIM)
    report.figure(
        "engine",
        {"tokens": tokens, "seconds": times, "speed_up": gain, "received": received, "formula_bytes": formula},
    )
    seconds = [f"{median(times[ranks]):.2f} s" for ranks in (1, RANKS)]
    print(f"engine, {tokens} tokens: {seconds[0]} on one rank, {seconds[1]} on two: {gain:.2f}x")
    print(f"  keys received a prompt: {received['keys_bytes'] / 2**20:.1f} MiB; by the formula {formula / 2**20:.1f}")
    report.ask(Ask("bytes of keys received over the formula", received["keys_bytes"] / formula, 1.0, "==", "x"))


def main() -> int:
    options = parser(__doc__.splitlines()[0]).parse_args()
    report = Report("context_parallel", options)
    if len(os.sched_getaffinity(0)) < RANKS:
        print(f"left out: {RANKS} cores are needed")
        return report.finish()
    tokens, rounds = (2048, 2) if options.quick else (8192, 3)
    report.figure("row_bytes_full_layer", ROW_BYTES)
    one_layer(report, tokens, rounds)
    engines(report, tokens, rounds)
    return report.finish()


if __name__ == "__main__":
    raise SystemExit(main())
