"""sm80.forward on a GPU of compute capability 8.0 or newer: the cases of its spec, layouts, sizes, hard inputs."""

import gc

import pytest
import torch

from flashattn_hopper import hopper_attention, jit
from flashattn_hopper.arguments import TORCH_DTYPES
from flashattn_hopper.kernels.sm80 import specs as sm80
from flashattn_hopper.spec.problem import Traits
from flashattn_hopper.spec.tile import Sm80FwdTile

from . import cases, fuzz
from .oracle import check_forward
from .test_forward import captured_by, check_strictly, dims_id, far_apart, hard_window, inputs, launch, same

pytestmark = pytest.mark.gpu(since=(8, 0))

BACKEND = "sm80"
HERE = torch.cuda.get_device_capability() if torch.cuda.is_available() else None
SPEC = sm80.FORWARD.on(HERE) or sm80.FORWARD
# What its tables do not use on this arch: other stages, rows of a warp, and places of Q.
OTHER_TILES = (
    Sm80FwdTile(64, 32, num_stages=1),
    Sm80FwdTile(64, 32, num_stages=3, q_in_registers=True),
    Sm80FwdTile(128, 64, num_stages=1),
    Sm80FwdTile(128, 32, num_warps=8, num_stages=2, q_in_registers=True),
    Sm80FwdTile(256, 32, num_warps=8, num_stages=1),
)
OTHERS = [
    (SPEC, Traits("fwd", "bf16", 128, 128, mask), tile, SPEC.arch)
    for tile, mask in zip(OTHER_TILES, ("full", "causal", "window", "causal", "full"))
]
every_variant = pytest.mark.parametrize("variant", [*cases.variants(SPEC), *OTHERS], ids=cases.variant_id)


@pytest.fixture(scope="module")
def kernels():
    """In place of the Hopper kernels: what the tests of this file launch, compiled by every core."""
    return jit.warmup([*cases.variants(SPEC), *OTHERS])


@pytest.fixture
def much_memory():
    """Tens of gigabytes, given back afterwards."""
    yield
    gc.collect()
    torch.cuda.empty_cache()


def attend(q, k, v, **keywords):
    """(out, lse)"""
    return hopper_attention(q, k, v, return_lse=True, backend=BACKEND, **keywords)


def window_of(variant):
    return (90, 20) if variant[1].mask == "window" else None


def problem(variant, batch, seqlens, heads=(4, 2)):
    traits = variant[1]
    return inputs(batch, seqlens, heads, (traits.headdim, traits.headdim_v), TORCH_DTYPES[traits.dtype])


@pytest.mark.parametrize("case", cases.cases_for(SPEC), ids=lambda case: case.id)
def test_case(case, poison):
    q, k, v = case.tensors()
    out, lse = attend(q, k, v, deterministic=case.traits.deterministic, **case.mask)
    poison.check(allocations=2)
    check_forward(out, lse, q, k, v, **case.mask)


@pytest.mark.parametrize("variant", OTHERS, ids=cases.variant_id)
@pytest.mark.parametrize("seqlens", [(1, 1), (129, 65), (333, 333), (100, 400), (400, 100)], ids=str)
def test_other_tiles(variant, seqlens, poison):
    q, k, v = problem(variant, 2, seqlens)
    (out, lse), mask = launch(variant, q, k, v, window_of(variant))
    poison.check(allocations=2)
    check_forward(out, lse, q, k, v, **mask)


@pytest.mark.parametrize("scale", [1e-6, 0.01, 1.0, 7.5])
def test_softmax_scale(scale):
    q, k, v = inputs(2, (150, 333), (4, 2), (64, 64))
    check_forward(*attend(q, k, v, softmax_scale=scale, causal=True), q, k, v, softmax_scale=scale, causal=True)


@every_variant
def test_without_lse(variant, poison):
    q, k, v = problem(variant, 2, (333, 400))
    (out, lse), _ = launch(variant, q, k, v, window_of(variant), want_lse=False)
    poison.check(allocations=1)
    assert lse is None and torch.equal(out, launch(variant, q, k, v, window_of(variant))[0][0])


def test_one_window_variant_serves_every_width():
    q, k, v = inputs(1, (300, 300), (2, 2), (128, 128))
    attend(q, k, v, window_size=(1, 1))
    before = jit.stats()
    for window in ((0, 0), (5, 0), (0, 5), (299, 0), (None, 4), (4, None), (1000, 1000)):
        check_forward(*attend(q, k, v, window_size=window), q, k, v, window_size=window)
    after = jit.stats()
    assert (after.compiles, after.disk_hits) == (before.compiles, before.disk_hits)


@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (192, 128), (256, 256), (72, 72)], ids=dims_id)
@pytest.mark.parametrize("layout", cases.LAYOUTS)
def test_layout(layout, dims):
    """The same bits as from contiguous copies, for one operand at a time and for all three."""
    arrange = cases.LAYOUTS[layout]
    for batch, seqlens, heads in ((2, (130, 259), (4, 2)), (1, (70, 1), (1, 1)), (3, (1, 90), (2, 1))):
        contiguous = inputs(batch, seqlens, heads, dims)
        expected = attend(*contiguous, causal=True)
        check_forward(*expected, *contiguous, causal=True)
        for chosen in ("qkv", "q", "k", "v"):
            operands = [arrange(x) if name in chosen else x for name, x in zip("qkv", contiguous)]
            assert same(attend(*operands, causal=True), expected), f"{chosen} {layout}"


