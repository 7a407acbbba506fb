"""Costs of the attention slots against each other: q-chunks, the prefill workspace, the indexer's rows shared by ranks.

    qchunk / ragged       seconds of one layer's selection at the default cap, and at a cap of 1 MiB
    workspace / paged     seconds of one layer's sparse MLA
    1 rank / 2 ranks      seconds of one layer's selection, ids exchanged over gloo; each rank on a core of its own

Ratios of slots are of the best of several interleaved rounds; milliseconds are medians. `rows` of one prompt at the end
of a context of `keys`, 32 index heads, top-k 512.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn

from attention import paged
from attention.batch import AttentionBatch
from attention.geometry import Geometry
from attention.indexer import ragged
from attention.indexer.qchunk import QChunk
from attention.layouts import LatentCache
from attention.scratch import Scratch
from attention.workspace_slot import Workspace
from benchmarks.attention import DTYPES, INDEX_DIM, INDEX_HEADS, batch_of, index_cache, latent_cache
from benchmarks.common import Ask, Report, interleave, median, parser
from parallel.collectives import all_gather_rows

TOPK = 512
HEADS = 16
DEFAULT_CAP = 64 << 20


def geometry(batch: AttentionBatch, kind: str, **more: Any) -> Geometry:
    """Of one prompt in a pool that is no larger than its context."""
    context = int(batch.seq_lens.max())
    return Geometry(
        max_model_len=context,
        max_requests=8,
        pool_tokens=context,
        topk=TOPK,
        index_heads=INDEX_HEADS,
        index_dim=INDEX_DIM,
        dtype=DTYPES.get(kind, torch.bfloat16),
        index_kind=kind,
        latent_kind="fp8_packed" if kind == "fp8" else kind,
        **more,
    )


def queries(rows: int, kind: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Index queries and head weights."""
    return torch.randn((rows, INDEX_HEADS, INDEX_DIM)).to(DTYPES.get(kind, torch.bfloat16)), torch.randn(
        (rows, INDEX_HEADS)
    )


def least(times: Mapping[str, Sequence[float]], over: str, under: str) -> float:
    """Best time of one arm over the best of another: what the work costs where nothing else interferes."""
    return min(times[over]) / min(times[under])


def chunks(report: Report, kind: str, rows: int, keys: int, rounds: int) -> None:
    """What cutting costs."""
    batch, cache, scratch = batch_of(rows, keys), index_cache(kind, keys), Scratch(64 << 20)
    q, weights = queries(rows, kind)
    made = geometry(batch, kind)
    slots: dict[str, Any] = {
        "ragged": ragged,
        "qchunk": QChunk(made, max_logits_bytes=DEFAULT_CAP),
        "tiny": QChunk(made, max_logits_bytes=1 << 20),
    }
    calls = {name: partial(slot.select, batch, q, weights, cache, TOPK, scratch) for name, slot in slots.items()}
    times = interleave(calls, rounds)
    slower = {name: least(times, name, "ragged") for name in ("qchunk", "tiny")}
    report.figure(f"qchunk_{kind}", {"ms": {n: 1e3 * median(t) for n, t in times.items()}, "over_ragged": slower})
    print(
        f"indexer {kind:9s} {rows} x {keys}: ragged {1e3 * median(times['ragged']):8.1f} ms, "
        f"qchunk {slower['qchunk']:.3f}x, at 1 MiB {slower['tiny']:.3f}x"
    )
    report.ask(Ask(f"q-chunks at the default cap over unsplit, {kind}", slower["qchunk"], 1.03, "<=", "x"))


