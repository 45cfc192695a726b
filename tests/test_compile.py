"""Every Hopper variant compiles without a GPU, and its machine code has what a fast kernel must have.

Those of other archs have files of their own; the matrix at the end is of the whole catalog.
"""

import itertools
from dataclasses import replace

import pytest
import torch

from flashattn_hopper import _toolchain, jit, planner
from flashattn_hopper.arguments import TORCH_DTYPES, check, problem_of
from flashattn_hopper.catalog import CATALOG
from flashattn_hopper.kernels.common.operands import BwdOperands, FwdOperands
from flashattn_hopper.kernels.sm90 import specs as sm90
from flashattn_hopper.spec.problem import BWD, HALF, Traits

from . import cases
from .fake_cuda import accepts
from .inspect_cubin import count_instructions, inspect, inspect_all

KERNELS = [spec for spec in CATALOG if spec.arch is not None and spec.dtypes <= HALF]  # fp8: test_compile_fp8.py
VARIANTS = [variant for spec in KERNELS for variant in cases.variants(spec)]
OTHERS = cases.other_variants(sm90.FORWARD)
FORWARDS, BACKWARDS = (cases.variants(spec) for spec in (sm90.FORWARD, sm90.BACKWARD))

# Registers of a thread at launch: what 65536 allow, in eights, for so many threads; hand-overs start from there.
LAUNCH_REGISTERS = {256: 255, 384: 168, 512: 128}
# WGMMAs that ptxas serialises show as many more WARPGROUP instructions: 78 and up, against 21 to 29.
MOST_WARPGROUP = 40


# The machine code. One process needs 5 s for each variant, so this part is for `pytest -n`.


def check_main_kernel(used, tile, arch):
    """What holds for every kernel of warpgroups in roles."""
    check_no_spills(used)
    for family in ("HGMMA", "UTMALDG", "UTMASTG", "USETMAXREG"):
        assert used.count(family), f"no {family}"
    # A missing election: the copy is then issued once for every lane.
    assert used.count("BRA.U.ANY") == 0
    assert used.count("WARPGROUP") <= MOST_WARPGROUP, f"{used.count('WARPGROUP')} WARPGROUP: WGMMAs are serialised"
    assert used.block == (tile.num_threads, 1, 1)
    assert used.registers <= LAUNCH_REGISTERS[used.threads]
    # The hand-over must fit what the launch allocated: one warpgroup of producers, the others consumers.
    producer, consumer = tile.registers
    assert producer + tile.num_consumers * min(consumer, 255) <= arch.registers // 128


def draws(used):
    """Instructions that draw a ticket. An addition would be aggregated over the warp, and waited for at once."""
    return sum(n for name, n in used.opcodes.items() if name.startswith("ATOMG.") and ".INC." in name)


def check_no_spills(used):
    assert not used.local_memory and used.stack == 0, f"spilled registers: {used.local_memory}, stack {used.stack} B"


@pytest.mark.compile
@pytest.mark.parametrize("variant", [*FORWARDS, *OTHERS], ids=cases.variant_id)
def test_machine_code(variant, monkeypatch):
    _, traits, tile, arch = variant
    shared = smem_of(monkeypatch)
    used = inspect(jit.compile_cubin(*variant))
    check_main_kernel(used, tile, arch)
    # A ticket is drawn where a walk begins or in one of its loops; the other atomic counts the blocks that are done.
    dynamic = tile.schedule == "dynamic"
    assert (draws(used) >= 2) == dynamic and used.count("ATOMG") - draws(used) == dynamic
    assert len(shared) == 1 and shared[0] <= tile.smem_bytes(traits) <= arch.smem_bytes


