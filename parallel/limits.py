"""Which parallel sizes go together, checked at start.

    world = PP * TP * PCP * DP                        PCP multiplies the ranks, DCP shares those that are there

    PCP == 1    TP mod DCP == 0
    PCP  > 1    DCP in {1, PCP, TP * PCP}
    DCP  > 1    interleave divides the page
    both > 1    sparse MLA; a packed fp8 (656-byte) cache where the kernel reads no other

Source: vLLM 0.33 config/parallel.py and PCPManager.validate_config, facts section 5.
"""

from __future__ import annotations

from dataclasses import dataclass

from parallel.dcp import check_sharding


@dataclass(frozen=True, slots=True)
class Sizes:
    """Parallel sizes of one launch."""

    tp: int = 1
    pcp: int = 1
    dcp: int = 1
    pp: int = 1
    dp: int = 1
    interleave: int = 1
    page_size: int = 64

    @property
    def world(self) -> int:
        """Ranks in all."""
        return self.pp * self.tp * self.pcp * self.dp


FLAGS = {
    "tp": "--tp-size",
    "pcp": "--prefill-context-parallel-size",
    "dcp": "--decode-context-parallel-size",
    "pp": "--pp-size",
    "dp": "--dp-size",
}


def check_sizes(sizes: Sizes) -> None:
    """Raises ValueError, naming the flags that disagree and the values that would do."""
    for field, flag in FLAGS.items():
        if getattr(sizes, field) < 1:
            raise ValueError(f"{flag} must be at least 1, got {getattr(sizes, field)}")
    check_sharding(sizes.dcp, sizes.interleave, sizes.page_size if sizes.dcp > 1 else None)
    if sizes.pcp == 1 and sizes.tp % sizes.dcp:
        raise ValueError(
            f"{FLAGS['dcp']} {sizes.dcp} does not divide {FLAGS['tp']} {sizes.tp}; choose a divisor of {sizes.tp}"
        )
    if sizes.pcp > 1:
        allowed = sorted({1, sizes.pcp, sizes.tp * sizes.pcp})
        if sizes.dcp not in allowed:
            raise ValueError(
                f"{FLAGS['dcp']} {sizes.dcp} does not go with {FLAGS['pcp']} {sizes.pcp} and {FLAGS['tp']} {sizes.tp}; "
                f"choose one of {', '.join(map(str, allowed))}"
            )


def check_cache(sizes: Sizes, sparse: bool, needs_packed: bool, packed_fp8: bool) -> None:
    """Raises ValueError where PCP + DCP meets a model or a cache that it cannot serve.

    `sparse`: the model is sparse MLA. `needs_packed`: the chosen kernel gathers packed fp8 rows only (FlashMLA).
    `packed_fp8`: the cache holds such rows.
    """
    if sizes.pcp == 1 or sizes.dcp == 1:
        return
    both = f"{FLAGS['pcp']} {sizes.pcp} with {FLAGS['dcp']} {sizes.dcp}"
    if not sparse:
        raise ValueError(f"{both} needs a sparse-MLA model (index_topk); set {FLAGS['dcp']} 1")
    if needs_packed and not packed_fp8:
        raise ValueError(f"{both} needs --kv-cache-dtype fp8_e4m3; set it, or {FLAGS['dcp']} 1")
