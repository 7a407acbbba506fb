"""Context parallelism on SGLang's seam: `head-tail`, and SGLang's own two splits as a CPU can run them.

    input   rows of the step  ──shard_hidden_states──> this rank's rows, padded to the longest rank
    layer   latent rows, index keys (RoPE done, local positions)  ──gather_kv_cache──> all rows, into every rank's cache
    end     hidden states  ──gather_hidden_states──> all rows, in the step's order

    gathered | rank 0's rows, padding | rank 1's rows, padding |     restore[g]: where global row g lies (tables.py)

SGLang asks `materialize_full_...` for whole keys before attention. Here they return what they get: the attention
backend gathers where it writes its cache, so that nothing is gathered twice. Beside prefills, head-tail deals out the
requests of one row one by one; SGLang's own splits cut them like any other row. Where the ranks share a cache
(`dcp_size`), head-tail leaves those requests, and prefills of fewer than 2P segments, whole on every rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from sglang.srt.layers.cp.base import (
    BaseContextParallelMetadata,
    ContextParallelStrategy,
    ContextParallelStrategyKind,
    CPAttentionBackendKind,
)
from sglang.srt.layers.cp.interleave import InterleaveCPStrategy
from sglang.srt.layers.cp.padding import pad_local_rows
from sglang.srt.layers.cp.zigzag import ZigzagCPStrategy
from sglang.srt.runtime_context import get_parallel

from parallel.balance import one_row
from parallel.head_tail import HeadTail, head_tail
from parallel.tables import gather_bytes


@dataclass
class Traffic:
    """Since start: bytes that this rank received, and gathers, by what they carried."""

    keys_bytes: int = 0
    keys_gathers: int = 0
    hidden_bytes: int = 0
    hidden_gathers: int = 0


class Deferred(ContextParallelStrategy):
    """What all splits share on CPU: keys are gathered by the attention backend, and every gather is counted."""

    def __init__(self, cp_size: int) -> None:
        super().__init__(cp_size)
        self.traffic = Traffic()

    def materialize_full_mla_kv(self, forward_batch: Any, layer: Any, k_nope: Any, k_rope: Any) -> Any:
        return k_nope, k_rope

    def materialize_full_indexer_k_cache(self, key: Any, forward_batch: Any) -> Any:
        return key

    def gather_kv_cache(self, x: Any, forward_batch: Any, stream: Any = None) -> Any:
        self.traffic.keys_bytes += self._received(x, forward_batch)
        self.traffic.keys_gathers += 1
        return super().gather_kv_cache(x, forward_batch, stream)

    def gather_hidden_states(self, x: Any, forward_batch: Any, stream: Any = None) -> Any:
        self.traffic.hidden_bytes += self._received(x, forward_batch)
        self.traffic.hidden_gathers += 1
        return super().gather_hidden_states(x, forward_batch, stream)

    def gathered_rows(self, metadata: Any) -> int:
        """Rows that each rank sends."""
        return int(max(metadata.per_rank_actual_token))

    def _received(self, x: torch.Tensor, forward_batch: Any) -> int:
        row = x[0].numel() * x.element_size() if x.shape[0] else 0
        return gather_bytes(self.gathered_rows(forward_batch.attn_cp_metadata), self.cp_size, row)


class InterleaveStrategy(Deferred, InterleaveCPStrategy):
    """SGLang's interleave."""


class ZigzagStrategy(Deferred, ZigzagCPStrategy):
    """SGLang's zigzag; it gathers ranks as long as the longest, without the padding of its inputs."""

    def gathered_rows(self, metadata: Any) -> int:
        return int(max(metadata.per_rank_logical_token or metadata.per_rank_actual_token))


@dataclass
class HeadTailMetadata(BaseContextParallelMetadata):
    """One step's layout. The lists are named and filled as SGLang's padding helpers expect.

    per_rank_logical_token: rows of each rank. per_rank_actual_token: the same padded, equal on all ranks.
    rows: int64 global rows of this rank. restore: int64 [G] gathered row of each global row, made when first asked for.
    """

    layout: HeadTail | None = None
    per_rank_actual_token: list[int] | None = None
    per_rank_logical_token: list[int] | None = None
    max_rank_len: list[int] | None = None
    rows: torch.Tensor | None = None
    restore: torch.Tensor | None = None


