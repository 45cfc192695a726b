"""sm80.forward as data: where it runs, which tiles, what it refuses, and what the runner hands to it. No GPU."""

import itertools
from dataclasses import replace

import pytest
import torch

from flashattn_hopper import hopper_attention, jit, planner, runner
from flashattn_hopper.catalog import CATALOG
from flashattn_hopper.kernels.common.operands import BwdOperands, FwdOperands
from flashattn_hopper.kernels.sm80 import specs as sm80
from flashattn_hopper.spec.arch import SM80, SM86, SM90, SM100, SM120, ArchSpec
from flashattn_hopper.spec.mask import Band
from flashattn_hopper.spec.problem import BWD, FWD, AttentionProblem, Shape, Traits
from flashattn_hopper.spec.tile import ROW_PAD, Sm80BwdTile, Sm80FwdTile

from . import cases

SPEC = sm80.FORWARD
ARCHS = (SPEC.arch, *(arch for arch, _ in SPEC.ports))
SHAPE = Shape(2, 5, 9, 4, 2)
D128 = Traits(FWD, "bf16", 128, 128)

# Compute capability -> the target that is compiled for it.
TARGETS = {
    (8, 0): "sm_80",
    (8, 6): "sm_86",
    (8, 7): "sm_87",
    (8, 9): "sm_89",
    (9, 0): "sm_90a",
    (10, 0): "sm_100",
    (10, 3): "sm_100",
    (11, 0): "sm_110",
    (12, 0): "sm_120",
    (12, 1): "sm_120",
}


# Where it runs


@pytest.mark.parametrize("capability", TARGETS, ids=str)
def test_every_gpu_since_ampere_has_a_target(capability):
    chosen = planner.plan(D128, capability, "sm80", SHAPE)
    assert chosen.spec.name == "sm80.forward" and chosen.spec.arch.target == TARGETS[capability]
    assert chosen.spec.arch.capability <= capability and chosen.spec.arch.capability[0] == capability[0]
    assert chosen.tile == chosen.spec.tiles.find(D128, SHAPE.seqlen_k)
    chosen.tile.check(chosen.spec.arch, chosen.traits)


@pytest.mark.parametrize("capability", [None, (7, 5), (7, 0), (13, 0)], ids=str)
def test_other_devices_are_refused_by_name(capability):
    assert SPEC.on(capability) is None
    reason = SPEC.refuses(D128, capability, "sm80")
    assert reason.startswith(
        "needs one of sm_80, sm_86, sm_87, sm_89, sm_90, sm_100, sm_110, sm_120, the tensors are on "
    )
    with pytest.raises(NotImplementedError, match=r"sm80\.forward: needs one of sm_80"):
        planner.plan(D128, capability, "sm80", SHAPE)


@pytest.mark.parametrize("capability", TARGETS, ids=str)
def test_it_is_chosen_where_no_hopper_kernel_runs(capability):
    expected = "sm90.forward" if capability == SM90.capability else "sm80.forward"
    assert planner.plan(D128, capability, "auto", SHAPE).spec.name == expected


@pytest.mark.parametrize("deterministic", (False, True))
@pytest.mark.parametrize("capability", TARGETS, ids=str)
def test_so_is_its_backward(capability, deterministic):
    expected = "sm90.backward" if capability == SM90.capability else "sm80.backward"
    traits = replace(D128, phase=BWD, deterministic=deterministic)
    assert planner.plan(traits, capability, "auto", SHAPE).spec.name == expected


def test_its_own_arch_is_the_spec_itself():
    assert SPEC.on(SM80.capability) is SPEC and next(s for s in CATALOG if s.name == SPEC.name) is SPEC
    there = SPEC.on(SM86.capability)
    assert (there.arch, there.tiles, there.ports) == (SM86, sm80.SMALL, ())
    assert there.on(SM86.capability) is there and there.on(SM80.capability) is None
    assert replace(there, arch=SPEC.arch, tiles=SPEC.tiles, ports=SPEC.ports) == SPEC


def test_machine_code_runs_on_later_minor_revisions_unless_it_is_specific():
    assert SM80.runs_on((8, 0)) and SM80.runs_on((8, 6)) and not SM86.runs_on((8, 0)) and not SM80.runs_on((9, 0))
    assert SM90.runs_on((9, 0)) and not SM90.runs_on((9, 1))
    assert SM100.runs_on((10, 3)) and not SM100.runs_on((12, 0)) and not SM120.runs_on(None)
    assert {arch.runs_on(None) for arch in ARCHS} == {False}


