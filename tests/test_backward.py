"""The Hopper backward kernel on a GPU: the cases of its spec, incoming gradients, streams, graphs, hard inputs.

dk and dv are summed by one thread block each and in a fixed order: they repeat bit by bit. dq is added by several
thread blocks, unless it has a kernel of its own or they take turns.
"""

import gc
import zlib
from functools import partial

import pytest
import torch
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from flashattn_hopper import SAC_SAVE_OPS, api, explain, hopper_attention, jit, ops, planner, reference
from flashattn_hopper.arguments import TORCH_DTYPES
from flashattn_hopper.kernels.sm90 import specs as sm90
from flashattn_hopper.spec.tile import TileTable

from . import cases, fuzz, oracle
from .oracle import check_grads

pytestmark = pytest.mark.gpu

SPEC = sm90.BACKWARD
BF, HALF = torch.bfloat16, torch.float16
VARIANTS = cases.variants(SPEC)
ALLOCATIONS = 6  # of a forward and a backward: out, lse, dq, dk, dv, workspace
MASKS = {"full": {}, "causal": {"causal": True}, "window": {"window_size": (90, 33)}}

each_variant = pytest.mark.parametrize("variant", VARIANTS, ids=cases.variant_id)
each_headdim = pytest.mark.parametrize("headdim", sorted({d for d, e in SPEC.headdims if d == e and d % 64 == 0}))
each_mask = pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)


@pytest.fixture(autouse=True)
def only_the_kernel(monkeypatch):
    """Gradients of the reference would pass every test here."""

    def refuse(*_):
        raise AssertionError("the reference was asked for gradients")

    if cases.BACKEND == SPEC.backend:
        monkeypatch.setattr(reference, "backward", refuse)


@pytest.fixture
def much_memory():
    """Tens of gigabytes, given back afterwards."""
    yield
    gc.collect()
    torch.cuda.empty_cache()


@pytest.fixture
def long_tiles(monkeypatch):
    """The tiles of long sequences, whatever the length."""
    find = TileTable.find
    monkeypatch.setattr(TileTable, "find", lambda table, traits, seqlen: find(table, traits, 1 << 20))
    known = api._calls.clear, ops._prepared.clear, planner._plan.cache_clear
    for forget in known:
        forget()
    yield
    for forget in known:
        forget()


@pytest.fixture
def fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


attend = lambda q, k, v, **keywords: hopper_attention(q, k, v, return_lse=True, backend=cases.BACKEND, **keywords)


def grads_of(leaves, out, lse, dout, dlse):
    flows = [(x, g) for x, g in ((out, dout), (lse, dlse)) if g is not None]
    return torch.autograd.grad([x for x, _ in flows], leaves, [g for _, g in flows])


def gradients(q, k, v, dout, dlse=None, **keywords):
    """(dq, dk, dv); dout or dlse may be None."""
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    return grads_of(leaves, *attend(*leaves, **keywords), dout, dlse)


def inputs(batch=2, seqlens=(200, 300), heads=(4, 2), dims=(64, 64), dtype=BF, seed=0):
    """q, k, v, dout, dlse, normal."""
    generator = torch.Generator(cases.DEVICE).manual_seed(seed)
    make = lambda *shape: torch.randn(batch, *shape, generator=generator, device=cases.DEVICE)
    q, k = make(seqlens[0], heads[0], dims[0]), make(seqlens[1], heads[1], dims[0])
    v, dout = make(seqlens[1], heads[1], dims[1]), make(seqlens[0], heads[0], dims[1])
    return *(x.to(dtype) for x in (q, k, v, dout)), make(heads[0], seqlens[0])


def check(q, k, v, dout, dlse=None, **keywords):
    """Gradients, held against float64."""
    grads = gradients(q, k, v, dout, dlse, **keywords)
    check_grads(grads, q, k, v, dout, dlse, **keywords)
    return grads


