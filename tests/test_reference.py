"""The tiled reference against dense float64, and the oracle against PyTorch. CPU only."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from flashattn_hopper import reference
from flashattn_hopper.spec.mask import Band

from . import oracle
from .oracle import check_forward, check_grads

INF = float("inf")
NAN = float("nan")
MASKS = {
    "full": {},
    "causal": {"causal": True},
    "window": {"window_size": (9, 4)},
    "lookback": {"causal": True, "window_size": (12, -1)},
    "ahead": {"window_size": (-1, 3)},
}
LENGTHS = ((1, 1), (5, 2), (33, 33), (20, 70), (70, 20), (64, 64))
HEADS = ((1, 1), (2, 2), (7, 1), (12, 4), (96, 8))
HEADDIMS = ((64, 64), (1, 1), (7, 7), (20, 20), (72, 72), (160, 160), (48, 80), (24, 16))
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
SMALL = reference.Limits(rows=16, keys=24, elements=2**12)


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Tensors this small gain nothing from threads, and threads that wait for each other slow a shared machine down."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def small_tiles(monkeypatch):
    """Several chunks and tiles, ragged ones among them, from small tensors."""
    monkeypatch.setitem(reference.LIMITS, "cpu", SMALL)


def band_of(causal=False, window_size=(None, None)):
    left, right = (None if edge in (None, -1) else edge for edge in window_size)
    return Band(left, 0 if causal else right)


def inputs(seqlen_q, seqlen_k, heads=(1, 1), headdims=(64, 64), dtype=torch.float32, batch=1, seed=0):
    generator = torch.Generator().manual_seed(seed)
    make = lambda s, h, d: torch.randn(batch, s, h, d, generator=generator, dtype=torch.float64).to(dtype)
    (heads_q, heads_kv), (headdim, headdim_v) = heads, headdims
    q, k, v = make(seqlen_q, heads_q, headdim), make(seqlen_k, heads_kv, headdim), make(seqlen_k, heads_kv, headdim_v)
    dout = make(seqlen_q, heads_q, headdim_v)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    dlse = torch.randn(batch, heads_q, seqlen_q, generator=generator, dtype=torch.float64).to(wide)
    return q, k, v, dout, dlse


def run(q, k, v, dout=None, dlse=None, needs=(True, True, True), softmax_scale=None, **mask):
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    out, lse = reference.forward(q, k, v, band_of(**mask), scale)
    return out, lse, reference.backward(dout, dlse, q, k, v, out, lse, band_of(**mask), scale, needs)


class Attention(torch.autograd.Function):
    """(out, lse) with the reference's gradient, for losses written as a user writes them."""

    @staticmethod
    def forward(ctx, q, k, v, band):
        ctx.band, ctx.scale = band, q.shape[-1] ** -0.5
        ctx.set_materialize_grads(False)
        out, lse = reference.forward(q, k, v, band, ctx.scale)
        ctx.save_for_backward(q, k, v, out, lse)
        return out, lse

    @staticmethod
    def backward(ctx, dout, dlse):
        saved = ctx.saved_tensors
        return (*reference.backward(dout, dlse, *saved, ctx.band, ctx.scale, ctx.needs_input_grad[:3]), None)


def leaves(*tensors):
    return [x.detach().clone().requires_grad_() for x in tensors]


# The oracle itself


@pytest.mark.parametrize("mask", MASKS)
def test_oracle_agrees_with_torch_sdpa(mask):
    q, k, v, dout, _ = inputs(20, 33, (4, 2), (16, 8), torch.float64, batch=2)
    seen = oracle.visible(20, 33, **MASKS[mask])
    q, k, v = leaves(q, k, v)
    heads = (x.transpose(1, 2) for x in (q, k, v))
    out = F.scaled_dot_product_attention(*heads, attn_mask=seen, enable_gqa=True).transpose(1, 2)
    grads = torch.autograd.grad(out, (q, k, v), dout)
    exact = oracle.attention(q, k, v, dout=dout, **MASKS[mask])
    for actual, expected in zip(exact, (out, None, *grads)):
        if expected is not None:
            torch.testing.assert_close(actual, expected, rtol=0, atol=1e-12)
    usual = oracle.plain(q, k, v, dout=dout, **MASKS[mask])
    assert all(oracle.error(getattr(usual, n), getattr(exact, n)) < 1e-12 for n in ("out", "lse", "dq", "dk", "dv"))


