"""Online softmax of the two score rows that a thread of an m64 accumulator owns.

FlashAttention's online softmax (Dao et al., 2022, algorithm 1) with one liberty: what is subtracted from the scores,
the `bias`, need not be the running maximum. Any bias gives the same probabilities after normalisation as long as
nothing overflows, because 16-bit and 32-bit floats keep their relative precision at every magnitude. Tiles without a
mask use it: they subtract the bias known before the tile (`update_optimistic`), so nothing waits for their maximum.

    bias, row_sum     per row; log2 units and a per-thread partial sum
    ceiling           an optimistic partial sum above it moves the bias by an exact power of two (`settle`)
    overflowed        what an optimistic tile cannot repair: a rise beyond float range within one tile, or a bias
                      so large that S*c - bias loses its cancellation. The work is then done a second time, `exact`.
"""

import math
from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

LN_2 = math.log(2.0)
LOG2_E = math.log2(math.e)

# The largest partial sum before the bias moves. Every P is below it too, before it is converted: 2**15 is the
# largest power of two that float16 holds with room for rounding.
CEILING = {"fp16": 2.0**15, "bf16": 2.0**40}

# Rounding of maximum * c to float32 is off by up to 2**-24 of it; beyond 2**22 that is a quarter of a binary order.
BIAS_LIMIT = 2.0**22


def tree(op, xs):
    """Why a tree: nothing else can run before the maximum, so its latency counts."""
    while len(xs) > 1:
        xs = [op(xs[i], xs[i + 1]) for i in range(0, len(xs) - 1, 2)] + xs[len(xs) & ~1 :]
    return xs[0]


def quad(op, x):
    """Reduce over the four lanes that share a row."""
    x = op(x, cute.arch.shuffle_sync_bfly(x, offset=2))
    return op(x, cute.arch.shuffle_sync_bfly(x, offset=1))


