"""Workload traces: who arrives when, with how many tokens, and which prefix it shares. Pure: no torch, no SGLang.

file ──read──> [Request] ──scale──> [Request] ──prompts──> token ids
         │                                          equal block ids -> equal tokens
         └ azure.py, mooncake.py, record.py: one format each
"""

from glm_runtime.traces.flags import add_arguments, load
from glm_runtime.traces.prompts import prompts, reuse
from glm_runtime.traces.read import KINDS, read
from glm_runtime.traces.record import block_names, header, row
from glm_runtime.traces.request import Request, TraceError
from glm_runtime.traces.scale import scale

__all__ = [
    "KINDS",
    "Request",
    "TraceError",
    "add_arguments",
    "block_names",
    "header",
    "load",
    "prompts",
    "read",
    "reuse",
    "row",
    "scale",
]
