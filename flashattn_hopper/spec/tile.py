"""How a kernel cuts its work: self-checking rows of a table."""

from __future__ import annotations

from dataclasses import dataclass

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
    Of 8-bit operands: `value_columns` of V that one product takes, None for all; `serial`, a tile's products one after
    the other, so that their accumulators share registers.
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

    def __post_init__(self):
        self._require(self.tile_m in (64, 128, 192), "tile_m", "64, 128 or 192")
        self._require(self.tile_n % 16 == 0 and 16 <= self.tile_n <= 256, "tile_n", "a multiple of 16 up to 256")
        self._require(self.num_stages == 2, "num_stages", "2 (a ring slot counts in twos)")
        self._require(self.q_stages in (1, 2), "q_stages", "1 or 2")
        self._require(self.schedule in ("grid", "dynamic"), "schedule", "'grid' or 'dynamic'")
        self._require(self.output in ("own", "q", "v"), "output", "'own', 'q' or 'v'")
        self._require(self.output != "v" or self.tile_m == 128, "output", "'v' only with tile_m=128: a stage each")
        self._require(self.output != "v" or self.tile_n >= 64, "output", "'v' only with tile_n >= 64: its 64 rows")
        self._require(self.q_stages == 1 or self.output != "q", "q_stages", "1 with output='q', which bars a prefetch")
        self._require(self.q_stages == 1 or self.schedule == "dynamic", "q_stages", "1 for 'grid': no next tile")

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
        need = self.smem_bytes(traits)
        if need > arch.smem_bytes:
            raise ValueError(
                f"{self}: {traits.slug} needs {need:,} B of shared memory; {arch.name} has {arch.smem_bytes:,}"
            )
        if traits.dtype == "fp8" and (self.output != "own" or 128 % self.tile_n or self.tile_n % 32):
            raise ValueError(
                f"{self}: fp8 needs output='own' (out is wider than the codes) and tile_n of 32, 64 or 128"
            )
        if self.value_columns is not None and (traits.dtype != "fp8" or traits.headdim_v % self.value_columns):
            raise ValueError(f"{self}: value_columns are a divisor of headdim_v, with fp8; got {traits.slug}")
        if traits.headdim_v != traits.headdim and self.output == "q":
            raise ValueError(f"{self}: output='q' needs slabs of one size; {traits.slug} has two")

    @classmethod
    def candidates(cls, arch: ArchSpec, traits: Traits):
        """Every tile worth measuring for these traits: what bench/tune.py enumerates."""
        for tile_m in (128, 192):
            for tile_n in range(48, 193, 16):
                # Scores, probabilities and output of one thread must fit its registers beside about 30 others.
                live = tile_n // 2 + tile_n // 4 + traits.headdim_v // 2
                if live + 30 > cls(tile_m, tile_n).registers[1]:
                    continue
                for schedule, q_stages, output in (
                    ("grid", 1, "q"),
                    ("dynamic", 1, "q"),
                    ("dynamic", 1, "v"),
                    ("dynamic", 2, "v"),
                    ("dynamic", 1, "own"),
                    ("dynamic", 2, "own"),
                ):
                    try:
                        tile = cls(tile_m, tile_n, schedule=schedule, q_stages=q_stages, output=output)
                        tile.check(arch, traits)
                    except ValueError:
                        continue
                    yield tile


@dataclass(frozen=True)
class BwdTile:
    """One way to cut the Hopper backward kernel: tile_n keys by tile_m queries, for two consumer warpgroups.

    128 keys: 64 for each warpgroup. 64 keys: both work on them, each on half of the columns of dK and dV.
    `query_n`: None sums dQ in float32 global memory; a number gives dQ a kernel of its own, 128 queries by query_n
    keys, which costs two more products, needs no sums in memory, and repeats bit by bit.
    `kv_stages`: 1 is one thread block per key tile; with 2, resident blocks draw tickets, and K and V of the next key
    tile are loaded, and dK and dV of the last one stored, under this one.
    """

    tile_m: int
    tile_n: int = 128
    query_n: int | None = None
    kv_stages: int = 1

    def __post_init__(self):
        if self.tile_m not in (64, 128):
            raise ValueError(f"BwdTile: tile_m={self.tile_m!r}; allowed: 64 or 128")
        if self.tile_n not in (64, 128):
            raise ValueError(f"BwdTile: tile_n={self.tile_n!r}; allowed: 64 or 128")
        if self.tile_n == 64 and (self.query_n is None or self.tile_m != 64 or self.kv_stages != 1):
            raise ValueError(f"{self}: tile_n=64 needs tile_m=64, a query_n, and kv_stages=1")
        if self.kv_stages not in (1, 2):
            raise ValueError(f"BwdTile: kv_stages={self.kv_stages!r}; allowed: 1 or 2")
        if self.query_n is not None and (self.query_n % 16 or not 16 <= self.query_n <= 256):
            raise ValueError(f"BwdTile: query_n={self.query_n!r}; allowed: None or a multiple of 16 up to 256")

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
        scores = 2 if self.tile_n == 64 else int(self.query_n is None)  # P and dS, dS, or neither in shared memory
        stage = self.tile_m * (widths + scores * self.tile_n * size + 8)
        return self.kv_stages * self.tile_n * widths + 2 * stage + 1024

    def workspace_floats(self, rows: int, headdim: int) -> int:
        """For each of `rows` padded query rows: lse and delta, and dQ where it is summed in memory; then a ticket."""
        return rows * (2 + (headdim if self.query_n is None else 0)) + 4

    def check(self, arch: ArchSpec, traits: Traits) -> None:
        """Raise ValueError, with the budget in the text, where this tile does not fit."""
        need = self.smem_bytes(traits)
        if need > arch.smem_bytes:
            raise ValueError(
                f"{self}: {traits.slug} needs {need:,} B of shared memory; {arch.name} has {arch.smem_bytes:,}"
            )


@dataclass(frozen=True)
class Row:
    """One line of a tile table. A bound on seqlen_k chooses among compiled variants; it is never part of a key."""

    headdim: int | tuple[int, int]
    tile: FwdTile | BwdTile
    dtypes: frozenset[str] = HALF
    masks: tuple[str, ...] = ("full", "causal", "window")
    min_seqlen: int = 0
    deterministic: tuple[bool, ...] = (False, True)

    @property
    def dims(self) -> tuple[int, int]:
        return self.headdim if isinstance(self.headdim, tuple) else (self.headdim, self.headdim)

    def covers(self, traits: Traits) -> bool:
        return (
            self.dims == (traits.headdim, traits.headdim_v)
            and traits.dtype in self.dtypes
            and traits.mask in self.masks
            and traits.deterministic in self.deterministic
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

    def find(self, traits: Traits, seqlen: int) -> FwdTile | BwdTile:
        for row in self:
            if seqlen >= row.min_seqlen and row.covers(traits):
                return row.tile
        raise LookupError(f"no tile for {traits.slug}")
