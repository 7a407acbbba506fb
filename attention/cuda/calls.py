"""What the GPU slots ask of a device. Everything else of them is plain torch and runs anywhere.

    keys     gather_keys   scores   page_scores   topk   best
    rows     gather_rows   remap    attend_rows   attend_pages

Tests put `attention.kernels.reference` in this place and run the rest on a CPU.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from attention.layouts import IndexCache, LatentCache


class Calls(Protocol):
    """The device calls. Tensors are on one device; arguments are checked by the callers.

    Attributes:
        allocates_scores: `scores` and `page_scores` bring their own memory; else they fill the room they are given.
        head_multiple: heads that `attend_rows` and `attend_pages` take come in multiples of it.
    """

    allocates_scores: bool
    head_multiple: int

    def gather_keys(self, cache: IndexCache, slots: Tensor, keys: Tensor, scales: Tensor) -> None:
        """Fill keys float8_e4m3fn [n, 128] and scales float32 [n] from int64 slots [n]."""
        ...

    def scores(
        self, q: Tensor, weights: Tensor, keys: Tensor, scales: Tensor, ks: Tensor, ke: Tensor, width: int, room: Tensor
    ) -> Tensor:
        """Index scores of q float8_e4m3fn [m, H, 128], weights float32 [m, H], over gathered keys.

        Args:
            ks, ke: int32 [m], keys that each row sees. width: largest ke - ks, at least 1.
            room: float32, flat, m * width or more elements unless `allocates_scores`.

        Returns:
            float32 [m, width], key j of row i at column j - ks[i]; cells behind the last key of a row hold anything.
        """
        ...

    def page_scores(
        self, q: Tensor, weights: Tensor, cache: IndexCache, pages: Tensor, seen: Tensor, width: int, room: Tensor
    ) -> Tensor:
        """`scores` for rows of one request each, keys read in place: float32 [m, width], position p at column p.

        `pages` int32 [m, pages], `seen` int32 [m] keys of each row, `width` the largest of them.
        """
        ...

    def topk(self, scores: Tensor, lengths: Tensor, out: Tensor) -> None:
        """Fill out int32 [m, k] with the k best columns of the first lengths[i] of each row.

        Valid ids first, then -1; their order, and which of equal scores is kept, are the library's.
        """
        ...

    def best(self, scores: Tensor, lengths: Tensor, ids: Tensor | None, out: Tensor, out_scores: Tensor) -> None:
        """`topk` that also gives the scores, for merging: ties to the lowest column, ids in the order of columns.

        `ids` int32 [m, columns] names the columns (None: their numbers). Fills out int32 [m, k], out_scores float32
        [m, k], whose cells behind the valid ids hold anything.
        """
        ...

    def gather_rows(self, cache: LatentCache, slots: Tensor, out: Tensor) -> None:
        """Fill out bfloat16 [n, 576] with the latent rows at int64 slots [n], up-converted."""
        ...

    def remap(self, ids: Tensor, owner: Tensor, starts: Tensor, pages: Tensor, out: Tensor) -> None:
        """Fill out int32 [m, k]: starts[owner[i]] + id; -1 stays, and an id past the page table becomes -1."""
        ...

    def attend_rows(self, q: Tensor, rows: Tensor, ids: Tensor, counts: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        """Sparse MLA of q bfloat16 [m, heads, 576] over rows bfloat16 [n, 576] by row numbers int32 [m, k].

        The first counts[i] ids of a row are valid. Returns ([m, heads, 512] bfloat16, natural log-sum-exp [m, heads]
        float32); rows without an id hold anything.
        """
        ...

    def attend_pages(
        self, q: Tensor, cache: LatentCache, pages: Tensor, owner: Tensor, ids: Tensor, counts: Tensor, scale: float
    ) -> tuple[Tensor, Tensor]:
        """`attend_rows` over positions, rows read in place: `pages` int32 [requests, pages], `owner` int32 [m]."""
        ...
