"""Tensors as the Hopper kernels hold them: swizzled shared memory, TMA slices, slabs of one warpgroup."""

import cutlass.cute as cute
import cutlass.utils.hopper_helpers as hopper
from cutlass import Float32
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warpgroup
from cutlass.tensor_utils import LayoutEnum

SLAB = 64  # rows of one warpgroup: the M of its matrix instruction


def staged(dtype, rows, width, stages, unit=None):
    """A swizzled row-major tile, several times. `unit`: columns that a product takes at a time, if not all."""
    kind = hopper.get_smem_layout_atom(LayoutEnum.ROW_MAJOR, dtype, unit or width)
    return cute.tile_to_shape(warpgroup.make_smem_layout_atom(kind, dtype), (rows, width, stages), order=(0, 1, 2))


def one_stage(layout):
    return cute.slice_(layout, (None, None, 0))


def stage_bytes(dtype, layout):
    return cute.size_in_bytes(dtype, one_stage(layout))


def slices(atom, shared, tensor, tile, head, batch, column=0, row=None):
    """(atom, source, destination) of one head's tiles; blocks are the source's last mode, stages the destination's.

    `tile` is (rows, columns), `column` which columns and `row` which rows; None: all blocks of them.
    """
    g = cute.local_tile(tensor[None, None, head, batch], tile, (row, column))
    dst, src = cpasync.tma_partition(
        atom, 0, cute.make_layout(1), cute.group_modes(shared, 0, 2), cute.group_modes(g, 0, 2)
    )
    return atom, src, dst


def write_slab(values, slab, width, place):
    """A warpgroup's 16-bit accumulator fragment into its slab (64, width). TMA sees it after `fence` and a barrier."""
    dtype = values.element_type
    atom = hopper.get_smem_store_op(LayoutEnum.ROW_MAJOR, dtype, Float32)
    view = hopper.make_trivial_tiled_mma(  # one warpgroup's view, so each addresses its own slab
        dtype, dtype, OperandMajorMode.K, OperandMajorMode.K, Float32, (1, 1, 1), (SLAB, width)
    )
    thr = cute.make_tiled_copy_C(atom, view).get_slice(place.warp * 32 + place.lane)
    cute.copy(atom, thr.retile(values), thr.partition_D(slab))


def fence():
    """What this thread has written to shared memory is there for TMA."""
    cute.arch.fence_proxy("async.shared", space="cta")
