"""Tiles check themselves, and the tables cover what the kernels declare: no torch, no GPU."""

import itertools

import pytest

from flashattn_hopper.catalog import CATALOG
from flashattn_hopper.spec.arch import SM80, SM90
from flashattn_hopper.spec.problem import FWD, Traits
from flashattn_hopper.spec.tile import FwdTile, Row, TileTable

TILED = [spec for spec in CATALOG if spec.tiles is not None]


def traits_of(spec):
    for dims, dtype, mask in itertools.product(spec.headdims, sorted(spec.dtypes), spec.masks):
        yield Traits(spec.phase, dtype, *dims, mask)


@pytest.mark.parametrize(
    "field,arguments",
    (
        ("tile_m", {"tile_m": 96}),
        ("tile_n", {"tile_n": 40}),
        ("tile_n", {"tile_n": 0}),
        ("tile_n", {"tile_n": 272}),
        ("num_stages", {"num_stages": 3}),
        ("q_stages", {"q_stages": 3, "output": "own", "schedule": "dynamic"}),
        ("q_stages", {"q_stages": 2, "output": "q", "schedule": "dynamic"}),
        ("q_stages", {"q_stages": 2, "output": "own", "schedule": "grid"}),
        ("schedule", {"schedule": "static"}),
        ("output", {"output": "k"}),
        ("output", {"output": "v", "tile_m": 192}),
        ("output", {"output": "v", "tile_n": 48}),
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


@pytest.mark.parametrize("dims", ((64, 64), (128, 128), (192, 128), (256, 256)), ids=str)
def test_candidates_fit_and_include_the_table(dims):
    traits = Traits(FWD, "bf16", *dims)
    candidates = list(FwdTile.candidates(SM90, traits))
    assert len(candidates) == len(set(candidates)) > 0
    for tile in candidates:
        tile.check(SM90, traits)
    for spec in TILED:
        assert {row.tile for row in spec.tiles.rows_for(traits)} <= set(candidates), "bench/tune.py would miss it"


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
