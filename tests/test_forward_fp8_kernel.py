"""The compiled FP8 forward without a GPU: its PTX, run by hopper_machine, against the emulation.

Kernels are cut as in the table but for the schedule: a thread block for each query tile, so that no tickets are drawn.
One test has the table's own, with two blocks for all tiles.
"""

import functools
import tempfile
from dataclasses import replace

import pytest
import torch

from flashattn_hopper import jit, quantize_fp8, reference_fp8, runner_fp8
from flashattn_hopper.kernels.sm90.specs import FORWARD_FP8
from flashattn_hopper.quantize import restore_lse
from flashattn_hopper.spec.mask import Band

from .exponentials import emulate, exp2_halves, traits_of
from .hopper_machine import Map, run_forward
from .ptx_machine import Memory

pytestmark = pytest.mark.compile

NAN = float("nan")
SUMS = 2**-10  # of lse: a half keeps 11 bits, and a part of a row is summed in a few of them
MASKS = {"full": Band(), "causal": Band(right=0), "window": Band(150, 3), "narrow": Band(2, 0)}
PLAIN = (1, 150, 300, 2, 1)  # batch, seqlen_q, seqlen_k, heads, kv heads


@functools.cache
def ptx(traits, dynamic=False):
    """Text and tile of what the table compiles for long sequences."""
    tile = FORWARD_FP8.tiles.find(traits, 4096)
    if not dynamic:
        tile = replace(tile, schedule="grid", q_stages=1, ahead=False)
    with tempfile.TemporaryDirectory() as folder:
        options = f"--keep-ptx --dump-dir {folder}"
        return jit._compile(FORWARD_FP8, traits, tile, FORWARD_FP8.arch, options).__ptx__, tile


def attend(q, k, v, band, scale, late=(), num_ctas=None):
    """(out, lse, restored lse) of BlockScaled operands, handed over as runner_fp8 and the kernel's host half do."""
    codes = runner_fp8.from_scaled(q, k, v)._replace(logit_offset=q.logit_offset)
    (batch, seqlen_q, heads, _), d_v = q.shape, v.shape[3]
    traits = traits_of(q, k, v, band)
    text, tile = ptx(traits, num_ctas is not None)
    memory, out = Memory(1 << 24), torch.full((batch, seqlen_q, heads, d_v), NAN, dtype=q.dtype)
    restored = memory.empty(4 * batch * heads * seqlen_q)
    scales = codes.q_descale, codes.k_descale, codes.v_descale, codes.logit_offset
    scales = [*(0 if x is None else memory.add(x) for x in scales), restored]
    heads_first = lambda x, *cut: Map(x.transpose(1, 2), *cut)
    maps = (
        heads_first(codes.q, traits.headdim, 64),
        heads_first(codes.k, traits.headdim, tile.tile_n),
        Map(codes.v, tile.tile_n, traits.headdim_v),
        heads_first(out, traits.headdim_v, 64),
    )
    lse = run_forward(text, tile, maps, band, scale, memory, late, num_ctas, scales)
    return out, lse, memory.read(restored, 4 * lse.numel()).view(torch.float32).view(lse.shape)


def operands(shape=PLAIN, dims=(64, 64), dtype=torch.bfloat16):
    batch, seqlen_q, seqlen_k, heads, heads_kv = shape
    sizes = (seqlen_q, heads, dims[0]), (seqlen_k, heads_kv, dims[0]), (seqlen_k, heads_kv, dims[1])
    return [torch.randn(batch, *size).to(dtype) for size in sizes]


def check(q, k, v, mask, scale=None, late=(), num_ctas=None, **recipe):
    codes = quantize_fp8(q, k, v, **recipe)
    scale = q.shape[3] ** -0.5 if scale is None else scale
    out, lse, restored = attend(*codes, MASKS[mask], scale, late, num_ctas)
    wanted, core = emulate(*codes, MASKS[mask], scale)
    assert torch.equal(out.isnan(), wanted.isnan())
    # The same products, sums and roundings of P; what differs is the order of float32 sums.
    clear = ~wanted.isnan()
    assert (out.float() - wanted.float())[clear].norm() <= 1e-3 * wanted.float()[clear].norm()
    for found, expected in ((lse, core), (restored, restore_lse(core, codes[0], scale))):
        assert torch.equal(found.isnan(), expected.isnan()) and torch.equal(found.isneginf(), expected.isneginf())
        # A quarter of a row or half of it is summed in halves first, four values at a time and those of two blocks.
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=SUMS, equal_nan=True)
    return out, codes


