"""A kernel of a few lines under the contract of a real one, for tests of the JIT: `x[i] = factor * x[i]`."""

import os
import pathlib
import time

import cutlass
import cutlass.cute as cute
from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream

DTYPES = {"fp16": cutlass.Float16, "bf16": cutlass.BFloat16}


class Toy:
    def __init__(self, traits, tile):
        self.dtype = DTYPES[traits.dtype]
        self.num_threads = tile.num_threads

    def arguments(self):
        x = make_fake_compact_tensor(self.dtype, (cute.sym_int(),), assumed_align=16)
        return x, cutlass.Float32(1.0), make_fake_stream(use_tvm_ffi_env_stream=True)

    @cute.jit
    def __call__(self, x: cute.Tensor, factor: cutlass.Float32, stream):
        blocks = cute.ceil_div(x.shape[0], self.num_threads)
        self.kernel(x, factor).launch(grid=[blocks, 1, 1], block=[self.num_threads, 1, 1], stream=stream)

    @cute.kernel
    def kernel(self, x: cute.Tensor, factor: cutlass.Float32):
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        i = block * self.num_threads + thread
        if i < x.shape[0]:
            x[i] = (x[i].to(cutlass.Float32) * factor).to(self.dtype)


class Stalling(Toy):
    """Its compilation creates the file $TOY_STALLED and then lasts for ever; without the variable it is a Toy."""

    def arguments(self):
        if stalled := os.environ.get("TOY_STALLED"):
            pathlib.Path(stalled).touch()
            while True:
                time.sleep(1)
        return super().arguments()


class Broken(Toy):
    def arguments(self):
        raise RuntimeError("a toy that does not compile")
