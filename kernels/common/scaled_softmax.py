"""Online softmax of scores that are products of codes, and P on the scale of e4m3.

    S = codes * q_descale[row] * k_descale[tile] * softmax_scale * log2 e       P = 2^(S - bias + 8)

The scales are folded into the multiplier of the exponent, so they cost nothing for each score. 2^8, because P = 1 must
be a code (256 is; 448 is the largest), so that a row with one dominant key is exact, and because small P need the
exponents. For the same reason the bias is the running maximum itself in every tile: an optimistic bias (softmax.py)
would need headroom, and e4m3 has none to give.
"""

import math
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float16, Float32, Int32, const_expr

from .eight_bit import (
    LOWEST,
    ONES,
    PACK4,
    SPAN,
    add_halves,
    exp2_halves,
    fixed_point,
    half_of,
    multiply,
    pack4_halves,
)
from .softmax import LN_2, Softmax, quad, row_of, tree
from .work import again

P_SHIFT = 8.0  # log2 of the scale of P
SMALLEST = 2.0**-126  # a multiplier below it, or NaN, counts as it: a hidden score is -inf and must stay it


def word(w):
    """The scores whose codes are register w of P: two neighbours of a row from each of two neighbouring groups of S."""
    first = 2 * (w % 2) + 8 * (w // 2)
    return [first + e for e in (0, 1, 4, 5)]


def larger(a, b):
    """NaN, if one is: a polynomial exponential does not pass it on."""
    return cute.arch.fmax(a, b, nan=True)


def float_tops(S):
    return [tree(larger, [S[i] for i in row_of(cute.size(S), r)]) for r in range(2)]


@dataclass(frozen=True)
class ScaledSoftmax(Softmax):
    """`scale_log2` is for each of the two rows and lacks the scale of K; `bias` is in log2 units in both attempts."""

    k_scales: Any = None  # of the head, one for `TILE` keys
    tiles: int = 1  # KV tiles that share one
    v_scale: Any = None  # of the head
    k_scale: Float32 | None = None
    votes: bool = False  # whether to take the branch of `tops`
    below: Any = None  # whether a row of this warp has a bias below zero
    polynomial: int = 0  # of eight blocks of 16 keys, those whose exponentials are polynomials
    codes: Any = None  # the scores as they leave the product, before a mask

    def of_tile(self, n):
        """Early: a load and a vote, which have time under the product that gives the scores."""
        below = cute.arch.vote_any_sync(cute.arch.fmin(self.bias[0], self.bias[1]) < 0.0) if self.votes else None
        return replace(self, k_scale=self.k_scales[n // self.tiles], below=below)

    def of_scores(self, S):
        return replace(self, codes=S)

    def first(self, S, exact):
        return self.to_codes(S, exact, float_tops(S))[0]

    def tile(self, S, masked, exact, O):
        tops = float_tops if masked else self.code_tops if self.codes.element_type is Int32 else self.tops
        return self.to_codes(S, exact, tops(S))

    def code_tops(self, S):
        return [reduce(cutlass.max, [self.codes[i] for i in row_of(cute.size(S), r)]).to(Float32) for r in range(2)]

    @cute.jit
    def tops(self, S):
        """Largest score of each row that this thread has; where all are negative, any of them if the bias is not.

        Floats from zero on order as integers do, whose maximum takes three operands. Of negative ones alone it is the
        smallest, which a bias from zero on makes harmless.
        """
        if const_expr(not self.votes):
            return float_tops(S)
        top = cute.make_rmem_tensor(2, Float32)
        if self.below:
            for r, x in enumerate(float_tops(S)):
                top[r] = x
        else:
            bits, words = cute.recast_tensor(S, Int32), cute.recast_tensor(top, Int32)
            for r in cutlass.range_constexpr(2):
                words[r] = reduce(cutlass.max, [bits[i] for i in row_of(cute.size(S), r)])
        return top

    @cute.jit
    def to_codes(self, S, exact, tops):
        """Words of P, four codes each, and the two factors for O. `tops`: the rows' maxima, of what this thread has.

        `exact` rounds the scaled score before it subtracts, as the maximum was: that cancels at any magnitude.
        """
        P = cute.make_rmem_tensor(cute.size(S) // 4, Int32)
        scores = [S[i] for i in range(cute.size(S))]
        alpha, poison = cute.make_rmem_tensor(2, Float32), cute.make_rmem_tensor(2, Float32)
        scales = []
        for r in cutlass.range_constexpr(2):
            scale = self.scale_log2[r] * self.k_scale
            poison[r] = multiply(scale, Float32(0.0))
            scales.append(cute.arch.fmax(scale, Float32(SMALLEST)))
        quads = [quad(larger, tops[r]) for r in range(2)]
        for r in cutlass.range_constexpr(2):
            scale, top, old = scales[r], quads[r], self.bias[r]
            # A row or a tile that held inf or NaN has the scale NaN; so becomes the sum of each row that sees it.
            poison[r] = cutlass.select_(top == -math.inf, Float32(0.0), poison[r] + multiply(top, Float32(0.0)))
            new = cute.arch.fmax(old, multiply(top, scale))
            self.bias[r] = new
            new = cutlass.select_(new == -math.inf, Float32(0.0), new)
            alpha[r] = cute.arch.exp2(old - new)
            self.row(P, scores, r, scale, new, exact, alpha[r])
        for r in cutlass.range_constexpr(2):
            self.row_sum[r] = self.row_sum[r] + poison[r]
        return P, alpha

    def row(self, P, scores, r, scale, bias, exact, alpha):
        """One row's scores to codes, and its sum: in one chain, an addition takes less time than the next exponential.

        Exponentials of some blocks of 16 keys are polynomials, in the issue slots that the others leave. Their sum is
        one of halves first, 16 of them at most.
        """
        if exact:
            scored = lambda i: (multiply(scores[i], scale) - bias) + P_SHIFT
            slope, offset = Float32(1.0 / SPAN), Float32(LOWEST / SPAN)
        else:
            shift = P_SHIFT - bias
            scored = lambda i: scores[i] * scale + shift
            slope, offset = scale * (1.0 / SPAN), (shift + LOWEST) * (1.0 / SPAN)
        total, halves, one = self.row_sum[r] * alpha, None, again(Int32(ONES)) if self.polynomial else None
        for w in range(r, cute.size(P), 2):
            places = word(w)
            if self.by_polynomial(w // 2):
                x = [scored(i) if exact else scores[i] for i in places]
                y = [fixed_point(x[e], slope, offset, e % 2) for e in range(4)]
                u, v = exp2_halves(y[0], y[1], one), exp2_halves(y[2], y[3], one)
                P[w], both = pack4_halves(u, v), add_halves(u, v)
                halves = both if halves is None else add_halves(halves, both)
            else:
                p = [cute.arch.exp2(scored(i)) for i in places]
                for x in p:
                    total = total + x
                P[w] = PACK4["e4m3"](*p)
        if halves is not None:
            total = total + (half_of(halves, 0, Float16) + half_of(halves, 1, Float16))
        self.row_sum[r] = total

    def by_polynomial(self, block):
        """`polynomial` of eight blocks, evenly among the others."""
        return block * self.polynomial % 8 < self.polynomial

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