def assert_same(grads, expected, label=""):
    """dk and dv bit by bit; dq but for the order in which thread blocks added to it."""
    for name, a, b in zip(("dk", "dv"), grads[1:], expected[1:]):
        assert torch.equal(a, b), f"{label} {name}: {int((a != b).sum())} elements differ"
    rounding = torch.finfo(grads[0].dtype).eps * expected[0].abs().amax().item()
    torch.testing.assert_close(grads[0], expected[0], rtol=2 * torch.finfo(grads[0].dtype).eps, atol=rounding)


def check_strictly(grads, q, k, v, dout, mask, label="{}".format):
    """Against float64 without plain PyTorch, which rounds its scores and so overflows or loses them; by sequence.

    Allowed are the roundings of P, dS, out and the result, and what four units of float32 in a logit do to P.
    """
    exact = oracle.attention(q, k, v, dout=dout, **mask)
    for what, actual in zip(("dq", "dk", "dv"), grads):
        assert bool(actual.isfinite().all()), f"{what}: {int((~actual.isfinite()).sum())} elements are not finite"
        off = (actual.double() - getattr(exact, what)).abs().flatten(1).amax(1)
        logit = exact.terms["lse"].flatten(1).amax(1)
        allowed = (2 * torch.finfo(q.dtype).eps + 2**-21 * logit) * exact.terms[what].flatten(1).amax(1)
        for b in (off > allowed).nonzero().flatten().tolist():
            raise AssertionError(f"{label(b)}: {what} off by {off[b]:.3e}, allowed are {allowed[b]:.3e}")


# The matrix


def test_the_kernel_is_what_runs():
    q, k, v, *_ = inputs()
    assert explain(q, k, v, backend="sm90").backward == "sm90.backward"
    by_itself = "reference.backward" if SPEC.on_request else "sm90.backward"
    assert explain(q, k, v).backward == by_itself
    repeats = "sm90.backward" if "deterministic" in SPEC.features else "reference.backward"
    assert explain(q, k, v, backend="sm90", deterministic=True).backward == repeats


@pytest.mark.parametrize("case", cases.cases_for(SPEC), ids=lambda case: case.id)
def test_case(case, poison):
    """Half of them with a gradient into lse too; every element of gradients and workspace starts as NaN."""
    q, k, v = case.tensors()
    dout = torch.randn(*q.shape[:3], v.shape[3], device=q.device).to(q.dtype)
    dlse = torch.randn(q.shape[0], q.shape[2], q.shape[1], device=q.device)
    dlse = dlse if zlib.crc32(case.id.encode()) % 2 else None
    grads = gradients(q, k, v, dout, dlse, deterministic=case.traits.deterministic, **case.mask)
    poison.check(ALLOCATIONS)
    check_grads(grads, q, k, v, dout, dlse, **case.mask)


@each_variant
def test_ragged_lengths(variant):
    """1 to 300 keys, beside as many queries: one sequence of equal logits at -16 sqrt(headdim) (C07), one normal."""
    _, traits, _, _ = variant
    dtype = TORCH_DTYPES[traits.dtype]
    mask = cases.mask_arguments(traits.mask, (70, 9))
    every = traits.mask == "full" and traits.headdim in (64, 128) and not traits.deterministic
    q, k, v, dout, _ = inputs(2, (300, 300), (1, 1), (traits.headdim, traits.headdim_v), dtype)
    q[0], k[0] = 4, -4
    for length in range(1, 301, 1 if every else 13):
        part = [x[:, :length] for x in (q, k, v, dout)]
        grads = gradients(*part, deterministic=traits.deterministic, **mask)
        check_strictly(grads, *part, mask, lambda b, n=length: f"length {n}, sequence {b}")


