"""sm80.backward on a GPU of compute capability 8.0 or newer: the cases of its spec, incoming gradients, layouts."""

import zlib

import pytest
import torch

from flashattn_hopper import explain, hopper_attention, jit, reference
from flashattn_hopper.kernels.sm80 import specs as sm80

from . import cases, fuzz, oracle
from .oracle import check_grads
from .test_backward import ALLOCATIONS, check_strictly, grads_of, inputs

pytestmark = pytest.mark.gpu(since=(8, 0))

BACKEND = "sm80"
HERE = torch.cuda.get_device_capability() if torch.cuda.is_available() else None
FORWARD, SPEC = (spec.on(HERE) or spec for spec in (sm80.FORWARD, sm80.BACKWARD))
each_mask = pytest.mark.parametrize(
    "mask", [{}, {"causal": True}, {"window_size": (90, 33)}], ids=["full", "causal", "window"]
)
each_headdim = pytest.mark.parametrize("headdim", [headdim for headdim, _ in SPEC.headdims])


@pytest.fixture(scope="module")
def kernels():
    """In place of the Hopper kernels: what the tests of this file launch, compiled by every core."""
    return jit.warmup([*cases.variants(FORWARD), *cases.variants(SPEC)])


@pytest.fixture(autouse=True)
def only_the_kernel(monkeypatch):
    """Gradients of the reference would pass every test here."""

    def refuse(*_):
        raise AssertionError("the reference was asked for gradients")

    if BACKEND == SPEC.backend:
        monkeypatch.setattr(reference, "backward", refuse)


def gradients(q, k, v, dout, dlse=None, **keywords):
    """(dq, dk, dv); dout or dlse may be None."""
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    out, lse = hopper_attention(*leaves, return_lse=True, backend=BACKEND, **keywords)
    return grads_of(leaves, out, lse, dout, dlse)


def check(q, k, v, dout, dlse=None, **keywords):
    """Gradients, held against float64."""
    grads = gradients(q, k, v, dout, dlse, **keywords)
    check_grads(grads, q, k, v, dout, dlse, **keywords)
    return grads


def test_the_kernel_is_what_runs():
    q, k, v, *_ = inputs()
    assert explain(q, k, v, backend=BACKEND, deterministic=True).backward == "sm80.backward"


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


@pytest.mark.parametrize("seqlens", [(1, 300), (300, 1), (5, 2), (300, 130), (129, 128), (64, 1000)], ids=str)
@pytest.mark.parametrize("mask", [{"causal": True}, {"window_size": (20, 0)}], ids=["causal", "window"])
def test_queries_without_keys_and_keys_without_queries(mask, seqlens, poison):
    q, k, v, dout, dlse = inputs(2, seqlens, (4, 2), (64, 64))
    grads = gradients(q, k, v, dout, dlse, **mask)
    poison.check(ALLOCATIONS)
    check_grads(grads, q, k, v, dout, dlse, **mask)
    seen = oracle.visible(*seqlens, device=q.device, **mask)
    assert not grads[0][:, ~seen.any(1)].any(), "dq of queries without keys"
    assert not any(grad[:, ~seen.any(0)].any() for grad in grads[1:]), "dk, dv of keys without queries"


@each_headdim
def test_ragged_lengths(headdim):
    """Beside as many queries: one sequence of equal logits at -16 sqrt(headdim), one normal."""
    q, k, v, dout, _ = inputs(2, (300, 300), (1, 1), (headdim, headdim))
    q[0], k[0] = 4, -4
    for length in range(1, 301, 7):
        part = [x[:, :length] for x in (q, k, v, dout)]
        check_strictly(gradients(*part), *part, {}, lambda b, n=length: f"length {n}, sequence {b}")


@pytest.mark.parametrize("heads", [(1, 1), (8, 1), (7, 7), (12, 3), (96, 8), (33, 11)], ids=str)
@each_headdim
def test_groups_of_heads(headdim, heads):
    check(*inputs(1, (140, 270), heads, (headdim, headdim)), causal=True)


@pytest.mark.parametrize("dims", [(72, 72), (80, 80), (104, 104), (8, 8), (64, 8), (16, 128), (120, 40)], ids=str)
@each_mask
def test_padded_headdims(dims, mask, poison):
    for length in (60, 70, 300):
        operands = inputs(1, (length, length + 10), (2, 2), dims)
        grads = gradients(*operands, **mask)
        poison.check(ALLOCATIONS)
        check_grads(grads, *operands, **mask)


@pytest.mark.parametrize("scale", [1e-6, 0.01, 1.0, 7.5])
def test_softmax_scale(scale):
    check(*inputs(), softmax_scale=scale, causal=True)


@each_mask
@each_headdim
def test_a_loss_on_lse_alone(headdim, mask):
    q, k, v, _, dlse = inputs(dims=(headdim, headdim))
    _, _, dv = check(q, k, v, None, dlse, **mask)
    assert not dv.any()


@pytest.mark.parametrize("layout", cases.LAYOUTS)
def test_layout(layout):
    """The same bits as from contiguous copies, for one operand at a time and for all four."""
    operands = inputs(2, (130, 259), (4, 2), (64, 64))[:4]
    expected = gradients(*operands, causal=True, deterministic=True)
    for chosen in ("qkvd", *"qkvd"):
        moved = [cases.LAYOUTS[layout](x) if name in chosen else x for name, x in zip("qkvd", operands)]
        grads = gradients(*moved, causal=True, deterministic=True)
        assert all(torch.equal(a, b) for a, b in zip(grads, expected)), f"{chosen} {layout}"


@each_mask
@each_headdim
def test_repeats_bit_by_bit(headdim, mask):
    """dK and dV always, dQ where it was asked for."""
    operands = inputs(2, (700, 900), (8, 2), (headdim, headdim))
    for deterministic in (False, True):
        first = gradients(*operands, deterministic=deterministic, **mask)[not deterministic :]
        for _ in range(20):
            again = gradients(*operands, deterministic=deterministic, **mask)[not deterministic :]
            assert all(torch.equal(a, b) for a, b in zip(again, first))


@pytest.mark.parametrize("needs", ["q", "kv", "k", "v"])
@each_mask
@each_headdim
def test_what_nobody_needs_is_left_out(headdim, mask, needs):
    """What is computed has the bits of the deterministic gradients, whose kernels run alone."""
    *operands, dout, _ = inputs(1, (300, 270), (4, 2), (headdim, headdim))
    expected = dict(zip("qkv", gradients(*operands, dout, deterministic=True, **mask)))
    leaves = [x.detach().requires_grad_(name in needs) for name, x in zip("qkv", operands)]
    out = hopper_attention(*leaves, backend=BACKEND, **mask)
    wanted = [leaf for leaf in leaves if leaf.requires_grad]
    for name, grad in zip(needs, torch.autograd.grad(out, wanted, dout)):
        assert torch.equal(grad, expected[name]), name


@pytest.mark.parametrize("first_seed", fuzz.SHARES)
def test_fuzz(first_seed):
    fuzz.check(first_seed, backend=BACKEND, backward=True)
