"""Runs PTX on the CPU: the arithmetic of a kernel without tensor cores, thread by thread, on a machine without a GPU.

    machine = Machine(text)                     text of one compiled module
    address = machine.memory.add(tensor)        and .empty(num_bytes), poisoned
    machine.launch("codes", blocks, threads, [bytes of each parameter, ...])
    machine.memory.read(address, num_bytes)

Threads of a block are numpy vectors; of those that are furthest behind, all run one instruction at a time, so that
threads that parted meet again. What it does not know raises, and so does an access outside of an allocation or off its
alignment, a shuffle that some lanes of a warp miss, a barrier that some threads of the block miss.

Trap: a fused multiply-add is rounded from 64 fraction bits, which in one of some 10^9 cases is not the nearest float32.
"""

from __future__ import annotations

import operator
import re

import numpy as np
import torch

_BITS = {"16": np.uint32, "32": np.uint32, "64": np.uint64}  # 16-bit registers live in wider ones
_SIGNED = {np.uint32: np.int32, np.uint64: np.int64}
_SPECIAL = ("%tid.x", "%ctaid.x", "%laneid")
_LOGIC = {"and": operator.and_, "or": operator.or_, "xor": operator.xor}
_COMPARE = {
    "eq": operator.eq, "ne": operator.ne, "lt": operator.lt, "le": operator.le, "gt": operator.gt, "ge": operator.ge,
}  # fmt: skip


class Memory:
    """Global memory: allocations with gaps between them."""

    def __init__(self, size=1 << 26):
        self.bytes = np.full(size, 0xA5, np.uint8)
        self.top, self.spans = 1 << 16, []

    def add(self, tensor: torch.Tensor) -> int:
        """The whole storage of a CPU tensor; returns the address of the tensor's first element."""
        storage = tensor.untyped_storage()
        raw = torch.empty(0, dtype=torch.uint8).set_(storage, 0, (storage.nbytes(),)).numpy()
        address = self.empty(raw.size)
        self.bytes[address : address + raw.size] = raw
        return address + tensor.storage_offset() * tensor.element_size()

    def empty(self, size: int) -> int:
        address = self.top
        self.spans.append((address, address + size))
        self.top = (address + size + 1023) // 512 * 512
        return address

    def read(self, address: int, size: int) -> torch.Tensor:
        return torch.from_numpy(self.bytes[address : address + size].copy())

    def check(self, addresses, size):
        inside = np.zeros(addresses.shape, bool)
        for low, high in self.spans:
            inside |= (addresses >= low) & (addresses + size <= high)
        assert inside.all(), f"access to {[hex(a) for a in addresses[~inside][:4]]} is outside of every allocation"
        assert not (addresses % size).any(), "misaligned access"


class Machine:
    def __init__(self, text: str):
        self.memory, self.kernels = Memory(), {}
        for name, body in re.findall(r"\.entry kernel_cutlass_(\w+?)_flashattn\w*\(.*?\n\{\n(.*?)\n\}\n", text, re.S):
            self.kernels[name] = _parse(body)

    def launch(self, name: str, blocks: int, threads: int, parameters: list[bytes]):
        for block in range(blocks):
            _Block(*self.kernels[name], parameters, self.memory, threads, block).run()


def _parse(body):
    """Instructions as (words of the opcode, operands, (predicate, wanted) or None), and where labels point."""
    code, labels = [], {}
    text = re.sub(r"//[^\n]*", "", body).replace("{ .reg", ".reg")
    for statement in re.split(r";|(?<=:)\n", text):
        statement = statement.strip()
        while match := re.match(r"(\$\w+):\s*(.*)", statement, re.S):
            labels[match[1]], statement = len(code), match[2].strip()
        statement = statement.removeprefix("}").strip()
        if not statement or statement.startswith((".reg", ".pragma")):
            continue
        predicate = None
        if match := re.match(r"@(!?)(%p\d+|[pq])\s+(.*)", statement, re.S):
            predicate, statement = (match[2], not match[1]), match[3]
        opcode, _, rest = re.sub(r"\s+", " ", statement).partition(" ")
        operands = [part.strip() for part in re.findall(r"\{[^}]*\}|\[[^\]]*\]|[^,\s][^,]*", rest)]
        code.append((opcode.split("."), operands, predicate))
    return code, labels