@pytest.mark.parametrize(
    "dims, mask, recipe",
    [
        ((64, 64), "full", {}),
        ((64, 64), "causal", {"qk_dtype": "int8"}),
        ((64, 64), "window", {}),
        ((96, 96), "causal", {}),
        ((128, 128), "full", {}),
        ((128, 128), "causal", {}),
        ((128, 128), "narrow", {"qk_dtype": "int8"}),
        ((192, 128), "causal", {}),
        ((192, 192), "full", {"qk_dtype": "int8"}),
        ((256, 256), "causal", {}),
        ((112, 80), "full", {}),
    ],
    ids=str,
)
def test_against_the_emulation(dims, mask, recipe):
    q, k, v = operands(dims=dims)
    check(q, k + 2 * torch.randn(1, 1, 1, dims[0]).bfloat16(), v, mask, **recipe)


LATE = {"all late": ("products", "loads", "stores"), "loads early": ("products", "stores")}


@pytest.mark.parametrize("late", LATE)
@pytest.mark.parametrize(
    "dims, mask, recipe",
    [
        ((64, 64), "full", {"qk_dtype": "int8"}),
        ((128, 128), "causal", {}),
        ((256, 256), "full", {}),
    ],
    ids=str,
)
def test_waits_are_where_they_must_be(dims, mask, recipe, late):
    """Five tiles of keys in two stages; another kind of tile for each head dimension."""
    check(*operands((1, 130, 560, 1, 1), dims), mask, late=LATE[late], **recipe)


@pytest.mark.parametrize(
    "dims, mask, recipe",
    [((64, 64), "full", {}), ((128, 128), "causal", {}), ((256, 256), "causal", {"qk_dtype": "int8"})],
    ids=str,
)
def test_many_tiles_of_a_block(dims, mask, recipe):
    """What a tile leaves behind for the next: scales of its rows and head, phases of the rings, O in shared memory."""
    late = LATE["loads early"]
    check(*operands((2, 270, 300, 2, 1), dims), mask, late=late, num_ctas=2, **recipe)


def test_second_attempts_of_a_round():
    """Of some tiles of a block only; logits beyond 2^22 in log2 units."""
    q, k, v = operands((1, 600, 300, 2, 1), (128, 128))
    q[:, 128:256, 0] *= 1000
    codes = quantize_fp8(q, k, v)
    out, lse, _ = attend(*codes, Band(), 1e3, num_ctas=2)
    wanted, core = emulate(*codes, Band(), 1e3)
    assert core[0, 0, 128:256].abs().max() > 2**22 and core[0, 1].abs().max() < 2**22 and out.isfinite().all()
    torch.testing.assert_close(lse, core, rtol=1e-6, atol=1e-2)
    assert ((out - wanted).float().abs().amax(-1) <= 0.02).double().mean() > 0.95


@pytest.mark.parametrize("late", LATE)
def test_a_missing_wait_is_seen(monkeypatch, late):
    """The two ways of being late find one mistake each: a stage that nobody waits for, and one given back while the
    product still reads it. Where products take turns, the order of the loads would forgive the second."""
    from flashattn_hopper.kernels.sm90.pipeline import Ring
    from flashattn_hopper.kernels.sm90.pv_operand import Late

    issue = Late.issue

    def given_back_early(self, slot):
        issue(self, slot)
        self.ring.release(slot)

    if late == "loads early":
        monkeypatch.setattr(Late, "issue", given_back_early)
        monkeypatch.setattr(Late, "collect", lambda self, slot: None)
        monkeypatch.setattr(Late, "end", lambda self, slot: self.add(0))
    else:
        monkeypatch.setattr(Ring, "wait", lambda self, slot: None)
    ptx.cache_clear()
    try:
        with pytest.raises(AssertionError):
            check(*operands((1, 130, 560, 1, 1), (96, 96)), "full", late=LATE[late])
    finally:
        ptx.cache_clear()


