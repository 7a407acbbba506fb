"""Stop strings that are found however the model cuts them into tokens, and never shown in part.

SGLang looks for a stop string in the text of the last tokens, as many as its tokenizer makes of the string, and one:

    stop "the end"     as encoded: th|e| e|nd     4 + 1 tokens are looked at
    as the model writes it:        t|h|e| |e|n|d  7 tokens: missed, and its head is streamed

Every token stands for at least one byte, so as many tokens as the string has bytes always hold it. A whole answer that
does not stream is passed on every 50 tokens; there SGLang does not hold the head of a stop string back, as it does for
a stream.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def wide_window(result: None, params: Any, *_args: Any, **_kwargs: Any) -> None:
    """After SamplingParams.normalize: look at as many tokens as the longest stop string has bytes."""
    longest = max((len(text.encode()) for text in params.stop_strs), default=0)
    params.stop_str_max_len = max(params.stop_str_max_len, longest)


def held_back(original: Callable[..., None], accumulator: Any, *, req: Any) -> None:
    """Around the output streamer's accept: a request that does not stream waits while a stop string may have begun."""
    if not req.stream and req.sampling_params.stop_strs and not req.finished() and req.check_match_stop_str_prefix():
        return
    original(accumulator, req=req)
