"""What the Hopper kernels can do and how they cut the work. Data only: neither torch nor cutlass is imported."""

from flashattn_hopper.spec.arch import SM90
from flashattn_hopper.spec.kernel import KernelSpec
from flashattn_hopper.spec.problem import FWD, HALF
from flashattn_hopper.spec.tile import FwdTile, Row, TileTable

FORWARD_TILES = TileTable(
    Row(64, FwdTile(192, 128, schedule="dynamic", q_stages=2, output="own")),
    Row(96, FwdTile(128, 128, schedule="dynamic", q_stages=2, output="own")),
    Row(128, FwdTile(128, 128, schedule="dynamic", q_stages=2, output="own")),
    Row((192, 128), FwdTile(128, 128, schedule="dynamic", output="v")),
    Row(192, FwdTile(128, 112, schedule="dynamic", output="v")),
    Row(256, FwdTile(128, 80, schedule="dynamic", output="v")),
)

FORWARD = KernelSpec(
    name="sm90.forward",
    phase=FWD,
    arch=SM90,
    dtypes=HALF,
    features=frozenset({"gqa", "deterministic"}),
    invariant_to=frozenset({"gqa", "deterministic"}),
    multiple=8,
    tiles=FORWARD_TILES,
    evidence="nvidia-h200/forward",
    entry="flashattn_hopper.kernels.sm90.forward:Forward",
)
