"""Everything that a plan depends on, checked once."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

from attention.cuda.choice import ChoiceError, Machine, choose
from attention.flags import CPU_MAX_LOGITS_MB, AttentionFlags
from attention.indexer.split import DEFAULT_MAX_LOGITS_MB, logits_elements
from attention.sizes import step_rows
from glm_runtime import memory
from glm_runtime.plan.devices import Device
from glm_runtime.plan.shapes import Model, PlanError
from parallel.limits import Sizes, check_cache, check_sizes
from policies.ledger.config import LedgerConfig
from policies.ledger.flags import LedgerFlags

PAGE = 64
WEIGHT_BYTES = {"fp4": 0.5625, "fp8": 1.0, "bfloat16": 2.0, "float32": 4.0}
"""Bytes a parameter: fp4 with one fp8 scale for 16 values."""
KV_KINDS = ("float32", "bfloat16", "fp8_e4m3")
"""fp8_e4m3: packed rows of 656 B; on compute capability 10, where SGLang reads by trtllm, raw ones of 576 B."""
LIBRARIES = ("deep_gemm", "flash_mla", "flashinfer", "sgl_kernel")
"""Taken to be there."""
SPLITS = ("head-tail", "interleave", "zigzag")
MOST_WORK = 1 << 22
"""Rows of steps (steps x requests in them) and chunks of a layer that a plan walks through; more take minutes."""


@dataclass(frozen=True)
class Setup:
    """A launch that could be.

    Attributes:
        context: prompt tokens. output: tokens to generate. cached: of the prompt, what the prefix cache would hold.
        decodes, decode_context: requests that decode all the while, and their context at the start.
        memory_share: of a device's memory that weights, pools and buffers may take.
        workspace: whether the prefill workspace slot is in use; qchunk: whether the q-chunk indexer is.
        max_model_len: positions that a request may have; None: as the model's config says.

    Raises:
        PlanError: naming the flags.
    """

    model: Model
    device: Device
    devices: int
    sizes: Sizes = field(default_factory=Sizes)
    ep: int = 1
    context: int = 8192
    output: int = 1
    cached: int = 0
    decodes: int = 0
    decode_context: int = 0
    max_model_len: int | None = None
    ledger: LedgerFlags = field(default_factory=LedgerFlags)
    attention: AttentionFlags = field(default_factory=AttentionFlags)
    qchunk: bool = True
    workspace: bool = True
    split: str = "head-tail"
    kv: str = "bfloat16"
    weights: str = "fp8"
    memory_share: float = 0.9

    def __post_init__(self) -> None:
        try:
            check_sizes(self.sizes)
            check_cache(
                self.sizes,
                sparse=True,
                needs_packed=not self.device.is_cpu,
                packed_fp8=self.latent_kind == "fp8_packed",
            )
        except ValueError as error:
            raise PlanError(str(error)) from None
        if self.sizes.world != self.devices:
            raise PlanError(
                f"--gpus names {self.devices} devices, the parallel sizes make {self.sizes.world} ranks "
                f"(tp {self.sizes.tp} x pcp {self.sizes.pcp} x dp {self.sizes.dp})"
            )
        if self.sizes.pp != 1:
            raise PlanError(f"--pp-size {self.sizes.pp} is not planned; only 1 is")
        for flag, value, least in (
            ("--context", self.context, 1),
            ("--output", self.output, 1),
            ("--cached-prefix", self.cached, 0),
            ("--decodes", self.decodes, 0),
            ("--decode-context", self.decode_context, 1 if self.decodes else 0),
            ("--ep-size", self.ep, 1),
        ):
            if value < least:
                raise PlanError(f"{flag} {value}: at least {least} is needed")
        if self.ep not in (1, self.expert_ranks):
            raise PlanError(f"--ep-size {self.ep}: 1, or all {self.expert_ranks} ranks that share the experts")
        for flag, name, known in (
            ("--kv-cache-dtype", self.kv, KV_KINDS),
            ("--weights", self.weights, tuple(WEIGHT_BYTES)),
            ("--cp-split", self.split, SPLITS),
        ):
            if name not in known:
                raise PlanError(f"{flag} {name}: known are {', '.join(known)}")
        if not 0 < self.memory_share <= 1:
            raise PlanError(f"--mem-fraction-static {self.memory_share}: above 0 and at most 1 is needed")
        if self.max_model_len is not None and self.context >= self.max_model_len:
            raise PlanError(
                f"--context {self.context} leaves no room for output within --max-model-len {self.max_model_len}; "
                f"raise that to {self.context + self.output}, or shorten the prompt"
            )
        if self.model["num_attention_heads"] % self.sizes.tp:
            raise PlanError(
                f"--tp-size {self.sizes.tp} does not divide the model's {self.model['num_attention_heads']} heads"
            )
        self.ledger_config()  # raises what contradicts itself
        self._check_work()
        _ = self.reads

    def _check_work(self) -> None:
        """PlanError for a plan that would not end: it walks through every step, and every chunk of a layer."""
        budget = self.ledger_flags.max_num_batched_tokens
        assert budget is not None
        gap = max(1, self.ledger_flags.prefill_schedule_interval) if self.decodes else 1
        steps = -(-self.context // budget) * gap
        chunks = self.context * self.context // 2 // logits_elements(self.logits_bytes) if self.qchunk else 0
        # NOTE: a step costs about as much as 32 chunks, whoever is in it.
        if steps * (32 + self.decodes) + chunks > MOST_WORK:
            raise PlanError(
                f"--context {self.context} at --max-num-batched-tokens {budget} makes {steps:,} steps of up to "
                f"{self.decodes + 1:,} requests and about {chunks:,} indexer chunks a layer, too many to plan one by "
                "one; plan a shorter prompt, a larger budget or fewer decodes"
            )

    @property
    def position_limit(self) -> int:
        """Positions that a request may have: the flag's, else the model's."""
        return self.max_model_len if self.max_model_len is not None else self.model["max_position_embeddings"]

    @property
    def refused(self) -> str | None:
        """Why a server would refuse this prompt, or None."""
        if self.context < self.position_limit:
            return None
        return (
            f"a prompt of {self.context:,} tokens leaves no room for output within {self.position_limit:,} positions: "
            f"a server refuses it. Planned as if there were {self.context + self.output:,}"
        )

    @property
    def unbuilt(self) -> str | None:
        """Why no server starts with these ranks yet, or None."""
        if self.device.is_cpu or self.sizes.pcp == self.sizes.dcp == 1:
            return None
        return (
            "on a GPU --prefill-context-parallel-size and --decode-context-parallel-size are refused with qchunk and "
            "workspace, and --cp-split head-tail is refused: counted and timed as if they were built"
        )

    @property
    def ledger_flags(self) -> LedgerFlags:
        """The ledger's flags with the device's defaults filled in."""
        kind = "cpu" if self.device.is_cpu else "cuda"
        gib = self.device.memory_bytes / (1 << 30)
        return self.ledger.with_defaults("server", kind, self.sizes.tp * self.sizes.pp, gib, self.device.name)

    def ledger_config(self) -> LedgerConfig:
        """The ledger's settings, as the scheduler process would make them, without a step in flight."""
        flags = self.ledger_flags
        assert flags.max_num_seqs is not None
        limit = max(self.position_limit, self.context + self.output, self.decode_context + self.most_steps)
        try:
            return flags.config(limit, flags.max_num_seqs, PAGE, overlap=False)
        except ValueError as error:
            raise PlanError(" ".join(str(error).split())) from None

    @property
    def most_steps(self) -> int:
        """More steps than the prompt can take; bounds the tokens that a decode beside it gains."""
        flags = self.ledger_flags
        return (self.context + self.output) * max(1, flags.prefill_schedule_interval) + 8

    @property
    def expert_ranks(self) -> int:
        """Ranks over which the experts are cut."""
        return self.sizes.tp * self.sizes.pcp * self.sizes.dp

    @property
    def heads(self) -> int:
        """Attention heads of a rank."""
        return self.model["num_attention_heads"] // self.sizes.tp

    @property
    def factor(self) -> int | None:
        """Workspace factor by the flag; None: the rule."""
        return self.attention.sparse_mla_prefill_workspace_factor

    @property
    def logits_bytes(self) -> int:
        """Cap on index scores at once."""
        default = CPU_MAX_LOGITS_MB if self.device.is_cpu else DEFAULT_MAX_LOGITS_MB
        return (self.attention.sparse_indexer_max_logits_mb or default) << 20

    @property
    def strict(self) -> bool:
        """Whether both caps of the indexer are kept even for one row."""
        return self.attention.indexer_strict_cap is not False

    @property
    def latent_kind(self) -> str:
        """Layout of the latent rows, as `attention.layouts` names it."""
        if self.kv != "fp8_e4m3":
            return self.kv
        return "fp8_raw" if not self.device.is_cpu and self.device.capability[0] == 10 else "fp8_packed"

    @property
    def latent_row(self) -> int:
        """Bytes of one cached token in one layer."""
        return self.model.latent_values if self.latent_kind == "fp8_raw" else memory.latent_row_bytes(self.kv)

    @property
    def index_row(self) -> int:
        """Bytes of one index key: fp8 on a GPU whatever the cache; on the CPU as the cache."""
        return memory.index_row_bytes(self.kv if self.device.is_cpu else "fp8_e4m3")

    @cached_property
    def reads(self) -> tuple[str, str]:
        """("workspace" or "pages", why): what prefill rows read, with SGLang's default backends on this device."""
        if not self.workspace:
            return "pages", "--prefill-kv paged"
        if self.device.is_cpu:
            return "workspace", "on a CPU, whatever the rows"
        raw, packed = self.latent_kind == "fp8_raw", self.latent_kind == "fp8_packed"
        machine = Machine(
            capability=self.device.capability,
            heads=self.heads,
            index_heads=self.model["index_n_heads"],
            latent_kind=self.latent_kind,
            prefill_backend="trtllm" if raw else "flashmla_kv" if packed else "flashmla_sparse",
            topk_backend="sgl-kernel",
            topk=self.model["index_topk"],
            libraries=LIBRARIES,
        )
        try:
            found = choose(machine, workspace=True)
        except ChoiceError as error:
            raise PlanError(str(error)) from None
        return found.reads or "pages", found.why

    @property
    def gathers(self) -> bool:
        """Whether prefill contexts are gathered into the workspace."""
        return self.reads[0] == "workspace"

    def step_rows(self, rows: int, pool_tokens: int) -> int:
        """`rows` of a workspace, cut to what a step of this launch with a pool of so many tokens can fill."""
        seqs = self.ledger_flags.max_num_seqs
        assert seqs is not None
        return step_rows(rows, seqs, self.position_limit, pool_tokens)