def test_oracle_gradient_of_lse_agrees_with_autograd():
    q, k, v, _, dlse = inputs(5, 9, (2, 1), (16, 16), torch.float64)
    q, k = leaves(q, k)
    logits = torch.einsum("bqhd,bkhd->bhqk", q, k.expand(-1, -1, 2, -1)) / 4
    hidden = ~oracle.visible(5, 9, causal=True)
    dq, dk = torch.autograd.grad(logits.masked_fill(hidden, -INF).logsumexp(-1), (q, k), dlse)
    exact = oracle.attention(q, k, v, causal=True, dlse=dlse)
    torch.testing.assert_close(exact.dq, dq, rtol=0, atol=1e-12)
    torch.testing.assert_close(exact.dk, dk, rtol=0, atol=1e-12)
    assert exact.dv.count_nonzero() == 0


@pytest.mark.parametrize("dtype", DTYPES)
def test_oracle_rejects_what_is_slightly_wrong(dtype):
    q, k, v, dout, dlse = inputs(33, 33, (2, 2), dtype=dtype)
    out, lse, (dq, dk, dv) = run(q, k, v, dout, dlse)
    exact, usual = (f(q, k, v, dout=dout, dlse=dlse) for f in (oracle.attention, oracle.plain))
    for what, actual in zip(("out", "lse", "dq", "dk", "dv"), (out, lse, dq, dk, dv)):
        ref = getattr(exact, what)
        allowed = oracle.budget(oracle.error(getattr(usual, what), ref), ref, dtype, what, exact.terms[what])
        assert allowed < 0.15 * ref.abs().max(), f"{what}: a budget this wide tests nothing"
        arguments = (ref, getattr(usual, what), dtype, what)
        oracle.assert_close_to_oracle(actual, *arguments, terms=exact.terms[what])
        wrong = ref.clone()
        wrong[0, 0, 0] += 1.01 * allowed
        with pytest.raises(AssertionError, match="largest error"):
            oracle.assert_close_to_oracle(wrong, *arguments, terms=exact.terms[what])
        for value in (NAN, INF, -INF):
            wrong = actual.clone()
            wrong[0, 0, 0] = value
            with pytest.raises(AssertionError, match="first difference"):
                oracle.assert_close_to_oracle(wrong, *arguments, terms=exact.terms[what])


def test_oracle_notices_a_swapped_alignment():
    q, k, v, _, _ = inputs(20, 33)
    out, lse = reference.forward(q, k, v, Band(None, 20 - 33), 0.125)  # top-left
    with pytest.raises(AssertionError):
        check_forward(out, lse, q, k, v, causal=True)


# The reference against the oracle


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("lengths", LENGTHS, ids=lambda s: "x".join(map(str, s)))
def test_lengths_and_masks(lengths, mask, dtype):
    q, k, v, dout, dlse = inputs(*lengths, (4, 2), (20, 12), dtype, batch=3)
    out, lse, grads = run(q, k, v, dout, dlse, **MASKS[mask])
    check_forward(out, lse, q, k, v, **MASKS[mask])
    check_grads(grads, q, k, v, dout, dlse, **MASKS[mask])
    assert [x.dtype for x in (out, *grads)] == [dtype] * 4
    assert lse.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert all(x.is_contiguous() for x in (out, lse, *grads))


@pytest.mark.parametrize("tiles", ("small", "default"))
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float32), ids=str)
@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("headdims", HEADDIMS, ids=str)
def test_headdims_and_heads(headdims, heads, dtype, tiles, request):
    if tiles == "small":
        request.getfixturevalue("small_tiles")
    q, k, v, dout, dlse = inputs(19, 26, heads, headdims, dtype)
    out, lse, grads = run(q, k, v, dout, dlse, causal=True)
    check_forward(out, lse, q, k, v, causal=True)
    check_grads(grads, q, k, v, dout, dlse, causal=True)


