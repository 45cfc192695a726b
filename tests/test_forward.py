"""The Hopper forward kernel on a GPU: the cases of its spec, memory layouts, streams, graphs, sizes, hard inputs."""

import gc

import pytest
import torch

from flashattn_hopper import _toolchain, hopper_attention, jit, planner, runner
from flashattn_hopper.arguments import TORCH_DTYPES
from flashattn_hopper.kernels.sm90 import specs as sm90
from flashattn_hopper.spec.mask import Band, Seqlens
from flashattn_hopper.spec.problem import FWD, AttentionProblem, Shape, Traits

from . import cases, oracle
from .oracle import check_forward

pytestmark = pytest.mark.gpu

SPEC = sm90.FORWARD
DTYPES = sorted(SPEC.dtypes)
BF = torch.bfloat16
dims_id = lambda dims: f"d{dims[0]}" if dims[0] == dims[1] else f"d{dims[0]}x{dims[1]}"
each_variant = pytest.mark.parametrize("variant", cases.variants(SPEC), ids=cases.variant_id)
# With what the table could use but does not: every switch of FwdTile.
every_variant = pytest.mark.parametrize(
    "variant", [*cases.variants(SPEC), *cases.other_variants(SPEC)], ids=cases.variant_id
)


def attend(q, k, v, **keywords):
    """(out, lse)"""
    return hopper_attention(q, k, v, return_lse=True, backend=cases.BACKEND, **keywords)


def launch(variant, q, k, v, window=None, want_lse=True):
    """(out, lse) by one variant, whichever the table would choose for this length."""
    spec, traits, tile, _ = variant
    mask = cases.mask_arguments(traits.mask, window)
    band = Band(*window) if window else Band(None, 0 if mask else None)
    shape = Shape(q.shape[0], q.shape[1], k.shape[1], q.shape[2], k.shape[2])
    problem = AttentionProblem(traits, shape, band, q.shape[3] ** -0.5)
    forward = runner.bind(jit.compiled(*variant), planner.Plan(spec, traits, tile), problem, q, k, v)
    return forward(q, k, v, want_lse), mask


def inputs(batch, seqlens, heads, dims, dtype=BF, seed=0):
    """q, k, v, normal."""
    generator = torch.Generator(cases.DEVICE).manual_seed(seed)
    make = lambda seqlen, h, d: torch.randn(
        batch, seqlen, h, d, generator=generator, device=cases.DEVICE, dtype=torch.float32
    ).to(dtype)
    return make(seqlens[0], heads[0], dims[0]), make(seqlens[1], heads[1], dims[0]), make(seqlens[1], heads[1], dims[1])


def synchronize():
    if cases.DEVICE == "cuda":
        torch.cuda.synchronize()


def same(pair, other):
    """Bit by bit, out and lse."""
    return all(torch.equal(bits(a), bits(b)) for a, b in zip(pair, other))


def bits(x):
    return x.view(torch.int32 if x.dtype == torch.float32 else torch.int16)


@pytest.fixture(autouse=True)
def tickets_are_left_zero():
    """Invariant of the dynamic schedule, after whatever a test does."""
    yield
    synchronize()
    assert not any(bool(counters.any()) for counters in runner._tickets.values())


@pytest.fixture
def much_memory():
    """Tens of gigabytes, given back afterwards."""
    yield
    gc.collect()
    torch.cuda.empty_cache()


# The matrix


@pytest.mark.parametrize("case", cases.cases_for(SPEC), ids=lambda case: case.id)
def test_case(case, poison):
    q, k, v = case.tensors()
    out, lse = attend(q, k, v, deterministic=case.traits.deterministic, **case.mask)
    poison.check(allocations=2)
    check_forward(out, lse, q, k, v, **case.mask)


