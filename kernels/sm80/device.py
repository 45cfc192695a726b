"""What both products' kernels of the backward are launched with."""

from typing import Any, NamedTuple

import cutlass.cute as cute
from cutlass import Float32, Int64

from ..common.tensors import band_of


class Device(NamedTuple):
    q: cute.Tensor
    k: cute.Tensor
    v: cute.Tensor
    do: cute.Tensor
    stats: Int64  # (lse, delta) of padded query rows, float32
    scale: Float32
    window_left: Any
    window_right: Any

    def band(self, mask):
        return band_of(mask, self.window_left, self.window_right)
