"""Which library call serves the slots on this device. Pure: facts in, a choice out.

Scores, whatever the cache (index keys are e4m3 pages on a GPU):

    capability    gathered keys                  pages of single rows             else
    9.x, 10.x     DeepGEMM fp8_mqa_logits        DeepGEMM fp8_paged_mqa_logits    Triton, where DeepGEMM is missing
    others        Triton                         Triton

Top-k: what --dsa-topk-backend names, where its library is there (sgl-kernel's is for 2,048 ids), else Triton.

`workspace`: how prefill rows read latent rows

    cache rows   SGLang's prefill backend                       heads a rank   reads       by
    bfloat16     any                                            any            pages       SGLang's own
    fp8_packed   flashmla_kv                                    below 32       pages       SGLang's FP8 decode kernel
    fp8_packed   flashmla_kv                                    32 and more    workspace   FlashMLA flash_mla_sparse_fwd
    fp8_packed   flashmla_sparse, flashmla_auto                 any            workspace   FlashMLA flash_mla_sparse_fwd
    fp8_packed   flashinfer_sparse_mla (SGLang's on 12.x)       any            pages       FlashInfer
    fp8_raw      trtllm (SGLang's on 10.x)                      any            pages       FlashInfer
    fp8_raw      flashmla_sparse, flashmla_auto, flashmla_kv    any            workspace   FlashMLA flash_mla_sparse_fwd
    fp8_*        others                                         any            refused

A workspace saves what is read again and up-converted each time. bfloat16 rows have nothing to convert, and with few
heads the FP8 kernel reads pages at no loss: vLLM 0.33 gathers in neither case (facts section 3). FlashMLA takes query
heads in multiples of 64, on 10.x of 128 (others are padded), and ids in multiples of 128. Where it does not fit, is
missing, or on other capabilities, our Triton kernel reads the workspace; it takes any number of heads. DeepGEMM takes
32, 64 or 128 index heads (fewer are padded).
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, Literal

NOT_RUN = "not yet run on a GPU"
LEAST_HEADS = 32
DEEPGEMM = (9, 10)
FLASHMLA_HEADS = {9: 64, 10: 128}
FLASHMLA_IDS = 128
SGL_TOPK = 2048

Reads = Literal["pages", "workspace"]
KINDS = ("bfloat16", "fp8_packed", "fp8_raw")
IN_PLACE = {
    "fp8_packed": {"flashinfer_sparse_mla": "FlashInfer's sparse MLA reads packed pages"},
    "fp8_raw": {"trtllm": "FlashInfer's trtllm-gen kernel reads raw pages"},
}
GATHERED = ("flashmla_kv", "flashmla_sparse", "flashmla_auto")


class ChoiceError(ValueError):
    """The slots cannot be honoured on this device; one line naming the flags."""


@dataclass(frozen=True)
class Machine:
    """What the choice depends on.

    Attributes:
        capability: compute capability, (major, minor).
        heads: query heads of one rank. index_heads: of the indexer.
        latent_kind: layout of the latent rows, one of `KINDS`.
        prefill_backend, topk_backend: SGLang's, resolved (--dsa-prefill-backend, --dsa-topk-backend).
        topk: ids a row.
        libraries: importable here, of deep_gemm, flash_mla, flashinfer, sgl_kernel.
    """

    capability: tuple[int, int]
    heads: int
    index_heads: int
    latent_kind: str
    prefill_backend: str
    topk_backend: str
    topk: int
    libraries: Collection[str]


@dataclass(frozen=True)
class Choice:
    """The calls in use.

    Attributes:
        score: "DeepGEMM" or "Triton". topk: "sgl-kernel", "flashinfer", "torch" or "Triton".
        reads: what prefill rows of the `workspace` slot read; None where that slot is not chosen.
        attend: whose sparse MLA reads the workspace, "FlashMLA" or "Triton"; "" where none is read.
        pages: whose sparse MLA serves a gathered batch's rows that read pages, "FlashMLA" or "Triton"; "" likewise.
        head_multiple: heads of a query are padded to a multiple of it.
        why: one clause.
    """

    score: str
    topk: str
    reads: Reads | None = None
    attend: str = ""
    pages: str = ""
    head_multiple: int = 1
    why: str = ""

    def facts(self) -> dict[str, Any]:
        """Plain JSON values for GET /policy."""
        found: dict[str, Any] = {"scores": self.score, "top_k": self.topk, "state": NOT_RUN}
        if self.reads is not None:
            found |= {"prefill_reads": self.reads, "because": self.why}
        if self.reads == "workspace":
            found |= {"sparse_mla": self.attend, "sparse_mla_pages": self.pages, "head_multiple": self.head_multiple}
        return found

    def line(self, chunked: bool) -> str:
        """One line for the log; `chunked` says whether the indexer is `qchunk`."""
        parts = [f"index scores by {self.score}, top-k by {self.topk}"] if chunked else []
        if self.reads == "workspace":
            parts.append(f"prefill reads the workspace by {self.attend}, single rows read pages by {self.pages}")
        elif self.reads == "pages":
            parts.append(f"prefill reads pages by SGLang's own kernel: {self.why}")
        return f"{'; '.join(parts)} ({NOT_RUN})"


def choose(machine: Machine, workspace: bool) -> Choice:
    """The calls for `machine`; `workspace` says whether that prefill-KV slot is chosen.

    Raises:
        ChoiceError: a cache layout or a prefill backend that the slot cannot serve.
    """
    major = machine.capability[0]
    deep = major in DEEPGEMM and "deep_gemm" in machine.libraries and 128 % max(32, machine.index_heads) == 0
    score = "DeepGEMM" if deep else "Triton"
    topk = _topk(machine)
    if not workspace:
        return Choice(score, topk)
    reads, why = _reads(machine)
    if reads == "pages":
        return Choice(score, topk, reads, why=why)
    flash = major in FLASHMLA_HEADS and "flash_mla" in machine.libraries and machine.topk % FLASHMLA_IDS == 0
    if not flash:
        return Choice(score, topk, reads, "Triton", "Triton", 1, why)
    pages = "FlashMLA" if machine.latent_kind == "fp8_packed" else "Triton"
    return Choice(score, topk, reads, "FlashMLA", pages, FLASHMLA_HEADS[major], why)


def _topk(machine: Machine) -> str:
    if machine.topk_backend == "torch":
        return "torch"
    if machine.topk_backend == "flashinfer" and "flashinfer" in machine.libraries:
        return "flashinfer"
    if machine.topk_backend == "sgl-kernel" and "sgl_kernel" in machine.libraries and machine.topk == SGL_TOPK:
        return "sgl-kernel"
    return "Triton"


def _reads(machine: Machine) -> tuple[Reads, str]:
    kind, backend = machine.latent_kind, machine.prefill_backend
    if kind not in KINDS:
        raise ChoiceError(
            f"--prefill-kv workspace knows no {kind} rows on a GPU; use --kv-cache-dtype bfloat16 or fp8_e4m3"
        )
    if kind == "bfloat16":
        return "pages", "bfloat16 rows need no up-conversion"
    if backend in IN_PLACE[kind]:
        return "pages", IN_PLACE[kind][backend]
    if backend not in GATHERED:
        raise ChoiceError(
            f"--prefill-kv workspace cannot honour --dsa-prefill-backend {backend} with {kind} rows; "
            f"choose one of {', '.join((*IN_PLACE[kind], *GATHERED))}, or --prefill-kv paged"
        )
    if kind == "fp8_packed" and backend == "flashmla_kv" and machine.heads < LEAST_HEADS:
        return "pages", f"{machine.heads} heads a rank, fewer than {LEAST_HEADS}: the FP8 decode kernel serves prefill"
    return "workspace", f"{kind} rows, {machine.heads} heads a rank, {backend}"


def needs_factor(indexer: str, choice: Choice) -> bool:
    """Whether --sparse-mla-prefill-workspace-factor has anything to size."""
    return indexer == "qchunk" or choice.reads == "workspace"
