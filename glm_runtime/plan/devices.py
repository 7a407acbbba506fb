"""What one device can do: data sheets for GPUs, a quarter of a second of measuring for the CPU.

| device | memory | bf16 / fp8 dense | memory/s | link/s, one way |
|--------|--------|------------------|----------|-----------------|
| H100   |  80 GB |   989 / 1,979 TF | 3.35 TB  |  450 GB         |
| H200   | 141 GB |   989 / 1,979 TF | 4.8 TB   |  450 GB         |
| B200   | 180 GB | 2,250 / 4,500 TF | 8.0 TB   |  900 GB         |

Peaks are NVIDIA's, without sparsity. The shares of them that kernels reach are assumptions, told with every time.
"""

from __future__ import annotations

import re
import statistics
import time
from dataclasses import dataclass, replace

from glm_runtime.plan.shapes import PlanError

GIB = 1 << 30


@dataclass(frozen=True)
class Device:
    """One device; flop/s, bytes/s, seconds.

    `matmul` and `matmul_fp8` are peaks; `gemm_share`, `attend_share` and `memory_share` what is reached of them;
    `score` the reached rate of index scoring; `launch` the cost of starting one piece of work; `head_block` the
    multiple to which attention kernels pad the heads of a rank; `capability` is CUDA's.
    """

    name: str
    memory_bytes: int
    matmul: float
    matmul_fp8: float
    bandwidth: float
    link: float
    score: float
    launch: float = 5e-6
    exchange: float = 2e-5
    gemm_share: float = 0.6
    attend_share: float = 0.4
    memory_share: float = 0.8
    link_share: float = 0.8
    head_block: int = 64
    capability: tuple[int, int] = (9, 0)
    is_cpu: bool = False

    def assumptions(self) -> list[str]:
        """What a predicted time rests on."""
        source = "measured here just now" if self.is_cpu else "data sheet"
        return [
            f"{self.name} ({source}): {self.matmul / 1e12:.3g} TF/s, fp8 {self.matmul_fp8 / 1e12:.3g} TF/s, "
            f"{self.bandwidth / 1e9:.4g} GB/s, link {self.link / 1e9:.4g} GB/s one way",
            f"reached: GEMM {self.gemm_share:.0%}, sparse attention {self.attend_share:.0%}, memory "
            f"{self.memory_share:.0%}, link {self.link_share:.0%}; index scoring {self.score / 1e12:.3g} TF/s",
            f"{self.launch * 1e6:.3g} us a launch, {self.exchange * 1e6:.3g} us an exchange; nothing overlaps; "
            f"heads of a rank padded to {self.head_block}",
        ]


GPUS: dict[str, Device] = {
    "H100": Device("H100", 80 * 10**9, 989e12, 1979e12, 3.35e12, 450e9, 300e12),
    "H200": Device("H200", 141 * 10**9, 989e12, 1979e12, 4.8e12, 450e9, 300e12),
    "B200": Device("B200", 180 * 10**9, 2250e12, 4500e12, 8.0e12, 900e9, 680e12, capability=(10, 0)),
}


def parse(text: str) -> tuple[int, Device]:
    """(count, device) of "8xH200", "H200" or "2xCPU", whose ranks share its memory. PlanError naming what is known."""
    found = re.fullmatch(r"(?:([1-9]\d{0,5})x)?(\w+)", text)
    name = found[2].upper() if found else ""
    if found is None or name not in (*GPUS, "CPU"):
        raise PlanError(f"--gpus {text}: expected COUNTxDEVICE with one of {', '.join(GPUS)}, CPU")
    count = int(found[1] or 1)
    if name != "CPU":
        return count, GPUS[name]
    device = measure()
    return count, replace(device, memory_bytes=device.memory_bytes // count)


def measure(size: int = 768, rounds: int = 9) -> Device:
    """This machine's CPU, one thread as the server runs one rank: float32 GEMM and copy, medians."""
    import psutil
    import torch

    from attention.indexer.qchunk import BYTES_PER_SECOND, LATENCY_SECONDS, PRODUCTS_PER_SECOND

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        a, b = torch.randn(size, size), torch.randn(size, size)
        source, target = torch.randn(1 << 23), torch.empty(1 << 23)
        products, copies = [], []
        for _ in range(rounds):
            start = time.perf_counter()
            torch.mm(a, b)
            middle = time.perf_counter()
            target.copy_(source)
            products.append(middle - start)
            copies.append(time.perf_counter() - middle)
    finally:
        torch.set_num_threads(threads)
    matmul = 2 * size**3 / statistics.median(products)
    return Device(
        "CPU",
        psutil.virtual_memory().total,
        matmul,
        matmul,
        2 * source.numel() * 4 / statistics.median(copies),
        BYTES_PER_SECOND,
        2 * PRODUCTS_PER_SECOND,
        launch=2e-5,
        exchange=LATENCY_SECONDS,
        gemm_share=0.7,
        attend_share=0.2,
        memory_share=0.8,
        link_share=1.0,
        head_block=1,
        is_cpu=True,
    )
