"""One fixed block of bytes from which a call takes its temporary tensors.

    |<------------------------- nbytes ------------------------->|
    | scores of the query cut | packed keys |        free        |
    0                         64-byte aligned steps              ^ never grows

``take`` moves a mark forward, ``clear`` moves it back to 0. Nothing is allocated after construction, so the peak of
a forward pass is what was asked for at the start.
"""

from __future__ import annotations

import math

import torch

_ALIGN = 64


class ScratchTooSmall(ValueError):
    """The smallest cut of the work does not fit in the scratch budget."""


class Scratch:
    """A bump allocator over one uint8 tensor of ``nbytes`` on ``device``.

    ``peak`` is the largest number of bytes ever in use. Raises ``ValueError`` for a size below 4 KiB.
    """

    def __init__(self, nbytes: int, device: torch.device | str = "cpu") -> None:
        if nbytes < 1 << 12:
            raise ValueError(f"scratch: {nbytes} bytes; at least {1 << 12} are needed")
        raw = torch.empty(nbytes + _ALIGN, dtype=torch.uint8, device=device)
        shift = -raw.data_ptr() % _ALIGN
        self._bytes = raw[shift : shift + nbytes]
        self._base = self._bytes.data_ptr()
        self._mark = 0
        self.nbytes = nbytes
        self.peak = 0

    @property
    def free(self) -> int:
        """Bytes left before ``take`` refuses."""
        return self.nbytes - self._mark

    def clear(self) -> None:
        """Give back everything taken so far; tensors taken earlier must not be used any more."""
        self._mark = 0

    def address(self, nbytes: int, what: str) -> int:
        """Reserve ``nbytes`` and return their address. Raises ``ScratchTooSmall`` naming ``what``."""
        start = self._mark
        stop = start + nbytes
        if stop > self.nbytes:
            raise ScratchTooSmall(
                f"{what}: {nbytes} bytes do not fit in what is left of the scratch "
                f"({self.nbytes - start} of {self.nbytes}); raise --indexer-scratch-mb"
            )
        self._mark = stop + (-stop % _ALIGN)
        self.peak = max(self.peak, stop)
        return self._base + start

    def take(self, shape: tuple[int, ...], dtype: torch.dtype, what: str = "scratch") -> torch.Tensor:
        """Reserve an uninitialised tensor. Raises ``ScratchTooSmall`` naming ``what``."""
        nbytes = math.prod(shape) * dtype.itemsize
        start = self.address(nbytes, what) - self._base
        return self._bytes[start : start + nbytes].view(dtype).view(shape)