@pytest.mark.parametrize("mask", MASKS)
def test_default_tiles(mask):
    """More than one tile of the size used in earnest, causal edges and ragged ends inside."""
    q, k, v, dout, dlse = inputs(300, 530, (2, 1), (16, 8), torch.float32)
    out, lse, grads = run(q, k, v, dout, dlse, **MASKS[mask])
    check_forward(out, lse, q, k, v, **MASKS[mask])
    check_grads(grads, q, k, v, dout, dlse, **MASKS[mask])


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("edges", ((None, -1), (-3, None), (-2, 6), (4, -2), (-40, None), (None, -40)), ids=str)
def test_negative_edges(edges):
    """Edges may cut the diagonal away; here a query i sees keys i + shift + [-left, right]."""
    q, k, v, _, _ = inputs(30, 37, dtype=torch.float64)
    out, lse = reference.forward(q, k, v, Band(*edges), 0.125)
    ahead = torch.arange(37) - (torch.arange(30)[:, None] + 7)
    left, right = edges
    seen = (ahead >= -left if left is not None else ahead == ahead) & (ahead <= right if right is not None else True)
    logits = torch.einsum("bqhd,bkhd->bhqk", q, k).mul(0.125).masked_fill(~seen, -INF)
    torch.testing.assert_close(lse, logits.logsumexp(-1), rtol=0, atol=1e-12)
    expected = torch.einsum("bhqk,bkhd->bqhd", logits.softmax(-1).nan_to_num(0), v)
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("tiles", (SMALL, reference.Limits(5, 7, 1), reference.LIMITS["cpu"]), ids=str)
def test_float64_to_twelve_digits(tiles, mask, monkeypatch):
    monkeypatch.setitem(reference.LIMITS, "cpu", tiles)
    for lengths in ((40, 40), (70, 20), (20, 70)):
        q, k, v, dout, dlse = inputs(*lengths, (6, 2), (16, 8), torch.float64, batch=2)
        exact = oracle.attention(q, k, v, dout=dout, dlse=dlse, **MASKS[mask])
        out, lse, grads = run(q, k, v, dout, dlse, **MASKS[mask])
        for actual, expected in zip((out, lse, *grads), exact):
            torch.testing.assert_close(actual, expected, rtol=0, atol=1e-12)


def test_gradcheck():
    q, k, v = leaves(*inputs(6, 9, (2, 1), (4, 3), torch.float64)[:3])
    assert torch.autograd.gradcheck(lambda *x: Attention.apply(*x, Band(5, 0)), (q, k, v))


@pytest.mark.parametrize("scale", (0.0, 1.0, 0.3, -0.5))
def test_softmax_scale(scale):
    q, k, v, dout, dlse = inputs(20, 30, (2, 1), (8, 8), torch.bfloat16)
    out, lse, grads = run(q, k, v, dout, dlse, softmax_scale=scale)
    check_forward(out, lse, q, k, v, softmax_scale=scale)
    check_grads(grads, q, k, v, dout, dlse, softmax_scale=scale)


@pytest.mark.parametrize("batch,seqlen_q,seqlen_k", ((0, 5, 4), (2, 0, 4), (2, 5, 0), (0, 0, 0)))
@pytest.mark.parametrize("mask", ("full", "causal"))
def test_empty(batch, seqlen_q, seqlen_k, mask):
    q, k, v, dout, dlse = inputs(seqlen_q, seqlen_k, (4, 2), (8, 6), torch.bfloat16, batch=batch)
    out, lse, grads = run(q, k, v, dout, dlse, **MASKS[mask])
    check_forward(out, lse, q, k, v, **MASKS[mask])
    assert out.shape == (batch, seqlen_q, 4, 6) and out.count_nonzero() == 0
    assert torch.equal(lse, torch.full((batch, 4, seqlen_q), -INF))
    for x, grad in zip((q, k, v), grads):
        assert torch.equal(grad, torch.zeros_like(x))


def test_needs_and_missing_gradients():
    q, k, v, dout, dlse = inputs(20, 33, (4, 2), (8, 8), torch.float32)
    zero_dout, zero_dlse = torch.zeros_like(dout), torch.zeros_like(dlse)
    for flows in ((dout, dlse), (dout, None), (None, dlse), (None, None)):
        filled = (zero_dout if flows[0] is None else flows[0], zero_dlse if flows[1] is None else flows[1])
        every = run(q, k, v, *filled, causal=True)[2]
        for needs in itertools.product((True, False), repeat=3):
            grads = run(q, k, v, *flows, needs=needs, causal=True)[2]
            assert [g is not None for g in grads] == list(needs)
            for grad, expected in zip(grads, every):
                if grad is not None:
                    torch.testing.assert_close(grad, expected, rtol=0, atol=1e-6)


# Memory layout, autocast, memory use