def space(report: Report, kind: str, rows: int, keys: int, rounds: int) -> None:
    """What gathering costs, or saves."""
    cache: LatentCache = latent_cache("fp8_packed" if kind == "fp8" else kind, keys)
    batch, scratch = batch_of(rows, keys), Scratch(64 << 20)
    dtype = DTYPES.get(kind, torch.bfloat16)
    q_nope, q_rope = torch.randn((rows, HEADS, 512)).to(dtype), torch.randn((rows, HEADS, 64)).to(dtype)
    ids = torch.stack([torch.randperm(keys - rows)[:TOPK].sort().values for _ in range(rows)]).to(torch.int32)
    arms: dict[str, Any] = {"paged": paged, "workspace": Workspace(geometry(batch, kind))}
    calls = {name: partial(arm.attend, batch, q_nope, q_rope, cache, ids, 0.05, scratch) for name, arm in arms.items()}
    times = interleave(calls, rounds)
    slower = least(times, "workspace", "paged")
    report.figure(f"workspace_{kind}", {"ms": {n: 1e3 * median(t) for n, t in times.items()}, "over_paged": slower})
    print(
        f"sparse MLA {kind:9s} {rows} x {keys}: paged {1e3 * median(times['paged']):8.1f} ms, workspace {slower:.3f}x"
    )


def _rank(rank: int, ranks: int, folder: str, rows: int, keys: int, rounds: int) -> None:
    torch.set_num_threads(1)
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
    torch.manual_seed(0)
    batch, cache, scratch = batch_of(rows, keys), index_cache("float32", keys), Scratch(64 << 20)
    q, weights = queries(rows, "float32")
    world = dist.group.WORLD
    assert world is not None, "made just above"
    exchange = partial(all_gather_rows, group=world)
    shared = geometry(
        batch, "float32", knobs={"indexer_tp_shard_min_rows": ranks}, ranks=ranks, rank=rank, exchange=exchange
    )
    arms = {"every rank scores all": QChunk(geometry(batch, "float32")), "rows shared": QChunk(shared)}
    ids = {}
    times: dict[str, list[float]] = {name: [] for name in arms}
    for turn in range(rounds + 1):
        for name, slot in arms.items():
            dist.barrier()
            start = time.perf_counter()
            ids[name] = slot.select(batch, q, weights, cache, TOPK, scratch)
            dist.barrier()
            if turn:
                times[name].append(time.perf_counter() - start)
    alone, together = ids.values()
    if rank == 0:
        torch.save((times, torch.equal(alone, together)), Path(folder) / "times.pt")
    dist.destroy_process_group()


def shard(report: Report, rows: int, keys: int, rounds: int, ranks: int = 2) -> None:
    """Selection of one layer on two ranks: each scores everything, or its share and the ids are exchanged."""
    if len(os.sched_getaffinity(0)) < ranks:
        print(f"row shard: left out, {ranks} cores are needed")
        return
    with tempfile.TemporaryDirectory() as folder:
        spawn(_rank, (ranks, folder, rows, keys, rounds), nprocs=ranks)
        times, equal = torch.load(Path(folder) / "times.pt", weights_only=False)
    gain = median(times["every rank scores all"]) / median(times["rows shared"])
    best = min(times["every rank scores all"]) / min(times["rows shared"])
    report.figure(
        "row_shard",
        {"ms": {n: 1e3 * median(t) for n, t in times.items()}, "speed_up": gain, "speed_up_best": best, "equal": equal},
    )
    print(f"row shard, {ranks} ranks, {rows} x {keys}: {gain:.2f}x (best of each {best:.2f}x), ids equal: {equal}")
    report.ask(Ask("indexer on two ranks over one", gain, 1.5, ">=", "x"))


def main() -> int:
    options = parser(__doc__.splitlines()[0]).parse_args()
    report = Report("slots", options)
    torch.set_num_threads(options.threads)
    rows, keys, rounds = (128, 4096, 5) if options.quick else (512, 8192, 9)
    for kind in ("float32", "bfloat16", "fp8"):
        chunks(report, kind, rows, keys, rounds)
        space(report, kind, rows, keys, rounds)
    shard(report, *((1024, 2048, 3) if options.quick else (4096, 4096, 5)))
    return report.finish()


if __name__ == "__main__":
    raise SystemExit(main())
