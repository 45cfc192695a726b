"""Tiles check themselves, and the tables cover what the kernels declare: no torch, no GPU."""

import itertools
from dataclasses import replace

import pytest

from flashattn_hopper.catalog import CATALOG
from flashattn_hopper.kernels.sm90.specs import FORWARD_FP8
from flashattn_hopper.spec.arch import SM80, SM90
from flashattn_hopper.spec.problem import BWD, FWD, Traits
from flashattn_hopper.spec.tile import ROW_PAD, BwdTile, FwdTile, Row, TileTable

TILED = [spec for spec in CATALOG if spec.tiles is not None]


def traits_of(spec):
    compiled_in = "deterministic" in spec.features - spec.invariant_to
    for dims, dtype, mask in itertools.product(spec.headdims, sorted(spec.dtypes), spec.masks):
        for deterministic in (False, True)[: 1 + compiled_in]:
            for int8_qk in (False, True)[: 1 + ("int8_qk" in spec.features)]:
                yield Traits(spec.phase, dtype, *dims, mask, deterministic=deterministic, int8_qk=int8_qk)


@pytest.mark.parametrize(
    "field,arguments",
    (
        ("tile_m", {"tile_m": 96}),
        ("tile_n", {"tile_n": 40}),
        ("tile_n", {"tile_n": 0}),
        ("tile_n", {"tile_n": 272}),
        ("polynomial", {"polynomial": 9}),
        ("num_stages", {"num_stages": 3}),
        ("q_stages", {"q_stages": 3, "output": "own", "schedule": "dynamic"}),
        ("q_stages", {"q_stages": 2, "output": "q", "schedule": "dynamic"}),
        ("q_stages", {"q_stages": 2, "output": "own", "schedule": "grid"}),
        ("schedule", {"schedule": "static"}),
        ("output", {"output": "k"}),
        ("output", {"output": "v", "tile_m": 192}),
        ("output", {"output": "v", "tile_n": 48}),
        ("output", {"output": "v", "q_stages": 2, "schedule": "dynamic"}),
    ),
    ids=str,
)
def test_a_tile_names_the_field_that_is_wrong(field, arguments):
    with pytest.raises(ValueError, match=f"{field}=.*allowed: "):
        FwdTile(**({"tile_m": 128, "tile_n": 128} | arguments))


@pytest.mark.parametrize("tile_m", (64, 128, 192))
def test_registers_fit_the_multiprocessor(tile_m):
    tile = FwdTile(tile_m, 128)
    producer, consumer = tile.registers
    assert tile.num_threads == 128 * (tile.num_consumers + 1) and tile.num_consumers * 64 == tile_m
    assert 128 * (producer + consumer * tile.num_consumers) <= SM90.registers
    assert producer % 8 == consumer % 8 == 0 and tile.num_threads <= SM90.max_threads
    assert consumer <= 256 and producer >= 24  # what the hardware lets a warpgroup ask for


def test_shared_memory_counts_every_buffer():
    traits = Traits(FWD, "bf16", 64, 64)
    base = FwdTile(128, 128, schedule="dynamic").smem_bytes(traits)
    assert base - 1024 == 2 * 64 * (128 + 2 * 2 * 128)  # Q, and K and V in two stages
    own = FwdTile(128, 128, schedule="dynamic", output="own").smem_bytes(traits)
    assert own - base == 128 * 64 * 2
    assert FwdTile(128, 128, schedule="dynamic", output="own", q_stages=2).smem_bytes(traits) - own == 128 * 64 * 2
    assert FwdTile(128, 128, schedule="dynamic", output="v").smem_bytes(traits) == base
    wider = Traits(FWD, "bf16", 64, 128)
    assert FwdTile(128, 128, output="own").smem_bytes(wider) - own == 64 * 2 * (128 + 2 * 128)