@pytest.mark.usefixtures("small_tiles")
def test_any_strides():
    q, k, v, dout, dlse = inputs(30, 41, (4, 2), (16, 8), torch.float32, batch=2)
    contiguous = run(q, k, v, dout, dlse, causal=True)
    spread = lambda x: torch.stack((x, x), -1)[..., 0]  # stride 2 in the last dimension
    heads_first = lambda x: x.transpose(1, 2).contiguous().transpose(1, 2)
    sequence_first = lambda x: x.transpose(0, 1).contiguous().transpose(0, 1)
    for layout in (spread, heads_first, sequence_first):
        other = run(layout(q), layout(k), layout(v), layout(dout), dlse.mT.contiguous().mT, causal=True)
        for a, b in zip((*contiguous[:2], *contiguous[2]), (*other[:2], *other[2])):
            assert torch.equal(a, b) and b.is_contiguous()


def test_expanded_keys_get_the_gradient_of_the_shared_head():
    q, k, v, dout, _ = inputs(20, 33, (8, 1), (16, 8), torch.float64, batch=3)
    k, v = k[:1], v[:1]
    shared, wide = leaves(k, v), leaves(k, v)
    expand = lambda x, heads: x.expand(3, -1, heads, -1)
    one = Attention.apply(q, *(expand(x, 1) for x in shared), Band(None, 0))[0]
    many = Attention.apply(q, *(expand(x, 8) for x in wide), Band(None, 0))[0]
    torch.testing.assert_close(one, many, rtol=0, atol=1e-12)
    for a, b in zip(torch.autograd.grad(one, shared, dout), torch.autograd.grad(many, wide, dout)):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


def test_autocast_of_the_caller_changes_nothing():
    q, k, v, dout, dlse = inputs(20, 33, dtype=torch.float32)
    expected = run(q, k, v, dout, dlse)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        actual = run(q, k, v, dout, dlse)
    for a, b in zip((*expected[:2], *expected[2]), (*actual[:2], *actual[2])):
        assert torch.equal(a, b)