@pytest.mark.parametrize("seqlens", [(1, 300), (300, 1), (5, 2), (300, 130), (129, 128), (64, 1000)], ids=str)
@pytest.mark.parametrize("mask", [{"causal": True}, {"window_size": (20, 0)}], ids=["causal", "window"])
def test_queries_without_keys_and_keys_without_queries(mask, seqlens, poison):
    """C01, C10: the first queries where Sq > Sk; the first keys where a window is narrower than Sk - Sq."""
    q, k, v, dout, dlse = inputs(2, seqlens, (4, 2), (64, 64))
    grads = gradients(q, k, v, dout, dlse, **mask)
    poison.check(ALLOCATIONS)
    check_grads(grads, q, k, v, dout, dlse, **mask)
    seen = oracle.visible(*seqlens, device=q.device, **mask)
    blind_rows, blind_keys = ~seen.any(1), ~seen.any(0)
    assert bool(blind_rows.any()) == (seqlens[0] > seqlens[1])
    assert not grads[0][:, blind_rows].any(), "dq of queries without keys"
    assert not grads[1][:, blind_keys].any() and not grads[2][:, blind_keys].any(), "dk, dv of keys without queries"


@pytest.mark.parametrize("heads", [(1, 1), (8, 1), (7, 7), (12, 3), (96, 8), (33, 11)], ids=str)
@each_headdim
def test_groups_of_heads(headdim, heads):
    check(*inputs(1, (140, 270), heads, (headdim, headdim)), causal=True)


@pytest.mark.parametrize("dims", [(72, 72), (80, 80), (104, 104), (8, 8), (64, 8), (16, 128), (120, 40)], ids=str)
@each_mask
def test_c25_padded_headdims(dims, mask, poison):
    for length in (60, 70, 300):
        operands = inputs(1, (length, length + 10), (2, 2), dims)
        grads = gradients(*operands, **mask)
        poison.check(ALLOCATIONS)
        check_grads(grads, *operands, **mask)


@pytest.mark.parametrize("scale", [1e-6, 0.01, 1.0, 7.5])
def test_softmax_scale(scale):
    check(*inputs(), softmax_scale=scale, causal=True)


def test_one_window_variant_serves_every_width():
    operands = inputs(1, (300, 300))
    gradients(*operands, window_size=(1, 1))
    before = jit.stats()
    for window in ((0, 0), (5, 0), (0, 5), (299, 0), (None, 4), (4, None), (1000, 2**40)):
        check(*operands, window_size=window)
    after = jit.stats()
    assert (after.compiles, after.disk_hits) == (before.compiles, before.disk_hits)


# What arrives


@each_mask
@each_headdim
def test_c17_a_loss_on_lse_alone(headdim, mask):
    q, k, v, _, dlse = inputs(dims=(headdim, headdim))
    _, _, dv = check(q, k, v, None, dlse, **mask)
    assert not dv.any()


@pytest.mark.parametrize(
    "loss", [lambda out, lse: lse.mean(), lambda out, lse: out.sum() + lse.sum()], ids=["lse.mean", "out.sum + lse.sum"]
)
def test_c17_expanded_gradients_of_both(loss):
    q, k, v, *_ = inputs(4, (100, 100))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out, lse = attend(*leaves)
    ends = [x.detach().requires_grad_() for x in (out, lse)]
    arrives = torch.autograd.grad(loss(*ends), ends, allow_unused=True)
    grads = torch.autograd.grad(loss(out, lse), leaves)
    check_grads(grads, q, k, v, *(None if g is None else g.contiguous() for g in arrives))


def test_c13_a_loss_of_out_times_the_sum():
    for length in (1, 100, 129):
        q, k, v, *_ = (0.1 * x for x in inputs(1, (length, length), (12, 12)))
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        out, lse = attend(*leaves, causal=True)
        (out * lse.exp().transpose(1, 2).unsqueeze(-1)).sum().backward()
        assert all(bool(x.grad.isfinite().all()) for x in leaves)