class _Block:
    def __init__(self, code, labels, parameters, memory, threads, block):
        self.code, self.labels, self.parameters, self.memory = code, labels, parameters, memory
        self.threads = threads
        self.at = np.zeros(threads, np.int64)
        self.coming = []  # copies into shared memory that nobody has waited for: (threads, targets, sources)
        self.shared = np.full(227 << 10, 0xEE, np.uint8)
        tid = np.arange(threads, dtype=np.uint32)
        self.registers = dict(zip(_SPECIAL, (tid, np.full_like(tid, block), tid % 32)))
        self.registers["__dynamic_shmem__0"] = np.zeros_like(tid)

    def run(self):
        end = len(self.code)
        while (here := self.at.min()) < end:
            active = self.at == here
            words, operands, predicate = self.code[here]
            self.at[active] = here + 1
            if predicate is not None:
                active &= self.registers[predicate[0]] == predicate[1]
            if words[0] == "bra":
                self.at[active] = self.labels[operands[0]]
            elif words[0] == "ret":
                self.at[active] = end
            elif words[0] in ("fence", "membar"):
                pass  # every access is seen at once
            elif words[:2] == ["bar", "warp"]:
                pass
            elif words[0] == "bar":
                assert (active | (self.at >= end)).all(), "a barrier that some threads miss"
            elif active.any():
                with np.errstate(all="ignore"):
                    self.step(words, operands, active)

    def get(self, name, kind=np.uint32):
        if name in self.registers:
            return self.registers[name]
        number = int(name[2:], 16) if name.startswith("0f") else int(name, 0)
        return np.full(self.threads, number & np.iinfo(kind).max, kind)

    def put(self, name, value, active):
        before = self.registers.get(name)
        if before is None or before.dtype != value.dtype:
            before = np.zeros_like(value)
        self.registers[name] = np.where(active, value, before)

    def step(self, words, operands, active):
        name, last = words[0], words[-1]
        kind = _BITS.get(last[1:], np.uint32)
        special = getattr(self, f"do_{name}", None)
        if special is not None:
            special(words, operands, active, kind)
            return
        values = [self.get(x, kind) for x in operands[1:]]
        if words == ["not", "pred"]:
            result = ~values[0]
        elif last == "pred":
            result = _LOGIC[name](*values)
        elif "sat" in words and last == "f32":
            x = _float(name, *(x.view(np.float32) for x in values)).view(np.float32)
            result = _bits(np.where(x > 0, np.minimum(x, 1), 0))  # NaN becomes 0
        elif last == "f16x2":
            result = _halves(name, *values)
        elif name == "lop3":
            result = _table(*values)
        elif last == "f32":
            result = _float(name, *(x.view(np.float32) for x in values))
        elif words == ["max", "u16x2"]:
            low, high = (np.maximum(values[0] >> s & 0xFFFF, values[1] >> s & 0xFFFF) for s in (0, 16))
            result = low | high << 16
        else:
            result = _integer(words, kind, values)
        self.put(operands[0], result, active)

    def do_ld(self, words, operands, active, kind):
        width = np.dtype(kind).itemsize
        targets = [x.strip() for x in operands[0].strip("{}").split(",")]
        base, offset = _address(operands[1])
        if words[1] == "param":
            raw = self.parameters[int(base.rsplit("_", 1)[1])]
            for i, target in enumerate(targets):
                piece = raw[offset + i * width : offset + (i + 1) * width]
                self.put(target, np.full(self.threads, int.from_bytes(piece, "little"), kind), active)
            return
        places, source = self.places(words, base, offset, len(targets), active)
        for i, target in enumerate(targets):
            value = np.zeros(self.threads, np.uint32)
            value[active] = source[places + 4 * i].copy().view(np.uint32)[:, 0]
            self.put(target, value, active)

    def do_st(self, words, operands, active, kind):
        sources = [x.strip() for x in operands[1].strip("{}").split(",")]
        places, target = self.places(words, *_address(operands[0]), len(sources), active)
        for i, source in enumerate(sources):
            target[places + 4 * i] = self.get(source)[active].copy().view(np.uint8).reshape(-1, 4)

    def do_atom(self, words, operands, active, kind):
        """Additions of one word, lane by lane."""
        assert "add" in words and words[-1].endswith("32"), words
        base, offset = _address(operands[1])
        before = np.zeros(self.threads, np.uint32)
        for lane in np.flatnonzero(active):
            address = self.get(base)[lane : lane + 1].astype(np.int64) + offset
            self.memory.check(address, 4)
            word = self.memory.bytes[address[0] : address[0] + 4].view(np.uint32)
            before[lane] = word[0]
            word[0] += self.get(operands[2])[lane]
        self.put(operands[0], before, active)

    def do_cp(self, words, operands, active, kind):
        """cp.async of 16 bytes: done as late as it may be, when its thread waits for all of its own."""
        if words[2] == "wait_all":
            for threads, targets, sources in self.coming:
                now = active[threads]
                span = np.arange(16)
                self.shared[targets[now, None] + span] = self.memory.bytes[sources[now, None] + span]
            left = [(t[~active[t]], a[~active[t]], b[~active[t]]) for t, a, b in self.coming]
            self.coming = [copy for copy in left if copy[0].size]
            return
        assert words == ["cp", "async", "cg", "shared", "global"] and operands[2] == "16", (words, operands)
        (to, to_offset), (source, offset) = map(_address, operands[:2])
        targets = self.get(to)[active].astype(np.int64) + to_offset
        sources = self.get(source)[active].astype(np.int64) + offset
        self.memory.check(sources, 16)
        assert not (targets % 16).any(), "misaligned copy"
        self.coming.append((np.flatnonzero(active), targets, sources))

    def places(self, words, base, offset, count, active):
        assert words[-1] == "b32", words
        addresses = self.get(base)[active].astype(np.int64) + offset
        inside = "global" in words
        if inside:
            self.memory.check(addresses, 4 * count)
        return addresses[:, None] + np.arange(4), self.memory.bytes if inside else self.shared

    def do_shfl(self, words, operands, active, kind):
        warps = active.reshape(-1, 32)
        assert (warps.all(1) | ~warps.any(1)).all(), "a shuffle that some lanes miss"
        lane = np.arange(self.threads)
        if words[2] == "bfly":
            source = lane ^ int(operands[2])
        else:
            source = lane // 32 * 32 + self.get(operands[2]).astype(np.int64) % 32
        self.put(operands[0].split("|")[0], self.get(operands[1])[source], active)

    def do_mov(self, words, operands, active, kind):
        target, source = operands
        if words[-1] == "pred":
            self.put(target, self.get(source) != 0, active)
            return
        if target.startswith("{"):
            bits = 8 * np.dtype(kind).itemsize // 2
            for i, half in enumerate(target.strip("{}").split(",")):
                value = self.get(source, kind) >> kind(bits * i) & kind((1 << bits) - 1)
                self.put(half.strip(), value.astype(np.uint32), active)
        elif source.startswith("{"):
            low, high = (self.get(x.strip()) & 0xFFFF for x in source.strip("{}").split(","))
            self.put(target, low | high << 16, active)
        else:
            self.put(target, self.get(source, kind), active)

    def do_setp(self, words, operands, active, kind):
        values = [self.get(x, kind) for x in operands[1:]]
        if words[-1] == "f32":
            values = [x.view(np.float32) for x in values]
        elif words[-1][0] == "s":
            values = [x.view(_SIGNED[kind]) for x in values]
        self.put(operands[0], _COMPARE[words[1]](*values), active)

    def do_selp(self, words, operands, active, kind):
        yes, no = (self.get(x, kind) for x in operands[1:3])
        self.put(operands[0], np.where(self.registers[operands[3]], yes, no), active)

    def do_cvt(self, words, operands, active, kind):
        sources = [self.get(x, _BITS.get(words[-1][1:], np.uint32)) for x in operands[1:]]
        self.put(operands[0], _CONVERSIONS[".".join(words)](*sources), active)


