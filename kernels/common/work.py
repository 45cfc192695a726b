"""What one thread block works on: the query tile, its head and batch, and the order in which tiles are taken."""

from dataclasses import dataclass
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import T


class Section(NamedTuple):
    """How many heads are worked on at the same time: as many as fit `l2_bytes` with their K and V, but enough of them
    for `query_tiles`, since a section with few tiles for each multiprocessor ends unevenly."""

    l2_bytes: int
    query_tiles: int


# Measured: docs/kernels/sm90_forward.md. Short sequences are bound by memory and want their K and V well inside L2.
SHORT, LONG = Section(8 << 20, 256), Section(32 << 20, 512)
SHORT_M_BLOCKS = 8


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

    A section is as many heads as keep their K and V in L2; within it the order is m_block major, so that it ends with
    short tiles. Sections are equally wide: a narrow last one would start long tiles when the others run out of work.
    """

    extent: Extent
    section: Int32

    @cute.jit
    def work(self, linear):
        e = self.extent
        s = linear // (self.section * e.m_blocks)
        inner = linear - s * (self.section * e.m_blocks)
        width = cutlass.min(self.section, e.heads * e.batch - s * self.section)
        m = inner // width
        head_batch = s * self.section + inner - m * width
        batch = head_batch // e.heads
        return Work(e.m_blocks - 1 - m, head_batch - batch * e.heads, batch)


def longest_first(extent, bytes_per_key):
    per_head = cutlass.max(cutlass.min(extent.seqlen_k, Int32(1 << 20)) * bytes_per_key, 1)
    m_blocks = cutlass.max(extent.m_blocks, 1)
    short, long = [cutlass.max(Int32(s.l2_bytes) // per_head, Int32(s.query_tiles) // m_blocks) for s in (SHORT, LONG)]
    widest = cutlass.max(Int32(cutlass.select_(m_blocks > SHORT_M_BLOCKS, long, short)), 1)
    total = cutlass.max(extent.heads * extent.batch, 1)
    sections = (total + widest - 1) // widest
    return LongestFirst(extent, (total + sections - 1) // sections)


@dataclass(frozen=True)
class HeadMap:
    """Grouped heads: `group` query heads share one head of K and V (1 without GQA)."""

    group: Int32

    def kv(self, head):
        return head // self.group


def order_of(mask: str, extent: Extent, bytes_per_key: int):
    """The order part for a mask kind: windows are equally long everywhere but at the start."""
    return longest_first(extent, bytes_per_key) if const_expr(mask == "causal") else InOrder(extent)
