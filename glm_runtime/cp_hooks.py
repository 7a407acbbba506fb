"""Prefill ranks on a CPU: the split that was asked for, and what SGLang's context parallelism asks of a GPU.

    get_cp_strategy()  ──> the split named by --cp-split, one object a process (`parallel/strategy.py`)
    EagerRunner        ──> shard, run the layers on own rows, gather once     (SGLang's asks for a CUDA stream)
    feed-forward part  ──> whole on every rank, on own rows: nothing to gather, nothing to sum

SGLang cuts the experts over the ranks and so moves hidden states twice a layer. With whole experts a row's bits are
those of one rank, and the only exchanges between layers are the keys'. The price is memory: each rank holds all weights
(but the LM head), as each rank of a data-parallel group would.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from glm_runtime.config import RuntimeConfig

INIT_STRATEGY = "sglang.srt.layers.cp.base.init_cp_strategy"
STRATEGY = "sglang.srt.layers.cp.base.get_cp_strategy"
EXTEND = "sglang.srt.model_executor.runner.eager_runner.EagerRunner._execute_extend_cp"
GATHER = "sglang.srt.distributed.parallel_state.GroupCoordinator.all_gather_into_tensor"
GATHERS_FFN = "sglang.srt.layers.layer_boundary.layout._cp_gathers_over_attn_cp"
ADDS_SHARED = "sglang.srt.layers.moe.utils.adds_replicated_output_to_partial"


def register(request: RuntimeConfig) -> None:
    """Register the hooks of a launch with prefill ranks on CPU."""
    HookRegistry.register(INIT_STRATEGY, checked, HookType.AROUND)
    HookRegistry.register(STRATEGY, strategy_of(request), HookType.AROUND)
    HookRegistry.register(EXTEND, extend, HookType.REPLACE)
    HookRegistry.register(GATHER, all_gather_into_tensor, HookType.REPLACE)
    HookRegistry.register(GATHERS_FFN, stays_on_own_rows, HookType.REPLACE)
    HookRegistry.register(ADDS_SHARED, adds_shared, HookType.REPLACE)


def checked(original: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
    """SGLang builds its own object here and knows two names; ours is built by `strategy_of`."""


def strategy_of(request: RuntimeConfig) -> Callable[..., Any]:
    """AROUND hook for `get_cp_strategy`: the split of `request`, made once the process has its sizes."""
    made: list[Any] = []

    def get_cp_strategy(original: Callable[..., Any]) -> Any:
        if not made:
            ranks = prefill_ranks()
            if ranks < 2:
                return None
            made.append(load(request)(ranks))
            made[0].dcp_size = request.sharding()[0]
        return made[0]

    return get_cp_strategy


def load(request: RuntimeConfig) -> Callable[[int], Any]:
    """Class or function that makes the split named by the request, given the number of ranks."""
    from parallel.strategy import SGLANG_SPLITS
    from policies.registry import resolve

    split = resolve(request.policy, request.slots).impl("context_parallel")
    found: Callable[[int], Any] | None = split.load()
    return SGLANG_SPLITS[split.name] if found is None else found


def prefill_ranks() -> int:
    """Ranks that share a prefill; 0 where this process has no parallel sizes yet."""
    from sglang.srt.runtime_context import get_parallel

    try:
        parallel = get_parallel()
        return int(parallel.attn_cp_size) if parallel.enable_prefill_cp else 0
    except (AssertionError, AttributeError, RuntimeError, ValueError):
        return 0


def extend(self: Any, forward_batch: Any, kwargs: dict[str, Any]) -> Any:
    """`EagerRunner._execute_extend_cp`: embed, keep own rows, run the layers, gather the hidden states, logits."""
    from sglang.srt.layers.cp.utils import cp_gather_after_forward, cp_shard_model_inputs

    from glm_runtime.cpu_rows import pad_rows

    model = self.model_runner.model
    embeds = kwargs.get("input_embeds")
    if embeds is None:
        embeds = model.get_input_embeddings()(forward_batch.input_ids)
    with cp_shard_model_inputs(embeds, forward_batch.positions, forward_batch, forward_batch.input_ids) as own:
        x, positions, ids = (pad_rows(part) for part in own)
        hidden = model.model(ids, positions, forward_batch, input_embeds=x)
    hidden = cp_gather_after_forward(hidden, forward_batch)
    return model.logits_processor(forward_batch.input_ids, hidden, model.lm_head, forward_batch)


def all_gather_into_tensor(self: Any, output: Any, input: Any) -> None:
    """SGLang registers an operator without a CPU kernel for platforms like ours; gloo does the same plainly."""
    import torch.distributed as dist

    # NOTE: torch renamed it; the old name warns in every process.
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    gather(output, input, group=self.device_group)


def stays_on_own_rows() -> bool:
    """`_cp_gathers_over_attn_cp`: the feed-forward part runs where attention's rows are."""
    return False


def adds_shared() -> bool:
    """`adds_replicated_output_to_partial`: no sum over ranks follows, so each adds its shared experts."""
    return True