class Allocations(TorchDispatchMode):
    """The largest tensor made, in elements, and the most bytes alive at a time among those made."""

    def __init__(self):
        super().__init__()
        self.alive, self.largest, self.peak = {}, 0, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for x in tree_leaves(result):
            if isinstance(x, torch.Tensor):
                storage = x.untyped_storage()
                self.largest = max(self.largest, storage.nbytes() // x.element_size())
                self.alive[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self.alive = {key: entry for key, entry in self.alive.items() if not entry[0].expired()}
        self.peak = max(self.peak, sum(size for _, size in self.alive.values()))
        return result


def test_memory_is_linear_in_seqlen():
    seen = {}
    for seqlen in (2048, 4096, 8192):
        tensors = inputs(seqlen, seqlen, (1, 1), (8, 8))
        with Allocations() as seen[seqlen]:
            run(*tensors)
        assert seen[seqlen].largest < seqlen * seqlen // 8
    first, second, third = (seen[s].peak for s in sorted(seen))
    # Linear with a constant part: twice the length adds twice as much as the doubling before. Quadratic is 4 times.
    assert third - second < 2.5 * (second - first)
    assert third < 8192 * 8192 * 4 / 16


def test_memory_is_bounded_in_batch_and_heads():
    """Beyond its operands and results, a call of any batch needs what a chunk needs."""
    extra = {}
    for batch in (128, 512):
        tensors = inputs(64, 64, (4, 4), (8, 8), batch=batch)
        with Allocations() as seen:
            results = run(*tensors)
        extra[batch] = seen.peak - sum(x.nbytes for x in (*tensors, *results[:2], *results[2]))
    assert extra[512] < 1.05 * extra[128]
    assert extra[512] < 10 * 4 * reference.LIMITS["cpu"].elements


# inf, NaN, extreme values


@pytest.mark.parametrize("tiles", (SMALL, reference.LIMITS["cpu"]), ids=str)
@pytest.mark.parametrize("mask", ("causal", "window", "full"))
@pytest.mark.parametrize("value", (NAN, INF, -INF))
def test_values_that_are_not_finite_reach_only_who_sees_them(value, mask, tiles, monkeypatch):
    monkeypatch.setitem(reference.LIMITS, "cpu", tiles)
    for name, position in itertools.product("qkv", (0, 29, 47)):
        q, k, v, dout, dlse = inputs(40, 50, (4, 2), (8, 6), torch.float32, batch=2)
        {"q": q, "k": k, "v": v}[name][1, min(position, 39 if name == "q" else 49), 1, 3] = value
        out, lse, grads = run(q, k, v, dout, dlse, **MASKS[mask])
        check_forward(out, lse, q, k, v, **MASKS[mask], label=f"{name}[{position}]={value}")
        check_grads(grads, q, k, v, dout, dlse, **MASKS[mask], label=f"{name}[{position}]={value}")
        assert bool(out[0].isfinite().all())


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("value", (NAN, INF))
def test_incoming_gradients_that_are_not_finite(value):
    """Where a query sees nothing they are dropped: lse is -inf there, and its square has gradient -inf."""
    q, k, v, dout, dlse = inputs(40, 25, (2, 2), (8, 8), torch.float32)
    dout[:, :15], dlse[:, :, :15] = value, -value
    grads = run(q, k, v, dout, dlse, causal=True)[2]
    assert all(bool(g.isfinite().all()) for g in grads) and grads[0][:, :15].count_nonzero() == 0
    quiet = run(q, k, v, dout.nan_to_num(0, 0, 0), dlse.nan_to_num(0, 0, 0), causal=True)[2]
    for a, b in zip(grads, quiet):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-5)
    dout[:, 30] = value
    check_grads(run(q, k, v, dout, dlse, causal=True)[2], q, k, v, dout, dlse, causal=True)


def test_keys_at_minus_infinity_count_as_not_seen():
    """A finite query has logit -inf with them: weight 0, so v gets gradient 0, while 0 * inf makes dq NaN."""
    q, k, v, dout, dlse = inputs(5, 9, (2, 2), (8, 8), torch.float32)
    q, k = q.abs(), torch.zeros_like(k)
    k[..., 0] = -INF
    out, lse, grads = run(q, k, v, dout, dlse)
    assert out.count_nonzero() == 0 and bool(lse.isneginf().all()) and grads[2].count_nonzero() == 0
    check_forward(out, lse, q, k, v)
    check_grads(grads, q, k, v, dout, dlse)


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("dtype", (torch.float16, torch.bfloat16), ids=str)
@pytest.mark.parametrize("logit", (-128.0, -2e4, 2e4))
def test_logits_far_from_zero(logit, dtype):
    q, k, v, dout, _ = inputs(40, 50, dtype=dtype)
    q, k = torch.zeros_like(q), torch.zeros_like(k)
    q[..., 0], k[..., 0] = 320.0, logit * 8 / 320
    out, lse, grads = run(q, k, v, dout)
    torch.testing.assert_close(out.double(), v.double().mean(1, keepdim=True).expand_as(out), rtol=2e-2, atol=2e-3)
    expected = 320.0 * k[0, 0, 0, 0].item() / 8 + torch.tensor(50.0).log().item()
    torch.testing.assert_close(lse, torch.full_like(lse, expected), rtol=1e-6, atol=0)
    check_forward(out, lse, q, k, v)
    check_grads(grads, q, k, v, dout)


@pytest.mark.usefixtures("small_tiles")
def test_heavy_tails():
    q, k, v, dout, dlse = heavy_tailed(2, 70, (4, 2), 64, torch.bfloat16)
    out, lse, grads = run(q, k, v, dout, dlse, causal=True)
    check_forward(out, lse, q, k, v, causal=True)
    check_grads(grads, q, k, v, dout, dlse, causal=True)


def heavy_tailed(batch, seqlen, heads, headdim, dtype):
    """Like activations: a lognormal scale for each token, one channel in a hundred 30 times larger."""
    tensors = inputs(seqlen, seqlen, heads, (headdim, headdim), torch.float32, batch)
    generator = torch.Generator().manual_seed(1)
    loud = torch.where(torch.rand(headdim, generator=generator) < 0.01, 30.0, 1.0)
    loud[0] = 30.0
    scaled = (x * torch.randn(*x.shape[:2], 1, 1, generator=generator).exp() * loud for x in tensors[:4])
    return *(x.to(dtype) for x in scaled), tensors[4]


# Known reports


@pytest.mark.parametrize("seqlen_q,seqlen_k,heads,headdim,batch", ((5, 2, 1, 64, 1), (300, 130, 4, 128, 2)))
def test_c01_more_queries_than_keys_causal(seqlen_q, seqlen_k, heads, headdim, batch):
    q, k, v, dout, dlse = inputs(seqlen_q, seqlen_k, (heads, heads), (headdim, headdim), torch.bfloat16, batch)
    out, lse, grads = run(q, k, v, dout, dlse, causal=True)
    blind = seqlen_q - seqlen_k
    assert out[:, :blind].count_nonzero() == 0 and grads[0][:, :blind].count_nonzero() == 0
    assert bool(lse[..., :blind].isneginf().all()) and bool(lse[..., blind:].isfinite().all())
    assert torch.equal(out[:, blind], v[:, 0])
    assert all(bool(g.isfinite().all()) for g in grads)
    check_forward(out, lse, q, k, v, causal=True)
    check_grads(grads, q, k, v, dout, dlse, causal=True)


def keys_seen(seqlen_q, seqlen_k, **mask):
    """Keys that each query mixes: K = 0 and V one-hot by key."""
    q, k = torch.randn(1, seqlen_q, 1, 8), torch.zeros(1, seqlen_k, 1, 8)
    v = torch.eye(seqlen_k).view(1, seqlen_k, 1, seqlen_k)
    out, lse = reference.forward(q, k, v, band_of(**mask), 1.0)
    counts = out.count_nonzero(-1).flatten()
    torch.testing.assert_close(lse.flatten(), counts.float().log(), rtol=0, atol=1e-6)
    return counts.tolist()


def test_c02_causal_is_bottom_right_aligned():
    assert keys_seen(2, 5, causal=True) == [4, 5]
    assert keys_seen(5, 2, causal=True) == [0, 0, 0, 1, 2]


@pytest.mark.parametrize("left,right", ((0, 0), (3, 0), (3, 2), (15, 0)))
def test_c03_window_counts_the_current_token_extra(left, right):
    expected = [min(15, i + right) - max(0, i - left) + 1 for i in range(16)]
    assert keys_seen(16, 16, window_size=(left, right)) == expected
    if right == 0:
        assert expected == [min(i + 1, left + 1) for i in range(16)]


def test_c09_huge_equal_inputs():
    q = torch.full((1, 1, 1, 64), 133120.0, dtype=torch.bfloat16)
    out, lse, (dq, dk, dv) = run(q, q, q, torch.ones_like(q))
    assert torch.equal(out, q)
    torch.testing.assert_close(lse.item(), 133120.0**2 * 8, rtol=1e-6, atol=0)
    assert dq.count_nonzero() == 0 and dk.count_nonzero() == 0 and torch.equal(dv, torch.ones_like(q))
    # The lse of a kernel that adds up in another order may be lower by more than any exp can take.
    lower = torch.nextafter(lse, torch.zeros_like(lse))
    grads = reference.backward(torch.ones_like(q), None, q, q, q, out, lower, Band(), 0.125)
    assert all(bool(g.isfinite().all()) for g in grads)


def test_c10_most_rows_see_nothing():
    for length, seed in zip((76, 34, 146), range(3)):
        q, k, v, _, _ = (x * 3 for x in inputs(length, 1, headdims=(32, 32), dtype=torch.float16, seed=seed))
        dout = torch.ones_like(q)
        out, _, (dq, dk, dv) = run(q, k, v, dout, causal=True)
        assert out[:, :-1].count_nonzero() == 0 and torch.equal(out[:, -1], v[:, 0])
        assert dq[:, :-1].count_nonzero() == 0 and torch.equal(dv, torch.ones_like(dv))
        # One key means dS = dP - delta = 0; both are the same sum of 32 terms, to float32 rounding.
        assert dq.abs().max() < 1e-4 and dk.abs().max() < 1e-4
        check_grads((dq, dk, dv), q, k, v, dout, causal=True)


def test_c12_a_query_without_keys_poisons_nothing():
    torch.manual_seed(0)
    project, lengths = torch.nn.Linear(16, 48), (0, 7)
    x = torch.randn(2, 7, 1, 16)
    losses, outs = [], []
    for sequence, length in zip(x, lengths):
        q, k, v = project(sequence[None]).chunk(3, -1)
        out, _ = Attention.apply(q, k[:, :length], v[:, :length], Band())
        outs.append(out)
        losses.append(out.square().sum())
    assert outs[0].count_nonzero() == 0
    gradient = torch.autograd.grad(sum(losses), project.weight, retain_graph=True)[0]
    assert bool(gradient.isfinite().all()) and gradient.count_nonzero() > 0
    assert torch.equal(gradient, torch.autograd.grad(losses[1], project.weight)[0])
    # One row of a tile instead of a whole sequence: a band one short of causal hides every key of the first query.
    q, k, v = project(x).chunk(3, -1)
    out, _ = Attention.apply(q, k, v, Band(None, -1))
    assert out[:, 0].count_nonzero() == 0 and out[:, 1:].count_nonzero() == out[:, 1:].numel()
    assert bool(torch.autograd.grad(out.square().sum(), project.weight)[0].isfinite().all())


def test_c15_one_query_many_keys():
    q, k, v, _, _ = inputs(1, 4096, (16, 16), dtype=torch.bfloat16)
    q, k, v = leaves(q, k, v)
    out, _ = Attention.apply(q, k, v, Band())
    out.transpose(1, 2).reshape(1, 16 * 64).sum().backward()
    assert all(bool(x.grad.isfinite().all()) for x in (q, k, v))
    p = torch.einsum("bqhd,bkhd->bhqk", q.double(), k.double()).div(8).softmax(-1)
    torch.testing.assert_close(v.grad.double(), p.permute(0, 3, 1, 2).expand_as(v), rtol=2**-8, atol=0)
    check_grads((q.grad, k.grad, v.grad), q, k, v, torch.ones(()).bfloat16().expand_as(out))


@pytest.mark.parametrize("headdim", (64, 128, 256))
def test_c16_real_activations_in_several_sequences(headdim):
    *tensors, _ = heavy_tailed(3, 70, (16, 2), headdim, torch.bfloat16)
    q, k, v, dout = (x.transpose(0, 1).contiguous().transpose(0, 1) for x in tensors)
    out, lse, grads = run(q, k, v, dout, causal=True)
    check_forward(out, lse, q, k, v, causal=True, per_sequence=True)
    check_grads(grads, q, k, v, dout, causal=True, per_sequence=True)


def test_c17_loss_on_lse():
    q, k, v, _, _ = inputs(64, 64, (2, 2), dtype=torch.bfloat16)
    q, k, v = leaves(q, k, v)
    _, lse = Attention.apply(q, k, v, Band())
    dq, dk, dv = torch.autograd.grad(lse.mean(), (q, k, v))
    p = torch.einsum("bqhd,bkhd->bhqk", q.double(), k.double()).div(8).softmax(-1)
    expected = torch.einsum("bhqk,bkhd->bqhd", p, k.double()) / 8 / lse.numel()
    torch.testing.assert_close(dq.double(), expected, rtol=2**-7, atol=1e-8)
    assert dv.count_nonzero() == 0 and dk.count_nonzero() == dk.numel()
    out, lse = Attention.apply(q, k, v, Band())
    grads = torch.autograd.grad(out.sum() + lse.sum(), (q, k, v))
    check_grads(grads, q, k, v, torch.ones_like(out), torch.ones_like(lse))


def test_c33_gradients_with_zero_strides():
    losses = (
        lambda out: out.sum(),
        lambda out: out.mean(),
        lambda out: out[:, :1].sum(),
        lambda out: out.transpose(1, 2).sum(),
    )
    for loss in losses:
        q, k, v = leaves(*inputs(5, 5, (2, 2), (8, 8), torch.bfloat16)[:3])
        out, _ = Attention.apply(q, k, v, Band(None, 0))
        leaf = out.detach().requires_grad_()
        dout = torch.autograd.grad(loss(leaf), leaf)[0].contiguous()
        check_grads(torch.autograd.grad(loss(out), (q, k, v)), q, k, v, dout, causal=True)


def test_gradients_over_parts_of_the_keys_add_up():
    """With the lse and out of the whole, as context parallelism passes them."""
    q, k, v, dout, dlse = inputs(100, 128, (4, 2), (16, 16), torch.float64)
    out, lse, (dq, dk, dv) = run(q, k, v, dout, dlse)
    parts = []
    for part in (slice(0, 70), slice(70, 128)):
        parts.append(reference.backward(dout, dlse, q, k[:, part], v[:, part], out, lse, Band(), 0.25))
    torch.testing.assert_close(parts[0][0] + parts[1][0], dq, rtol=0, atol=1e-12)
    torch.testing.assert_close(torch.cat((parts[0][1], parts[1][1]), 1), dk, rtol=0, atol=1e-12)
    torch.testing.assert_close(torch.cat((parts[0][2], parts[1][2]), 1), dv, rtol=0, atol=1e-12)