def test_the_best_of_several_archs_is_taken():
    """8.9 could run the code of 8.0, 8.6 and 8.7."""
    assert [arch.name for arch in ARCHS if arch.runs_on((8, 9))] == ["sm80", "sm86", "sm87", "sm89"]
    assert SPEC.on((8, 9)).arch.name == "sm89"
    without = replace(SPEC, ports=tuple(port for port in SPEC.ports if port[0].name != "sm89"))
    assert without.on((8, 9)).arch.name == "sm87"


def test_archs_are_distinct():
    assert len({arch.target for arch in ARCHS}) == len({arch.capability for arch in ARCHS}) == len(ARCHS)


def test_one_kernel_for_each_target_in_the_cache():
    keys = [jit.fingerprint(SPEC, D128, SPEC.on(arch.capability).tiles.find(D128, 1), arch) for arch in ARCHS]
    assert len({key["target"] for key in keys}) == len(ARCHS)
    assert len({tuple(sorted(key.items())) for key in keys}) == len(ARCHS)


@pytest.mark.parametrize("deterministic", [False, True])
def test_its_backward_is_sm80_s_or_the_automatic_one(deterministic):
    traits = replace(D128, phase=BWD, headdim=72, headdim_v=40, gqa=True, deterministic=deterministic)
    for capability in TARGETS:
        chosen = planner.plan(traits, capability, "sm80", SHAPE)
        assert (chosen.spec.name, chosen.spec.arch.target) == ("sm80.backward", TARGETS[capability])
        assert chosen.traits == Traits(BWD, "bf16", 96, 96, deterministic=deterministic)
        assert chosen.tile.summed is not deterministic
        top = chosen.spec.headdims[-1][0]
        wide = replace(traits, headdim=top + 8)
        assert planner.plan(replace(traits, headdim=top), capability, "sm80", SHAPE).spec.name == "sm80.backward"
        assert f"at most {top} and {top}" in planner.refusals(wide, capability, "sm80")["sm80.backward"]


@pytest.mark.parametrize("headdim", [64, 128, 200, 256])
@pytest.mark.parametrize("deterministic", [False, True])
def test_its_backward_takes_what_the_forward_takes(headdim, deterministic):
    for phase, spec in ((FWD, SPEC), (BWD, sm80.BACKWARD)):
        traits = replace(D128, phase=phase, headdim=headdim, headdim_v=headdim, deterministic=deterministic)
        for capability in TARGETS:
            assert spec.refuses(traits, capability, "sm80") is None


def test_sums_of_four_are_for_archs_that_have_them():
    for arch in ARCHS:
        for row in sm80.BACKWARD.on(arch.capability).tiles:
            assert row.tile.vector == (row.tile.summed and arch.capability >= (9, 0)), row


# Tiles


@pytest.mark.parametrize(
    "field, arguments",
    [
        ("num_warps", {"num_warps": 2}),
        ("tile_m", {"tile_m": 96}),
        ("tile_m", {"tile_m": 64, "num_warps": 8}),
        ("tile_m", {"tile_m": 256}),
        ("tile_n", {"tile_n": 40}),
        ("tile_n", {"tile_n": 0}),
        ("tile_n", {"tile_n": 272}),
        ("num_stages", {"num_stages": 0}),
        ("num_stages", {"num_stages": 5}),
    ],
    ids=str,
)
def test_a_tile_names_the_field_that_is_wrong(field, arguments):
    with pytest.raises(ValueError, match=f"Sm80FwdTile: {field}=.*allowed: "):
        Sm80FwdTile(**({"tile_m": 128, "tile_n": 64} | arguments))


def test_what_a_tile_derives():
    tile = Sm80FwdTile(128, 64)
    assert (tile.atoms, tile.num_threads, tile.schedule) == (2, 128, "grid")
    wide = Sm80FwdTile(128, 64, num_warps=8)
    assert (wide.atoms, wide.num_threads) == (1, 256)
    assert tile.num_threads * tile.registers[0] <= SM80.registers // 2, "two blocks of 4 warps"
    assert wide.num_threads * wide.registers[0] <= SM80.registers