@pytest.mark.parametrize("variant", cases.other_variants(SPEC), ids=cases.variant_id)
@pytest.mark.parametrize("seqlens", [(1, 1), (129, 65), (333, 333), (100, 400), (400, 100)], ids=str)
def test_other_tiles(variant, seqlens, poison):
    window = (100, 30) if variant[1].mask == "window" else None
    q, k, v = inputs(2, seqlens, (4, 2), (128, 128))
    (out, lse), mask = launch(variant, q, k, v, window)
    poison.check(allocations=2)
    check_forward(out, lse, q, k, v, **mask)


@pytest.mark.parametrize("scale", [1e-6, 0.01, 1.0, 7.5])
def test_softmax_scale(scale, poison):
    q, k, v = inputs(2, (150, 333), (4, 2), (64, 64))
    out, lse = attend(q, k, v, softmax_scale=scale, causal=True)
    poison.check(allocations=2)
    check_forward(out, lse, q, k, v, softmax_scale=scale, causal=True)


@every_variant
def test_without_lse(variant, poison):
    """Then there is no lse to write; the output is the same."""
    _, traits, _, _ = variant
    window = (90, 20) if traits.mask == "window" else None
    q, k, v = inputs(2, (333, 400), (4, 2), (traits.headdim, traits.headdim_v), TORCH_DTYPES[traits.dtype])
    (out, lse), _ = launch(variant, q, k, v, window, want_lse=False)
    poison.check(allocations=1)
    assert lse is None and torch.equal(out, launch(variant, q, k, v, window)[0][0])


def test_one_window_variant_serves_every_width():
    q, k, v = inputs(1, (300, 300), (2, 2), (128, 128))
    attend(q, k, v, window_size=(1, 1))
    before = jit.stats()
    for window in ((0, 0), (5, 0), (0, 5), (299, 0), (None, 4), (4, None), (1000, 1000)):
        check_forward(*attend(q, k, v, window_size=window), q, k, v, window_size=window)
    after = jit.stats()
    assert (after.compiles, after.disk_hits) == (before.compiles, before.disk_hits)


# Memory layout


@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (192, 128), (256, 256), (72, 72)], ids=dims_id)
@pytest.mark.parametrize("layout", cases.LAYOUTS)
def test_layout(layout, dims, poison):
    """The same bits as from contiguous copies, for one operand at a time and for all three."""
    arrange = cases.LAYOUTS[layout]
    for batch, seqlens, heads in ((2, (130, 259), (4, 2)), (1, (70, 1), (1, 1)), (3, (1, 90), (2, 1))):
        contiguous = inputs(batch, seqlens, heads, dims)
        expected = attend(*contiguous, causal=True)
        check_forward(*expected, *contiguous, causal=True)
        for chosen in ("qkv", "q", "k", "v"):
            operands = [arrange(x) if name in chosen else x for name, x in zip("qkv", contiguous)]
            assert same(attend(*operands, causal=True), expected), f"{chosen} {layout}"


@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (256, 256)], ids=dims_id)
@pytest.mark.parametrize("axis", ["batch", "seqlen", "heads", "batch and heads"])
def test_expanded_keys(axis, dims):
    q, k, v = inputs(3, (140, 300), (8, 8), dims)
    for name, dim in (("batch", 0), ("seqlen", 1), ("heads", 2)):
        if name in axis:
            k, v = (x.narrow(dim, 0, 1) for x in (k, v))
    wide = [x.expand(3, 300, 8, -1) for x in (k, v)]
    assert any(step == 0 for step in wide[0].stride())
    out, lse = attend(q, *wide, window_size=(120, 3))
    assert same((out, lse), attend(q, *(x.contiguous() for x in wide), window_size=(120, 3)))
    check_forward(out, lse, q, *wide, window_size=(120, 3))


def test_slices_of_one_packed_projection():
    q, k, v = inputs(2, (270, 270), (4, 4), (128, 128))
    by_matrix = torch.stack((q, k, v), 2)  # (B, S, 3, H, D)
    by_head = torch.stack((q, k, v), 3)  # (B, S, H, 3, D)
    grouped = torch.cat((q, k[:, :, :2], v[:, :, :2]), 2)  # (B, S, H + 2 Hk, D)
    expected = attend(q, k, v, causal=True)
    check_forward(*expected, q, k, v, causal=True)
    assert same(attend(*by_matrix.unbind(2), causal=True), expected)
    assert same(attend(*by_head.unbind(3), causal=True), expected)
    few = attend(q, k[:, :, :2].contiguous(), v[:, :, :2].contiguous(), causal=True)
    assert same(attend(*grouped.split((4, 2, 2), 2), causal=True), few)