def test_a_tile_that_does_not_fit_says_what_it_needs():
    tile, traits = FwdTile(128, 256), Traits(FWD, "bf16", 256, 256)
    with pytest.raises(ValueError, match=f"{tile.smem_bytes(traits):,} B of shared memory; sm90 has 232,448"):
        tile.check(SM90, traits)
    fits = FwdTile(192, 128, schedule="dynamic", q_stages=2, output="own")
    fits.check(SM90, Traits(FWD, "bf16", 64, 64))
    assert fits.smem_bytes(Traits(FWD, "bf16", 128, 128)) > SM80.smem_bytes
    with pytest.raises(ValueError, match="output='q' needs slabs of one size"):
        FwdTile(128, 64).check(SM90, Traits(FWD, "bf16", 64, 128))


def test_scores_ahead_need_room_and_one_skipped_tile_at_most():
    """A second one would wait for memory that its own warpgroup gives back later."""
    room = {"schedule": "dynamic", "q_stages": 2, "output": "own", "ahead": True}
    for missing in ({"q_stages": 1}, {"output": "v", "q_stages": 1}, {"serial": True}):
        with pytest.raises(ValueError, match="ahead=True; allowed: True only with"):
            FwdTile(128, 128, **room | missing)
    FwdTile(192, 128, **room).check(SM90, Traits(FWD, "bf16", 64, 64, "causal"))
    for tile, mask in ((FwdTile(128, 128, **room), "window"), (FwdTile(192, 64, **room), "causal")):
        with pytest.raises(ValueError, match="lets a warpgroup skip"):
            tile.check(SM90, Traits(FWD, "bf16", 64, 64, mask))


def test_keys_rise_where_no_mask_is_at_the_first_ones():
    rising = FwdTile(128, 64, schedule="dynamic", output="own", rising=True)
    rising.check(SM90, Traits(FWD, "bf16", 128, 128, "causal"))
    ahead = replace(rising, q_stages=2, ahead=True)
    for tile, dtype, mask in ((rising, "bf16", "full"), (rising, "bf16", "window"), (ahead, "bf16", "causal")):
        with pytest.raises(ValueError, match="rising is for causal masks, 16-bit and not ahead"):
            tile.check(SM90, Traits(FWD, dtype, 64, 64, mask))
    with pytest.raises(ValueError, match="rising is for causal masks, 16-bit and not ahead"):
        rising.check(SM90, Traits(FWD, "fp8", 64, 64, "causal"))


@pytest.mark.parametrize("mask", ("full", "causal"))
@pytest.mark.parametrize("dims", ((64, 64), (128, 128), (192, 128), (256, 256)), ids=str)
def test_candidates_fit_and_include_the_table(dims, mask):
    traits = Traits(FWD, "bf16", *dims, mask)
    candidates = list(FwdTile.candidates(SM90, traits))
    assert len(candidates) == len(set(candidates)) > 0
    for tile in candidates:
        tile.check(SM90, traits)
    for spec in (spec for spec in TILED if spec.phase == FWD and spec.arch is SM90):
        assert {row.tile for row in spec.tiles.rows_for(traits)} <= set(candidates), "bench/tune.py would miss it"


@pytest.mark.parametrize("dims", ((64, 64), (128, 128), (192, 128), (256, 256)), ids=str)
def test_candidates_of_codes_fit_and_include_the_table(dims):
    traits = Traits(FWD, "fp8", *dims)
    candidates = list(FwdTile.candidates(SM90, traits))
    assert len(candidates) == len(set(candidates)) > 0
    for tile in candidates:
        tile.check(SM90, traits)
    assert {row.tile for row in FORWARD_FP8.tiles.rows_for(traits)} <= set(candidates)
    if dims[1] > 64:
        with pytest.raises(ValueError, match="value_columns"):
            FwdTile(128, 128, schedule="dynamic", output="own", value_columns=64).check(SM90, traits)


# The backward's tiles


