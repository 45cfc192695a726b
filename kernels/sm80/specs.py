"""What the Ampere-style kernels can do and how they cut the work. Data only: neither torch nor cutlass is imported."""

from flashattn_hopper.spec.arch import SM80, SM86, SM87, SM89, SM90, SM100, SM110, SM120
from flashattn_hopper.spec.kernel import KernelSpec
from flashattn_hopper.spec.problem import BWD, FWD, HALF
from flashattn_hopper.spec.tile import Row, Sm80BwdTile, Sm80FwdTile, TileTable

# From the budgets of shared memory and registers (docs/kernels/sm80_forward.md); no other tile was measured.
# Warps of 32 queries read K and V half as often, where they fit the registers; two blocks of 4 warps then share a
# multiprocessor. For 163 KiB and more:
LARGE = TileTable(
    Row(64, Sm80FwdTile(128, 64, q_in_registers=True)),
    Row(96, Sm80FwdTile(128, 32)),
    Row(128, Sm80FwdTile(128, 32), masks=("full", "causal")),
    Row(128, Sm80FwdTile(128, 64, num_warps=8), masks=("window",)),
    Row((192, 128), Sm80FwdTile(128, 64, num_warps=8)),
    Row(192, Sm80FwdTile(128, 64, num_warps=8)),
    Row(256, Sm80FwdTile(128, 32, num_warps=8)),
)
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
    ports=((SM86, SMALL), (SM87, LARGE), (SM89, SMALL), (SM90, LARGE), (SM100, LARGE), (SM110, LARGE), (SM120, SMALL)),
    dtypes=HALF,
    features=frozenset({"gqa", "deterministic"}),
    invariant_to=frozenset({"gqa", "deterministic"}),
    multiple=8,
    tiles=LARGE,
    entry="flashattn_hopper.kernels.sm80.forward:Forward",
)

# 96 KiB at most: one table for every arch. Beyond headdim 128 dK and dV of 16 keys leave a warp no registers.
BACKWARD_TILES = TileTable(
    Row(64, Sm80BwdTile(64, query_n=64)),
    Row(96, Sm80BwdTile(32, 64, num_warps=4, query_n=32, query_m=64)),
    Row(128, Sm80BwdTile(32, query_n=32)),
)

BACKWARD = KernelSpec(
    name="sm80.backward",
    phase=BWD,
    arch=SM80,
    ports=tuple((arch, BACKWARD_TILES) for arch, _ in FORWARD.ports),
    dtypes=HALF,
    features=frozenset({"gqa", "deterministic"}),
    invariant_to=frozenset({"gqa", "deterministic"}),
    multiple=8,
    tiles=BACKWARD_TILES,
    entry="flashattn_hopper.kernels.sm80.backward:Backward",
    on_request="its tests have not all run on a GPU yet",
)