@pytest.mark.parametrize("offset", [1, 4, 8, 16])
def test_storage_offsets(offset):
    """8 half elements are the 16 bytes that TMA wants; with other offsets the call makes a copy."""
    contiguous = inputs(2, (130, 100), (2, 2), (64, 64))
    expected = attend(*contiguous)
    moved = [x.new_full((x.numel() + offset,), float("nan"))[offset:].view(x.shape).copy_(x) for x in contiguous]
    assert same(attend(*moved), expected)
    # One call later the base is aligned again: what is decided by strides must not stick to the pointer.
    assert same(attend(*contiguous), expected)


# Repetition, streams, graphs


@every_variant
def test_repeats_bit_by_bit(variant):
    """Also where a tile needs a second attempt, and wherever the schedule happens to put it."""
    _, traits, tile, _ = variant
    window = (200, 40) if traits.mask == "window" else None
    dims, dtype = (traits.headdim, traits.headdim_v), TORCH_DTYPES[traits.dtype]
    q, k, v = inputs(4, (5 * tile.tile_m + 17, 7 * tile.tile_n + 5), (16, 4), dims, dtype)
    q[2, :, 3] *= 200
    first, _ = launch(variant, q, k, v, window)
    repeated = [launch(variant, q, k, v, window)[0] for _ in range(20)]
    assert all(same(pair, first) for pair in repeated)


def several_problems():
    """(q, k, v, keyword arguments) of different shapes, headdims, masks and dtypes."""
    table = [
        (3, (500, 700), (8, 2), (64, 64), BF, {"causal": True}),
        (1, (64, 2000), (16, 16), (128, 128), BF, {}),
        (2, (900, 900), (4, 4), (256, 256), torch.float16, {"causal": True}),
        (5, (333, 333), (6, 3), (192, 128), BF, {"window_size": (100, 0)}),
        (2, (1200, 100), (4, 1), (96, 96), torch.float16, {}),
        (16, (129, 65), (8, 8), (64, 64), BF, {}),
        (1, (2000, 2000), (2, 2), (128, 128), torch.float16, {"window_size": (300, 50)}),
    ]
    return [(*inputs(b, s, h, d, t, seed), mask) for seed, (b, s, h, d, t, mask) in enumerate(table)]


def test_four_streams_at_once():
    problems = several_problems()
    serial = [attend(q, k, v, **mask) for q, k, v, mask in problems]
    for pair, (q, k, v, mask) in zip(serial, problems):
        check_forward(*pair, q, k, v, **mask)
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in range(4)]
    results = []
    for turn in range(50):
        for s, stream in enumerate(streams):
            i = (3 * turn + 2 * s) % len(problems)
            q, k, v, mask = problems[i]
            with torch.cuda.stream(stream):
                results.append((i, attend(q, k, v, **mask)))
    torch.cuda.synchronize()
    wrong = [n for n, (i, pair) in enumerate(results) if not same(pair, serial[i])]
    assert not wrong, f"{len(wrong)} of {len(results)} launches differ from serial ones, first {wrong[:10]}"


def test_side_stream_without_synchronisation():
    """Inputs that are still being computed on the same stream, outputs used at once (C40)."""
    q, k, v = inputs(2, (700, 700), (4, 4), (128, 128))
    expected = attend(q * 2, k, v, causal=True)[0].float().sum()
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)  # tens of milliseconds
        doubled = torch.empty_like(q).copy_(q).mul_(2)
        total = attend(doubled, k, v, causal=True)[0].float().sum()
        doubled.zero_()
    stream.synchronize()
    assert torch.equal(total, expected)