def test_shared_memory_counts_every_buffer():
    traits = Traits(FWD, "bf16", 64, 64)
    single = Sm80FwdTile(128, 64, num_stages=1).smem_bytes(traits)
    assert single == 2 * 64 * (128 + 2 * 64)
    assert Sm80FwdTile(128, 64, num_stages=3).smem_bytes(traits) - single == 2 * 2 * 64 * (64 + 64)
    assert Sm80FwdTile(128, 64, num_stages=1, q_in_registers=True).smem_bytes(traits) == single
    assert Sm80FwdTile(128, 64, num_stages=1).smem_bytes(Traits(FWD, "bf16", 192, 128)) == 2 * (128 * 192 + 64 * 320)


@pytest.mark.parametrize(
    "tile, arch, dims, reason",
    [
        (Sm80FwdTile(128, 64, 8), SM86, (192, 192), "147,456 B of shared memory; sm86 has 101,376"),
        (Sm80FwdTile(128, 64, 8), SM80, (256, 256), "196,608 B of shared memory; sm80 has 166,912"),
        (Sm80FwdTile(128, 32, 8), SM80, (96, 96), "copied in rounds of 64 rows"),
        (Sm80FwdTile(64, 48, 4), SM80, (96, 96), "copied in rounds of 32 rows"),
        (Sm80FwdTile(128, 64), SM80, (80, 80), "no multiple of 32"),
        (Sm80FwdTile(128, 64), SM80, (64, 128), "cannot stage out in the place of Q"),
        (Sm80FwdTile(128, 64), SM80, (128, 96), "cannot stage out in the place of Q"),
    ],
    ids=str,
)
def test_a_tile_that_does_not_fit_says_why(tile, arch, dims, reason):
    with pytest.raises(ValueError, match=reason):
        tile.check(arch, Traits(FWD, "bf16", *dims))


@pytest.mark.parametrize("arch", ARCHS, ids=lambda arch: arch.name)
def test_every_arch_has_a_tile_that_fits_for_everything_declared(arch):
    there = SPEC.on(arch.capability)
    assert there.headdims == SPEC.headdims, "a head dimension is padded alike everywhere"
    reached = set()
    for dims, dtype, mask in itertools.product(there.headdims, sorted(there.dtypes), there.masks):
        traits = Traits(FWD, dtype, *dims, mask)
        assert [row.min_seqlen for row in there.tiles.rows_for(traits)] == [0]
        tile = there.tiles.find(traits, 1)
        tile.check(arch, traits)
        reached.add(there.tiles.rows_for(traits)[0])
    assert reached == set(there.tiles)


@pytest.mark.parametrize("arch", (SM80, SM86), ids=lambda arch: arch.name)
@pytest.mark.parametrize("dims", ((64, 64), (96, 96), (128, 128), (192, 128), (192, 192), (256, 256)), ids=str)
def test_candidates_fit_and_include_the_table(arch, dims):
    traits = Traits(FWD, "bf16", *dims)
    candidates = list(Sm80FwdTile.candidates(arch, traits))
    assert len(candidates) == len(set(candidates)) > 0
    for tile in candidates:
        tile.check(arch, traits)
    tiles = {row.tile for row in SPEC.on(arch.capability).tiles if row.dims == dims}
    assert tiles <= set(candidates)
    assert not list(Sm80FwdTile.candidates(ArchSpec("tiny", "sm_80", (8, 0), 1024), traits))


def test_tile_ids_are_distinct():
    tiles = {row.tile for table in (sm80.LARGE, sm80.HOPPER, sm80.SMALL) for row in table}
    tiles |= {replace(tile, q_in_registers=not tile.q_in_registers) for tile in tiles}
    assert len({cases.tile_id(tile) for tile in tiles}) == len(tiles)


# What it refuses


@pytest.mark.parametrize("traits", cases.refusals_for(SPEC), ids=lambda traits: traits.slug)
def test_what_is_not_declared_is_refused_on_every_arch(traits):
    for capability in TARGETS:
        assert SPEC.refuses(traits, capability, "sm80")
        with pytest.raises(NotImplementedError, match=r"sm80\.forward: "):
            planner.plan(traits, capability, "sm80", SHAPE)


def test_cpu_tensors_are_refused_before_anything_is_compiled(monkeypatch):
    monkeypatch.setattr(jit, "compiled", None)
    q = torch.randn(1, 5, 4, 64, dtype=torch.bfloat16)
    with pytest.raises(NotImplementedError, match=r"sm80\.forward: needs one of .* the tensors are on cpu"):
        hopper_attention(q, q, q, backend="sm80")