def _address(operand):
    base, offset = re.fullmatch(r"\[([%\w$]+)(?:\+(-?\d+))?\]", operand).groups()
    return base, int(offset or 0)


def _bits(x):
    return np.asarray(x, np.float32).view(np.uint32)


def _float(name, *x):
    if name == "neg":
        return x[0].view(np.uint32) ^ np.uint32(1 << 31)
    if name == "abs":
        return x[0].view(np.uint32) & np.uint32(0x7FFFFFFF)
    if name == "fma":
        a, b, c = (y.astype(np.longdouble) for y in x)
        return _bits(a * b + c)
    one = np.float32(1.0)
    arithmetic = {"add": operator.add, "sub": operator.sub, "mul": operator.mul, "div": operator.truediv}
    return _bits(one / x[0] if name == "rcp" else arithmetic[name](*x))


def _halves(name, *x):
    """Of two halves in a word each, rounded once: a double holds the product and the sum."""
    result = 0
    for bit in (0, 16):
        a, b, *c = ((y >> bit & 0xFFFF).astype(np.uint16).view(np.float16).astype(np.float64) for y in x)
        value = a * b + c[0] if name == "fma" else {"add": operator.add, "mul": operator.mul}[name](a, b)
        result = result | value.astype(np.float16).view(np.uint16).astype(np.uint32) << bit
    return result


