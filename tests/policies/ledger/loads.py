"""Random loads that a ledger must be able to drain."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from policies.ledger import LedgerConfig
from tests.policies.ledger.world import Client, Load

MAX_MODEL_LEN = 96


@st.composite
def loads(draw: st.DrawFn, /, **fixed: Any) -> Load:
    """Up to ten requests over a pool that holds the largest of them, and often little more."""

    def rarely(values: st.SearchStrategy[int], usual: int) -> int:
        return draw(st.one_of(st.just(usual), values))

    block_size = draw(st.sampled_from([1, 4, 16]))
    spec = rarely(st.integers(1, 3), 0)
    slots = rarely(st.integers(1, 2), 0)
    budget = draw(st.sampled_from([12, 16, 24, 40, 100]))
    threshold = rarely(st.integers(4, 30), 0)
    chunks = draw(st.integers(0, 9)) > 0
    if not chunks:
        budget, slots = MAX_MODEL_LEN + slots, slots
    partial = rarely(st.integers(1, 3), 0)
    fields: dict[str, Any] = {
        "max_num_batched_tokens": budget,
        "max_num_seqs": draw(st.integers(1, 10)),
        "max_model_len": MAX_MODEL_LEN,
        "max_num_scheduled_tokens": draw(st.sampled_from([None, None, max(budget * 3 // 4, 1)])) if chunks else None,
        "max_num_active_seqs": draw(st.sampled_from([None, None, 3])),
        "long_prefill_token_threshold": threshold,
        "long_prefill_token_threshold_adaptive": draw(st.booleans()),
        "prefill_schedule_interval": rarely(st.integers(2, 5), 1),
        "scheduling_policy": draw(st.sampled_from(["fcfs", "priority"])),
        "enable_chunked_prefill": chunks,
        "scheduler_reserve_full_isl": draw(st.booleans()),
        "watermark": draw(st.sampled_from([0.0, 0.0, 0.1])),
        "num_spec_tokens": spec,
        "draft_slots": slots,
        "num_prefill_lookahead": 0 if threshold or not chunks else rarely(st.integers(1, 4), 0),
        "decode_first": draw(st.booleans()),
        "max_num_partial_prefills": partial,
        "max_long_partial_prefills": min(rarely(st.integers(1, 2), 0), partial or 2),
        "chunk_align": draw(st.sampled_from([1, block_size])),
        "fail_unfit": draw(st.booleans()),
        "async_scheduling": draw(st.booleans()),
    }
    config = LedgerConfig(**(fields | fixed))
    clients = []
    for i in range(draw(st.integers(1, 10))):
        max_tokens = draw(st.integers(1, 24))
        prompt = draw(st.integers(1, MAX_MODEL_LEN - max_tokens - 1))
        clients.append(
            Client(
                id=f"r{i}",
                step=draw(st.integers(0, 12)),
                prompt=prompt,
                max_tokens=max_tokens,
                stop_at=draw(st.integers(1, max_tokens)),
                group=draw(st.integers(0, 1)),
                shared=draw(st.sampled_from([0, prompt // 2, prompt])),
                priority=draw(st.integers(0, 2)),
                abort_step=draw(st.one_of(st.none(), st.none(), st.integers(0, 40))),
            )
        )
    whole = max(client.prompt + client.max_tokens for client in clients) + config.num_spec_tokens
    least = -(-whole // block_size) + 1
    return Load(
        config=config,
        clients=tuple(clients),
        blocks=draw(st.one_of(st.integers(least, 2 * least), st.just(20 * least))),
        block_size=block_size,
        caching=draw(st.booleans()),
        paced=draw(st.booleans()),
        drops=draw(st.booleans()),
        seed=draw(st.integers(0, 1000)),
    )