@pytest.mark.compile
@pytest.mark.parametrize("variant", BACKWARDS, ids=cases.variant_id)
def test_machine_code_of_the_backward(variant, monkeypatch):
    """Three kernels in one: prepare, main, and what ends dQ."""
    _, traits, tile, arch = variant
    shared = smem_of(monkeypatch)
    from flashattn_hopper.kernels.sm90.key_products import AHEAD

    kernels = inspect_all(jit.compile_cubin(*variant))
    summed = tile.summed
    assert kernels.keys() == {"prepare", "main", "finish" if summed else "kernel"}
    main = kernels["main"]
    check_main_kernel(main, tile, arch)
    assert main.count("UBLKCP"), "lse and delta are not copied in bulk"
    added = main.count("RED") + main.count("REDG")
    if summed:
        vectors = sum(n for name, n in main.opcodes.items() if name.startswith(("RED.", "REDG.")) and "F32x4" in name)
        # A quarter of the dQ that a thread holds: tile_m x headdim over the threads of the consumers. What is put off
        # stands there twice: under the next tile's scores, and after the last tile; so does all of it where dQ is late.
        of_a_thread = tile.tile_m * traits.headdim // (128 * tile.num_consumers)
        times = 1 + tile.delayed
        assert vectors == times * of_a_thread // 4 + AHEAD[tile.tile_m].late, "dQ is not added in vectors"
        assert added - vectors == main.count("MEMBAR.ALL.GPU") == tile.in_turn, "a counter that publishes the sums"
    else:
        assert not added
        check_main_kernel(kernels["kernel"], tile, arch)  # the same warpgroups and registers
    for name in kernels.keys() & {"prepare", "finish"}:
        used = kernels[name]
        check_no_spills(used)
        assert not any(map(used.count, ("HGMMA", "UTMALDG", "RED", "REDG")))
        assert used.threads == 256 and used.registers <= 64  # a thousand threads of a multiprocessor
        assert used.count("LDG") and used.count("STG")
    # The only atomic with an answer is the ticket that resident blocks draw, with a query tile or where there is none;
    # in turn their first one too.
    drawn = sum(used.count(word) for used in kernels.values() for word in ("ATOM", "ATOMG"))
    assert drawn == draws(main) == 2 * (tile.kv_stages == 2) + tile.in_turn
    assert len(shared) == (1 if summed else 2)
    assert shared[0] <= tile.smem_bytes(traits) <= arch.smem_bytes and max(shared) <= arch.smem_bytes


@pytest.mark.compile
@pytest.mark.parametrize("wanted, kernels", [("dq", {"prepare", "kernel"}), ("dkdv", {"prepare", "main"})])
@pytest.mark.parametrize("headdim", [128, 256])
def test_gradients_that_nobody_wants_have_no_kernel(headdim, wanted, kernels):
    spec = sm90.BACKWARD
    traits = spec.compiled(Traits(BWD, "bf16", headdim, headdim, "causal", deterministic=True))
    tile = replace(spec.tiles.find(traits, 1), wanted=wanted)
    assert inspect_all(jit.compile_cubin(spec, traits, tile, spec.arch)).keys() == kernels


def test_instructions_are_counted_for_each_kernel():
    """Two kernels as nvdisasm prints them, with predicates, labels and comments between."""
    text = """
\t.section\t.text.kernel_cutlass_one_x_0,"ax",@progbits
.text.kernel_cutlass_one_x_0:
        /*0000*/                   LDC R1, c[0x0][0x28] ;
        /*0010*/              @!P0 LDG.E.128 R4, desc[UR4][R2.64] ;
.L_x_1:
        /*0020*/              @UP1 UTMALDG.4D [UR8], [UR4] ;
\t.section\t.nv.shared.kernel_cutlass_one_x_0,"aw",@nobits
\t.section\t.text.kernel_cutlass_two_x_1,"ax",@progbits
        /*0000*/                   LDG.E R4, desc[UR4][R2.64] ;
        /*0010*/                   LDG.E R5, desc[UR4][R2.64] ;
"""
    assert count_instructions(text) == {
        "kernel_cutlass_one_x_0": {"LDC": 1, "LDG.E.128": 1, "UTMALDG.4D": 1},
        "kernel_cutlass_two_x_1": {"LDG.E": 2},
    }


@pytest.mark.compile
def test_one_kernel_is_not_picked_among_several():
    spec = sm90.BACKWARD
    traits = Traits(BWD, "bf16", 64, 64)
    cubin = jit.compile_cubin(spec, traits, spec.tiles.find(traits, 1), spec.arch)
    with pytest.raises(LookupError, match=r"one kernel was expected, found .*finish.*main.*prepare"):
        inspect(cubin)
    names = {used.name for used in inspect_all(cubin).values()}
    assert len(names) == 3 and all(name.startswith("kernel_") for name in names)


def smem_of(monkeypatch):
    """A list that gets the bytes of dynamic shared memory of each kernel that is traced from now on."""
    _toolchain.import_cute(sm90.FORWARD.arch.target)  # Trap: the first import of cutlass fixes the target it can load
    from cutlass.memory import SmemAllocator

    sizes, allocate = [], SmemAllocator.allocate

    def recording(self, what, *args, **kwargs):
        sizes.append(what.size_in_bytes())
        return allocate(self, what, *args, **kwargs)

    monkeypatch.setattr(SmemAllocator, "allocate", recording)
    return sizes


