"""What the Ampere-style kernels can do and how they cut the work. Data only: neither torch nor cutlass is imported."""

from dataclasses import replace

from flashattn_hopper.spec.arch import SM80, SM86, SM87, SM89, SM90, SM100, SM110, SM120
from flashattn_hopper.spec.kernel import KernelSpec
from flashattn_hopper.spec.problem import BWD, FWD, HALF
from flashattn_hopper.spec.tile import Row, Sm80BwdTile, Sm80FwdTile, TileTable

UNBOUNDED = ("full", "causal")  # all masks but windows

# From the budgets of shared memory and registers; at headdim 256 measured on an H200 (docs/kernels/sm80_forward.md).
# Warps of 32 queries read K and V half as often, where they fit the registers; two blocks of 4 warps then share a
# multiprocessor. For 163 KiB and more:
UP_TO_192 = (
    Row(64, Sm80FwdTile(128, 64, q_in_registers=True)),
    Row(96, Sm80FwdTile(128, 32)),
    Row(128, Sm80FwdTile(128, 32), masks=("full", "causal")),
    Row(128, Sm80FwdTile(128, 64, num_warps=8), masks=("window",)),
    Row((192, 128), Sm80FwdTile(128, 64, num_warps=8)),
    Row(192, Sm80FwdTile(128, 64, num_warps=8)),
)
WINDOW_256 = Row(256, Sm80FwdTile(128, 32, num_warps=8), masks=("window",))
LARGE = TileTable(*UP_TO_192, Row(256, Sm80FwdTile(128, 64, num_warps=8, num_stages=1), masks=UNBOUNDED), WINDOW_256)
# Two blocks share a multiprocessor of 227 KiB.
HOPPER = TileTable(*UP_TO_192, Row(256, Sm80FwdTile(64, 64, num_stages=1), masks=UNBOUNDED), WINDOW_256)
# For Blackwell the compiler spills hundreds of bytes of either.
BLACKWELL = TileTable(*UP_TO_192, Row(256, WINDOW_256.tile))
# For 99 KiB, and half the rate of products for each byte of shared memory:
SMALL = TileTable(
    Row(64, Sm80FwdTile(128, 64, q_in_registers=True)),
    Row(96, Sm80FwdTile(128, 32)),
    Row(128, Sm80FwdTile(128, 64, num_warps=8)),
    Row((192, 128), Sm80FwdTile(128, 64, num_warps=8, num_stages=1)),
    Row(192, Sm80FwdTile(128, 64, num_warps=8, num_stages=1)),
    Row(256, Sm80FwdTile(128, 32, num_warps=8, num_stages=1)),
)

FORWARD = KernelSpec(
    name="sm80.forward",
    phase=FWD,
    arch=SM80,
    ports=(
        (SM86, SMALL),
        (SM87, LARGE),
        (SM89, SMALL),
        (SM90, HOPPER),
        (SM100, BLACKWELL),
        (SM110, BLACKWELL),
        (SM120, SMALL),
    ),
    dtypes=HALF,
    features=frozenset({"gqa", "deterministic"}),
    invariant_to=frozenset({"gqa", "deterministic"}),
    multiple=8,
    tiles=LARGE,
    entry="flashattn_hopper.kernels.sm80.forward:Forward",
)

