"""The token ledger: the pure scheduler core of the `vllm-ledger` policy."""

from policies.ledger.config import LedgerConfig
from policies.ledger.core import Ledger, Pause
from policies.ledger.kv import NO_ROOM, KVPort, PagePool
from policies.ledger.plan import StepPlan
from policies.ledger.request import Request, Status
from policies.ledger.sizes import Pacer

__all__ = ["NO_ROOM", "KVPort", "Ledger", "LedgerConfig", "Pacer", "PagePool", "Pause", "Request", "Status", "StepPlan"]