WIDENED = {
    "one number": lambda x: x[:1, :1, :1, :1].expand_as(x),
    "batch expanded": lambda x: x[:1].expand_as(x),
    "sequence expanded": lambda x: x[:, :1].expand_as(x),
    "heads expanded": lambda x: x[:, :, :1].expand_as(x),
    "last dimension expanded": lambda x: x[..., :1].expand_as(x),
    "transposed from the end": lambda x: x.transpose(1, 3).contiguous().transpose(1, 3),
}


@pytest.mark.parametrize("arrange", [*cases.LAYOUTS.values(), *WIDENED.values()], ids=[*cases.LAYOUTS, *WIDENED])
@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (72, 40)], ids=str)
def test_layouts_of_dout(dims, arrange, poison):
    """C32, C33: transposed, sliced, expanded. Bits are those of a contiguous copy."""
    for batch, seqlens, heads in ((2, (130, 200), (4, 2)), (1, (70, 1), (1, 1)), (3, (1, 90), (2, 1))):
        q, k, v, dout, dlse = inputs(batch, seqlens, heads, dims)
        dout = arrange(dout)
        grads = gradients(q, k, v, dout, dlse, causal=True)
        poison.check(ALLOCATIONS)
        check_grads(grads, q, k, v, dout, dlse, causal=True)
        assert_same(grads, gradients(q, k, v, dout.contiguous(), dlse, causal=True))
        poison.check(ALLOCATIONS)


@pytest.mark.parametrize("name", cases.LAYOUTS)
@each_headdim
def test_layouts_of_the_inputs(headdim, name):
    """Bits are those of contiguous copies, one operand at a time and all three."""
    q, k, v, dout, dlse = inputs(2, (130, 259), (4, 2), (headdim, headdim))
    expected = check(q, k, v, dout, dlse, causal=True)
    for chosen in ("qkv", "q", "k", "v"):
        operands = [cases.LAYOUTS[name](x) if which in chosen else x for which, x in zip("qkv", (q, k, v))]
        grads = gradients(*operands, dout, dlse, causal=True)
        assert all(g.is_contiguous() for g in grads)
        assert_same(grads, expected, f"{chosen} {name}")


@pytest.mark.parametrize("axis", ["batch", "seqlen", "heads"])
def test_c35_gradients_of_expanded_keys(axis):
    """One gradient for each element of the expanded shape; autograd sums them."""
    dim = ("batch", "seqlen", "heads").index(axis)
    q, k, v, dout, _ = inputs(3, (140, 300), (4, 4))
    narrow = [x.narrow(dim, 0, 1).detach().requires_grad_() for x in (k, v)]
    wide = [x.expand(3, 300, 4, -1) for x in narrow]
    assert all(x.stride(dim) == 0 for x in wide)
    per_element = check(q, *wide, dout, window_size=(120, 3))
    out, _ = attend(q, *wide, window_size=(120, 3))
    for summed, grad in zip(torch.autograd.grad(out, narrow, dout), per_element[1:]):
        torch.testing.assert_close(summed, grad.sum(dim, keepdim=True), rtol=0, atol=0)


def test_c31_rows_of_dout_further_apart_than_32_bits(much_memory):
    rows, heads, headdim, step = 226_000, 16, 96, 9728
    q, k, v, dout, _ = inputs(1, (rows, 64), (heads, heads), (headdim, headdim))
    apart = torch.empty(rows * step, dtype=BF, device=cases.DEVICE).as_strided(dout.shape, (0, step, headdim, 1))
    assert apart.untyped_storage().nbytes() // 2 > 2**31
    grads = gradients(q, k, v, apart.copy_(dout))
    assert_same(grads, gradients(q, k, v, dout))
    last = slice(rows - 200, rows)
    exact = oracle.attention(q[:, last], k, v, dout=dout[:, last])
    usual = oracle.plain(q[:, last], k, v, dout=dout[:, last])
    oracle.assert_close_to_oracle(grads[0][:, last], exact.dq, usual.dq, BF, "dq", terms=exact.terms["dq"])