# What the runner hands over


@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (12, 1)], ids=str)
@pytest.mark.parametrize("band", [Band(), Band(None, 0), Band(3, 1)], ids=lambda band: band.kind)
def test_a_launch_gets_operands_without_tickets(monkeypatch, capability, band):
    sent, asked = [], []
    monkeypatch.setattr(planner, "capability_of", lambda device: capability)
    monkeypatch.setattr(runner.jit, "compiled", lambda *what: asked.append(what) or sent.append)
    monkeypatch.setattr(runner, "tickets", None)
    q = torch.ones(2, 5, 4, 72, dtype=torch.bfloat16)
    k, v = torch.ones(2, 2, 9, 2, 72, dtype=torch.bfloat16)
    traits = Traits(FWD, "bf16", 72, 72, band.kind, gqa=True, deterministic=True)
    problem = AttentionProblem(traits, SHAPE, band, 0.125)
    out, lse = runner.prepare(problem, "sm80", q, k, v)(q, k, v)
    ((spec, compiled, tile, arch),) = asked
    assert (spec.name, compiled) == ("sm80.forward", Traits(FWD, "bf16", 96, 96, band.kind))
    assert arch.target == TARGETS[capability] and tile == spec.tiles.find(compiled, SHAPE.seqlen_k)
    (operands,) = map(FwdOperands._make, sent)
    assert operands.q is q and (operands.o, operands.lse) == (out.data_ptr(), lse.data_ptr())
    assert operands[5:] == (0.125, *((3, 1) if band.kind == "window" else (None, None)), None, None)
    assert (out.shape, lse.shape) == ((2, 5, 4, 72), (2, 4, 5))


@pytest.mark.parametrize("sizes", [{"batch": 0}, {"seqlen_q": 0}, {"seqlen_k": 0}], ids=str)
def test_nothing_to_compute_launches_nothing(monkeypatch, sizes):
    monkeypatch.setattr(planner, "capability_of", lambda device: (8, 0))
    monkeypatch.setattr(runner.jit, "compiled", None)
    shape = replace(SHAPE, **sizes)
    make = lambda seqlen, heads: torch.ones(shape.batch, seqlen, heads, 64, dtype=torch.bfloat16)
    q, k, v = make(shape.seqlen_q, 4), make(shape.seqlen_k, 2), make(shape.seqlen_k, 2)
    problem = AttentionProblem(Traits(FWD, "bf16", 64, 64, gqa=True), shape, Band(), 0.125)
    out, lse = runner.prepare(problem, "sm80", q, k, v)(q, k, v)
    assert out.shape == q.shape and not out.any() and bool((lse == -float("inf")).all())


# The backward


@pytest.mark.parametrize(
    "field, arguments",
    [
        ("tile_m", {"tile_m": 48}),
        ("tile_m", {"tile_m": 256}),
        ("tile_n", {"tile_n": 96}),
        ("num_warps", {"num_warps": 2}),
        ("split", {"split": 3}),
        ("split", {"tile_n": 64}),
        ("step", {"step": 24}),
        ("step", {"tile_m": 64, "split": 4, "step": 32}),
        ("step", {"split": 4}),
        ("query_n", {"query_n": 48}),
        ("query_n", {"query_n": 64, "late": True}),
        ("query_n", {"query_n": 64, "vector": True}),
        ("query_m", {"query_n": 64, "query_m": 32}),
        ("staggered", {"staggered": True}),
        ("num_stages", {"num_stages": 3}),
        ("num_stages", {"num_stages": 1, "late": True}),
        ("wanted", {"wanted": "dq"}),
        ("wanted", {"query_n": 64, "wanted": "dv"}),
    ],
    ids=str,
)
def test_a_backward_tile_names_the_field_that_is_wrong(field, arguments):
    with pytest.raises(ValueError, match=f"Sm80BwdTile: {field}=.*allowed: "):
        Sm80BwdTile(**({"tile_m": 32} | arguments))


