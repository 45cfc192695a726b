"""Whole blocks of the sm80 kernels on a CPU, against float64: the hooks of their loops, masks, softmax, statistics.

As in test_sm80_fragments.py device code runs on arrays of one value for each lane; copies happen at once.
"""

import math
import types

import numpy as np
import pytest

from flashattn_hopper.spec.mask import Band, PythonArith, Seqlens
from flashattn_hopper.spec.problem import Traits
from flashattn_hopper.spec.tile import Sm80BwdTile, Sm80FwdTile

from .test_sm80_fragments import BASE, LANES, Fragment, filled, matrix, memory  # noqa: F401

from flashattn_hopper.kernels.common import mask, softmax, walk  # isort: skip
from flashattn_hopper.kernels.common.work import Work  # isort: skip
from flashattn_hopper.kernels.sm80 import backward, forward, mainloop, products, shared  # isort: skip

BANDS = {"full": Band(), "causal": Band(None, 0), "window": Band(37, 11), "negative": Band(60, -5)}
SEQLENS = [(1, 1), (150, 210), (210, 150), (70, 33)]
each_mask = pytest.mark.parametrize("band", BANDS.values(), ids=BANDS)
each_length = pytest.mark.parametrize("seqlens", SEQLENS, ids=str)


def same(x):
    return x