@pytest.mark.parametrize(
    "field,arguments",
    (
        ("tile_m", {"tile_m": 96}),
        ("tile_m", {"tile_m": 192}),
        ("tile_n", {"tile_n": 96}),
        ("query_n", {"query_n": 0}),
        ("query_n", {"query_n": 24}),
        ("query_n", {"query_n": 272}),
        ("kv_stages", {"kv_stages": 3}),
        ("wanted", {"query_n": 64, "wanted": "dk"}),
        ("wanted", {"wanted": "dq"}),
    ),
    ids=str,
)
def test_a_backward_tile_names_the_field_that_is_wrong(field, arguments):
    with pytest.raises(ValueError, match=f"BwdTile: {field}=.*allowed: "):
        BwdTile(**({"tile_m": 64} | arguments))


@pytest.mark.parametrize("arguments", ({}, {"tile_m": 128, "query_n": 64}, {"query_n": 64, "kv_stages": 2}), ids=str)
def test_keys_that_two_warpgroups_share_need_a_kernel_for_dq(arguments):
    with pytest.raises(ValueError, match="tile_n=64 needs tile_m=64, a query_n, and kv_stages=1"):
        BwdTile(**({"tile_m": 64, "tile_n": 64} | arguments))
    assert BwdTile(64, 64, query_n=64).tile_n == 64


@pytest.mark.parametrize("arguments", ({"query_n": 64}, {"kv_stages": 2}), ids=str)
def test_sums_in_turn_need_resident_blocks_and_a_kernel_for_dq_alone(arguments):
    with pytest.raises(ValueError, match="ordered sums need a query_n and kv_stages=2"):
        BwdTile(64, ordered=True, **arguments)


def test_sums_are_in_turn_where_all_gradients_are_wanted():
    tile = BwdTile(64, query_n=64, kv_stages=2, ordered=True)
    assert tile.summed and tile.in_turn
    for wanted in ("dq", "dkdv"):
        alone = replace(tile, wanted=wanted)
        assert not alone.summed and not alone.in_turn
    assert BwdTile(64).summed and not BwdTile(64).in_turn and not BwdTile(64, query_n=64).summed


def test_only_sums_in_memory_can_be_late():
    late = BwdTile(128, query_n=64, kv_stages=2, ordered=True, late=True)
    assert late.delayed and BwdTile(128, late=True).delayed and not BwdTile(128).delayed
    assert not any(replace(late, wanted=wanted).delayed for wanted in ("dq", "dkdv"))
    with pytest.raises(ValueError, match="late is for dQ that is summed in memory"):
        BwdTile(128, query_n=64, late=True)


@pytest.mark.parametrize("tile", (BwdTile(64), BwdTile(128), BwdTile(64, 64, query_n=64)), ids=str)
def test_a_backward_tile_fits_the_multiprocessor(tile):
    producer, consumer = tile.registers
    assert tile.num_threads == 128 * (tile.num_consumers + 1)
    assert 128 * (producer + consumer * tile.num_consumers) <= SM90.registers
    assert producer % 8 == consumer % 8 == 0 and tile.num_threads <= SM90.max_threads
    assert ROW_PAD % tile.tile_m == 0, "a query tile would straddle two blocks of the workspace"


def test_shared_memory_of_the_backward_counts_every_buffer():
    traits = Traits(BWD, "bf16", 64, 64)
    keys, queries, scores, stats = 2 * 128 * (64 + 64), 2 * 128 * (64 + 64), 2 * 128 * 128, 2 * 4 * 128
    summed = BwdTile(128).smem_bytes(traits)
    assert summed == keys + 2 * (queries + scores + stats) + 1024
    assert summed - BwdTile(64).smem_bytes(traits) == 2 * (queries + scores + stats) // 2
    assert summed - BwdTile(128, query_n=128).smem_bytes(traits) == 2 * scores  # dS stays in registers
    shared = BwdTile(64, 64, query_n=64).smem_bytes(traits)  # P and dS of half the keys and queries
    assert shared == keys // 2 + 2 * (queries + stats) // 2 + 2 * 2 * scores // 4 + 1024
    assert BwdTile(128, kv_stages=2).smem_bytes(traits) - summed == keys
    wider = Traits(BWD, "bf16", 64, 128)
    assert BwdTile(128).smem_bytes(wider) - summed == 2 * 64 * (128 + 2 * 128)
    assert BwdTile(64).smem_bytes(Traits(BWD, "fp16", 64, 64)) == BwdTile(64).smem_bytes(traits)