def test_what_a_backward_tile_derives():
    tile = Sm80BwdTile(64, split=2, late=True)
    assert (tile.num_threads, tile.keys, tile.queries, tile.at_once, tile.summed) == (256, 32, 32, 32, True)
    assert tile.dq_part(128) == (32, 32), "of 64 queries by 128 columns an eighth"
    own = Sm80BwdTile(64, num_warps=4, step=32, query_n=32, query_m=64)
    assert (own.num_threads, own.keys, own.queries, own.at_once) == (128, 32, 64, 32)
    assert (own.summed, own.query_threads) == (False, 128)
    assert tile.num_threads * tile.registers[0] <= SM86.registers


def test_shared_memory_and_workspace_of_the_backward():
    traits = Traits(BWD, "bf16", 128, 128)
    tile = Sm80BwdTile(64, split=2)
    operands, statistics, scores = 2 * (128 + 2 * 64) * 256, 2 * 64 * 8, 2 * 128 * 64
    assert tile.smem_bytes(traits) == operands + statistics + 2 * scores
    assert replace(tile, late=True).smem_bytes(traits) == operands + statistics + 3 * scores, "dS in two stages"
    one = replace(tile, num_stages=1).smem_bytes(traits)
    assert -(-(operands - 64 * 256 * 2 + statistics // 2 + 2 * scores) // 1024) * 1024 == one, "one of Q and dO less"
    assert Sm80BwdTile(64).smem_bytes(traits) == operands + statistics + scores, "P is nobody else's"
    assert Sm80BwdTile(64, query_n=32).smem_bytes(traits) == operands + statistics
    assert Sm80BwdTile(32, 64, query_n=128, num_warps=4).smem_bytes(traits) == 2 * (128 + 2 * 128) * 256
    assert tile.workspace_floats(256, 128) == 256 * (2 + 128)
    assert replace(tile, query_n=32).workspace_floats(256, 128) == 512
    assert all(ROW_PAD % n == 0 for n in (32, 64, 128)), "a tile would straddle the statistics of two heads"
    with pytest.raises(ValueError, match="164,864 B of shared memory; sm86 has 101,376"):
        tile.check(SM86, traits)
    with pytest.raises(ValueError, match="copied in rounds of 64 rows"):
        Sm80BwdTile(32).check(SM86, Traits(BWD, "bf16", 96, 96))
    with pytest.raises(ValueError, match="no 2 equal parts of columns"):
        Sm80BwdTile(64, num_warps=4, split=2).check(SM90, Traits(BWD, "bf16", 96, 96))
    with pytest.raises(ValueError, match="dQ of 96 columns has no 8 equal parts"):
        Sm80BwdTile(64).check(SM90, Traits(BWD, "bf16", 96, 96))


@pytest.mark.parametrize("arch", ARCHS, ids=lambda arch: arch.name)
def test_every_arch_has_a_backward_tile_that_fits(arch):
    there, reached = sm80.BACKWARD.on(arch.capability), set()
    assert there.arch is arch and set(there.headdims) <= set(sm80.BACKWARD.headdims)
    words = itertools.product(there.headdims, sorted(there.dtypes), there.masks, (False, True))
    for dims, dtype, mask, deterministic in words:
        traits = Traits(BWD, dtype, *dims, mask, deterministic=deterministic)
        (row,) = there.tiles.rows_for(traits)
        row.tile.check(arch, traits)
        assert not (deterministic and row.tile.summed)
        reached.add(row)
    assert reached == set(there.tiles)


def test_a_backward_launch_gets_its_operands(monkeypatch):
    sent = []
    q = torch.ones(2, 5, 4, 72, dtype=torch.bfloat16)
    k, v = torch.ones(2, 2, 9, 2, 72, dtype=torch.bfloat16)
    out, lse = torch.ones_like(q), torch.ones(2, 4, 5)
    traits = Traits(BWD, "bf16", 72, 72, "window", gqa=True)
    problem = AttentionProblem(traits, SHAPE, Band(3, 1), 0.125)
    chosen = planner.plan(traits, (8, 6), "sm80", SHAPE)
    dout = torch.ones_like(q)
    run = runner.bind_backward(sent.append, chosen, problem, dout, q, k, v, (True, True, True))
    grads = run(dout, None, q, k, v, out, lse)
    (operands,) = map(BwdOperands._make, sent)
    assert operands.q is q and (operands.o, operands.lse, operands.dlse) == (out.data_ptr(), lse.data_ptr(), 0)
    assert [operands.dq, operands.dk, operands.dv] == [grad.data_ptr() for grad in grads]
    assert operands[11:] == (0.125, 3, 1, None)