@pytest.fixture
def device(monkeypatch, memory):  # noqa: F811
    """Arithmetic of the device on arrays, control flow on the numbers that all lanes share."""
    arch = types.SimpleNamespace(
        fmax=np.maximum,
        fmin=lambda a, b, nan: np.minimum(a, b),
        exp2=np.exp2,
        shuffle_sync_bfly=lambda x, offset: x[LANES ^ offset],
        vote_any_sync=lambda flag: bool(flag.any()),
        rcp_approx=lambda x: 1 / x,
    )
    cute = types.SimpleNamespace(
        arch=arch,
        size=len,
        make_rmem_tensor=lambda size, dtype: Fragment([None] * size),
        math=types.SimpleNamespace(log2=lambda x, fastmath: np.log2(x)),
    )
    cutlass = types.SimpleNamespace(
        select_=np.where,
        min=np.minimum,
        max=np.maximum,
        range=lambda n, unroll: range(n),
        range_constexpr=range,
    )
    pairs = lambda s, dtype=None: [np.stack(s[2 * i : 2 * i + 2], -1) for i in range(len(s) // 2)]
    for module in (mask, softmax, walk, mainloop, products, forward, backward):
        for name, value in {
            "cute": cute,
            "cutlass": cutlass,
            "const_expr": same,
            "Float32": same,
            "Int32": same,
        }.items():
            monkeypatch.setattr(module, name, value, raising=False)
    monkeypatch.setattr(forward, "DeviceArith", PythonArith)
    monkeypatch.setattr(mainloop.InOrder, "packed", lambda self, s: pairs(s))
    for module in (products, backward):
        monkeypatch.setattr(module, "packed", pairs)
    plain = [
        (softmax.Softmax, "update", "settle", "finish"),
        (mainloop.InOrder, "begin", "first_update"),
        (walk.Walk, "kv"),
        (forward.Forward, "attempt"),
        (backward.Queries, "begin"),
        (backward.Backward, "key_tile"),
    ]
    for owner, *names in plain:
        for name in names:
            monkeypatch.setattr(owner, name, getattr(owner, name).__wrapped__)
    return memory


class AtOnce:
    """The pipeline: tile n of K and V is in its stage when it is asked for."""

    def __init__(self, memory, rings, values, stages):  # noqa: F811
        self.memory, self.rings, self.values, self.stages = memory, rings, values, stages

    def start(self, n): ...

    def before_scores(self, n, slot, first):
        for ring, values in zip(self.rings, self.values):
            put(self.memory, ring, slot, values, n)

    def before_values(self, n): ...

    def next(self, slot):
        return (slot + 1) % self.stages


def put(memory, ring, stage, values, block):  # noqa: F811
    """Tile `block` of `values` into a stage, zeros beyond its end."""
    tile = np.zeros((ring.rows, ring.width))
    part = values[block * ring.rows : (block + 1) * ring.rows]
    tile[: len(part)] = part
    filled(memory, ring, stage, tile)


def made(seqlens, headdim):
    rng = np.random.default_rng(sum(seqlens))
    q, k, v, do = (rng.normal(size=(n, headdim)) for n in (seqlens.q, seqlens.k, seqlens.k, seqlens.q))
    return q, k, v, do


def dense(q, k, v, band, seqlens, scale):
    """(P, out, lse) in float64, natural logarithm; rows without keys are 0 and -inf."""
    seen = band.keep(np.arange(seqlens.q)[:, None], np.arange(seqlens.k)[None, :], seqlens)
    scores = np.where(seen, q @ k.T * scale, -np.inf)
    top = scores.max(1, keepdims=True)
    top = np.where(np.isinf(top), 0.0, top)
    weights = np.exp(scores - top)
    total = weights.sum(1, keepdims=True)
    P = np.divide(weights, total, out=np.zeros_like(weights), where=total > 0)
    with np.errstate(divide="ignore"):
        return P, P @ v, (np.log(total) + top)[:, 0]


class Tensor:
    """An operand (B, S, H, D) of one head, as far as a kernel looks at it."""

    def __init__(self, values):
        self.values, self.shape = values, (1, len(values), 1, values.shape[1])


@each_mask
@each_length
@pytest.mark.parametrize("tile", [Sm80FwdTile(64, 32), Sm80FwdTile(128, 32, q_in_registers=True)], ids=str)
@pytest.mark.parametrize("exact", [False, True], ids=["optimistic", "exact"])
@pytest.mark.filterwarnings("ignore:divide by zero:RuntimeWarning", "ignore:invalid value:RuntimeWarning")
def test_the_forward_of_a_block(device, monkeypatch, tile, band, seqlens, exact):
    seqlens, headdim, scale = Seqlens(*seqlens), 64, 0.11
    q, k, v, _ = made(seqlens, headdim)
    _, out, lse = dense(q, k, v, band, seqlens, scale)
    sQ = shared.Swizzled(BASE, tile.tile_m, headdim)
    sK = shared.Swizzled(sQ.stage(1), tile.tile_n, headdim)
    sV = shared.Swizzled(sK.stage(tile.num_stages), tile.tile_n, headdim)
    kernel = forward.Forward(Traits("fwd", "bf16", headdim, headdim, "window"), tile)
    dev = types.SimpleNamespace(q=Tensor(q), k=Tensor(k), v=Tensor(v))
    monkeypatch.setattr(kernel, "band", lambda dev: band, raising=False)
    monkeypatch.setattr(forward, "rows_of", lambda tensor, head, batch, tile, tidx, threads: (tile, tensor.values))

    def staged(query, key, value, m_block, last, stages=1):
        put(device, *query[:1], 0, query[1], m_block)
        return AtOnce(device, (key[0], value[0]), (key[1], value[1]), stages)

    monkeypatch.setattr(forward, "Staged", staged)
    scale_log2 = scale * math.log2(math.e)
    for m_block in range(-(-seqlens.q // tile.tile_m)):
        for w in range(tile.num_warps):
            pair = lambda: Fragment([None] * 2)
            atoms = [
                mainloop.Atom(softmax.Softmax(pair(), pair(), scale_log2, 2.0**40), Fragment([None] * (headdim // 2)))
                for _ in range(tile.atoms)
            ]
            first = w * 16 * tile.atoms
            work, place = Work(m_block, 0, 0), forward.Place(None, LANES, first)
            monkeypatch.setattr(kernel, "anew", lambda dev, found=(work, place): (dev, *found), raising=False)
            bad = kernel.attempt(dev, forward.Shared(sQ, sK, sV), atoms, exact)
            assert not bad.any() or exact
            for i, atom in enumerate(atoms):
                if exact:
                    atom.softmax.bias[:] = [bias * scale_log2 for bias in atom.softmax.bias]
                inverse, logs = atom.softmax.finish(False)
                atom.softmax.rescale(atom.O, inverse)
                begin = m_block * tile.tile_m + first + 16 * i
                visible = min(16, seqlens.q - begin)
                if visible > 0:
                    found = np.stack(logs)[:, ::4].flatten()  # rows 0 to 7, 8 to 15
                    np.testing.assert_allclose(matrix(atom.O, headdim)[:visible], out[begin:][:visible], atol=1e-12)
                    np.testing.assert_allclose(found[:visible], lse[begin:][:visible], rtol=1e-12)


class Stats:
    """What prepare leaves of one head, padded rows included; `load` gives the lanes' own values."""

    def __init__(self, lse, delta):
        self.rows = np.stack([lse, delta], -1)

    def __call__(self, stats, head_row, seqlen_q, first, count):
        return types.SimpleNamespace(load=lambda: [self.rows[first + i // 2, i % 2] for i in range(2 * count)])


def prepared(lse, out, do):
    padded = -(-len(lse) // 128) * 128
    log2, delta = np.full(padded, np.inf), np.zeros(padded)
    sees = np.isfinite(lse)
    log2[: len(lse)][sees] = lse[sees] * math.log2(math.e)
    delta[: len(lse)][sees] = (out * do).sum(1)[sees]
    return Stats(log2, delta)


@each_mask
@each_length
@pytest.mark.parametrize("tile", [Sm80BwdTile(32, 64), Sm80BwdTile(64)], ids=str)
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
def test_the_backward_of_a_head(device, monkeypatch, tile, band, seqlens):
    seqlens, headdim, scale = Seqlens(*seqlens), 64, 0.11
    q, k, v, do = made(seqlens, headdim)
    P, out, lse = dense(q, k, v, band, seqlens, scale)
    stats = prepared(lse, out, do)
    monkeypatch.setattr(backward, "statistics", stats)
    dS = P * (do @ v.T - (out * do).sum(1, keepdims=True)) * scale
    kernel = backward.Backward(Traits("bwd", "bf16", headdim, headdim), tile)
    dev = types.SimpleNamespace(scale=scale, stats=None, q=types.SimpleNamespace(shape=(1, seqlens.q, 1, headdim)))
    stay, other = (shared.Swizzled(BASE + i * 2 * 128 * headdim, tile.tile_n, headdim) for i in range(2))
    ring, ring_two = (shared.Swizzled(other.stage(1 + 2 * i), tile.tile_m, headdim) for i in range(2))
    reader = lambda s, first: shared.Reader(s, shared.rows_first(s, LANES, first))
    streaming = lambda s: shared.Reader(s, shared.columns_first(s, LANES))
    turned = lambda s: shared.Reader(s, shared.rows_first(s, LANES), transpose=True)
    for n_block in range(-(-seqlens.k // tile.tile_n)):
        put(device, stay, 0, k, n_block)
        put(device, other, 0, v, n_block)
        segments = band.q_tiles(n_block, tile, seqlens)
        for first in range(0, tile.tile_n, 16):
            begin = n_block * tile.tile_n + first
            columns = mask.ColumnMask(band, tile.tile_m, seqlens, begin + LANES // 4, 2 * (LANES % 4))
            readers = (
                reader(stay, first), reader(other, first), streaming(ring), streaming(ring_two),
                turned(ring), turned(ring_two),
            )  # fmt: skip
            dK, dV = products.fragment(headdim), products.fragment(headdim)
            for i, m in enumerate(range(segments.begin, segments.end)):
                put(device, ring, i % 2, q, m)
                put(device, ring_two, i % 2, do, m)
                kernel.key_tile(dev, readers, columns, segments, dK, dV, 0, m, i % 2, LANES)
            products.scale(dK, scale)
            visible = max(min(16, seqlens.k - begin), 0)
            expected = dS.T @ q, P.T @ do
            for acc, exact in zip((dK, dV), expected):
                np.testing.assert_allclose(matrix(acc, headdim)[:visible], exact[begin:][:visible], atol=1e-11)
    for m_block in range(-(-seqlens.q // tile.tile_n)):
        put(device, stay, 0, q, m_block)
        put(device, other, 0, do, m_block)
        segments = band.kv_tiles(m_block, backward.Cut(tile.tile_n, tile.tile_m), seqlens)
        for first in range(0, tile.tile_n, 16):
            begin = m_block * tile.tile_n + first
            rows = [x for r in range(2) for x in stats(None, 0, seqlens.q, begin + LANES // 4 + 8 * r, 1).load()]
            dQ = products.fragment(headdim)
            hooks = backward.Queries(
                kernel.products, AtOnce(device, (ring, ring_two), (k, v), 2),
                reader(stay, first), reader(other, first), streaming(ring), streaming(ring_two), turned(ring),
                (headdim, headdim), dQ, rows,
                mask.BandMask(band, tile.tile_m, seqlens, begin + LANES // 4, 2 * (LANES % 4)),
                scale * math.log2(math.e),
            )  # fmt: skip
            walk.Walk(band).kv(segments, hooks, 0)
            products.scale(dQ, scale)
            visible = max(min(16, seqlens.q - begin), 0)
            np.testing.assert_allclose(matrix(dQ, headdim)[:visible], (dS @ k)[begin:][:visible], atol=1e-11)