def captured(q, k, v, stream=None, calls=1, **mask):
    """(graph, outputs): `calls` calls in a row, each on the output of the one before as its queries."""
    return captured_by(attend, q, k, v, stream, calls, **mask)


def captured_by(attend, q, k, v, stream=None, calls=1, **mask):
    attend(q, k, v, **mask)  # loads the kernel, which a capture must not
    torch.cuda.synchronize()
    graph, outputs = torch.cuda.CUDAGraph(), []
    with torch.cuda.graph(graph, stream=stream):
        for _ in range(calls):
            outputs.append(attend(outputs[-1][0] if outputs else q, k, v, **mask))
    return graph, outputs


@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (256, 256)], ids=dims_id)
def test_graph_replay(dims):
    q, k, v = inputs(2, (700, 700), (8, 4), dims)
    graph, outputs = captured(q, k, v, calls=3, causal=True)
    for seed in range(1, 6):
        for old, new in zip((q, k, v), inputs(2, (700, 700), (8, 4), dims, seed=seed)):
            old.copy_(new)
        for pair in outputs:
            for x in pair:
                x.fill_(float("nan"))
        graph.replay()
        queries = q
        for pair in outputs:
            assert same(pair, attend(queries, k, v, causal=True))
            queries = pair[0]


def test_two_graphs_of_one_stream_replayed_at_once():
    """They were captured on one stream but run side by side, so they must not share tickets."""
    operands = [inputs(2, (1500, 1500), (8, 8), (128, 128), seed=seed) for seed in (1, 2)]
    expected = [attend(*x, causal=True) for x in operands]
    stream = torch.cuda.Stream()
    graphs = [captured(*x, stream=stream, causal=True) for x in operands]
    streams = [torch.cuda.Stream() for _ in graphs]
    for _ in range(10):
        for _, outputs in graphs:
            for x in outputs[0]:
                x.fill_(float("nan"))
        torch.cuda.synchronize()
        for _ in range(5):
            for side, (graph, _) in zip(streams, graphs):
                with torch.cuda.stream(side):
                    graph.replay()
        torch.cuda.synchronize()
        for (_, outputs), pair in zip(graphs, expected):
            assert same(outputs[0], pair)


# Sizes


@pytest.mark.parametrize(
    "batch, seqlens, heads, dims, dtype",
    [
        (65536, (4, 4), (8, 8), (64, 64), torch.float16),  # C22
        (1, (10, 10), (65536, 65536), (16, 16), torch.float16),  # C22
        (13108, (3, 5), (5, 5), (64, 64), BF),  # 65540 heads of all sequences
        (65537, (2, 3), (1, 1), (256, 256), BF),
        (1, (70000, 40), (130, 1), (64, 64), BF),
    ],
    ids=str,
)
@pytest.mark.parametrize("mask", [{}, {"causal": True}], ids=["full", "causal"])
def test_more_tiles_than_a_grid_dimension_takes(batch, seqlens, heads, dims, dtype, mask, poison, much_memory):
    q, k, v = inputs(batch, seqlens, heads, dims, dtype)
    out, lse = attend(q, k, v, **mask)
    poison.check(allocations=2)
    part_b, part_h, part_q = 8192, 4096, 8192
    last = seqlens[0] - part_q
    for b in range(0, batch, part_b):
        for h in range(0, heads[0], part_h):
            at_b, at_h = slice(b, b + part_b), slice(h, h + part_h)
            shared = slice(None) if heads[1] == 1 else at_h
            # Of a long sequence the first and the last queries; a causal mask counts from the end, so only those.
            parts = [slice(last, None)] if last > 0 else [slice(None)]
            if last > 0 and not mask:
                parts.append(slice(0, part_q))
            for at_q in parts:
                check_forward(
                    out[at_b, at_q, at_h], lse[at_b, at_h, at_q],
                    q[at_b, at_q, at_h], k[at_b, :, shared], v[at_b, :, shared], **mask,
                )  # fmt: skip
    assert not bool(out.isnan().any())