MASKED = ("causal", "window")
# For a deterministic dQ, which has a kernel of its own.
DETERMINISTIC = (
    Row(64, Sm80BwdTile(64, split=2, query_n=64), deterministic=(True,)),
    Row(96, Sm80BwdTile(32, 64, num_warps=4, query_n=32, query_m=64), deterministic=(True,)),
)
DETERMINISTIC_128 = Row(128, Sm80BwdTile(32, query_n=32), deterministic=(True,))
DETERMINISTIC_256 = Row(256, Sm80BwdTile(64, 64, split=4, query_n=32), deterministic=(True,))
# Five products, dQ summed in memory, by what was measured on an H200 (docs/kernels/sm80_backward.md). For 227 KiB:
LATE_96 = Row(96, Sm80BwdTile(64, 64, num_warps=4, late=True, vector=True), deterministic=(False,))
STAGGERED_64 = Sm80BwdTile(128, split=2, late=True, staggered=True, vector=True)
LATE_128 = Sm80BwdTile(64, split=2, late=True, vector=True)
LARGEST = (
    LATE_96,
    Row(128, LATE_128, masks=("window",), deterministic=(False,)),  # staggered it spills
    Row(128, replace(LATE_128, staggered=True), masks=UNBOUNDED, deterministic=(False,)),
    Row(256, Sm80BwdTile(64, 64, split=4, late=True, staggered=True, vector=True), deterministic=(False,)),
    *DETERMINISTIC,
    DETERMINISTIC_256,
)
BACKWARD_HOPPER = TileTable(
    # The second tile is faster; without a mask it spills.
    Row(64, STAGGERED_64, masks=("full",), deterministic=(False,)),
    Row(64, Sm80BwdTile(64, num_warps=4, step=32, late=True, vector=True), masks=MASKED, deterministic=(False,)),
    *LARGEST,
    Row(128, Sm80BwdTile(64, split=2, query_n=32), deterministic=(True,)),
)
# For Blackwell the compiler spills with all columns of 32 keys in a warp, and in dQ's own order with tiles of 64.
BACKWARD_LARGEST = TileTable(
    Row(64, LATE_128, masks=("window",), deterministic=(False,)),
    Row(64, STAGGERED_64, masks=UNBOUNDED, deterministic=(False,)),
    *LARGEST,
    DETERMINISTIC_128,
)
# For 163 KiB, where one stage of dS is what fits:
BACKWARD_LARGE = TileTable(
    Row(64, Sm80BwdTile(64, split=2), deterministic=(False,)),
    Row(96, Sm80BwdTile(64, 64, num_warps=4), deterministic=(False,)),
    Row(128, Sm80BwdTile(64, split=2), deterministic=(False,)),
    Row(256, Sm80BwdTile(32, 64, split=2), deterministic=(False,)),
    *DETERMINISTIC,
    DETERMINISTIC_128,
    Row(256, Sm80BwdTile(32, 64, split=2, query_n=32, query_m=64), deterministic=(True,)),
)


def _small(vector):
    """For 99 KiB: at headdim 128 no sums of dQ fit, at 256 one stage of queries does."""
    narrow = Sm80BwdTile(32, 32, num_warps=4, split=2, num_stages=1)
    return TileTable(
        Row(64, Sm80BwdTile(64, split=2, vector=vector), deterministic=(False,)),
        Row(96, replace(LATE_96.tile, vector=vector), deterministic=(False,)),
        Row(256, replace(narrow, vector=vector), deterministic=(False,)),
        *DETERMINISTIC,
        replace(DETERMINISTIC_128, deterministic=(False, True)),
        Row(256, replace(narrow, query_n=16, query_m=64), deterministic=(True,)),
    )


BACKWARD_SMALL, BACKWARD_SM120 = _small(vector=False), _small(vector=True)

BACKWARD = KernelSpec(
    name="sm80.backward",
    phase=BWD,
    arch=SM80,
    ports=(
        (SM86, BACKWARD_SMALL),
        (SM87, BACKWARD_LARGE),
        (SM89, BACKWARD_SMALL),
        (SM90, BACKWARD_HOPPER),
        (SM100, BACKWARD_LARGEST),
        (SM110, BACKWARD_LARGEST),
        (SM120, BACKWARD_SM120),
    ),
    dtypes=HALF,
    features=frozenset({"gqa", "deterministic"}),
    invariant_to=frozenset({"gqa"}),
    multiple=8,
    tiles=BACKWARD_LARGE,
    entry="flashattn_hopper.kernels.sm80.backward:Backward",
)
