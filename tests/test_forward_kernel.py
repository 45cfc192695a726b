"""The compiled 16-bit forward without a GPU: its PTX, run by hopper_machine, against the error budget.

Kernels are cut as in the table. One block does all query tiles, one after the other, where nothing else is said.
"""

import functools
import tempfile

import pytest
import torch
from cutlass import Int32

from flashattn_hopper import jit
from flashattn_hopper.kernels.sm90.specs import FORWARD
from flashattn_hopper.spec.problem import FWD, Traits

from .hopper_machine import Map, run_forward
from .oracle import check_forward
from .ptx_machine import Memory
from .test_backward_kernel import DTYPES, LATE, MASKS
from .test_backward_kernel import operands as with_dout

pytestmark = pytest.mark.compile

LATE = {"plain": (), **LATE}
FULL_64, CAUSAL_128, CAUSAL_192 = ((64, 64), "full"), ((128, 128), "causal"), ((192, 192), "causal")
FULL_256, CAUSAL_256 = ((256, 256), "full"), ((256, 256), "causal")
KERNELS = [FULL_64, CAUSAL_128, CAUSAL_192, FULL_256, CAUSAL_256]


@functools.cache
def ptx(traits):
    """Text and tile of what the table compiles for short sequences."""
    tile = FORWARD.tiles.find(traits, 512)
    with tempfile.TemporaryDirectory() as folder:
        return jit._compile(FORWARD, traits, tile, FORWARD.arch, f"--keep-ptx --dump-dir {folder}").__ptx__, tile


def attend(q, k, v, band, scale, late=(), num_ctas=1):
    """(out, lse)"""
    (batch, seqlen_q, heads, d), d_v = q.shape, v.shape[3]
    dtype = next(name for name, kind in DTYPES.items() if kind == q.dtype)
    traits = FORWARD.compiled(Traits(FWD, dtype, d, d_v, band.kind))
    text, tile = ptx(traits)
    out = torch.full((batch, seqlen_q, heads, d_v), float("nan"), dtype=q.dtype)
    cuts = (traits.headdim, 64), (traits.headdim, tile.tile_n), (traits.headdim_v, tile.tile_n), (traits.headdim_v, 64)
    maps = [Map(x.transpose(1, 2), *cut) for x, cut in zip((q, k, v, out), cuts)]
    return out, run_forward(text, tile, maps, band, scale, Memory(1 << 24), late, num_ctas)


def operands(*words):
    return with_dout(*words)[:3]


def check(q, k, v, mask, late=(), num_ctas=1):
    band, words = MASKS[mask]
    out, lse = attend(q, k, v, band, q.shape[3] ** -0.5, late, num_ctas)
    check_forward(out, lse, q, k, v, per_sequence=True, **words)
    return out, lse


@pytest.mark.parametrize("late", LATE)
@pytest.mark.parametrize("dims, mask", KERNELS, ids=str)
def test_against_float64(dims, mask, late):
    """Two query tiles of several tiles of keys, the last of neither whole."""
    check(*operands((1, 200, 300, 1, 1), dims), mask, LATE[late])


@pytest.mark.parametrize("late", LATE)
def test_query_tiles_of_one_tile_of_keys(late):
    """O is staged where V of this query tile is, and where the one before had the other warpgroup's O."""
    check(*operands((2, 100, 50, 2, 1), (256, 256)), "full", LATE[late])


@pytest.mark.parametrize("late", LATE)
@pytest.mark.parametrize("dims", [(128, 128), (256, 256)], ids=str)
def test_rows_without_keys(dims, late):
    out, lse = check(*operands((1, 300, 130, 1, 1), dims), "causal", LATE[late])
    assert not out[:, :170].any() and lse[:, :, :170].isneginf().all()


def test_two_blocks_share_the_tiles_of_heads_that_share_keys():
    check(*operands((2, 100, 200, 4, 2), (64, 64), "fp16"), "full", LATE["far apart"], num_ctas=2)


def second_attempt(dims, mask, late=()):
    """Of one of two sequences: a key in a tile without a mask, whose scores exceed all others beyond float range."""
    q, k, v = operands((2, 100, 300, 1, 1), dims)
    q[..., 0], k[0, 140, 0, 0] = 32, 2.0**8
    out, _ = check(q, k, v, mask, late)
    assert torch.equal(out[0], v[0, 140].expand_as(out[0]))


@pytest.mark.parametrize("late", ["plain", "far apart"])
@pytest.mark.parametrize("dims, mask", [FULL_64, CAUSAL_256], ids=str)
def test_a_second_attempt(dims, mask, late):
    second_attempt(dims, mask, LATE[late])


def fails(monkeypatch, owner, name, function, test, *words):
    """A test must, with a method of the kernel replaced."""
    monkeypatch.setattr(owner, name, function)
    ptx.cache_clear()
    try:
        with pytest.raises(AssertionError):
            test(*words)
    finally:
        ptx.cache_clear()


def test_a_missing_second_attempt_is_seen(monkeypatch):
    from flashattn_hopper.kernels.common.softmax import Softmax

    fails(monkeypatch, Softmax, "overflowed", lambda self: Int32(0), second_attempt, *FULL_64)


def test_a_missing_wait_is_seen(monkeypatch):
    from flashattn_hopper.kernels.sm90.pipeline import Ring

    fails(monkeypatch, Ring, "wait", lambda self, slot: None, test_against_float64, *FULL_64, "all late")