# The matrix


def test_the_variants_are_what_the_catalog_promises():
    """Whatever is asked for, the plan is one of the variants that are compiled and inspected above."""
    compiled = set(VARIANTS)
    reached = set()
    lengths = (1, 64, 511, 512, 4096, 8192, 16384, 65536)
    for spec in KERNELS:
        features = itertools.product((False, True), repeat=len(spec.features))
        for dtype, mask, on in itertools.product(spec.dtypes, spec.masks, list(features)):
            extras = dict(zip(sorted(spec.features), on))
            top, top_v = max(spec.headdims)
            widths = range(spec.multiple, top + 1, spec.multiple)
            values = [d for d in (None, 8, 64, 128, 256) if d is None or d <= top_v]
            for headdim, headdim_v in itertools.product(widths, values):
                traits = Traits(spec.phase, dtype, headdim, headdim_v or headdim, mask, **extras)
                assert spec.refuses(traits, spec.arch.capability, spec.backend) is None
                padded = spec.compiled(traits)
                for length in lengths:
                    variant = spec, padded, spec.tiles.find(padded, length), spec.arch
                    assert variant in compiled, traits.slug
                    reached.add(variant)
    assert reached == compiled, "variants that no problem reaches"


@pytest.mark.parametrize("spec", KERNELS, ids=lambda spec: spec.name)
def test_what_is_not_declared_is_refused(spec):
    refused = cases.refusals_for(spec)
    assert {t.dtype for t in refused} | spec.dtypes == {"fp16", "bf16", "fp8", "fp32", "fp64"}
    for traits in refused:
        assert spec.refuses(traits, spec.arch.capability, spec.backend), traits.slug


@pytest.mark.parametrize("spec", KERNELS, ids=lambda spec: spec.name)
def test_cases_are_what_they_say(spec):
    found = cases.cases_for(spec)
    assert len({case.id for case in found}) == len(found)
    reached = set()
    for case in found:
        s, t = case.shape, case.traits
        shapes = [(s.batch, *rest) for rest in (
            (s.seqlen_q, s.num_heads_q, t.headdim),
            (s.seqlen_k, s.num_heads_kv, t.headdim),
            (s.seqlen_k, s.num_heads_kv, t.headdim_v),
        )]  # fmt: skip
        operands = [torch.empty(shape, dtype=TORCH_DTYPES[t.dtype], device="meta") for shape in shapes]
        request = check(
            *operands, case.mask.get("causal", False), case.mask.get("window_size"),
            None, "auto", True, t.deterministic, "auto",
        )  # fmt: skip
        edges = request.window_left, request.window_right
        problem = problem_of(*shapes, request.dtype, request.softmax_scale, *edges, request.deterministic)
        problem = problem.for_phase(spec.phase)
        assert (problem.traits, problem.shape) == (t, s)
        plan = planner.plan(t, spec.arch.capability, spec.backend, s)
        assert plan.spec is spec
        tile = plan.tile
        reached.add((spec, plan.traits, tile, spec.arch, s.seqlen_q % tile.tile_m, s.seqlen_k % tile.tile_n))
    for variant in cases.variants(spec):
        tile = variant[2]
        rests = [r[4:] for r in reached if r[:4] == variant]
        assert {tile.tile_m - 1, 0, 1} <= {q for q, _ in rests}
        assert {tile.tile_n - 1, 0, 1} <= {k for _, k in rests}
    assert {c.shape.seqlen_q > c.shape.seqlen_k for c in found} == {True, False}


def test_all_pairs_meet():
    factors = {"a": (1, 2, 3), "b": tuple("vwxyz"), "c": (True, False), "d": (None,), "e": (4, 5, 6), "f": (7, 8)}
    rows = cases.all_pairs(factors)
    for one, other in itertools.combinations(factors, 2):
        assert {(r[one], r[other]) for r in rows} == set(itertools.product(factors[one], factors[other]))
    assert all(row.keys() == factors.keys() for row in rows)
    assert len(rows) <= 20


@pytest.mark.parametrize("name", cases.LAYOUTS)
@pytest.mark.parametrize("shape", [(2, 5, 3, 8), (1, 5, 1, 16), (1, 1, 1, 8)], ids=str)
def test_layouts_keep_the_values(name, shape):
    x = torch.randn(shape)
    assert torch.equal(cases.LAYOUTS[name](x), x)