def test_c19_chunks_of_keys_with_the_results_of_all():
    """out and lse of 128 keys, a backward for 70 and one for 58: dq adds up, dk and dv are the parts."""
    q, k, v, dout, _ = inputs(2, (100, 128), (4, 2))
    out, lse = attend(q, k, v)
    whole = oracle.attention(q, k, v, dout=dout)
    usual = oracle.plain(q, k, v, dout=dout)
    scalars = 0.125, None, None, False, cases.BACKEND
    cut = [(k[:, at], v[:, at]) for at in (slice(70), slice(70, None))]
    parts = [ops.BWD(dout, None, q, *pair, out, lse, *scalars, (True,) * 3) for pair in cut]
    dq = parts[0][0].float() + parts[1][0].float()
    joined = dq.to(BF), *(torch.cat(pair, 1) for pair in zip(*(p[1:] for p in parts)))
    for what, grad in zip(("dq", "dk", "dv"), joined):
        terms = 2 * whole.terms[what]  # the parts of dq are rounded once more
        oracle.assert_close_to_oracle(grad, getattr(whole, what), getattr(usual, what), BF, what, terms=terms)


# Hard inputs


@each_variant
def test_hard_inputs(variant, poison):
    _, traits, tile, _ = variant
    q, k, v, names = cases.hard_inputs(traits, tile)
    mask = cases.mask_arguments(traits.mask, (2 * tile.tile_n + 64, tile.tile_n // 2))
    dout = torch.randn(*q.shape[:3], v.shape[3], device=q.device).to(q.dtype)
    grads = gradients(q, k, v, dout, deterministic=traits.deterministic, **mask)
    poison.check(ALLOCATIONS)
    check_strictly(grads, q, k, v, dout, mask, names.__getitem__)


@pytest.mark.parametrize("level", [-128.0, -20_000.0, 20_000.0])
@pytest.mark.parametrize("dtype", [BF, HALF], ids=str)
@each_headdim
def test_c07_c08_equal_logits_far_from_zero(headdim, dtype, level):
    """The padded rest of the last tile scores 0: with exp(0 - lse) it would overflow, or count."""
    for length in (64, 192, 704):
        q, k, v, dout, _ = inputs(1, (length, length), (1, 1), (headdim, headdim), dtype)
        q, k = torch.zeros_like(q), torch.zeros_like(k)
        q[..., 0], k[..., 0] = 64, level / 64 * headdim**0.5
        check_strictly(gradients(q, k, v, dout), q, k, v, dout, {})


@pytest.mark.parametrize("dtype, value", [(BF, 133120.0), (HALF, 59968.0)], ids=["bf16", "fp16"])
@pytest.mark.parametrize("length", [1, 2, 300])
def test_c09_huge_equal_inputs(dtype, value, length):
    """With such an lse exp(S - lse) is one rounding away from inf; P is at most 1 all the same."""
    x = torch.full((1, length, 1, 64), value, dtype=dtype, device=cases.DEVICE)
    dout = torch.ones_like(x)
    for grad in gradients(x, x, x, dout):
        assert bool(grad.isfinite().all())


@pytest.mark.parametrize("seqlen", [2, 130])
def test_c11_an_outlier_channel_and_tiny_gradients(seqlen):
    q, k, v, dout, _ = inputs(1, (seqlen, seqlen), (1, 1), (8, 8))
    k[..., 3] *= 70
    check(q, k, v, dout * 1e-8)


def test_c12_queries_without_keys_leave_parameters_alone():
    layer = torch.nn.Linear(64, 64, bias=False, device=cases.DEVICE, dtype=BF)
    x = torch.randn(2, 9, 2, 64, device=cases.DEVICE).to(BF)
    q, k, v = layer(x), layer(x[:, :4]), layer(x[:, :4])
    attend(q, k, v, causal=True)[0].square().sum().backward()
    assert bool(layer.weight.grad.isfinite().all()) and bool(layer.weight.grad.any())


def test_c15_one_query_and_65536_keys():
    q, k, v, *_ = inputs(1, (1, 65536), (16, 16))
    dout = torch.ones((), dtype=BF, device=q.device).expand_as(q)
    check(q, k, v, dout)


@each_headdim
def test_c16_heavy_tails(headdim):
    """Like activations: a lognormal scale for each token, one channel in a hundred far louder; stored (S, B, H, D)."""
    loud = torch.ones(headdim, device=cases.DEVICE)
    loud[::100] = 30
    spread = lambda x: (x * torch.randn(*x.shape[:2], 1, 1, device=x.device).exp() * loud).to(BF)
    store = cases.LAYOUTS["sequence_first"]
    q, k, v, dout, _ = inputs(3, (400, 400), (16, 2), (headdim, headdim), torch.float32)
    q, k, v = (store(spread(x)) for x in (q, k, v))
    dout = dout.to(BF)
    grads = gradients(q, k, v, dout, causal=True)
    check_grads(grads, q, k, v, dout, causal=True, per_sequence=True)


def test_a_nan_stays_in_its_head():
    q, k, v, dout, _ = inputs(2, (200, 200), (4, 2))
    expected = gradients(q, k, v, dout, causal=True)
    q[0, 77, 1, 3] = float("nan")
    dq, dk, dv = gradients(q, k, v, dout, causal=True)
    assert bool(dq[0, 77, 1].isnan().all()) and bool(dk[0, :, 0].isnan().any())
    others = [dq[0, :, [0, 2, 3]], dq[1], dk[0, :, 1], dk[1], dv[0, :, 1], dv[1]]
    before = [expected[0][0, :, [0, 2, 3]], expected[0][1]]
    before += [x for g in expected[1:] for x in (g[0, :, 1], g[1])]
    for x, y in zip(others, before):
        torch.testing.assert_close(x, y, rtol=2e-2, atol=2e-2)


# Repetition, streams, graphs


@each_variant
def test_repeats(variant):
    """C50: dk and dv bit by bit, wherever the thread blocks happen to run; dq too unless it is summed in any order."""
    _, traits, tile, _ = variant
    dims = traits.headdim, traits.headdim_v
    q, k, v, dout, dlse = inputs(4, (520, 700), (16, 4), dims, TORCH_DTYPES[traits.dtype])
    mask = cases.mask_arguments(traits.mask, (100, 0))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out, lse = attend(*leaves, deterministic=traits.deterministic, **mask)
    again = lambda: torch.autograd.grad([out, lse], leaves, [dout, dlse], retain_graph=True)
    first = again()
    for _ in range(100 if traits.deterministic else 20):
        grads = again()
        assert_same(grads, first)
        assert torch.equal(grads[0], first[0]) or (tile.summed and not tile.ordered), "dq"


def test_c51_many_sequences_beside_a_busy_stream():
    """One key tile: then dq too is added once, so all three repeat."""
    q, k, v, dout, _ = inputs(300, (2048, 128), (1, 1), (128, 128), HALF)
    q, k, v = (3 * x for x in (q, k, v))
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    out, _ = attend(*leaves)
    first = torch.autograd.grad(out, leaves, dout, retain_graph=True)
    for b in (0, 150, 299):
        part = slice(b, b + 1)
        check_grads([g[part] for g in first], q[part], k[part], v[part], dout[part], label=f"sequence {b}")
    side, busy = torch.cuda.Stream(), torch.randn(4096, 4096, device=cases.DEVICE, dtype=BF)
    for _ in range(50):
        with torch.cuda.stream(side):
            busy @ busy
        again = torch.autograd.grad(out, leaves, dout, retain_graph=True)
        assert all(torch.equal(a, b) for a, b in zip(again, first))
    torch.cuda.synchronize()


def several_problems():
    table = [
        (3, (500, 700), (8, 2), (64, 64), BF, {"causal": True}),
        (1, (64, 2000), (16, 16), (128, 128), BF, {}),
        (2, (900, 900), (4, 4), (128, 128), HALF, {"causal": True}),
        (5, (333, 333), (6, 3), (64, 128), BF, {"window_size": (100, 0)}),
        (2, (400, 300), (4, 2), max(SPEC.headdims), BF, {"causal": True}),
        (2, (1200, 100), (4, 1), (96, 96), HALF, {}),
        (1, (2000, 2000), (2, 2), (64, 64), HALF, {"window_size": (300, 50)}),
    ]
    return [(inputs(b, s, h, d, t, seed), mask) for seed, (b, s, h, d, t, mask) in enumerate(table)]


def test_four_streams_at_once():
    problems = several_problems()
    serial = [check(*operands, **mask) for operands, mask in problems]
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in range(4)]
    results = []
    for turn in range(25):
        for s, stream in enumerate(streams):
            i = (3 * turn + 2 * s) % len(problems)
            operands, mask = problems[i]
            with torch.cuda.stream(stream):
                results.append((i, gradients(*operands, **mask)))
    torch.cuda.synchronize()
    for i, grads in results:
        assert_same(grads, serial[i], f"problem {i}")


def test_side_stream_without_synchronisation():
    """Operands that are still being computed on the same stream, gradients used at once, inputs overwritten after."""
    q, k, v, dout, dlse = inputs(2, (700, 700), (4, 4), (128, 128))
    expected = gradients(q * 2, k, v, dout, dlse, causal=True)
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda._sleep(50_000_000)  # tens of milliseconds
        doubled = torch.empty_like(q).copy_(q).mul_(2)
        grads = [g.clone() for g in gradients(doubled, k, v, dout, dlse, causal=True)]
        doubled.zero_()
        torch.cuda.current_stream().synchronize()
    assert_same(grads, expected)


@each_headdim
@each_mask
def test_graph_replay(mask, headdim):
    """Forward and backward captured together, replayed on other values."""
    make = partial(inputs, 2, (300, 300), (8, 4), (headdim, headdim))
    held = make()
    gradients(*held, **mask)  # loads the kernels, which a capture must not
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        grads = gradients(*held, **mask)
    for seed in range(1, 5):
        for old, new in zip(held, make(seed=seed)):
            old.copy_(new)
        for grad in grads:
            grad.fill_(float("nan"))
        graph.replay()
        assert_same(grads, gradients(*held, **mask), f"seed {seed}")


# Sizes


@pytest.mark.parametrize(
    "batch, seqlens, heads, dims",
    [
        (1, (10, 10), (65536, 65536), (16, 16)),  # C22
        (13108, (3, 5), (5, 5), (64, 64)),  # 65540 heads of all sequences
        (65537, (2, 3), (1, 1), (128, 128)),
        (1, (9, 70_000), (130, 130), (64, 64)),  # 71110 key tiles
    ],
    ids=str,
)
def test_more_tiles_than_a_grid_dimension_takes(batch, seqlens, heads, dims, much_memory):
    q, k, v, dout, dlse = inputs(batch, seqlens, heads, dims, HALF)
    grads = gradients(q, k, v, dout, dlse, causal=True)
    assert all(bool(g.isfinite().all()) for g in grads)
    step_h = 4096 if seqlens[1] < 1000 else 2
    for b in {0, batch // 2, max(batch - 4096, 0)}:
        for h in {0, max(heads[0] - step_h, 0)}:
            at = slice(b, b + 4096), slice(None), slice(h, h + step_h)
            parts = [x[at] for x in (q, k, v, dout)]
            check_grads([g[at] for g in grads], *parts, dlse[at[0], at[2]], causal=True)


# torch.compile, checkpointing


def model(q, k, v):
    """Something for the compiler on both sides of the operator, and a gradient into lse."""
    out, lse = attend(q * 1.5, k, v, causal=True)
    return out.float().square().sum() + lse.sum()


def grads_of_model(function, q, k, v):
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    function(*leaves).backward()
    return [x.grad for x in leaves]


def assert_alike(actual, expected):
    for a, b in zip(actual, expected):
        torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_c37_c38_compiled(dynamic, fresh_compiler):
    compiled = torch.compile(model, fullgraph=True, dynamic=dynamic)
    for length in (196, 257) if dynamic else (1, 196):
        operands = inputs(2, (length, length), (8, 4))[:3]
        assert_alike(grads_of_model(compiled, *operands), grads_of_model(model, *operands))


def test_c37_opcheck_of_the_backward():
    for length in (1, 196):
        q, k, v, dout, dlse = inputs(1, (length, length), (2, 1))
        out, lse = attend(q, k, v)
        scalars = 0.125, None, None, False, cases.BACKEND
        for needs in ((True, True, True), (False, True, False)):
            torch.library.opcheck(
                ops.BWD,
                (dout, dlse, q, k, v, out, lse, *scalars, needs),
                # dq is summed in no fixed order, so two runs are compared with a tolerance.
                test_utils=("test_schema", "test_faketensor"),
            )


@each_mask
@pytest.mark.parametrize("wanted", [(0,), (1,), (2,), (1, 2), (0, 2)], ids=str)
@pytest.mark.parametrize("dims", [(64, 64), (72, 72), (128, 128), (192, 128), (256, 256)], ids=str)
def test_gradients_of_some_operands(dims, wanted, mask):
    """Of frozen operands none is computed; the others are those that all together get in the deterministic order."""
    q, k, v, dout, dlse = inputs(dims=dims)
    expected = gradients(q, k, v, dout, dlse, deterministic=True, **mask)
    operands = [x.detach().requires_grad_(i in wanted) for i, x in enumerate((q, k, v))]
    out, lse = attend(*operands, deterministic=True, **mask)
    found = grads_of([operands[i] for i in wanted], out, lse, dout, dlse)
    again = grads_of([operands[i] for i in wanted], *attend(*operands, deterministic=True, **mask), dout, dlse)
    assert all(map(torch.equal, found, again))
    # Where all are computed dQ is summed in turn, from the last query tile on: another order, in dK and dV too.
    rounding = 4 * torch.finfo(q.dtype).eps if not mask and max(dims) <= 128 else 0.0
    for i, grad in zip(wanted, found):
        limit = rounding * expected[i].abs().amax().item()
        torch.testing.assert_close(grad, expected[i], rtol=rounding, atol=limit, msg=f"gradient {i} differs")


@pytest.mark.parametrize("how", ["reentrant", "not reentrant", "attention kept"])
def test_checkpoint(how):
    q, k, v, *_ = inputs(2, (300, 300), (8, 4), (128, 128))
    ways = {"reentrant": {"use_reentrant": True}, "not reentrant": {"use_reentrant": False}}
    keep = partial(create_selective_checkpoint_contexts, SAC_SAVE_OPS)
    ways["attention kept"] = {"use_reentrant": False, "context_fn": keep}
    assert_same(
        grads_of_model(lambda *qkv: checkpoint(model, *qkv, **ways[how]), q, k, v), grads_of_model(model, q, k, v)
    )


def test_autocast():
    q, k, v, dout, _ = inputs(dtype=torch.float32)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    with torch.autocast(cases.DEVICE, BF):
        out, _ = attend(*leaves, causal=True)
    grads = torch.autograd.grad(out, leaves, dout.to(BF))
    assert all(g.dtype == torch.float32 for g in grads)
    halves = [x.detach().to(BF) for x in (q, k, v)]
    check_grads([g.to(BF) for g in grads], *halves, dout.to(BF), causal=True)


# Everything at once


@pytest.mark.parametrize("first_seed", fuzz.SHARES)
def test_fuzz(first_seed):
    fuzz.check(first_seed, backward=True)


@pytest.mark.parametrize("first_seed", fuzz.SHARES)
def test_fuzz_with_the_tiles_of_long_sequences(first_seed, long_tiles):
    fuzz.check(first_seed, backward=True)
