"""The token ledger of the `vllm-ledger` policy. What is exported here is pure: no torch, no SGLang.

Reading order: request (the counters), core (the loop), sizes and budgets (how many rows), roster and steady (who
runs), queues, plan (the answer), kv (what is asked of a pool), blocks (a pool with a prefix cache), step_time (a budget
in time).
"""

from policies.ledger.config import LedgerConfig
from policies.ledger.core import Ledger, Pause
from policies.ledger.kv import NO_ROOM, KVPort, PagePool
from policies.ledger.plan import StepPlan
from policies.ledger.request import Request, Status
from policies.ledger.sizes import Pacer

__all__ = ["NO_ROOM", "KVPort", "Ledger", "LedgerConfig", "Pacer", "PagePool", "Pause", "Request", "Status", "StepPlan"]