def far_apart(x, dim, stride):
    """A copy of x in which dimension `dim` has so large a stride that the tensor spans more than 2**31 elements."""
    steps = list(x.contiguous().stride())
    steps[dim] = stride
    span = 1 + sum((n - 1) * step for n, step in zip(x.shape, steps))
    assert span > 2**31
    return torch.empty(span, dtype=x.dtype, device=x.device).as_strided(x.shape, steps).copy_(x)


@pytest.mark.parametrize("dim, stride", [(0, 2**31 + 64), (1, 2**22), (2, 2**30 + 8)], ids=["batch", "seqlen", "heads"])
@pytest.mark.parametrize("which", ["q", "k", "v"])
def test_offsets_beyond_32_bits(which, dim, stride, much_memory):
    operands = inputs(2, (600, 600), (3, 3), (64, 64))
    expected = attend(*operands, causal=True)
    moved = [far_apart(x, dim, stride) if name == which else x for name, x in zip("qkv", operands)]
    assert same(attend(*moved, causal=True), expected)


def test_an_output_of_more_than_2_31_elements(poison, much_memory):
    q, k, v = inputs(1, (1, 64), (512, 1), (128, 128))
    seqlen = 33000
    q = torch.randn(1, seqlen, 512, 128, device=cases.DEVICE, dtype=BF)
    out, lse = attend(q, k, v)
    assert out.numel() > 2**31
    poison.check(allocations=2)
    for begin in range(0, seqlen, 3000):
        part = slice(begin, begin + 3000)
        assert same((out[:, part].contiguous(), lse[:, :, part].contiguous()), attend(q[:, part], k, v)), begin
    for part in (slice(0, 40), slice(16380, 16420), slice(seqlen - 40, seqlen)):
        check_forward(out[:, part], lse[:, :, part], q[:, part], k, v)


# Hard inputs


def check_strictly(out, lse, q, k, v, mask, label):
    """As check_forward, but against the exact result rounded once: plain PyTorch rounds its scores, we do not.

    That leaves the rounding of P and of the output. For scores that are exact in float32. Each sequence by itself.
    """
    exact = oracle.attention(q, k, v, **mask)
    assert torch.equal(lse.isneginf(), exact.lse.isneginf())
    off = (lse.double() - exact.lse).abs() > 2e-6 * exact.terms["lse"]  # sixteen units of float32, for each element
    assert not bool(off.any()), f"{label(int(off.nonzero()[0, 0]))}: lse wrong in {int(off.sum())} elements"
    for b in range(q.shape[0]):
        ref, terms = exact.out[b : b + 1], exact.terms["out"][b : b + 1]
        rounded = ref.to(q.dtype)
        oracle.assert_close_to_oracle(out[b : b + 1], ref, rounded, q.dtype, "out", terms=terms, label=label(b))


