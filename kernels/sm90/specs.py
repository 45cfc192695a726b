"""What the Hopper kernels can do and how they cut the work. Data only: neither torch nor cutlass is imported."""

from flashattn_hopper.spec.arch import SM90
from flashattn_hopper.spec.kernel import KernelSpec
from flashattn_hopper.spec.problem import BWD, FP8, FWD, HALF, QUANTIZE
from flashattn_hopper.spec.tile import BwdTile, FwdTile, Row, TileTable

# Q twice and O in memory of its own: the next query tile is loaded, and the last one stored, under the current one.
ROOMY = {"schedule": "dynamic", "q_stages": 2, "output": "own"}
# And the first scores of the next one are computed under the end of the current one.
AHEAD = ROOMY | {"ahead": True}
# Where headdim leaves no room for that, O is staged in V's stages.
TIGHT = {"schedule": "dynamic", "output": "v"}
# And query tiles of a head read the same K and V together.
RISING = TIGHT | {"rising": True}

FORWARD_TILES = TileTable(
    Row(64, FwdTile(192, 128, **ROOMY), masks=("full", "window")),
    Row(64, FwdTile(192, 128, **AHEAD), masks=("causal",), min_seqlen=1025),
    Row(64, FwdTile(128, 128, **AHEAD), masks=("causal",)),
    Row(96, FwdTile(128, 128, **AHEAD), masks=("full", "causal")),
    Row(96, FwdTile(128, 128, **ROOMY), masks=("window",)),
    Row(128, FwdTile(192, 80, schedule="dynamic", output="own"), masks=("full",), min_seqlen=8192),
    Row(128, FwdTile(128, 128, **AHEAD), masks=("full", "causal")),
    Row(128, FwdTile(128, 128, **ROOMY), masks=("window",)),
    Row((192, 128), FwdTile(128, 128, **RISING), masks=("causal",)),
    Row((192, 128), FwdTile(128, 128, **TIGHT), masks=("full", "window")),
    Row(192, FwdTile(128, 112, **RISING), masks=("causal",)),
    Row(192, FwdTile(128, 112, **TIGHT), masks=("full", "window")),
    Row(256, FwdTile(128, 64, **RISING), masks=("causal",)),
    Row(256, FwdTile(128, 80, **TIGHT), masks=("full", "window"), min_seqlen=1024),
    Row(256, FwdTile(128, 64, **TIGHT), masks=("full", "window")),
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

# A tile's own accumulator of PV must fit beside O. Up to headdim 128 it also fits beside S, so that PV runs under the
# softmax of the next tile, but not beside a window's second edge; there, beyond, and for three warpgroups the products
# take turns. int8 scores have a conversion each, which leaves less time for polynomials. Measured are full and causal
# masks at headdim 64, 128 and 256: docs/kernels/sm90_fp8.md.
ONE_BY_ONE = {"serial": True, "ping_pong": False}

FP8_TILES = TileTable(
    Row(64, FwdTile(192, 128, **ROOMY, **ONE_BY_ONE, polynomial=4), FP8, masks=("full", "window")),
    Row(64, FwdTile(192, 128, **ROOMY, **ONE_BY_ONE, polynomial=4), FP8, masks=("causal",), min_seqlen=1025),
    Row(64, FwdTile(128, 128, **AHEAD, polynomial=4), FP8, masks=("causal",)),
    Row(96, FwdTile(128, 128, **ROOMY, polynomial=2), FP8),
    Row(128, FwdTile(128, 128, **AHEAD, polynomial=3), FP8, masks=("full", "causal"), int8_qk=(False,)),
    Row(128, FwdTile(128, 128, **AHEAD, polynomial=2), FP8, masks=("full", "causal"), int8_qk=(True,)),
    Row(128, FwdTile(128, 128, **ROOMY, **ONE_BY_ONE, polynomial=2), FP8, masks=("window",)),
    Row((192, 128), FwdTile(128, 128, **ROOMY, polynomial=2), FP8, masks=("full", "causal")),
    Row((192, 128), FwdTile(128, 128, **ROOMY, **ONE_BY_ONE, polynomial=2), FP8, masks=("window",)),
    Row(192, FwdTile(128, 128, **ROOMY, **ONE_BY_ONE, value_columns=96, polynomial=2), FP8),
    Row(
        256,
        FwdTile(128, 128, schedule="dynamic", output="own", **ONE_BY_ONE, value_columns=128, polynomial=2),
        FP8,
    ),
)

FORWARD_FP8 = KernelSpec(
    name="sm90.forward_fp8",
    phase=FWD,
    arch=SM90,
    dtypes=FP8,
    features=frozenset({"gqa", "deterministic", "int8_qk", "fp16_out"}),
    invariant_to=frozenset({"gqa", "deterministic"}),
    multiple=16,
    tiles=FP8_TILES,
    entry="flashattn_hopper.kernels.sm90.forward:Forward",
)

# dQ summed in memory costs the fewest products, and repeats bit by bit where the sums are done in turn; a kernel of its
# own is for calls that want less than all gradients. Beyond headdim 128 dK and dV of 64 keys fill the registers of two
# warpgroups, and the sums of dQ would be the bottleneck. `late` where it pays: docs/kernels/sm90_backward.md, step 16.
IN_TURN = {"kv_stages": 2, "ordered": True}

BACKWARD_TILES = TileTable(
    Row(64, BwdTile(128, kv_stages=2, late=True), min_seqlen=1025, deterministic=(False,)),
    Row(64, BwdTile(128, kv_stages=2), deterministic=(False,)),
    Row(64, BwdTile(128, query_n=128, **IN_TURN, late=True), masks=("full",), min_seqlen=1025, deterministic=(True,)),
    Row(64, BwdTile(128, query_n=128, **IN_TURN), masks=("full",), deterministic=(True,)),
    Row(64, BwdTile(128, query_n=128, kv_stages=2), masks=("causal", "window"), deterministic=(True,)),
    Row(96, BwdTile(64, kv_stages=2), deterministic=(False,)),
    Row(96, BwdTile(64, query_n=96, **IN_TURN), masks=("full",), deterministic=(True,)),
    Row(96, BwdTile(64, query_n=96, kv_stages=2), masks=("causal", "window"), deterministic=(True,)),
    Row(128, BwdTile(64, kv_stages=2), deterministic=(False,)),
    Row(128, BwdTile(64, query_n=96, **IN_TURN), masks=("full",), deterministic=(True,)),
    Row(128, BwdTile(64, query_n=96, kv_stages=2), masks=("causal", "window"), deterministic=(True,)),
    Row((192, 128), BwdTile(64, 64, query_n=64)),
    Row(192, BwdTile(64, 64, query_n=64)),
    Row(256, BwdTile(64, 64, query_n=64)),
)

BACKWARD = KernelSpec(
    name="sm90.backward",
    phase=BWD,
    arch=SM90,
    dtypes=HALF,
    features=frozenset({"gqa", "deterministic"}),
    invariant_to=frozenset({"gqa"}),
    multiple=8,
    tiles=BACKWARD_TILES,
    evidence="nvidia-h200/backward",
    entry="flashattn_hopper.kernels.sm90.backward:Backward",
)

# What makes the operands of an FP8 forward. Not a row of the catalog: the planner does not choose it, the forward does.
QUANTIZER = KernelSpec(
    name="sm90.quantize",
    phase=QUANTIZE,
    arch=SM90,
    dtypes=HALF,
    features=frozenset(),
    multiple=16,
    entry="flashattn_hopper.kernels.sm90.quantize:Quantize",
)
