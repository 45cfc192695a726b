"""Band against brute force: no torch, no GPU."""

import itertools
from functools import cache
from typing import NamedTuple

import pytest

from flashattn_hopper.spec.mask import Band, Seqlens

EDGES = (None, -9, -3, -1, 0, 1, 2, 5, 40)
LENGTHS = tuple(itertools.product((1, 3, 4, 8, 9), (0, 1, 4, 7, 8, 12)))


class Tile(NamedTuple):
    tile_m: int
    tile_n: int


TILES = (Tile(1, 1), Tile(2, 3), Tile(4, 2), Tile(3, 4), Tile(16, 16))


@cache
def seen(seqlens, left, right):
    """By definition: {(query, key)} with key between diagonal - left and diagonal + right."""
    pairs = set()
    for i in range(seqlens.q):
        diagonal = i + seqlens.k - seqlens.q
        first = 0 if left is None else max(0, diagonal - left)
        last = seqlens.k - 1 if right is None else min(seqlens.k - 1, diagonal + right)
        pairs.update((i, j) for j in range(first, last + 1))
    return frozenset(pairs)


def bands():
    return itertools.product(EDGES, EDGES)


@pytest.mark.parametrize("seqlens", LENGTHS, ids=str)
def test_keep_is_the_definition(seqlens):
    seqlens = Seqlens(*seqlens)
    for edges in bands():
        band = Band(*edges)
        # One row and one column past the end: what overhangs is not seen.
        indices = itertools.product(range(seqlens.q + 1), range(seqlens.k + 1))
        kept = {(i, j) for i, j in indices if band.keep(i, j, seqlens)}
        assert kept == seen(seqlens, *edges), band