def hard_window(variant):
    """Wide enough for tiles without a mask."""
    _, traits, tile, _ = variant
    return (2 * tile.tile_n + 64, tile.tile_n // 2) if traits.mask == "window" else None


@every_variant
def test_hard_inputs(variant, poison):
    _, traits, tile, _ = variant
    q, k, v, names = cases.hard_inputs(traits, tile)
    (out, lse), mask = launch(variant, q, k, v, hard_window(variant))
    poison.check(allocations=2)
    check_strictly(out, lse, q, k, v, mask, names.__getitem__)


@every_variant
def test_a_second_attempt_among_first_ones(variant):
    """One hard sequence among easy ones: it comes out right, and the easy ones as if it were not there."""
    _, traits, tile, _ = variant
    q, k, v, names = cases.hard_inputs(traits, tile)
    easy, hard = names.index("saw"), names.index("stairs 100/16 rising left")
    order = [easy] * 40 + [hard] + [easy] * 40
    q, k, v = (x[order] for x in (q, k, v))
    (out, lse), mask = launch(variant, q, k, v, hard_window(variant))
    check_strictly(out, lse, q, k, v, mask, "sequence {}".format)
    (alone, _), _ = launch(variant, q[:40], k[:40], v[:40], hard_window(variant))
    assert torch.equal(out[:40], alone) and torch.equal(out[41:], alone)


@every_variant
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")], ids=str)
def test_keys_that_are_not_finite_reach_only_who_sees_them(variant, value):
    _, traits, tile, _ = variant
    seqlen = 3 * tile.tile_n + 13
    dims, dtype = (traits.headdim, traits.headdim_v), TORCH_DTYPES[traits.dtype]
    positions = (0, tile.tile_n + 1, 2 * tile.tile_n, seqlen - 1)
    q, k, v = inputs(len(positions) + 1, (seqlen, seqlen), (4, 2), dims, dtype)
    for entry, at in enumerate(positions):
        k[entry, at, 1, 3] = value  # in the second of the two heads, which serves the last two of q
    (out, lse), mask = launch(variant, q, k, v, (tile.tile_n + 70, 20) if traits.mask == "window" else None)
    check_forward(out, lse, q, k, v, per_sequence=True, **mask)
    assert bool(out[:, :, :2].isfinite().all()) and bool(out[-1].isfinite().all())


@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (256, 256)], ids=dims_id)
@pytest.mark.parametrize("dtype", DTYPES)
def test_queries_that_are_not_finite_stay_alone(dtype, dims):
    q, k, v = inputs(1, (200, 200), (2, 2), dims, TORCH_DTYPES[dtype])
    q[0, 5, 0, 1], q[0, 77, 1, 0] = float("nan"), float("inf")
    out, lse = attend(q, k, v, causal=True)
    check_forward(out, lse, q, k, v, causal=True)


@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (256, 256)], ids=dims_id)
@pytest.mark.parametrize("dtype", DTYPES)
def test_heavy_tails(dtype, dims):
    """Like activations: a lognormal scale for each token, one channel in a hundred far louder."""
    sigma, factor = (1.0, 30) if dtype == "bf16" else (0.5, 10)  # scores that float16 holds in plain PyTorch too
    loud = torch.ones(max(dims), device=cases.DEVICE)
    loud[::100] = factor
    spread = lambda x: x * (sigma * torch.randn(*x.shape[:2], 1, 1, device=x.device)).exp() * loud[: x.shape[-1]]
    q, k, v = (spread(x).to(TORCH_DTYPES[dtype]) for x in inputs(3, (400, 400), (8, 2), dims, torch.float32))
    for mask in ({}, {"causal": True}):
        check_forward(*attend(q, k, v, **mask), q, k, v, per_sequence=True, **mask)


def integers(*shape, seed=0):
    generator = torch.Generator(cases.DEVICE).manual_seed(seed)
    return torch.randint(-2, 3, shape, generator=generator, device=cases.DEVICE).to(BF)


def resident_blocks():
    return planner.num_sms(torch.device(cases.DEVICE, 0))


def tiles_of_a_round():
    """How many tiles a block does before second attempts; the import needs the compiler."""
    _toolchain.import_cute(SPEC.arch.target)
    from flashattn_hopper.kernels.common.schedule import ROUND

    return ROUND


