"""What only the token count tells.

prompt tokens + max_new_tokens <= context     more is refused, never cut (SGLang's --allow-auto-truncate cuts);
                                              without max_new_tokens the answer ends where the context does
prompt tokens                  >= 1           unless a session brings its own
positions and starts           inside the prompt
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from glm_runtime.guard.limits import Limits
from glm_runtime.guard.refusal import Refusal


def tokenised(obj: Any, token_ids: Sequence[int] | None, limits: Limits, *, truncate: bool = False) -> None:
    """Raise Refusal where one prompt, now tokens, cannot be served.

    Args:
        obj: the request of this one prompt, normalised by SGLang.
        token_ids: its tokens; None where embeddings stand for them.
        truncate: the server was started with --allow-auto-truncate.
    """
    fields = vars(obj)
    if token_ids is None:
        rows = fields.get("input_embeds")
        count = 0 if rows is None else len(rows)
    else:
        count = len(token_ids)
    session = fields.get("session_params")
    if not count and not (isinstance(session, Mapping) and session.get("id")):
        raise Refusal("text" if fields.get("text") is not None else "input_ids", "no tokens", "at least one token")
    if token_ids and fields.get("input_ids") is None and (max(token_ids) >= limits.vocab or min(token_ids) < 0):
        raise Refusal("text", max(token_ids), f"text of tokens from 0 to {limits.vocab - 1}")
    params = fields.get("sampling_params")
    new = params.get("max_new_tokens") if isinstance(params, Mapping) else None
    if not truncate:
        field = "text" if fields.get("text") is not None else "input_ids"
        if count >= limits.context:
            raise Refusal(field, f"{count} tokens", f"at most {limits.context - 1} tokens")
        if new is not None and count + new > limits.context:
            left = limits.context - count
            raise Refusal(
                "max_new_tokens", new, f"at most {left} ({count} of {limits.context} positions are the prompt)"
            )
    start = fields.get("logprob_start_len")
    if fields.get("return_logprob") and isinstance(start, int) and start > count:
        raise Refusal("logprob_start_len", start, f"-1 to {count}, the prompt's length")
    if fields.get("return_routed_experts") and fields.get("routed_experts_start_len", 0) > count:
        raise Refusal("routed_experts_start_len", fields["routed_experts_start_len"], f"0 to {count}")
    for name in ("multi_item_delimiter_indices", "token_indices_to_pool"):
        value = fields.get(name)
        if value and max(value) >= count:
            raise Refusal(name, max(value), f"positions from 0 to {count - 1}")
