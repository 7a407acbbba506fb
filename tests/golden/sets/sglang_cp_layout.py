"""SGLang's interleave and zigzag layouts."""

from __future__ import annotations

from typing import Any

from parallel.interleave import interleave, interleave_applies, zigzag, zigzag_applies


def check(case: dict[str, Any]) -> str | None:
    lens, cp = case["extend_lens"], case["cp"]
    applies = {"interleave": interleave_applies, "zigzag": zigzag_applies}[case["kind"]](lens, cp)
    got: dict[str, Any] = {"can_apply": applies, "per_rank_logical": None, "physical_rank_len": None, "ranks": None}
    if applies and case["kind"] == "interleave":
        spread = interleave(lens, cp)
        got["per_rank_logical"] = spread.rank_rows()
        got["physical_rank_len"] = spread.padded_rows()
        got["ranks"] = [{"rank": rank, "local_rows": spread.rows(rank).tolist()} for rank in range(cp)]
    elif applies:
        blocks = zigzag(lens, case["prefix_lens"], cp)
        got["per_rank_logical"] = blocks.rank_rows()
        got["physical_rank_len"] = blocks.padded_rows()
        got["ranks"] = [
            {
                "rank": rank,
                "local_rows": blocks.rows(rank).tolist(),
                "kv_len_prev": blocks.kv_lens(rank)[0],
                "kv_len_next": blocks.kv_lens(rank)[1],
                "q_prev": blocks.query_lens(rank)[0],
                "q_next": blocks.query_lens(rank)[1],
                "split_list": blocks.split_list(),
                "zigzag_index": blocks.zigzag_index(rank),
                "cp_reverse_index": blocks.cp_reverse_index(),
                "reverse_split_len": blocks.reverse_split_len(),
            }
            for rank in range(cp)
        ]
    for field, value in got.items():
        if value != case[field]:
            return f"{field}: got {value}, wanted {case[field]}"
    return None