def _table(a, b, c, table):
    """lop3.b32: bit i of the table is the result where a, b, c have the bits of i."""
    result = np.zeros_like(a)
    for i in range(8):
        if int(table[0]) >> i & 1:
            result |= (a if i & 4 else ~a) & (b if i & 2 else ~b) & (c if i & 1 else ~c)
    return result


def _integer(words, kind, values):
    name, last = words[0], words[-1]
    if name == "neg":
        return (-values[0].view(_SIGNED[kind])).view(kind)
    if len(words) > 2 and words[1] == "wide":
        wide = np.int64 if last[0] == "s" else np.uint64
        a, b = (x.view(np.int32 if last[0] == "s" else np.uint32).astype(wide).view(np.uint64) for x in values[:2])
        return (a * b).astype(np.uint32) if last == "u16" else a * b
    if name in ("shl", "shr"):
        a, places = values[0], values[1].astype(kind)
        if name == "shl":
            result = a << places
        else:
            result = (a.view(_SIGNED[kind]) >> places.view(_SIGNED[kind])).view(kind) if last[0] == "s" else a >> places
    elif name in _LOGIC:
        result = _LOGIC[name](*values)
    else:
        signed = last[0] == "s" and last != "s16"
        a, b = values[:2]
        if name in ("div", "min", "max") or words[1] == "hi":
            a, b = (x.view(_SIGNED[kind]) if signed else x for x in (a, b))
        if words[1] == "hi":
            result = (a.astype(np.int64) * b.astype(np.int64) >> int(last[1:])).astype(kind)
        elif name == "div":
            a, b = a.astype(np.int64), np.where(b == 0, 1, b).astype(np.int64)
            result = (np.sign(a) * np.sign(b) * (abs(a) // abs(b))).astype(kind)
        elif name in ("min", "max"):
            result = {"min": np.minimum, "max": np.maximum}[name](a, b).view(kind)
        else:
            result = {"add": operator.add, "sub": operator.sub, "mul": operator.mul, "mad": operator.mul}[name](a, b)
            result = result + values[2] if name == "mad" else result
    return result & kind(0xFFFF) if last.endswith("16") else result


def _codes(high, low):
    """cvt.rn.satfinite.e4m3x2.f32"""
    pack = lambda x: np.where(
        np.isnan(x),
        np.uint32(0x7F),
        torch.from_numpy(x.copy()).clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8).numpy().astype(np.uint32),
    )
    return pack(high.view(np.float32)) << 8 | pack(low.view(np.float32))


def _codes_of_halves(x):
    """cvt.rn.satfinite.e4m3x2.f16x2"""
    half = lambda bit: _bits((x >> bit & 0xFFFF).astype(np.uint16).view(np.float16))
    return _codes(half(16), half(0))


def _bytes(high, low, above):
    """cvt.pack.sat.s8.s32.b32"""
    byte = lambda x: np.clip(x.view(np.int32), -128, 127).astype(np.uint32) & 0xFF
    return above << 16 | byte(high) << 8 | byte(low)


def _rounded(x):
    """cvt.rni.s32.f32: NaN becomes 0."""
    x = np.rint(x.view(np.float32)).astype(np.float64)
    return np.where(np.isnan(x), 0, np.clip(x, -(2.0**31), 2.0**31 - 1)).astype(np.int32).view(np.uint32)


_CONVERSIONS = {
    "cvt.rn.satfinite.e4m3x2.f32": _codes,
    "cvt.rn.satfinite.e4m3x2.f16x2": _codes_of_halves,
    "cvt.pack.sat.s8.s32.b32": _bytes,
    "cvt.rni.s32.f32": _rounded,
    "cvt.f32.bf16": lambda x: (x & 0xFFFF) << np.uint32(16),
    "cvt.s8.s32": lambda x: x & 0xFF,
    "cvt.f32.f16": lambda x: _bits(x.astype(np.uint16).view(np.float16)),
    "cvt.rn.f32.u32": lambda x: _bits(x.astype(np.float32)),
    "cvt.rn.f32.s32": lambda x: _bits(x.view(np.int32).astype(np.float32)),
    "cvt.s64.s32": lambda x: x.view(np.int32).astype(np.int64).view(np.uint64),
    "cvt.u64.u32": lambda x: x.astype(np.uint64),
    "cvt.u32.u64": lambda x: x.astype(np.uint32),
    "cvt.u16.u32": lambda x: x & 0xFFFF,
    "cvt.u32.u16": lambda x: x & 0xFFFF,
    "cvt.u64.u16": lambda x: (x & 0xFFFF).astype(np.uint64),
}