def row_of(size, r):
    """Indices of row r in a fragment of `size` elements."""
    return [(c // 2) * 4 + r * 2 + c % 2 for c in range(size // 2)]


def rescale(O, alpha):
    """Multiply the two rows of a fragment by a factor each."""
    factors = alpha[0], alpha[1]
    for i in range(cute.size(O)):
        O[i] = O[i] * factors[(i // 2) % 2]


def probability(x):
    """P from a scaled score minus its row's lse, log2 units.

    Why at most 1: it is, but for rounding, and for huge scores rounding alone is worth many powers of two. NaN stays.
    """
    return cute.arch.exp2(cute.arch.fmin(x, Float32(0.0), nan=True))


@dataclass(frozen=True)
class Synchronous:
    """Matrix products that are done when the next instruction reads their result."""

    def drain(self): ...


@dataclass(frozen=True)
class Softmax:
    bias: cute.Tensor
    row_sum: cute.Tensor
    scale_log2: Float32
    ceiling: float
    products: Any = Synchronous()  # `drain` waits for those that add to O

    def reset(self):
        self.bias.fill(-math.inf)
        self.row_sum.fill(0.0)

    def of_tile(self, n):
        """Scales that belong to KV tile n: none."""
        return self

    def of_scores(self, S):
        """What the products of a tile themselves say: nothing that S does not."""
        return self

    def first(self, S, exact):
        """Probabilities of the first tile, in the place of its scores."""
        self.update(S, exact)
        return S

    def tile(self, S, masked, exact, O):
        """Probabilities, in the place of the scores, and the factors for O, or None where O needs none."""
        if masked:
            return S, self.update(S, exact)
        self.update_optimistic(S)
        self.settle(S, O)
        return S, None

    @cute.jit
    def update(self, S, exact):
        """Scores to probabilities in place, with the maximum of this tile; returns the two factors for O.

        `exact` keeps the bias in units of the scores and scales after subtracting, which cancels at any magnitude.
        """
        scores = [S[i] for i in range(cute.size(S))]
        alpha = cute.make_rmem_tensor(2, Float32)
        use = cute.make_rmem_tensor(2, Float32)
        before, after = self.units(exact)
        for r in cutlass.range_constexpr(2):
            top = quad(cute.arch.fmax, tree(cute.arch.fmax, [scores[i] for i in row_of(len(scores), r)]))
            old = self.bias[r]
            new = cute.arch.fmax(old, top * before)
            self.bias[r] = new
            new = cutlass.select_(new == -math.inf, Float32(0.0), new)
            use[r] = new
            alpha[r] = cute.arch.exp2((old - new) * after)
        shift = self.shift_first if const_expr(exact) else self.shift
        self.exponentiate(S, shift(scores, use), alpha)
        return alpha

    def units(self, exact):
        """What scores are multiplied by before a bias is subtracted and after it: the scale is in one of the places."""
        return (Float32(1.0), self.scale_log2) if exact else (self.scale_log2, Float32(1.0))

    def update_optimistic(self, S):
        """As update, with the biases left alone: no maximum to wait for. Follow with `settle`."""
        self.exponentiate(S, self.shift([S[i] for i in range(cute.size(S))], self.bias), None)

    def shift_first(self, scores, bias):
        """`bias` in units of the scores."""
        biases = bias[0], bias[1]
        return [(score - biases[(i // 2) % 2]) * self.scale_log2 for i, score in enumerate(scores)]

    def shift(self, scores, bias):
        biases = bias[0], bias[1]
        return [score * self.scale_log2 - biases[(i // 2) % 2] for i, score in enumerate(scores)]

    def exponentiate(self, P, exponents, alpha):
        """exp2 into the fragment P and row sums, in four chains."""
        size = len(exponents)
        for r in range(2):
            row = [cute.arch.exp2(exponents[i]) for i in row_of(size, r)]
            for i, p in zip(row_of(size, r), row):
                P[i] = p
            sums = row[:4]
            sums[0] = sums[0] + (self.row_sum[r] if alpha is None else self.row_sum[r] * alpha[r])
            for c in range(4, size // 2):
                sums[c % 4] = sums[c % 4] + row[c]
            self.row_sum[r] = (sums[0] + sums[1]) + (sums[2] + sums[3])

    @cute.jit
    def settle(self, X, O):
        """After an optimistic tile: if a sum got large, move its bias by an exact power of two."""
        if cute.arch.vote_any_sync(cute.arch.fmax(self.row_sum[0], self.row_sum[1]) > self.ceiling):
            self.products.drain()
            factor = cute.make_rmem_tensor(2, Float32)
            for r in cutlass.range_constexpr(2):
                top = quad(cute.arch.fmax, self.row_sum[r])
                bits = cute.make_rmem_tensor(1, Float32)
                bits[0] = top
                power = cutlass.min((cute.recast_tensor(bits, Int32)[0] >> 23) - 127, 126)  # an infinity stays one
                power = Int32(cutlass.select_(top > self.ceiling, power, Int32(0)))
                cute.recast_tensor(bits, Int32)[0] = (127 - power) << 23
                factor[r] = bits[0]
                self.row_sum[r] = self.row_sum[r] * factor[r]
                self.bias[r] = self.bias[r] + power.to(Float32)
            self.rescale(X, factor)
            self.rescale(O, factor)

    def overflowed(self):
        """1 if the first attempt cannot stand: see the head of this file. NaN among the scores counts too."""
        bad = Int32(cutlass.select_(self.row_sum[0] + self.row_sum[1] < math.inf, Int32(0), Int32(1)))
        for r in range(2):
            bias = self.bias[r]
            large = cute.arch.fmax(bias, cutlass.select_(bias == -math.inf, Float32(0.0), -bias)) > BIAS_LIMIT
            bad = bad | Int32(cutlass.select_(large, Int32(1), Int32(0)))
        return bad

    def rescale(self, O, alpha):
        rescale(O, alpha)

    @cute.jit
    def finish(self, exact):
        """Reciprocal row sums (for O) and natural-log lse; a row without keys gives 0 and -inf."""
        inverse, lse = cute.make_rmem_tensor(2, Float32), cute.make_rmem_tensor(2, Float32)
        _, to_log2 = self.units(exact)
        for r in cutlass.range_constexpr(2):
            total = quad(lambda a, b: a + b, self.row_sum[r])
            empty = total == 0.0
            inverse[r] = cutlass.select_(empty, Float32(0.0), cute.arch.rcp_approx(total))
            ln = (self.bias[r] * to_log2 + cute.math.log2(total, fastmath=True)) * LN_2
            lse[r] = cutlass.select_(empty, Float32(-math.inf), ln)
        return inverse, lse