@every_variant
def test_repeats_bit_by_bit(variant):
    """Also where a block needs a second attempt."""
    q, k, v = problem(variant, 4, (5 * variant[2].tile_m + 17, 7 * variant[2].tile_n + 5), (16, 4))
    q[2, :, 3] *= 200
    first, _ = launch(variant, q, k, v, window_of(variant))
    assert all(same(launch(variant, q, k, v, window_of(variant))[0], first) for _ in range(20))


def test_graph_replay():
    q, k, v = inputs(2, (700, 700), (8, 4), (128, 128))
    graph, (pair,) = captured_by(attend, q, k, v, causal=True)
    for old, new in zip((q, k, v), inputs(2, (700, 700), (8, 4), (128, 128), seed=1)):
        old.copy_(new)
    graph.replay()
    assert same(pair, attend(q, k, v, causal=True))


@pytest.mark.parametrize(
    "batch, seqlens, heads, dims",
    [(65536, (4, 4), (8, 8), (64, 64)), (1, (10, 10), (65536, 65536), (16, 16)), (65537, (2, 3), (1, 1), (256, 256))],
    ids=str,
)
@pytest.mark.parametrize("mask", [{}, {"causal": True}], ids=["full", "causal"])
def test_more_tiles_than_a_grid_dimension_takes(batch, seqlens, heads, dims, mask, poison, much_memory):
    q, k, v = inputs(batch, seqlens, heads, dims)
    out, lse = attend(q, k, v, **mask)
    poison.check(allocations=2)
    for b in range(0, batch, 8192):
        for h in range(0, heads[0], 4096):
            at = slice(b, b + 8192), slice(None), slice(h, h + 4096)
            check_forward(out[at], lse[at[0], at[2]], q[at], k[at], v[at], **mask)


@pytest.mark.parametrize("dim, stride", [(0, 2**31 + 64), (1, 2**22), (2, 2**30 + 8)], ids=["batch", "seqlen", "heads"])
@pytest.mark.parametrize("which", ["q", "k", "v"])
def test_offsets_beyond_32_bits(which, dim, stride, much_memory):
    operands = inputs(2, (600, 600), (3, 3), (64, 64))
    expected = attend(*operands, causal=True)
    moved = [far_apart(x, dim, stride) if name == which else x for name, x in zip("qkv", operands)]
    assert same(attend(*moved, causal=True), expected)


@every_variant
def test_hard_inputs(variant, poison):
    q, k, v, names = cases.hard_inputs(variant[1], variant[2])
    (out, lse), mask = launch(variant, q, k, v, hard_window(variant))
    poison.check(allocations=2)
    check_strictly(out, lse, q, k, v, mask, names.__getitem__)


@every_variant
def test_a_second_attempt_among_first_ones(variant):
    """One hard sequence among easy ones: it comes out right, and the easy ones as if it were not there."""
    q, k, v, names = cases.hard_inputs(variant[1], variant[2])
    easy, hard = names.index("saw"), names.index("stairs 100/16 rising left")
    q, k, v = (x[[easy] * 40 + [hard] + [easy] * 40] for x in (q, k, v))
    (out, lse), mask = launch(variant, q, k, v, hard_window(variant))
    check_strictly(out, lse, q, k, v, mask, "sequence {}".format)
    (alone, _), _ = launch(variant, q[:40], k[:40], v[:40], hard_window(variant))
    assert torch.equal(out[:40], alone) and torch.equal(out[41:], alone)


@every_variant
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")], ids=str)
def test_keys_that_are_not_finite_reach_only_who_sees_them(variant, value):
    tile = variant[2]
    seqlen = 3 * tile.tile_n + 13
    positions = (0, tile.tile_n + 1, 2 * tile.tile_n, seqlen - 1)
    q, k, v = problem(variant, len(positions) + 1, (seqlen, seqlen))
    for entry, at in enumerate(positions):
        k[entry, at, 1, 3] = value  # in the second of the two heads, which serves the last two of q
    (out, lse), mask = launch(variant, q, k, v, window_of(variant))
    check_forward(out, lse, q, k, v, per_sequence=True, **mask)
    assert bool(out[:, :, :2].isfinite().all()) and bool(out[-1].isfinite().all())


def test_gradients_arrive_through_the_automatic_backward():
    """Beyond the head dimensions of sm80.backward."""
    q, k, v = (x.requires_grad_() for x in inputs(2, (130, 200), (4, 2), (192, 192)))
    hopper_attention(q, k, v, causal=True, backend=BACKEND).float().square().sum().backward()
    expected = [x.grad.clone() for x in (q, k, v)]
    for x in (q, k, v):
        x.grad = None
    hopper_attention(q, k, v, causal=True, backend="reference").float().square().sum().backward()
    for x, grad in zip((q, k, v), expected):
        assert torch.allclose(x.grad.float(), grad.float(), rtol=0.05, atol=0.05)


@pytest.mark.parametrize("first_seed", fuzz.SHARES)
def test_fuzz(first_seed):
    fuzz.check(first_seed, backend=BACKEND)
