"""Runs the PTX of the Ampere-style kernels on the CPU: hopper_machine with cp.async and the products of one warp.

Copies arrive when they are waited for. Products are exact sums, rounded once an instruction.
"""

from __future__ import annotations

import numpy as np

from . import hopper_machine
from .hopper_machine import _DECODE, _Warp
from .ptx_machine import _address


class Warp(_Warp):
    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.copies, self.committed = [], []

    def ready(self, words, operands, active):
        if words[:3] == ["cp", "async", "wait_group"]:
            while len(self.committed) > int(operands[0]):
                for copy in self.committed.pop(0):
                    copy()
        return super().ready(words, operands, active)

    def do_cp(self, words, operands, active, kind):
        if words[2] == "commit_group":
            self.committed, self.copies = [*self.committed, self.copies], []
            return
        if words[2] == "wait_group":
            return
        target, source = (self.get(base)[active].astype(np.int64) + offset for base, offset in map(_address, operands[:2]))
        size = self.get(operands[3])[active].astype(np.int64)
        assert not (target % 16).any() and np.isin(size, (0, 16)).all()
        self.memory.check(source[size > 0], 16)
        byte = np.arange(16)

        def copy():
            data = np.zeros((len(target), 16), np.uint8)
            data[size > 0] = self.memory.bytes[source[size > 0][:, None] + byte]
            self.shared[target[:, None] + byte] = data

        self.copies.append(copy)

    def do_ldmatrix(self, words, operands, active, kind):
        if "trans" not in words:
            super().do_ldmatrix(words, operands, active, kind)
            return
        base, offset = _address(operands[1])
        rows, lane = self.get(base).astype(np.int64) + offset, np.arange(32)
        for i, name in enumerate(operands[0].strip("{}").split(",")):
            halves = [rows[8 * i + 2 * (lane % 4) + j] + 2 * (lane // 4) for j in range(2)]
            pair = [self.shared[half[:, None] + np.arange(2)].view(np.uint16)[:, 0].astype(np.uint32) for half in halves]
            self.put(name.strip(), pair[0] | pair[1] << np.uint32(16), active)

    def do_mma(self, words, operands, active, kind):
        assert active.all() and words[3] == "m16n8k16"
        names = lambda x: [name.strip() for name in x.strip("{}").split(",")]
        half = lambda name: _DECODE[words[-2]](self.get(name).copy().view(np.uint16)).reshape(32, 2)
        g, t = np.arange(32) // 4, np.arange(32) % 4
        A, B = np.zeros((16, 16)), np.zeros((16, 8))
        for name, (row, column) in zip(names(operands[1]), ((0, 0), (8, 0), (0, 8), (8, 8))):
            for j in range(2):
                A[g + row, 2 * t + j + column] = half(name)[:, j]
        for i, name in enumerate(names(operands[2])):
            for j in range(2):
                B[2 * t + j + 8 * i, g] = half(name)[:, j]
        D = A @ B
        values = [self.get(name).view(np.float32) for name in names(operands[3])]
        for e, name in enumerate(names(operands[0])):
            total = D[g + 8 * (e // 2), 2 * t + e % 2] + values[e]
            self.registers[name] = total.astype(np.float32).view(np.uint32)

    def do_red(self, words, operands, active, kind):
        if words[-2] == "v4":
            super().do_red(words, operands, active, kind)
            return
        base, offset = _address(operands[0].replace(" ", ""))
        places = self.get(base)[active].astype(np.int64) + offset
        self.memory.check(places, 4)
        np.add.at(self.memory.bytes.view(np.float32), places // 4, self.get(operands[1]).view(np.float32)[active])


def run(text, parameters, threads, blocks, memory, kernel):
    code, labels = hopper_machine.parse(hopper_machine.entry(text, kernel))
    for block in range(blocks):
        shared = np.full(hopper_machine.SHARED_BYTES, 0xFF, np.uint8)
        state = hopper_machine._Shared({}, threads, blocks, frozenset())
        warps = [Warp(code, labels, parameters, memory, shared, w, block, state) for w in range(threads // 32)]
        while warps:
            moved = [warp.run() for warp in warps]
            assert any(moved), f"deadlock at {[warp.where() for warp in warps]}"
            warps = [warp for warp in warps if not warp.done]