def test_hard_inputs_rise_beyond_float_range_within_a_tile():
    variant = VARIANTS[0]
    q, k, _, names = cases.hard_inputs(*variant[1:3], device="cpu")
    scores = torch.einsum("bqhd,bkhd->bhqk", q.double(), k.double().expand(-1, -1, 2, -1))
    assert scores.abs().max() < 2**24 and torch.equal(scores, scores.round())  # exact in float32
    bits = scores * variant[1].headdim ** -0.5 / torch.tensor(2.0).log()
    tiles = bits[..., : 5 * variant[2].tile_n].unflatten(-1, (5, -1))
    rise = (tiles.amax(-1)[..., :-1] - tiles.amax(-1)[..., 1:]).amax((1, 2, 3))  # from a tile to the one on its left
    inside = (tiles.amax(-1) - tiles.amin(-1)).amax((1, 2, 3))
    assert rise[names.index("stairs 100/64 rising left")] > 127 and rise[names.index("stairs 48/128 rising left")] > 60
    assert sum((inside > 127).tolist()) > 10


# What a compiled kernel accepts


def windowed(spec, tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FLASHATTN_HOPPER_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        traits = Traits(spec.phase, "bf16", 64, 64, "window")
        yield jit.compiled(spec, traits, spec.tiles.find(traits, 512), spec.arch)


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    yield from windowed(sm90.FORWARD, tmp_path_factory)


@pytest.fixture(scope="module")
def compiled_backward(tmp_path_factory):
    yield from windowed(sm90.BACKWARD, tmp_path_factory)


def operands(**changes):
    """Operands of a windowed call, B = 2, Sq = 40, Sk = 60, 4 and 2 heads, with some replaced."""
    make = lambda seqlen, heads: torch.zeros(2, seqlen, heads, 64, dtype=torch.bfloat16)
    usual = FwdOperands(
        q=make(40, 4),
        k=make(60, 2),
        v=make(60, 2),
        o=4096,  # addresses, never followed: no kernel is launched here
        lse=0,
        softmax_scale=0.125,
        window_left=3,
        window_right=5,
        num_ctas=132,
        tickets=4096,
    )
    return tuple(usual._replace(**changes))


def half(*shape, stride=None):
    if stride is None:
        return torch.zeros(shape, dtype=torch.bfloat16)
    return torch.zeros(1 << 18, dtype=torch.bfloat16).as_strided(shape, stride)


ACCEPTED = {
    "usual": {},
    "padded rows": {"q": half(2, 40, 4, 72)[..., :64], "k": half(2, 60, 2, 72)[..., :64]},
    "heads first": {"q": half(2, 4, 40, 64).transpose(1, 2)},
    "slices of a packed projection": {"k": half(2, 60, 3, 2, 64)[:, :, 1], "v": half(2, 60, 3, 2, 64)[:, :, 2]},
    "expanded heads": {"k": half(2, 60, 1, 64).expand(-1, -1, 2, -1)},
    "expanded batch": {"v": half(1, 60, 2, 64).expand(2, -1, -1, -1)},
    "another length": {"k": half(2, 333, 2, 64), "v": half(2, 333, 2, 64)},
    "multi-query": {"k": half(2, 60, 1, 64), "v": half(2, 60, 1, 64)},
    "a narrower headdim": {"q": half(2, 40, 4, 40), **{name: half(2, 60, 2, 40) for name in "kv"}},
    "a narrower headdim of v": {"v": half(2, 60, 2, 48)},
    "an lse": {"lse": 4096},
}
REFUSED = {
    "an odd row stride": {"q": half(2, 40, 4, 65)[..., :64]},
    "an odd batch stride": {"k": half(2, 60, 2, 64, stride=(7684, 128, 64, 1))},
    "a last dimension of stride 2": {"v": half(2, 60, 2, 128)[..., ::2]},
    "a misaligned base": {"q": half(2 * 40 * 4 * 64 + 1)[1:].view(2, 40, 4, 64)},
    "another dtype": {"q": torch.zeros(2, 40, 4, 64, dtype=torch.float16)},
    "float32 inputs": {name: torch.zeros(2, 60, 2, 64) for name in "kv"},
    "another batch": {"k": half(3, 60, 2, 64), "v": half(3, 60, 2, 64)},
    "lengths of k and v that differ": {"v": half(2, 61, 2, 64)},
    "heads of k and v that differ": {"v": half(2, 60, 4, 64)},
    "headdims of q and k that differ": {"k": half(2, 60, 2, 56)},
    "three dimensions": {"q": half(80, 4, 64)},
    "an output that is no address": {"o": half(2, 40, 4, 64)},
    "no lse": {"lse": None},
    "no window edge": {"window_left": None},
    "no tickets": {"tickets": None},
    "a fraction for an edge": {"window_right": 1.5},
    "too few operands": None,
}


@pytest.mark.compile
@pytest.mark.skipif(torch.cuda.is_available(), reason="a fake CUDA tensor must not reach a real device")
@pytest.mark.parametrize("name", [*ACCEPTED, *REFUSED])
def test_operands(compiled, name):
    if name in ACCEPTED:
        assert accepts(compiled, operands(**ACCEPTED[name])) == "accepted"
        return
    changes = REFUSED[name]
    answer = accepts(compiled, operands()[:-1] if changes is None else operands(**changes))
    assert answer.startswith(("TypeError", "ValueError", "RuntimeError")), answer


def backward_operands(**changes):
    """Operands of a windowed backward, B = 2, Sq = 40, Sk = 60, 4 and 2 heads, with some replaced."""
    make = lambda seqlen, heads: half(2, seqlen, heads, 64)
    addresses = dict.fromkeys(("o", "lse", "dlse", "dq", "dk", "dv", "workspace"), 4096)
    usual = BwdOperands(
        q=make(40, 4),
        k=make(60, 2),
        v=make(60, 2),
        do=make(40, 4),
        **addresses,
        softmax_scale=0.125,
        window_left=3,
        window_right=5,
        num_ctas=132,
    )
    return tuple(usual._replace(**changes))


ACCEPTED_BACKWARD = {
    "usual": {},
    "no gradient into lse": {"dlse": 0},
    "dout stored heads first": {"do": half(2, 4, 40, 64).transpose(1, 2)},
    "dout expanded over heads": {"do": half(2, 40, 1, 64).expand(-1, -1, 4, -1)},
    "dout expanded over the sequence": {"do": half(2, 1, 4, 64).expand(-1, 40, -1, -1)},
    "dout in padded rows": {"do": half(2, 40, 4, 72)[..., :64]},
    "slices of a packed projection": {"k": half(2, 60, 3, 2, 64)[:, :, 1], "v": half(2, 60, 3, 2, 64)[:, :, 2]},
    "another length": {"k": half(2, 333, 2, 64), "v": half(2, 333, 2, 64)},
    "multi-query": {"k": half(2, 60, 1, 64), "v": half(2, 60, 1, 64)},
    "a narrower headdim": {"q": half(2, 40, 4, 40), "k": half(2, 60, 2, 40)},
    "a narrower headdim of v": {"v": half(2, 60, 2, 48), "do": half(2, 40, 4, 48)},
}
REFUSED_BACKWARD = {
    "a last dimension of stride 0": {"do": half(2, 40, 4, 1).expand(-1, -1, -1, 64)},
    "an odd row stride of dout": {"do": half(2, 40, 4, 65)[..., :64]},
    "a misaligned dout": {"do": half(2 * 40 * 4 * 64 + 1)[1:].view(2, 40, 4, 64)},
    "dout of another length": {"do": half(2, 41, 4, 64)},
    "dout with other heads": {"do": half(2, 40, 2, 64)},
    "dout in another headdim than v": {"do": half(2, 40, 4, 48)},
    "dout in float32": {"do": torch.zeros(2, 40, 4, 64)},
    "another batch": {"k": half(3, 60, 2, 64), "v": half(3, 60, 2, 64)},
    "lengths of k and v that differ": {"v": half(2, 61, 2, 64)},
    "headdims of q and k that differ": {"k": half(2, 60, 2, 56)},
    "a gradient that is no address": {"dq": half(2, 40, 4, 64)},
    "no workspace": {"workspace": None},
    "dlse left out": {"dlse": None},
    "no window edge": {"window_left": None},
    "no number of blocks": {"num_ctas": None},
    "too few operands": None,
}


@pytest.mark.compile
@pytest.mark.skipif(torch.cuda.is_available(), reason="a fake CUDA tensor must not reach a real device")
@pytest.mark.parametrize("name", [*ACCEPTED_BACKWARD, *REFUSED_BACKWARD])
def test_backward_operands(compiled_backward, name):
    if name in ACCEPTED_BACKWARD:
        assert accepts(compiled_backward, backward_operands(**ACCEPTED_BACKWARD[name])) == "accepted"
        return
    changes = REFUSED_BACKWARD[name]
    sent = backward_operands()[:-1] if changes is None else backward_operands(**changes)
    answer = accepts(compiled_backward, sent)
    assert answer.startswith(("TypeError", "ValueError", "RuntimeError")), answer