@pytest.mark.parametrize(
    "slug",
    [
        "fwd.bf16.d64.full",
        "fwd.bf16.d128.causal",
        "fwd.bf16.d128.full",
        "fwd.bf16.d192.causal",
        "fwd.bf16.d256.full",
        "fwd.bf16.d256.causal",
    ],
)
def test_many_second_attempts(slug, much_memory):
    """More than a round of tiles in every resident block, and each of them overflows the first attempt; where keys rise
    each but the first ones of a head, which see no tile without a mask."""
    traits = Traits.parse(slug)
    headdim, heads = traits.headdim, 64
    tile = SPEC.tiles.find(traits, 300)
    seqlen = 2 * tile.tile_n + 10 + 2 * tile.tile_m * tile.rising
    if tile.rising:
        last = Band(right=0).kv_tiles(-(-seqlen // tile.tile_m) - 1, tile, Seqlens(seqlen, seqlen))
        assert last.full_end >= 2, "the first tile takes its maximum"
    batch = int(1.2 * tiles_of_a_round() * resident_blocks() / (heads * -(-seqlen // tile.tile_m))) + 1
    q, k = integers(batch, seqlen, heads, headdim, seed=1), integers(batch, seqlen, 2, headdim, seed=2)
    v = torch.randn(batch, seqlen, 2, headdim, device=cases.DEVICE).to(BF)
    # 100 nats for every 16 keys, rising to where the loop ends, and from another level in each sequence.
    keys = torch.arange(seqlen, device=cases.DEVICE)
    stairs = 100 * ((keys if tile.rising else seqlen - 1 - keys) // 16) * headdim**0.5 / 32
    q[..., 0] = 32
    k[..., 0] = (stairs.view(1, -1, 1) + torch.arange(batch, device=cases.DEVICE).view(-1, 1, 1)).round().to(BF)
    mask = cases.mask_arguments(traits.mask)
    out, lse = attend(q, k, v, **mask)
    assert bool(out.isfinite().all()) and bool(lse.isfinite().all())
    for b in range(batch):
        for h in (b % heads, 63 - b % 32):  # the tiles of a block lie all over
            one = (out[b : b + 1, :, h : h + 1], lse[b : b + 1, h : h + 1], q[b : b + 1, :, h : h + 1])
            shared = slice(h // 32, h // 32 + 1)
            label = lambda _, b=b, h=h: f"sequence {b}, head {h}"
            check_strictly(*one, k[b : b + 1, :, shared], v[b : b + 1, :, shared], mask, label)


@pytest.mark.parametrize("headdim", [64, 128, 256])
def test_second_attempts_between_rounds(headdim, much_memory):
    """Only the first tiles of each round need one, and all tiles are one key tile long, so that roles run far apart.

    Logits beyond 2**22 ask for a second attempt; equal ones give the mean of v.
    """
    tile = SPEC.tiles.find(Traits(FWD, "bf16", headdim, headdim), 50)
    blocks, heads, per_round = resident_blocks(), 32, tiles_of_a_round()
    batch = -(-(per_round + 8) * blocks // heads)
    q, k = integers(batch, tile.tile_m, heads, headdim, seed=1), integers(batch, 50, heads, headdim, seed=2)
    v = torch.randn(batch, 50, heads, headdim, device=cases.DEVICE).to(BF)
    # With one query tile for each head, tile n of the launch is head n.
    hard = torch.zeros(batch * heads, dtype=torch.bool, device=cases.DEVICE)
    hard[: blocks + 7] = hard[per_round * blocks - 20 : (per_round + 2) * blocks] = True
    hard = hard.view(batch, 1, heads, 1)
    q, k = (torch.where(hard, x.new_full((), 4096), x) for x in (q, k))
    first = attend(q, k, v)
    for b in range(0, batch, 64):
        check_strictly(*(x[b : b + 64] for x in (*first, q, k, v)), {}, lambda i, b=b: f"sequence {b + i}")
    assert all(same(attend(q, k, v), first) for _ in range(10))


# Devices


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs a second GPU")
def test_c40_the_second_gpu():
    q, k, v = inputs(2, (300, 300), (4, 2), (128, 128))
    expected = attend(q, k, v, causal=True)
    assert torch.cuda.current_device() == 0
    other = [x.to("cuda:1") for x in (q, k, v)]
    for _ in range(3):
        out, lse = attend(*other, causal=True)
        assert out.device == lse.device == torch.device("cuda:1") and torch.cuda.current_device() == 0
        torch.cuda.synchronize(1)
        assert same((out.to("cuda:0"), lse.to("cuda:0")), expected)
        assert same(attend(q, k, v, causal=True), expected)
    leaves = [x.requires_grad_() for x in other]
    attend(*leaves, causal=True)[0].sum().backward()
    assert all(x.grad.device == x.device and bool(x.grad.isfinite().all()) for x in leaves)
