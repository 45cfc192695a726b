"""How a kernel cuts its work: self-checking rows of a table."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

from .arch import ArchSpec
from .problem import HALF, Traits

WARPGROUP = 128
ROW_PAD = 128  # rows of a head's workspace in the backward pass are padded to it
BYTES = {"fp16": 2, "bf16": 2, "fp8": 1}


@dataclass(frozen=True)
class FwdTile:
    """One way to cut the Hopper forward kernel.

    tile_m queries (64 for each consumer warpgroup) by tile_n keys, K and V in `num_stages` stages each.
    `schedule`: "grid" is one thread block per query tile, "dynamic" resident blocks that draw tickets.
    `output`: where a warpgroup stages its 64 rows of O: in memory of their "own", in its slab of "q" (the next Q then
    waits for the store), or in a stage of "v" (the next V waits; two warpgroups, two stages).
    `ping_pong`: consumer warpgroups take turns issuing their matrix products.
    `ahead`: the first scores of a query tile are computed under the last product and the epilogue of the one before.
    `rising`: KV tiles from the first one up (causal), so that query tiles of a head read the same ones together.
    Of 8-bit operands: `value_columns` of V that one product takes, None for all; `serial`, a tile's products one after
    the other, so that their accumulators share registers; `polynomial`, of every eight blocks of 16 keys those whose
    exponentials are polynomials in packed halves, because there are not enough units for all of them.
    """

    tile_m: int
    tile_n: int
    num_stages: int = 2
    q_stages: int = 1
    output: str = "q"
    schedule: str = "grid"
    ping_pong: bool = True
    value_columns: int | None = None
    serial: bool = False
    polynomial: int = 0
    ahead: bool = False
    rising: bool = False

    def __post_init__(self):
        self._require(self.tile_m in (64, 128, 192), "tile_m", "64, 128 or 192")
        self._require(self.tile_n % 16 == 0 and 16 <= self.tile_n <= 256, "tile_n", "a multiple of 16 up to 256")
        self._require(self.num_stages == 2, "num_stages", "2 (a ring slot counts in twos)")
        self._require(self.q_stages in (1, 2), "q_stages", "1 or 2")
        self._require(self.schedule in ("grid", "dynamic"), "schedule", "'grid' or 'dynamic'")
        self._require(self.polynomial in range(9), "polynomial", "0 to 8")
        self._require(self.output in ("own", "q", "v"), "output", "'own', 'q' or 'v'")
        self._require(self.output != "v" or self.tile_m == 128, "output", "'v' only with tile_m=128: a stage each")
        self._require(self.output != "v" or self.tile_n >= 64, "output", "'v' only with tile_n >= 64: its 64 rows")
        # With a second stage of Q the producer may run two query tiles ahead of a store, whose barrier has two phases.
        self._require(self.output != "v" or self.q_stages == 1, "output", "'v' only with q_stages=1")
        self._require(self.q_stages == 1 or self.output != "q", "q_stages", "1 with output='q', which bars a prefetch")
        self._require(self.q_stages == 1 or self.schedule == "dynamic", "q_stages", "1 for 'grid': no next tile")
        roomy = self.q_stages == 2 and self.output == "own" and not self.serial
        self._require(roomy or not self.ahead, "ahead", "True only with q_stages=2, output='own' and not serial")

    def _require(self, ok, field, allowed):
        if not ok:
            raise ValueError(f"FwdTile: {field}={getattr(self, field)!r}; allowed: {allowed}")

    @property
    def num_consumers(self) -> int:
        return self.tile_m // 64

    @property
    def num_threads(self) -> int:
        return WARPGROUP * (1 + self.num_consumers)

    @property
    def registers(self) -> tuple[int, int]:
        """(producer, consumer) registers per thread after the hand-over."""
        return {1: (56, 256), 2: (24, 240), 3: (32, 160)}[self.num_consumers]

    def smem_bytes(self, traits: Traits) -> int:
        """Shared memory of one thread block, barriers and schedule board included (an upper bound by 1 KiB)."""
        size = BYTES[traits.dtype]
        q = self.tile_m * traits.headdim * size
        o = self.tile_m * traits.headdim_v * 2
        kv = self.num_stages * self.tile_n * (traits.headdim + traits.headdim_v) * size
        return self.q_stages * q + kv + (o if self.output == "own" else 0) + 1024

    def check(self, arch: ArchSpec, traits: Traits) -> None:
        """Raise ValueError, with the budget in the text, where this tile does not fit."""
        check_smem(self, arch, traits)
        if traits.dtype == "fp8" and (self.output != "own" or 128 % self.tile_n or self.tile_n % 32):
            raise ValueError(
                f"{self}: fp8 needs output='own' (out is wider than the codes) and tile_n of 32, 64 or 128"
            )
        if self.value_columns is not None and (
            traits.dtype != "fp8" or not self.serial or traits.headdim_v % self.value_columns
        ):
            raise ValueError(
                f"{self}: value_columns are a divisor of headdim_v, with fp8 and serial; got {traits.slug}"
            )
        if self.polynomial and traits.dtype != "fp8":
            raise ValueError(f"{self}: polynomial is for fp8, whose codes are coarser; got {traits.slug}")
        if self.ahead and (traits.mask == "window" or self.tile_m - 64 > self.tile_n):
            # A skipped tile waits for its V, and a second one for memory that is given back after all of them.
            raise ValueError(f"{self}: ahead lets a warpgroup skip one KV tile at most; not for {traits.slug}")
        if self.rising and (traits.mask != "causal" or traits.dtype == "fp8" or self.ahead):
            # Walks with a left edge have partial tiles at both ends; scales of FP8 are read from the last tile down.
            raise ValueError(f"{self}: rising is for causal masks, 16-bit and not ahead; got {traits.slug}")
        if traits.headdim_v != traits.headdim and self.output == "q":
            raise ValueError(f"{self}: output='q' needs slabs of one size; {traits.slug} has two")

    @classmethod
    def candidates(cls, arch: ArchSpec, traits: Traits):
        """Every tile worth measuring for these traits: what bench/tune.py enumerates."""
        if traits.dtype == "fp8":
            yield from cls._of_codes(arch, traits)
            return
        for tile_m in (128, 192):
            for tile_n in range(48, 193, 16):
                # Scores, probabilities and output of one thread must fit its registers beside about 30 others.
                live = tile_n // 2 + tile_n // 4 + traits.headdim_v // 2
                if live + 30 > cls(tile_m, tile_n).registers[1]:
                    continue
                for schedule, q_stages, output, ahead in (
                    ("grid", 1, "q", False),
                    ("dynamic", 1, "q", False),
                    ("dynamic", 1, "v", False),
                    ("dynamic", 1, "own", False),
                    ("dynamic", 2, "own", False),
                    ("dynamic", 2, "own", True),
                ):
                    for rising in (False, True):
                        try:
                            tile = cls(tile_m, tile_n, 2, q_stages, output, schedule, ahead=ahead, rising=rising)
                            tile.check(arch, traits)
                        except ValueError:
                            continue
                        yield tile

    @classmethod
    def _of_codes(cls, arch, traits):
        for tile_m, tile_n, q_stages, ping_pong, columns, polynomial, ahead in product(
            (128, 192), (64, 128), (1, 2), (False, True), (False, None, 64, 96, 128), (0, 2, 3, 4), (False, True)
        ):
            serial = columns is not False
            value_columns = columns or None
            if value_columns == traits.headdim_v or (ahead and (serial or q_stages == 1)):
                continue
            tile = cls(
                tile_m, tile_n, 2, q_stages, "own", "dynamic", ping_pong, value_columns, serial, polynomial, ahead
            )
            # A tile's own accumulator is beside the scores where its product runs under their exponentials.
            sums = (value_columns or traits.headdim_v) // 2
            live = max(tile_n // 2, sums) if serial else tile_n // 2 + sums
            if live + tile_n // 8 + traits.headdim_v // 2 + 30 > tile.registers[1]:
                continue
            try:
                tile.check(arch, traits)
            except ValueError:
                continue
            yield tile


@dataclass(frozen=True)
class BwdTile:
    """One way to cut the Hopper backward kernel: tile_n keys by tile_m queries, for two consumer warpgroups.

    128 keys: 64 for each warpgroup. 64 keys: both work on them, each on half of the columns of dK and dV.
    `query_n`: None sums dQ in float32 global memory; a number gives dQ a kernel of its own (unless `ordered`), 128
    queries by query_n keys, which costs two more products, needs no sums in memory, and repeats bit by bit.
    `kv_stages`: 1 is one thread block per key tile; with 2, resident blocks draw tickets, and K and V of the next key
    tile are loaded, and dK and dV of the last one stored, under this one.
    `ordered`: where all gradients are wanted, dQ is summed in memory all the same, in the order of the key tiles, so
    that it repeats bit by bit (only with a query_n, for the other calls, and resident blocks).
    `late`: where dQ is summed in memory, a tile's is computed with the next one, so that warpgroups need not meet.
    `wanted`: "all" gradients, or "dq" or "dkdv" alone, for which the other launch is left out (only with a query_n).
    """

    tile_m: int
    tile_n: int = 128
    query_n: int | None = None
    kv_stages: int = 1
    ordered: bool = False
    late: bool = False
    wanted: str = "all"

    def __post_init__(self):
        if self.tile_m not in (64, 128):
            raise ValueError(f"BwdTile: tile_m={self.tile_m!r}; allowed: 64 or 128")
        if self.tile_n not in (64, 128):
            raise ValueError(f"BwdTile: tile_n={self.tile_n!r}; allowed: 64 or 128")
        if self.tile_n == 64 and (self.query_n is None or self.tile_m != 64 or self.kv_stages != 1):
            raise ValueError(f"{self}: tile_n=64 needs tile_m=64, a query_n, and kv_stages=1")
        if self.wanted not in ("all", "dq", "dkdv") or (self.wanted != "all" and self.query_n is None):
            raise ValueError(f"BwdTile: wanted={self.wanted!r}; allowed: 'all', and with a query_n 'dq' or 'dkdv'")
        if self.kv_stages not in (1, 2):
            raise ValueError(f"BwdTile: kv_stages={self.kv_stages!r}; allowed: 1 or 2")
        if self.query_n is not None and (self.query_n % 16 or not 16 <= self.query_n <= 256):
            raise ValueError(f"BwdTile: query_n={self.query_n!r}; allowed: None or a multiple of 16 up to 256")
        if self.ordered and (self.query_n is None or self.kv_stages != 2):
            raise ValueError(f"{self}: ordered sums need a query_n and kv_stages=2")
        if self.late and self.query_n is not None and not self.ordered:
            raise ValueError(f"{self}: late is for dQ that is summed in memory, so with no query_n, or ordered")

    @property
    def summed(self) -> bool:
        """Whether dQ is summed in global memory, and not computed by a kernel of its own."""
        return self.query_n is None or self.in_turn

    @property
    def in_turn(self) -> bool:
        """Whether thread blocks add to a query tile of dQ one after the other, in the order of their keys."""
        return self.ordered and self.wanted == "all"

    @property
    def delayed(self) -> bool:
        """Whether dQ of a query tile is computed with the next one."""
        return self.late and self.summed

    @property
    def num_consumers(self) -> int:
        return 2

    @property
    def num_threads(self) -> int:
        return WARPGROUP * (1 + self.num_consumers)

    @property
    def registers(self) -> tuple[int, int]:
        """(producer, consumer) registers per thread after the hand-over."""
        return 24, 240

    def smem_bytes(self, traits: Traits) -> int:
        """K and V; Q, dO, dS, lse and delta in two stages each; barriers (an upper bound by 1 KiB)."""
        size = BYTES[traits.dtype]
        widths = (traits.headdim + traits.headdim_v) * size
        scores = 2 if self.tile_n == 64 else int(self.summed)  # P and dS, dS, or neither in shared memory
        stage = self.tile_m * (widths + scores * self.tile_n * size + 8)
        return self.kv_stages * self.tile_n * widths + 2 * stage + 1024

    @property
    def dq_by_rows(self) -> bool:
        """Where dQ is summed in memory a warpgroup computes half of its rows, or, of 64 rows, half of its columns."""
        return self.tile_m == 128

    def dq_columns(self, headdim: int) -> int:
        """Columns of dQ that a warpgroup computes; K is swizzled so that they are whole atoms."""
        return headdim if self.dq_by_rows else headdim // self.num_consumers

    def workspace_floats(self, rows: int, headdim: int) -> int:
        """For each of `rows` padded query rows: lse and delta, dQ where it is summed in memory, and where that is done
        in turn a counter (a query tile uses its first row's); then a ticket."""
        return rows * (2 + (headdim if self.summed else 0) + self.in_turn) + 4

    def check(self, arch: ArchSpec, traits: Traits) -> None:
        """Raise ValueError, with the budget in the text, where this tile does not fit."""
        check_smem(self, arch, traits)


@dataclass(frozen=True)
class Sm80FwdTile:
    """One way to cut the Ampere forward kernel: tile_m queries by tile_n keys, for warps of 16 or 32 queries each.

    `num_stages`: 1 is one tile of K and one of V, each loaded under the product before it; with more, that many tiles
    of both, so that loads run `num_stages - 1` tiles ahead.
    `q_in_registers`: Q is read from shared memory once, not with every tile of keys.
    """

    tile_m: int
    tile_n: int
    num_warps: int = 4
    num_stages: int = 2
    q_in_registers: bool = False

    schedule = "grid"  # one thread block for each query tile

    def __post_init__(self):
        self._require(self.num_warps in (4, 8), "num_warps", "4 or 8")
        rows = 16 * self.num_warps
        self._require(self.tile_m in (rows, 2 * rows), "tile_m", f"{rows} or {2 * rows} for {self.num_warps} warps")
        self._require(self.tile_n % 16 == 0 and 16 <= self.tile_n <= 256, "tile_n", "a multiple of 16 up to 256")
        self._require(self.num_stages in (1, 2, 3, 4), "num_stages", "1 to 4")

    def _require(self, ok, field, allowed):
        if not ok:
            raise ValueError(f"Sm80FwdTile: {field}={getattr(self, field)!r}; allowed: {allowed}")

    @property
    def atoms(self) -> int:
        """Matrix products of 16 rows that make up a warp's queries."""
        return self.tile_m // (16 * self.num_warps)

    @property
    def num_threads(self) -> int:
        return 32 * self.num_warps

    @property
    def registers(self) -> tuple[int]:
        """Registers that one thread may use; two blocks of 4 warps, or one of 8, then fit a multiprocessor."""
        return (255,)

    def smem_bytes(self, traits: Traits) -> int:
        """Q, in whose place out is staged, and every stage of K and V."""
        widths = traits.headdim + traits.headdim_v
        return BYTES[traits.dtype] * (self.tile_m * traits.headdim + self.num_stages * self.tile_n * widths)

    def check(self, arch: ArchSpec, traits: Traits) -> None:
        """Raise ValueError, with the budget in the text, where this tile does not fit."""
        check_smem(self, arch, traits)
        for width in (traits.headdim, traits.headdim_v):
            if width % 32:
                raise ValueError(f"{self}: {traits.slug} has a head dimension that is no multiple of 32")
            # Every thread copies the same 16 bytes of a row in each round, so that its swizzle is a constant.
            rows = 8 * self.num_threads // copy_unit(width)
            if self.tile_m % rows or self.tile_n % rows:
                raise ValueError(f"{self}: {traits.slug} is copied in rounds of {rows} rows")
        if traits.headdim_v > traits.headdim or copy_unit(traits.headdim_v) != copy_unit(traits.headdim):
            raise ValueError(f"{self}: {traits.slug} cannot stage out in the place of Q")

    @classmethod
    def candidates(cls, arch: ArchSpec, traits: Traits):
        """Every tile worth measuring for these traits."""
        for num_warps, atoms, tile_n, num_stages, resident in product(
            (4, 8), (1, 2), (32, 64, 96, 128), (1, 2, 3), (False, True)
        ):
            tile = cls(16 * num_warps * atoms, tile_n, num_warps, num_stages, resident)
            # Scores, half of them as probabilities, out and Q of one thread, beside about 40 others.
            live = atoms * (tile_n // 2 + tile_n // 8 + traits.headdim_v // 2 + resident * traits.headdim // 4)
            if live + 40 > tile.registers[0]:
                continue
            try:
                tile.check(arch, traits)
            except ValueError:
                continue
            yield tile


@dataclass(frozen=True)
class Sm80BwdTile:
    """One way to cut the Ampere backward: tile_n keys stay, tiles of tile_m queries stream by in `num_stages` stages.

    `split`: warps that share keys, of which each then has the scores of its part of the queries, and its part of the
    columns of dK and dV. `step`: queries of its part that a warp works on at once; None is all of them.
    `query_n`: None sums dQ in float32 global memory; a number gives dQ a kernel of its own, query_m queries by query_n
    keys with a warp for each 16 queries, which costs two more products and repeats bit by bit.
    Of sums: `late`, dQ of a tile is computed in the next one, which takes a second stage for dS and saves a barrier;
    `staggered`, then one half of the warps computes it before the scores of that tile and the other after them;
    `vector`, four sums in one instruction, for archs since Hopper.
    """

    tile_m: int
    tile_n: int = 128
    num_warps: int = 8
    split: int = 1
    step: int | None = None
    query_n: int | None = None
    query_m: int = 128
    late: bool = False
    staggered: bool = False
    vector: bool = False
    num_stages: int = 2
    wanted: str = "all"  # as in BwdTile

    kv_stages = 1  # one thread block for each tile that stays

    def __post_init__(self):
        for field, allowed in (
            ("tile_m", (32, 64, 128)),
            ("tile_n", (32, 64, 128)),
            ("num_warps", (4, 8)),
            ("split", (1, 2, 4)),
            ("num_stages", (1, 2)),
            ("query_n", (None, 16, 32, 64, 128)),
            ("query_m", (64, 128)),
            ("wanted", ("all", "dq", "dkdv")),
        ):
            self._require(getattr(self, field) in allowed, field, f"one of {allowed}")
        self._require(self.keys % 16 == 0, "split", "16 keys or more for a warp")
        self._require(self.at_once % 16 == 0 and self.queries % self.at_once == 0, "step", "a divisor, at least 16")
        if self.summed:
            self._require(self.wanted == "all", "wanted", "'all', and with a query_n 'dq' or 'dkdv'")
        else:
            self._require(not self.late and not self.vector, "query_n", "None with late or vector")
        self._require(self.num_stages == 2 or not self.late, "num_stages", "2 with late, which counts in twos")
        self._require(self.late or not self.staggered, "staggered", "only with late")

    def _require(self, ok, field, allowed):
        if not ok:
            raise ValueError(f"Sm80BwdTile: {field}={getattr(self, field)!r}; allowed: {allowed}")

    @property
    def summed(self) -> bool:
        return self.query_n is None

    @property
    def keys(self) -> int:
        """Keys of a warp: of its dK and dV, and of its scores."""
        return self.tile_n * self.split // self.num_warps

    @property
    def queries(self) -> int:
        """Queries of a tile that a warp has scores of."""
        return self.tile_m // self.split

    @property
    def at_once(self) -> int:
        return self.step or self.queries

    @property
    def score_stages(self) -> tuple[int, int]:
        """Tiles of P and of dS in shared memory: P for those who share keys, dS for them and for sums of dQ."""
        shared = int(self.split > 1)
        return shared, max(shared, self.summed * (1 + self.late))

    def dq_part(self, headdim: int) -> tuple[int, int]:
        """(queries, columns) of a summed dQ that a warp computes: of equal parts those that read least."""
        size = self.tile_m * headdim // self.num_warps
        whole = lambda m, n: m * n == size and n % 16 == 0 and headdim % n == 0 and _in_units(n, headdim)
        parts = [(m, size // m) for m in (16, 32, 64, 128) if m <= self.tile_m and whole(m, size // m)]
        if not parts:
            raise ValueError(f"{self}: dQ of {headdim} columns has no {self.num_warps} equal parts")
        return min(parts, key=sum)

    @property
    def num_threads(self) -> int:
        return 32 * self.num_warps

    @property
    def query_threads(self) -> int:
        """Of the kernel for dQ."""
        return 2 * self.query_m

    @property
    def registers(self) -> tuple[int]:
        return (255,)

    def smem_bytes(self, traits: Traits) -> int:
        """Of the larger kernel: K and V, the stages of Q, dO, lse and delta, P and dS; or Q and dO, K and V in two
        stages."""
        widths = traits.headdim + traits.headdim_v
        scores = self.tile_n * self.tile_m * sum(self.score_stages)
        keys = 2 * ((self.tile_n + self.num_stages * self.tile_m) * widths + scores) + 8 * self.num_stages * self.tile_m
        queries = 0 if self.summed else 2 * (self.query_m + 2 * self.query_n) * widths
        return -(-max(keys, queries) // 1024) * 1024

    def workspace_floats(self, rows: int, headdim: int) -> int:
        """For each of `rows` padded query rows: lse and delta, and dQ where it is summed in memory."""
        return rows * (2 + (headdim if self.summed else 0))

    def check(self, arch: ArchSpec, traits: Traits) -> None:
        """Raise ValueError, with the budget in the text, where this tile does not fit."""
        check_smem(self, arch, traits)
        for width in (traits.headdim, traits.headdim_v):
            copied = [(self.num_threads, (self.tile_m, self.tile_n))]
            copied += [] if self.summed else [(self.query_threads, (self.query_m, self.query_n))]
            for threads, tiles in copied:
                rows = 8 * threads // copy_unit(width)
                if width % 32 or any(tile % rows for tile in tiles):
                    raise ValueError(f"{self}: {traits.slug} is copied in rounds of {rows} rows, 32 columns at a time")
            if width % self.split or not _in_units(width // self.split, width):
                raise ValueError(f"{self}: {traits.slug} has no {self.split} equal parts of columns")
        if self.summed:
            self.dq_part(traits.headdim)


def _in_units(part: int, width: int) -> bool:
    """Whether parts of so many columns are whole copy units, or whole parts of one."""
    unit = copy_unit(width)
    return not (part % unit and unit % part)


def copy_unit(width: int) -> int:
    """Columns that lie together in shared memory where a tile of `width` columns is copied by 16 bytes."""
    return 64 if width % 64 == 0 else 32


def check_smem(tile: Tile, arch: ArchSpec, traits: Traits) -> None:
    need = tile.smem_bytes(traits)
    if need > arch.smem_bytes:
        raise ValueError(
            f"{tile}: {traits.slug} needs {need:,} B of shared memory; {arch.name} has {arch.smem_bytes:,}"
        )


Tile = FwdTile | BwdTile | Sm80FwdTile | Sm80BwdTile


@dataclass(frozen=True)
class Row:
    """One line of a tile table. A bound on seqlen_k chooses among compiled variants; it is never part of a key."""

    headdim: int | tuple[int, int]
    tile: Tile
    dtypes: frozenset[str] = HALF
    masks: tuple[str, ...] = ("full", "causal", "window")
    min_seqlen: int = 0
    deterministic: tuple[bool, ...] = (False, True)
    int8_qk: tuple[bool, ...] = (False, True)

    @property
    def dims(self) -> tuple[int, int]:
        return self.headdim if isinstance(self.headdim, tuple) else (self.headdim, self.headdim)

    def covers(self, traits: Traits) -> bool:
        return (
            self.dims == (traits.headdim, traits.headdim_v)
            and traits.dtype in self.dtypes
            and traits.mask in self.masks
            and traits.deterministic in self.deterministic
            and traits.int8_qk in self.int8_qk
        )


class TileTable(tuple):
    """Rows in order; the first one that covers the traits and whose `min_seqlen` is reached wins."""

    def __new__(cls, *rows: Row):
        return super().__new__(cls, rows)

    def __getnewargs__(self):
        return tuple(self)

    @property
    def headdims(self) -> tuple[tuple[int, int], ...]:
        """Compiled (headdim, headdim_v) pairs, cheapest first."""
        return tuple(sorted({row.dims for row in self}, key=lambda d: (d[0] + d[1], d)))

    def rows_for(self, traits: Traits) -> tuple[Row, ...]:
        return tuple(row for row in self if row.covers(traits))

    def find(self, traits: Traits, seqlen: int) -> Tile:
        for row in self:
            if seqlen >= row.min_seqlen and row.covers(traits):
                return row.tile
        raise LookupError(f"no tile for {traits.slug}")