class HeadTailSplit(ContextParallelStrategy):
    """vLLM's split: rank r of P owns segments r and 2P-1-r of each request's new rows (`head_tail.py`)."""

    name = "head-tail"
    dcp_size = 1  # ranks that share a cache: above 1 decode rows and short prefills are run by every rank
    kind = ContextParallelStrategyKind.NONE  # neither is_zigzag() nor is_interleave() may answer yes

    def can_apply(self, num_tokens: int, forward_batch: Any) -> bool:
        if self.cp_size < 2 or not forward_batch.forward_mode.is_context_parallel_extend():
            return False
        return sum(forward_batch.extend_seq_lens_cpu or ()) > 0

    def build_metadata(
        self, num_tokens: int, seqs_len: Sequence[int] | None, extend_seqs_len: Sequence[int] | None = None
    ) -> HeadTailMetadata:
        """Layout of `extend_seqs_len` new rows at the end of `seqs_len` keys, both [R]."""
        new = np.array(extend_seqs_len if extend_seqs_len is not None else seqs_len or [num_tokens], dtype=np.int64)
        ends = new if seqs_len is None else np.array(seqs_len, dtype=np.int64)
        layout = head_tail(new, ends - new, ~one_row(new), self.cp_size, self.dcp_size)
        return HeadTailMetadata(
            total_seq_lens=int(new.sum()),
            bs=len(new),
            layout=layout,
            per_rank_actual_token=layout.rank_rows.tolist(),
            max_rank_len=[layout.dispatch_rows] * self.cp_size,
            rows=torch.from_numpy(layout.rows(self.cp_rank)),
        )

    def shard_hidden_states(self, x: Any, forward_batch: Any) -> Any:
        metadata = forward_batch.attn_cp_metadata
        return pad_local_rows(x.index_select(0, metadata.rows), metadata, dim=0)

    def shard_position_ids(self, positions: Any, forward_batch: Any) -> Any:
        metadata = forward_batch.attn_cp_metadata
        return pad_local_rows(positions.index_select(-1, metadata.rows), metadata, dim=-1)

    def local_q_indices(self, num_tokens: int, forward_batch: Any) -> Any:
        return forward_batch.attn_cp_metadata.rows

    def gather_hidden_states(self, x: Any, forward_batch: Any, stream: Any = None) -> Any:
        return self._gather(x, forward_batch.attn_cp_metadata)

    def gather_kv_cache(self, x: Any, forward_batch: Any, stream: Any = None) -> Any:
        return self._gather(x, forward_batch.attn_cp_metadata)

    def _gather(self, x: torch.Tensor, metadata: HeadTailMetadata) -> torch.Tensor:
        """Rows x [at least this rank's, ...] -> all rows of the step [G, ...], in its order."""
        assert metadata.layout is not None and metadata.rows is not None and metadata.per_rank_actual_token is not None
        length, own = max(metadata.per_rank_actual_token), metadata.rows.shape[0]
        if metadata.restore is None:
            metadata.restore = torch.from_numpy(metadata.layout.tables(length).hidden_restore_idx)
        sent = x[:length]
        if own < length or sent.shape[0] < length:
            sent = x.new_zeros((length, *x.shape[1:]))
            sent[:own] = x[:own]
        gathered = x.new_empty((length * self.cp_size, *x.shape[1:]))
        get_parallel().attn_cp_group.all_gather_into_tensor(gathered, sent.contiguous())
        return gathered.index_select(0, metadata.restore)

    def run_attention(
        self,
        q: Any,
        forward_batch: Any,
        device: Any,
        attn_fn: Any,
        attention_backend: Any = CPAttentionBackendKind.DSA,
    ) -> Any:
        raise NotImplementedError("head-tail: attention is the backend's own, over local_q_indices")

    def materialize_full_kv(
        self, forward_batch: Any, layer: Any = None, k: Any = None, v: Any = None, swa_loc: Any = None
    ) -> Any:
        raise NotImplementedError("head-tail serves MLA models only")

    def materialize_full_mla_kv(self, forward_batch: Any, layer: Any, k_nope: Any, k_rope: Any) -> Any:
        raise NotImplementedError("head-tail: the attention backend gathers where it writes its cache")


class HeadTailStrategy(Deferred, HeadTailSplit):
    """`head-tail` as the CPU backend runs it."""


# SGLang's own splits as a CPU can run them.
SGLANG_SPLITS: dict[str, type[Deferred]] = {"interleave": InterleaveStrategy, "zigzag": ZigzagStrategy}
