"""Online softmax of scores that are products of codes, and P on the scale of e4m3.

    S = codes * q_descale[row] * k_descale[tile] * softmax_scale * log2 e       P = 2^(S - bias + 8)

The scales are folded into the multiplier of the exponent, so they cost nothing for each score. 2^8, because P = 1 must
be a code (256 is; 448 is the largest), so that a row with one dominant key is exact, and because small P need the
exponents. For the same reason the bias is the running maximum itself in every tile: an optimistic bias (softmax.py)
would need headroom, and e4m3 has none to give.
"""

import math
from dataclasses import dataclass, replace
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, const_expr

from .eight_bit import multiply
from .softmax import LN_2, Softmax, quad, row_of, tree

P_SHIFT = 8.0  # log2 of the scale of P
SMALLEST = 2.0**-126  # a multiplier below it, or NaN, counts as it: a hidden score is -inf and must stay it


@dataclass(frozen=True)
class ScaledSoftmax(Softmax):
    """`scale_log2` is for each of the two rows and lacks the scale of K; `bias` is in log2 units in both attempts."""

    k_scales: Any = None  # of the head, one for `TILE` keys
    tiles: int = 1  # KV tiles that share one
    v_scale: Any = None  # of the head
    k_scale: Float32 | None = None

    def of_tile(self, n):
        return replace(self, k_scale=self.k_scales[n // self.tiles])

    def tile(self, S, masked, exact, O):
        return self.update(S, exact)

    @cute.jit
    def update(self, S, exact):
        """Scores to P in place; returns the two factors for O.

        `exact` rounds the scaled score before it subtracts, as the maximum was: that cancels at any magnitude.
        """
        exponents = [S[i] for i in range(cute.size(S))]
        alpha, poison = cute.make_rmem_tensor(2, Float32), cute.make_rmem_tensor(2, Float32)
        for r in cutlass.range_constexpr(2):
            scale = self.scale_log2[r] * self.k_scale
            poison[r] = multiply(scale, Float32(0.0))
            scale = cute.arch.fmax(scale, Float32(SMALLEST))
            top = quad(cute.arch.fmax, tree(cute.arch.fmax, [exponents[i] for i in row_of(len(exponents), r)]))
            old = self.bias[r]
            # A row or a tile that held inf or NaN has the scale NaN; so becomes the sum of each row that sees it.
            poison[r] = cutlass.select_(top == -math.inf, Float32(0.0), poison[r])
            new = cute.arch.fmax(old, multiply(top, scale))
            self.bias[r] = new
            new = cutlass.select_(new == -math.inf, Float32(0.0), new)
            alpha[r] = cute.arch.exp2(old - new)
            for i in row_of(len(exponents), r):
                if const_expr(exact):
                    exponents[i] = (multiply(exponents[i], scale) - new) + P_SHIFT
                else:
                    exponents[i] = exponents[i] * scale + (P_SHIFT - new)
        self.exponentiate(S, exponents, alpha)
        for r in cutlass.range_constexpr(2):
            self.row_sum[r] = self.row_sum[r] + poison[r]
        return alpha

    def rescale(self, O, inverse):
        """By the factors of `finish`. 0 is a row without keys, whose O may hold NaN of a V that it does not see."""
        for i in range(cute.size(O)):
            factor = inverse[(i // 2) % 2]
            O[i] = cutlass.select_(factor == 0.0, Float32(0.0), O[i] * factor)

    def units(self, exact):
        """The bias is scaled in both attempts."""
        return Float32(1.0), Float32(1.0)

    @cute.jit
    def finish(self, exact):
        """Factors of O (with the scale of V) and natural-log lse of the scores that the codes give."""
        inverse, lse = cute.make_rmem_tensor(2, Float32), cute.make_rmem_tensor(2, Float32)
        v_scale = self.v_scale[0]
        for r in cutlass.range_constexpr(2):
            total = quad(lambda a, b: a + b, self.row_sum[r])
            empty = total == 0.0
            inverse[r] = cutlass.select_(empty, Float32(0.0), v_scale * cute.arch.rcp_approx(total))
            ln = (self.bias[r] + (cute.math.log2(total, fastmath=True) - P_SHIFT)) * LN_2
            lse[r] = cutlass.select_(empty, Float32(-math.inf), ln)
        return inverse, lse