@pytest.mark.parametrize("positive", (0, 44), ids=str)
def test_tiles_of_negative_scores(positive):
    """Maxima of floats as integers: of negative ones alone they are wrong, below a bias from zero on and only there."""
    q, k, v = operands(dims=(128, 128))
    q, k = 0.1 * q.abs(), -k.abs()
    k[:, k.shape[1] - positive :] *= -0.1  # the tile that the walk begins with
    _, codes = check(q, k, v, "full", hadamard=False, smooth_k=False)
    scores = codes[0].data.float()[0, :, 0] @ codes[1].data.float()[0, :256, 0].T
    assert scores.max() < 0


@pytest.mark.parametrize("shape", [(2, 70, 129, 4, 2), (1, 1, 1, 1, 1), (1, 300, 100, 2, 2)], ids=str)
def test_shapes(shape):
    check(*operands(shape, dtype=torch.float16), "causal")


def test_another_order_of_keys_is_seen(monkeypatch):
    """That the comparison can fail: V packed without the permutation."""
    plain = lambda v: torch.nn.functional.pad(
        v.view(torch.uint8).permute(0, 2, 3, 1), (0, -v.shape[1] % 128)
    ).contiguous().view(v.dtype)  # fmt: skip
    monkeypatch.setattr(runner_fp8, "pack_values", plain)
    with pytest.raises(AssertionError):
        check(*operands(), "causal")


@pytest.mark.parametrize("qk_dtype", ["fp8", "int8"])
@pytest.mark.parametrize("place", range(3))
@pytest.mark.parametrize("mask", ["causal", "window"])
def test_nan_is_seen_where_it_is_visible(mask, place, qk_dtype):
    tensors = operands((1, 300, 290, 2, 2))
    tensors[place][0, 200, 1, 5] = NAN
    out, _ = check(*tensors, mask, qk_dtype=qk_dtype, smooth_k=False)
    assert out.isnan().any() and not out[:, :, 0].isnan().any()


@pytest.mark.parametrize("mask, place", [("full", 1), ("causal", 0)])
def test_a_code_of_nan_is_seen(mask, place):
    """Codes of somebody else, with finite scales. A polynomial makes 0 of NaN; the maximum passes it on."""
    codes = quantize_fp8(*operands((4, 70, 290, 1, 1)), qk_dtype="fp8")
    for b in range(4):
        row = (5, 140 + 24 * b)[place]  # of keys: in blocks of either kind, masked tiles and others
        codes[place].data.view(torch.uint8)[b, row, 0, 5] = 0x7F
    out, _, _ = attend(*codes, MASKS[mask], 0.125)
    wanted, _ = reference_fp8.forward(*codes, MASKS[mask], 0.125)
    assert wanted.isnan().any() and torch.equal(out.isnan(), wanted.isnan())


def test_the_polynomial():
    """1 is 1, nothing is below 0, and the error is small beside that of a code, 2^-4."""
    assert exp2_halves(torch.tensor([8.0, 0.0, -14.0, -15.0, -NAN, -1e30, -float("inf")])).tolist() == [
        256.0, 1.0, 2.0**-14, 0.0, 0.0, 0.0, 0.0,
    ]  # fmt: skip
    x = torch.arange(-14, 8, 2.0**-12)
    assert (exp2_halves(x) / x.exp2() - 1).abs().max() < 2.9e-3


def test_rows_without_keys_stay_zero_beside_nan():
    q, k, v = operands((1, 300, 100, 2, 2))
    v[0, 3] = NAN
    out, _ = check(q, k, v, "causal", smooth_k=False)
    assert not out[:, :200].any() and out[:, 200:].isnan().all()


def test_huge_logits_take_the_second_attempt():
    """Beyond 2^22 in log2 units. Weights of equal scores aside, a row is one key's value, exactly."""
    q, k, v = operands((1, 130, 300, 1, 1))
    codes = quantize_fp8(q, k, v)
    out, lse, _ = attend(*codes, Band(), 1e6)
    wanted, core = emulate(*codes, Band(), 1e6)
    assert core.abs().max() > 2**22 and out.isfinite().all()
    torch.testing.assert_close(lse, core, rtol=1e-6, atol=0)
    assert ((out - wanted).abs().amax(-1) == 0).double().mean() > 0.95
