"""After an acknowledged abort nothing more is said.

    streamed       aborted before anything was sent: no part is sent, and the last one carries no token
    whole          aborted before a second token was made: the answer carries none

The scheduler lets the step in flight end, and its token would come after the abort was acknowledged.
"""

from __future__ import annotations

from collections.abc import Container
from typing import Any

MESSAGE = "aborted before the first token"
LISTS = (
    "output_token_logprobs",
    "output_top_logprobs",
    "output_token_ids_logprobs",
    "output_token_sampling_logprobs",
    "output_token_sampling_mask",
)


def settle(output: Any, aborted: Container[str], spoken: set[str], stream: bool) -> bool:
    """Whether an output of SGLang's `generate_request` goes out; one that comes too late loses its token in place.

    Args:
        output: one answer, or the list of a batch.
        aborted: ids whose abort was acknowledged.
        spoken: ids of this request that have had an output sent; added to here.
        stream: the outputs are parts.
    """
    if isinstance(output, list):
        for entry in output:
            settle(entry, aborted, spoken, stream)
        return True
    meta = output.get("meta_info") if isinstance(output, dict) else None
    if meta is None or "id" not in meta:
        return True
    name, finish = meta["id"], meta.get("finish_reason")
    if name in aborted and name not in spoken:
        if stream and finish is None:
            return False
        if stream or meta.get("completion_tokens", 0) <= 1:
            _silence(output, meta)
    spoken.add(name)
    return True


def _silence(output: dict[str, Any], meta: dict[str, Any]) -> None:
    finish = meta.get("finish_reason")
    if not isinstance(finish, dict) or finish.get("type") != "abort":
        meta["finish_reason"] = {"type": "abort", "message": MESSAGE}
    meta["completion_tokens"] = 0
    for name in LISTS:
        if name in meta:
            meta[name] = []
    if "text" in output:
        output["text"] = ""
    if "output_ids" in output:
        output["output_ids"] = []
