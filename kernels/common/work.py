"""What one thread block works on: the query tile, its head and batch, and the order in which tiles are taken."""

from dataclasses import dataclass
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, const_expr
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import T


class Section(NamedTuple):
    """How many heads are worked on at the same time: as many as fit `l2_bytes` with their K and V, but at least enough
    of them for `query_tiles`."""

    l2_bytes: int
    query_tiles: int


# Up to SHORT_M_BLOCKS query tiles for each head, and beyond. Measured: docs/kernels/sm90_forward.md.
SHORT, LONG = Section(8 << 20, 256), Section(16 << 20, 256)
SHORT_M_BLOCKS = 8
NARROW = Section(8 << 20, 1)


class DeviceArith:
    """`min` and `max` for spec.mask on device integers."""

    min = staticmethod(cutlass.min)
    max = staticmethod(cutlass.max)


class Work(NamedTuple):
    m_block: Int32
    head: Int32
    batch: Int32


class Place(NamedTuple):
    """Where a consumer thread is: its warpgroup among the consumers, its warp in it, its lane."""

    wg: Int32
    warp: Int32
    lane: Int32


def thread_again():
    """The thread index read anew: what an epilogue derives from it does not occupy registers through the main loop."""
    asm = llvm.inline_asm(
        T.i32(), [], "mov.u32 $0, %tid.x;", "=r",
        has_side_effects=True, is_align_stack=False, asm_dialect=llvm.AsmDialect.AD_ATT,
    )  # fmt: skip
    return Int32(asm)


def kept(value, lane):
    """The same Int32 through a shuffle, which the compiler cannot work out anew: it stays in a register.

    Why: what derives from the thread index is read anew in a loop, behind the queue of matrix instructions.
    """
    return cute.arch.shuffle_sync(value, lane)


def again(value):
    """The same Int32 or Int64, so that the compiler does not know it: what is derived from it is computed anew."""
    kind, bits, letter = (T.i64(), 64, "l") if isinstance(value, Int64) else (T.i32(), 32, "r")
    asm = llvm.inline_asm(
        kind, [value.ir_value()], f"mov.b{bits} $0, $1;", f"={letter},{letter}",
        has_side_effects=True, is_align_stack=False, asm_dialect=llvm.AsmDialect.AD_ATT,
    )  # fmt: skip
    return type(value)(asm)


@dataclass(frozen=True)
class Extent:
    """The grid of query tiles of one launch."""

    m_blocks: Int32
    heads: Int32
    batch: Int32
    seqlen_k: Int32

    def tiles(self):
        return self.m_blocks * self.heads * self.batch


@dataclass(frozen=True)
class InOrder:
    """Query tiles of a head one after the other: all are equally long, and K and V of the head stay in L2."""

    extent: Extent

    @cute.jit
    def work(self, linear):
        e = self.extent
        head_batch = linear // e.m_blocks
        m_block = linear - head_batch * e.m_blocks
        batch = head_batch // e.heads
        return Work(m_block, head_batch - batch * e.heads, batch)


@dataclass(frozen=True)
class LongestFirst:
    """For masks that end at the diagonal: the last, longest query tiles of a section of heads first.

    Within a section the order is m_block major, so that it ends with short tiles. The first `cut` heads come in
    sections of `width`; the rest, if any, is one wide section, so that the launch ends evenly: a narrow last one would
    start long tiles when the others run out of work.
    """

    extent: Extent
    width: Int32
    cut: Int32

    @cute.jit
    def work(self, linear):
        e = self.extent
        total, cut_tiles = e.heads * e.batch, self.cut * e.m_blocks
        first, origin, section, end = Int32(0), Int32(0), self.width, self.cut
        if linear >= cut_tiles:
            first, origin, section, end = self.cut, cut_tiles, cutlass.max(total - self.cut, 1), total
        s = (linear - origin) // (section * e.m_blocks)
        inner = linear - origin - s * (section * e.m_blocks)
        first = first + s * section
        width = cutlass.max(cutlass.min(section, end - first), 1)
        m = inner // width
        head_batch = first + inner - m * width
        batch = head_batch // e.heads
        return Work(e.m_blocks - 1 - m, head_batch - batch * e.heads, batch)


def longest_first(extent, bytes_per_key, narrow=True):
    """Even sections; with few query tiles for each head and `narrow`, narrow ones and a wide one last. Not narrow are
    sums in memory, which get into each other's way where few heads are worked on, and the kernel for dQ, which has no
    registers for it."""
    per_head = cutlass.max(cutlass.min(extent.seqlen_k, Int32(1 << 20)) * bytes_per_key, 1)
    m_blocks, total = cutlass.max(extent.m_blocks, 1), cutlass.max(extent.heads * extent.batch, 1)
    heads = lambda s: cutlass.max(cutlass.max(Int32(s.l2_bytes) // per_head, Int32(s.query_tiles) // m_blocks), 1)
    short = m_blocks <= SHORT_M_BLOCKS
    wide = cutlass.min(Int32(cutlass.select_(short, heads(SHORT), heads(LONG))), total)
    sections = (total + wide - 1) // wide
    width, cut = (total + sections - 1) // sections, total
    if const_expr(narrow):
        few = heads(NARROW)
        width = Int32(cutlass.select_(short, few, width))
        cut = Int32(cutlass.select_(short, ((total - wide) // few) * few, cut))
    return LongestFirst(extent, width, cut)


@dataclass(frozen=True)
class HeadMap:
    """Grouped heads: `group` query heads share one head of K and V (1 without GQA)."""

    group: Int32

    def kv(self, head):
        return head // self.group


def order_of(mask: str, extent: Extent, bytes_per_key: int, narrow: bool = True):
    """The order part for a mask kind: windows are equally long everywhere but at the start."""
    return longest_first(extent, bytes_per_key, narrow) if const_expr(mask == "causal") else InOrder(extent)