@pytest.mark.parametrize("tile", TILES, ids=str)
@pytest.mark.parametrize("seqlens", LENGTHS, ids=str)
def test_kv_tiles(seqlens, tile):
    seqlens = Seqlens(*seqlens)
    for edges in bands():
        pairs = seen(seqlens, *edges)
        for m_block in range(-(-seqlens.q // tile.tile_m)):
            segments = Band(*edges).kv_tiles(m_block, tile, seqlens)
            rows = range(m_block * tile.tile_m, min((m_block + 1) * tile.tile_m, seqlens.q))
            keys = [[j for j in range(seqlens.k) if (i, j) in pairs] for i in rows]
            _check_segments(segments, keys, tile.tile_n, seqlens.k, (edges, m_block))
            begin, full_begin, full_end, end = segments
            assert end > begin, f"{edges} {m_block}: no tile is visited"
            # Whoever sees a full tile sees a key to the right of it, or the tile is the last one.
            for n_block in range(full_begin, full_end):
                after = (n_block + 1) * tile.tile_n
                assert n_block == end - 1 or all(visible[-1] >= after for visible in keys), (edges, m_block)


@pytest.mark.parametrize("tile", TILES, ids=str)
@pytest.mark.parametrize("seqlens", LENGTHS, ids=str)
def test_q_tiles(seqlens, tile):
    seqlens = Seqlens(*seqlens)
    for edges in bands():
        pairs = seen(seqlens, *edges)
        for n_block in range(-(-seqlens.k // tile.tile_n)):
            segments = Band(*edges).q_tiles(n_block, tile, seqlens)
            # Overhanging keys are rows that nobody sees: a tile that has them may not count as full.
            columns = range(n_block * tile.tile_n, (n_block + 1) * tile.tile_n)
            queries = [[i for i in range(seqlens.q) if (i, j) in pairs] for j in columns]
            _check_segments(segments, queries, tile.tile_m, seqlens.q, (edges, n_block))


def _check_segments(segments, visible, size, length, what):
    """`visible`: for each row of the tile, the indices of the other operand that it sees."""
    begin, full_begin, full_end, end = segments
    assert 0 <= begin <= full_begin <= full_end <= end <= max(1, -(-length // size)), (what, segments)
    outside = [x for row in visible for x in row if not begin * size <= x < end * size]
    assert not outside, f"{what}: {segments} do not visit {outside}"
    for block in range(full_begin, full_end):
        inside = set(range(block * size, (block + 1) * size))
        assert all(inside <= set(row) for row in visible), f"{what}: {segments} call {block} full"


@pytest.mark.parametrize("tile", TILES, ids=str)
@pytest.mark.parametrize("seqlens", LENGTHS, ids=str)
def test_turns_count_the_key_tiles_before(seqlens, tile):
    """Each key tile that visits a query tile finds as many before it as have visited it."""
    blocks = range(-(-seqlens[1] // tile.tile_n))
    for edges in bands():
        band, seqlens = Band(*edges), Seqlens(*seqlens)
        visits = [band.q_tiles(n, tile, seqlens) for n in blocks]
        for n in blocks:
            for m in range(visits[n].begin, visits[n].end):
                before = sum(visits[other].begin <= m < visits[other].end for other in range(n))
                assert band.q_tile_turn(n, m, tile, seqlens) == before, (edges, n, m)


def test_tiles_are_not_visited_in_vain():
    """Of 16 tiles, causal visits the 10 on and under the diagonal, and a window of one tile the 7 around it."""
    tile, seqlens = Tile(8, 8), Seqlens(32, 32)
    visits = lambda band: [s.end - s.begin for s in (band.kv_tiles(m, tile, seqlens) for m in range(4))]
    transposed = lambda band: [s.end - s.begin for s in (band.q_tiles(n, tile, seqlens) for n in range(4))]
    assert visits(Band(None, 0)) == [1, 2, 3, 4] and transposed(Band(None, 0)) == [4, 3, 2, 1]
    assert visits(Band(8, 0)) == [1, 2, 2, 2] and transposed(Band(8, 0)) == [2, 2, 2, 1]
    assert visits(Band()) == [4] * 4 and transposed(Band()) == [4] * 4


def test_full_tiles_are_found():
    tile, seqlens = Tile(8, 8), Seqlens(32, 32)
    full = lambda segments: (segments.full_begin, segments.full_end)
    assert full(Band().kv_tiles(1, tile, seqlens)) == (0, 4)
    assert full(Band().kv_tiles(1, tile, Seqlens(32, 31))) == (0, 3)
    # (first + right) // 8, one key below the textbook bound, which would be 4 for right = 7 too.
    assert full(Band(None, 0).kv_tiles(3, tile, seqlens)) == (0, 3)
    assert full(Band(None, 7).kv_tiles(3, tile, seqlens)) == (0, 3)
    assert full(Band(None, 8).kv_tiles(3, tile, seqlens)) == (0, 4)
    assert full(Band(15, 0).kv_tiles(3, tile, seqlens)) == (2, 3)
    assert full(Band(None, 0).q_tiles(0, tile, seqlens)) == (1, 4)
    overhanging = Band().q_tiles(3, tile, Seqlens(32, 31))
    assert overhanging.full_begin == overhanging.full_end and (overhanging.begin, overhanging.end) == (0, 4)


def test_kind():
    expected = {
        (None, None): "full",
        (None, 0): "causal",
        (None, 1): "window",
        (None, -1): "window",
        (0, None): "window",
        (3, 0): "window",
    }
    assert {edges: Band(*edges).kind for edges in expected} == expected


def test_bands_are_values():
    assert Band(3, 0) == Band(3, 0) and len({Band(3, 0), Band(3, 0), Band(None, 0)}) == 2
    with pytest.raises(AttributeError):
        Band().left = 1


def test_arith_is_used_for_every_minimum_and_maximum():
    """A device integer has no Python `min`: whatever the caller lends must do."""
    calls = []

    class Arith:
        @staticmethod
        def min(a, b):
            calls.append("min")
            return a if a < b else b

        @staticmethod
        def max(a, b):
            calls.append("max")
            return a if a > b else b

    tile, seqlens = Tile(4, 4), Seqlens(9, 13)
    for edges in bands():
        band = Band(*edges)
        assert band.kv_tiles(1, tile, seqlens, Arith) == band.kv_tiles(1, tile, seqlens)
        assert band.q_tiles(1, tile, seqlens, Arith) == band.q_tiles(1, tile, seqlens)
    assert {"min", "max"} <= set(calls)
