"""Runs the PTX of a Hopper kernel with roles on the CPU: TMA, mbarriers, named barriers, matrix instructions.

    run(text, parameters, maps, threads, blocks, memory)

What ptx_machine does for threads of one kind, this does for warps that wait for one another: each runs until it has to
wait. A missing arrival shows as a deadlock. Copies and matrix products happen when they are issued; those named in
`late` as late as they may: "products" when a warp waits for their group, "stores" when it waits for them, "loads" one
by one when nothing else can move. With any of them other warps go on after an arrival; with "others" first those that
come before, so that warps get as far apart as waits let them. A missing wait shows in results of what is late; a stage
that is given back too early, where products are late and loads are not. Matrix products are exact sums, rounded once an
instruction; a Hopper GPU keeps fewer bits.

Shared memory is swizzled by the address, as the hardware does: of a copy by the width of its box, of a matrix operand
by its descriptor. `maps`: parameter number -> Map, what the host makes a tensor map of.
"""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass, field

import numpy as np
import torch

from flashattn_hopper import runner
from flashattn_hopper.spec.mask import Seqlens

from . import ptx_machine
from .ptx_machine import _BITS, _COMPARE, _address, _bits, _Block

SHARED_BYTES = 240 * 1024
_MASK = {128: 7, 64: 3, 32: 1}  # swizzle span in bytes -> the bits that move
_SPAN = {1: 128, 2: 64, 3: 32}  # layout type of a matrix descriptor
_VALUES = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).double().numpy()
# What the bytes of a row are worth, by the type of a product's operands.
_DECODE = {
    "e4m3": lambda x: _VALUES[x],
    "s8": lambda x: x.view(np.int8).astype(np.float64),
    "f16": lambda x: np.ascontiguousarray(x).view(np.float16).astype(np.float64),
    "bf16": lambda x: (
        (np.ascontiguousarray(x).view(np.uint16).astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    ),
}


def _swizzled(address, span):
    return address ^ (((address >> 7) & _MASK[span]) << 4)


@dataclass
class Map:
    """A tensor (batch, heads, rows, columns), any strides, and the tile that its copies move, in boxes of `span` bytes
    by `rows`. `unit`: columns that are swizzled alike, if not all of them."""

    tensor: torch.Tensor
    width: int
    rows: int
    unit: int | None = None

    @property
    def span(self):
        size = (self.unit or self.width) * self.tensor.element_size()
        return next(span for span in _MASK if size % span == 0)

    def addresses(self, first):
        return _swizzled(first + np.arange(self.rows * self.span), self.span).reshape(self.rows, -1)

    def box(self, at):
        """A view of what a box at (column, row, head, batch) covers of the tensor."""
        column, row, head, batch = at
        raw = self.tensor[batch, head].view(torch.uint8 if self.tensor.element_size() == 1 else torch.int16)
        return raw[row : row + self.rows, column : column + self.span // self.tensor.element_size()]

    def load(self, at, shared, first):
        part = self.box(at)
        whole = torch.zeros(self.rows, self.span // self.tensor.element_size(), dtype=part.dtype)
        whole[: part.shape[0], : part.shape[1]] = part
        shared[self.addresses(first)] = whole.numpy().view(np.uint8)

    def store(self, at, shared, first):
        part = self.box(at)
        whole = torch.from_numpy(shared[self.addresses(first)].copy()).view(part.dtype)
        part.copy_(whole[: part.shape[0], : part.shape[1]])


@dataclass
class _Arrivals:
    """An mbarrier."""

    count: int
    pending: int
    num_bytes: int = 0
    phase: int = 0

    def settle(self):
        if self.pending == 0 and self.num_bytes == 0:
            self.phase, self.pending = self.phase ^ 1, self.count
        assert self.pending >= 0, "more arrivals than an mbarrier expects"


@dataclass
class _Named:
    """A named barrier; `votes` are the ORs of past generations."""

    arrived: int = 0
    generation: int = 0
    vote: bool = False
    votes: tuple = ()

    def arrive(self, expected, vote=False):
        self.arrived, self.vote = self.arrived + 32, self.vote or vote
        assert self.arrived <= expected, "more threads than a named barrier expects"
        if self.arrived == expected:
            self.votes, self.generation = (*self.votes, self.vote), self.generation + 1
            self.arrived, self.vote = 0, False


@dataclass
class _Shared:
    """What the warps of a block share beside memory. `loads` are those that are to be done yet."""

    maps: dict
    threads: int
    blocks: int
    late: frozenset
    loads: list = field(default_factory=list)
    mbarriers: dict = field(default_factory=dict)
    named: dict = field(default_factory=dict)


def run(text, parameters, maps, threads, blocks, memory, late=(), kernel="", resident=1):
    """`kernel`: which one of a module with several. So many blocks are `resident`, which may wait for each other."""
    code, labels = parse(entry(text, kernel))

    def start(block):
        shared = np.full(SHARED_BYTES, 0xFF, np.uint8)
        state = _Shared(maps, threads, blocks, frozenset(late))
        return [_Warp(code, labels, parameters, memory, shared, w, block, state) for w in range(threads // 32)]

    waiting = list(range(blocks))
    warps, polls = [], 0
    while warps or waiting:
        while waiting and len({id(warp.state) for warp in warps}) < resident:
            warps += start(waiting.pop(0))
        moved = []
        for warp in warps:
            moved.append(warp.run())
            if moved[-1] and "others" in late and not warp.polling:
                break
        # One that asks memory again and again is waiting too.
        idle = not any(m and not warp.polling for m, warp in zip(moved, warps))
        polls = polls + 1 if idle else 0
        if polls > any(warp.polling for warp in warps):
            states = list({id(warp.state): warp.state for warp in warps}.values())
            loads = [state.loads for state in states if state.loads]
            assert loads, f"deadlock at {[warp.where() for warp in warps]}"
            for each in loads:
                each.pop(0)()
            polls = 0
        warps = [warp for warp in warps if not warp.done]


def run_forward(text, tile, maps, band, scale, memory, late=(), num_ctas=None, scales=()):
    """A kernel of class Forward, handed over as its host half does; lse (batch, heads, queries).

    `maps`: of q, k, v and out. `num_ctas`: blocks of a dynamic schedule, if it is one. `scales`: addresses, of FP8.
    """
    sizes = [[x.tensor.shape[mode] for mode in (2, 3, 1, 0)] for x in maps]
    seqlen_q, _, heads, batch = sizes[0]
    address = lambda x: struct.pack("<Q", x)
    lse = memory.empty(4 * batch * heads * seqlen_q)
    tickets = memory.add(torch.zeros(2, dtype=torch.int32))
    edges = runner.window_edges(band, Seqlens(seqlen_q, sizes[1][0])) if band.kind == "window" else ()
    parameters = [part for size in sizes for part in (b"", struct.pack("<4i", *size))]
    parameters += [address(lse), b"", b"", struct.pack("<f", np.float32(scale) * np.float32(np.log2(np.e)))]
    parameters += [struct.pack("<i", edge) for edge in edges]
    parameters += [address(x) for x in (*([] if num_ctas is None else [tickets]), *scales)]
    tiles = -(-seqlen_q // tile.tile_m) * heads * batch
    blocks = min(num_ctas or tiles, tiles)
    run(text, parameters, dict(zip(range(0, 8, 2), maps)), tile.num_threads, blocks, memory, late)
    assert not memory.read(tickets, 8).any(), "tickets are left for the next launch"
    return memory.read(lse, 4 * batch * heads * seqlen_q).view(torch.float32).view(batch, heads, seqlen_q)


def entry(text, kernel):
    """The part of a module that is a kernel."""
    found = [part for part in text.split(".entry ")[1:] if part.startswith(f"kernel_cutlass_{kernel}")]
    assert len(found) == 1, f"{len(found)} kernels are called {kernel!r}"
    return found[0]


def parse(text):
    """Of one kernel; a loop that waits for an mbarrier becomes one instruction."""
    text = re.sub(r"//[^\n]*", "", text)
    wait = r"\{\s*\.reg \.pred\s+P1;\s*LAB_WAIT:\s*mbarrier\S+ P1, (\[[^\]]*\]), ([^,]+), \d+;.*?DONE:\s*\}"
    text = re.sub(wait, r"mbarrier_wait \1, \2;", text, flags=re.S)
    body = re.sub(r"\{\s*\.reg", ".reg", text[text.index("\n{") + 2 : text.rindex("}")])
    return ptx_machine._parse(re.sub(r"\}\s*\n", "\n", body))


class _Warp(_Block):
    def __init__(self, code, labels, parameters, memory, shared, warp, block, state):
        super().__init__(code, labels, parameters, memory, 32, block)
        self.shared, self.warp, self.done, self.joined = shared, warp, False, None
        self.state, self.late, self.polling = state, state.late, False
        self.maps, self.mbarriers, self.named = state.maps, state.mbarriers, state.named
        self.group, self.groups, self.stores = [], [], []  # of products and of stores that wait
        self.registers["%tid.x"] = self.registers["%tid.x"] + np.uint32(32 * warp)
        self.registers["%cluster_ctarank"] = np.zeros(32, np.uint32)
        self.registers["%nctaid.x"] = np.full(32, state.blocks, np.uint32)

    def where(self):
        words, operands, _ = self.code[self.at.min()]
        return self.warp, ".".join(words), operands[:2]

    def get(self, name, kind=np.uint32):
        if name not in self.registers and name.startswith("%r"):
            return np.full(32, 0x7FC0_BAD0, kind)  # not written yet; as a float it is NaN
        if name not in self.registers and "_param_" in name:
            return np.full(32, int(name.rsplit("_", 1)[1]), np.uint64)  # the address of a tensor map: its number
        return super().get(name, kind)

    def run(self):
        """Until it ends or waits; whether it moved."""
        moved, end, self.polling = False, len(self.code), False
        while (here := self.at.min()) < end:
            active = self.at == here
            words, operands, predicate = self.code[here]
            taken = active if predicate is None else active & (self.registers[predicate[0]] == predicate[1])
            if taken.any() and not self.ready(words, operands, taken):
                return moved
            self.at[active], moved = here + 1, True
            if words[0] == "bra":
                self.at[taken] = self.labels[operands[0]]
            elif words[0] == "ret":
                self.at[taken] = end
            elif taken.any() and words[0] not in ("mbarrier_wait", "bar", "barrier"):
                with np.errstate(all="ignore"):
                    self.step(words, operands, taken)
                if words[:2] == ["ld", "acquire"]:
                    self.polling = True
                    return moved
                if self.late and words[:2] == ["mbarrier", "arrive"]:
                    return True
        assert not self.stores, "a store that nobody waited for"
        assert not self.group and not self.groups, "a product that nobody waited for"
        self.done = True
        return True

    def ready(self, words, operands, active):
        """Instructions that wait, and arrivals at named barriers."""
        if words[0] == "mbarrier_wait":
            parity = int(self.get(operands[1])[active][0])
            return self.mbarriers[self.place(operands[0], active)].phase != parity
        if words[0] not in ("bar", "barrier"):
            return True
        assert active.all(), "a barrier that some lanes miss"
        if words[1] == "warp":
            return True
        voting = words[0] == "barrier"
        number, *count = (int(self.get(x)[0]) for x in operands[int(voting) : 2 + int(voting)])
        barrier = self.named.setdefault(number, _Named())
        if self.joined is None:
            generation = barrier.generation
            barrier.arrive(
                count[0] if count else self.state.threads, voting and bool(self.registers[operands[3]].any())
            )
            if words[1] == "arrive":
                return True
            self.joined = generation
        if barrier.generation == self.joined:
            return False
        if voting:
            self.registers[operands[0]] = np.full(32, barrier.votes[self.joined])
        self.joined = None
        return True

    def place(self, operand, active):
        base, offset = _address(operand)
        return int(self.get(base)[active][0]) + offset

    def step(self, words, operands, active):
        value = _SIMPLE.get(".".join(words))
        if words[0] in ("fence", "prefetch", "setmaxnreg", "griddepcontrol"):
            return
        if value is not None:
            width = _BITS.get(words[-1].removesuffix("x2")[1:], np.uint32)
            self.put(operands[0], value(*(self.get(x, width) for x in operands[1:])), active)
            return
        super().step(words, operands, active)

    def do_cvta(self, words, operands, active, kind):
        self.put(operands[0], self.get(operands[1], np.uint64), active)

    def do_mapa(self, words, operands, active, kind):
        """Shared memory of a cluster, which is one block."""
        self.put(operands[0], self.get(operands[1]), active)

    def do_elect(self, words, operands, active, kind):
        elected = np.arange(32) == np.argmax(active)
        self.put(operands[0].split("|")[1], elected, active)

    def do_vote(self, words, operands, active, kind):
        assert active.all() and "any" in words, "a vote that some lanes miss"
        self.put(operands[0], np.full(32, self.registers[operands[1]].any()), active)

    def do_setp(self, words, operands, active, kind):
        if len(words) == 4 and words[2] == "and":
            a, b, condition = (self.get(x) for x in operands[1:])
            result = _COMPARE[words[1]](a, b) & condition
        elif words[-1] in ("s16", "b16"):
            result = _COMPARE[words[1]](*(_signed(self.get(x), 16) for x in operands[1:]))
        elif words[1].endswith("u") and words[-1] == "f32":  # or unordered
            a, b = (self.get(x).view(np.float32) for x in operands[1:])
            result = _COMPARE[words[1][:-1]](a, b) | np.isnan(a) | np.isnan(b)
        else:
            super().do_setp(words, operands, active, kind)
            return
        self.put(operands[0], result, active)

    def do_mov(self, words, operands, active, kind):
        target, source = operands
        pieces = lambda x: [name.strip() for name in x.strip("{}").split(",")]
        if words[-1] == "b64" and target.startswith("{"):
            for i, half in enumerate(pieces(target)):
                self.put(half, (self.get(source, np.uint64) >> np.uint64(32 * i)).astype(np.uint32), active)
        elif words[-1] == "b64" and source.startswith("{"):
            low, high = (self.get(x).astype(np.uint64) for x in pieces(source))
            self.put(target, low | high << np.uint64(32), active)
        else:
            super().do_mov(words, operands, active, kind)

    def do_mbarrier(self, words, operands, active, kind):
        if words[1] == "init":
            count = int(self.get(operands[1])[active][0])
            self.mbarriers[self.place(operands[0], active)] = _Arrivals(count, count)
            return
        barrier = self.mbarriers[self.place(operands[1], active)]
        if words[1] == "test_wait":
            self.put(operands[0], barrier.phase != self.get(operands[2]), active)
            return
        if "expect_tx" in words:
            barrier.num_bytes += int(self.get(operands[2])[active][0])
        barrier.pending -= int(active.sum())
        barrier.settle()

    def do_cp(self, words, operands, active, kind):
        if "tensor" not in words:
            if "wait_group" in words:
                for store in self.stores:
                    store()
                self.stores.clear()
            elif words[2] == "bulk" and words[-1].endswith("bytes"):
                self.copy_bulk(operands, active)
            return
        if "prefetch" in words:
            return
        load = words[5] == "shared::cta"
        where, inside = operands[int(load)], operands[1 - int(load)]
        name, coordinates = re.match(r"\[(\S+), \{(.*)\}\]", where).groups()
        lane = int(np.argmax(active))
        at = [int(self.get(x.strip()).view(np.int32)[lane]) for x in coordinates.split(",")]
        tensor, first = self.maps[int(self.get(name)[lane])], self.place(inside, active)
        if not load:
            if "stores" in self.late:
                self.stores.append(lambda: tensor.store(at, self.shared, first))
            else:
                tensor.store(at, self.shared, first)
            return
        self.arrive(operands[2], active, tensor.rows * tensor.span, lambda: tensor.load(at, self.shared, first))

    def copy_bulk(self, operands, active):
        """Neighbouring bytes of global memory."""
        first, source = (self.place(x, active) for x in operands[:2])
        size = int(self.get(operands[2])[active][0])
        assert size % 16 == first % 16 == 0
        self.memory.check(np.array([source, source + size - 16]), 16)

        def copy():
            self.shared[first : first + size] = self.memory.bytes[source : source + size]

        self.arrive(operands[3], active, size, copy)

    def arrive(self, barrier, active, size, copy):
        """Do a copy that arrives at an mbarrier, now or later."""
        assert active.sum() == 1, "a copy for each lane"
        barrier = self.mbarriers[self.place(barrier, active)]

        def done():
            copy()
            barrier.num_bytes -= size
            barrier.settle()

        if "loads" in self.late:
            self.state.loads.append(done)
        else:
            done()

    def do_red(self, words, operands, active, kind):
        """Four floats of each lane, or one word of one lane, added to global memory."""
        if words[-1] in ("s32", "u32"):
            assert active.sum() == 1 and "release" in words, "a counter of several lanes, or one that publishes nothing"
            place = self.place(operands[0], active)
            self.memory.check(np.array([place]), 4)
            self.memory.bytes[place : place + 4].view(np.int32)[0] += self.get(operands[1]).view(np.int32)[active][0]
            return
        assert words[-3:] == ["add", "v4", "f32"]
        base, offset = _address(operands[0])
        places = self.get(base)[active].astype(np.int64) + offset
        self.memory.check(places, 16)
        floats = self.memory.bytes.view(np.float32)
        for i, name in enumerate(operands[1].strip("{}").split(",")):
            np.add.at(floats, places // 4 + i, self.get(name.strip()).view(np.float32)[active])

    def do_atom(self, words, operands, active, kind):
        """An addition to one word of global memory, or a count that starts again at a bound, by one lane."""
        assert active.sum() == 1 and ("add" in words or "inc" in words), "an atomic of several lanes"
        lane, place = int(np.argmax(active)), self.place(operands[1], active)
        self.memory.check(np.array([place]), 4)
        word = self.memory.bytes[place : place + 4].view(np.int32)
        before = np.full(32, word[0], np.int32)
        operand = self.get(operands[2]).view(np.int32)[lane]
        word[0] = word[0] + operand if "add" in words else 0 if word[0] >= operand else word[0] + 1
        self.put(operands[0], before.view(np.uint32), active)

    def do_stmatrix(self, words, operands, active, kind):
        base, offset = _address(operands[0])
        rows = self.get(base).astype(np.int64) + offset
        lane = np.arange(32)
        for i, name in enumerate(operands[1].strip("{}").split(",")):
            places = rows[8 * i + lane // 4] + 4 * (lane % 4)
            self.shared[places[:, None] + np.arange(4)] = self.get(name.strip()).copy().view(np.uint8).reshape(32, 4)

    def do_ldmatrix(self, words, operands, active, kind):
        base, offset = _address(operands[1])
        rows = self.get(base).astype(np.int64) + offset
        lane = np.arange(32)
        for i, name in enumerate(operands[0].strip("{}").split(",")):
            places = rows[8 * i + lane // 4] + 4 * (lane % 4)
            self.put(name.strip(), self.shared[places[:, None] + np.arange(4)].view(np.uint32)[:, 0], active)

    def do_wgmma(self, words, operands, active, kind):
        if words[1] == "mma_async":
            # What an instruction reads when it is issued; registers and shared memory it may read later.
            value = lambda x: x if x.startswith("{") else int(self.get(x)[0])
            flips = [False, False, *(x == "1" for x in operands[6:])][
                -2:
            ]  # of A and B; one in registers is not flipped
            issued = words, operands[0], value(operands[1]), value(operands[2]), self.registers[operands[3]][0], flips
            if "products" in self.late:
                self.group.append(issued)
            else:
                self.product(*issued)
        elif words[1] == "commit_group":
            self.groups, self.group = [*self.groups, self.group], []
        elif words[1] == "wait_group":
            while len(self.groups) > int(operands[0]):
                for issued in self.groups.pop(0):
                    self.product(*issued)

    def product(self, words, target, a, b, sums, flips):
        columns, decode = int(re.match(r"m64n(\d+)k", words[4])[1]), _DECODE[words[-1]]
        lane, own = np.arange(32), 16 * (self.warp % 4)
        row, pair = lane // 4, lane % 4
        if isinstance(a, str):
            left = np.zeros((16, 32), np.uint8)
            for i, name in enumerate(a.strip("{}").split(",")):
                codes = self.get(name.strip()).copy().view(np.uint8).reshape(32, 4)
                for e in range(4):
                    left[row + 8 * (i % 2), 16 * (i // 2) + 4 * pair + e] = codes[:, e]
        else:
            left = self.matrix(a, 64, flips[0])[own : own + 16]
        product = decode(left) @ decode(self.matrix(b, columns, flips[1])).T
        number = np.int32 if words[-1] == "s8" else np.float32
        for e, name in enumerate(target.strip("{}").split(",")):
            value = product[row + 8 * (e // 2 % 2), 8 * (e // 4) + 2 * pair + e % 2]
            if sums:
                value = value + self.get(name.strip()).view(number)
            bits = value.astype(number).view(np.uint32)
            # Hardware has one NaN, which is above every number as an integer.
            self.registers[name.strip()] = np.where(np.isnan(value), np.uint32(0x7FFFFFFF), bits)

    def matrix(self, descriptor, rows, flipped):
        """Rows of 32 bytes that a descriptor names: groups of eight rows, each row as long as the swizzle's span.

        `flipped`: what lies side by side are elements of 16 bits of one column, as many as the span holds; the next as
        many lie `leading` further, groups of eight columns `stride`.
        """
        first, leading, stride = ((descriptor >> bit & 0x3FFF) << 4 for bit in (0, 16, 32))
        span = _SPAN[descriptor >> 62]
        row, byte = np.arange(rows)[:, None], np.arange(32)[None]
        place = row // 8 * stride + row % 8 * span + byte
        if flipped:
            column, half, long = byte // 2, byte % 2, 2 * row
            place = long // span * leading + long % span + column // 8 * stride + column % 8 * span + half
        return self.shared[_swizzled(first + place, span)]


def _signed(x, bits):
    x = x.astype(np.int64) & ((1 << bits) - 1)
    return (x ^ (1 << (bits - 1))) - (1 << (bits - 1))


def _word(x, bits=32):
    return (x & ((1 << bits) - 1)).astype(np.uint32)


def _floats(function):
    return lambda *x: _bits(function(*(y.view(np.float32) for y in x)))


def _maximum(*x):
    for y in x[1:]:
        x = (np.fmax(x[0], y),)
    return x[0]


def _halves(dtype):
    def convert(high, low):
        half = lambda x: torch.from_numpy(x.view(np.float32).copy()).to(dtype).view(torch.int16).numpy()
        return _word(half(high).astype(np.int64), 16) << 16 | _word(half(low).astype(np.int64), 16)

    return convert


def _remainder(a, b):
    return a % np.where(b == 0, 1, b).astype(a.dtype)


_SIMPLE = {
    "ex2.approx.ftz.f32": _floats(np.exp2),
    "lg2.approx.ftz.f32": _floats(np.log2),
    "rcp.approx.ftz.f32": _floats(lambda x: np.float32(1.0) / x),
    "max.f32": _floats(_maximum),
    "min.f32": _floats(np.fmin),
    "cvt.rn.bf16x2.f32": _halves(torch.bfloat16),
    "cvt.rn.f16x2.f32": _halves(torch.float16),
    "cvt.s16.s8": lambda x: _word(_signed(x, 8), 16),
    "cvt.s32.s8": lambda x: _word(_signed(x, 8)),
    "cvt.s32.s16": lambda x: _word(_signed(x, 16)),
    "mul.wide.s16": lambda a, b: _word(_signed(a, 16) * _signed(b, 16)),
    "shr.s16": lambda a, places: _word(_signed(a, 16) >> places.astype(np.int64), 16),
    "max.NaN.f32": _floats(np.maximum),
    "min.NaN.f32": _floats(np.minimum),
    "max.relu.s32": lambda a, b: np.maximum(np.maximum(a.view(np.int32), b.view(np.int32)), 0).view(np.uint32),
    "min.relu.s32": lambda a, b: np.maximum(np.minimum(a.view(np.int32), b.view(np.int32)), 0).view(np.uint32),
    "rem.u32": _remainder,
    "not.b32": lambda x: ~x,
    "not.pred": lambda x: ~x,
    "xor.b32": lambda a, b: a ^ b,
}
