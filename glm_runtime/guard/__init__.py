"""The guard: one place that no request gets past, whatever front it came through.

    HTTP, ZMQ, Engine ─> TokenizerManager.generate_request
                           │ request.check     every field: type, range, sizes                   nothing computed yet
                           │ prompt.tokenised  what only the token count tells                   before the scheduler
                           │ grammar.compiles  schemas and patterns, in another process          under a time limit
                           └─> scheduler       an exception that one request causes ends that request (scheduler.py)

A request that could harm is refused with its field, the value and the bound: `Refusal`, HTTP 400. The checks are pure;
`hook.py` (tokenizer manager), `front.py` (HTTP) and `scheduler.py` know SGLang.
"""

from glm_runtime.guard.limits import Limits
from glm_runtime.guard.refusal import Refusal
from glm_runtime.guard.request import check, check_embedding

__all__ = ["Limits", "Refusal", "check", "check_embedding"]