def test_the_workspace():
    assert BwdTile(64).workspace_floats(256, 128) == 256 * (128 + 2) + 4  # dQ, lse, delta; a ticket
    assert BwdTile(64, query_n=96).workspace_floats(256, 128) == 256 * 2 + 4
    ordered = BwdTile(64, query_n=96, kv_stages=2, ordered=True)
    assert ordered.workspace_floats(256, 128) == 256 * (128 + 2 + 1) + 4  # counters too
    assert replace(ordered, wanted="dq").workspace_floats(256, 128) == 256 * 2 + 4


def test_a_backward_tile_that_does_not_fit_says_what_it_needs():
    traits = Traits(BWD, "bf16", 128, 128)
    need = BwdTile(128).smem_bytes(traits)
    with pytest.raises(ValueError, match=f"bwd.bf16.d128.full needs {need:,} B of shared memory; sm90 has 232,448"):
        BwdTile(128).check(SM90, traits)
    BwdTile(64).check(SM90, traits)
    wider = Traits(BWD, "bf16", 64, 128)
    BwdTile(128).check(SM90, wider)
    with pytest.raises(ValueError, match="shared memory; sm80 has"):
        BwdTile(128).check(SM80, wider)


# The tables


@pytest.mark.parametrize("spec", TILED, ids=lambda spec: spec.name)
def test_every_declared_variant_finds_a_tile_that_fits(spec):
    for traits in traits_of(spec):
        assert any(row.min_seqlen == 0 for row in spec.tiles.rows_for(traits)), f"{traits.slug}: short sequences"
        for row in spec.tiles.rows_for(traits):
            row.tile.check(spec.arch, traits)
        for seqlen in (0, 1, 512, 1 << 20):
            assert spec.tiles.find(traits, seqlen) in {row.tile for row in spec.tiles.rows_for(traits)}


@pytest.mark.parametrize("spec", TILED, ids=lambda spec: spec.name)
def test_every_row_is_reachable(spec):
    """A row hidden behind an earlier one, or of a dtype or mask that the kernel refuses, is a mistake in the table."""
    bounds = {row.min_seqlen for row in spec.tiles}
    reached = set()
    for traits, seqlen in itertools.product(traits_of(spec), bounds):
        first = next(i for i, row in enumerate(spec.tiles) if row.covers(traits) and seqlen >= row.min_seqlen)
        assert spec.tiles.find(traits, seqlen) is spec.tiles[first].tile
        reached.add(first)
    assert reached == set(range(len(spec.tiles)))


def test_the_first_row_that_is_reached_wins():
    table = TileTable(
        Row(64, FwdTile(192, 128), masks=("full",), min_seqlen=4096),
        Row(64, FwdTile(128, 128), masks=("full", "causal")),
        Row((64, 32), FwdTile(128, 64)),
    )
    full, causal, window = (Traits(FWD, "bf16", 64, 64, mask) for mask in ("full", "causal", "window"))
    assert [table.find(full, s).tile_m for s in (0, 4095, 4096)] == [128, 128, 192]
    assert table.find(causal, 8192).tile_m == 128
    assert table.headdims == ((64, 32), (64, 64))
    assert table.find(Traits(FWD, "fp16", 64, 32), 1).tile_n == 64
    for refused in (window, Traits(FWD, "fp8", 64, 64), Traits(FWD, "bf16", 32, 64)):
        with pytest.raises(LookupError, match=refused.slug.replace(".", r"\.")):
            table.find(refused, 1)
