"""Compiles variants in worker processes and reads what their machine code uses. Needs no GPU."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import NamedTuple

from .. import _cubin, _toolchain, jit


class Used(NamedTuple):
    """What the kernels of one variant use: the most `registers` of a thread at launch, and the `local` memory of a
    thread in bytes, where spilled registers go. `error` is the compiler's, "" where there is none."""

    registers: int = 0
    local: int = 0
    error: str = ""


class Builder:
    """Variants `(spec, traits, tile, arch)` -> `Used`, each compiled once however many cells share it.

    Used as a context. On leaving, what has not started is dropped and every worker ends.
    """

    def __init__(self, variants: Iterable[tuple], processes: int | None = None):
        distinct = list(dict.fromkeys(variants))
        count = max(1, min(len(distinct), processes or len(os.sched_getaffinity(0))))
        self.pool = ThreadPoolExecutor(count)
        self.mine = threading.local()
        self.workers: list[_Worker] = []
        self.futures: dict[tuple, Future] = {one: self.pool.submit(self._build, one) for one in distinct}

    def __enter__(self) -> Builder:
        return self

    def __exit__(self, *_):
        self.pool.shutdown(wait=False, cancel_futures=True)
        for worker in self.workers:
            worker.close()
        self.pool.shutdown()

    def when_built(self, call: Callable[[], None]) -> None:
        """`call` once for each variant, from another thread, when it is done."""
        for future in self.futures.values():
            future.add_done_callback(lambda _: call())

    def used(self, variant: tuple) -> Used:
        """Waits for the variant."""
        return self.futures[variant].result()

    def _build(self, variant) -> Used:
        worker = getattr(self.mine, "worker", None)
        if worker is None:
            worker = self.mine.worker = _Worker()
            self.workers.append(worker)
        spec, *rest = variant
        try:
            # Why without the table: it is not needed to compile.
            return worker.ask((replace(spec, tiles=None), *rest))
        except (EOFError, OSError):
            self.mine.worker = None  # the next variant gets a new one
            return Used(error=f"the compiler's process ended with status {worker.close()}")


def missing_compiler() -> str:
    """Why nothing can be compiled here; "" where it can."""
    try:
        _toolchain.find()
    except ImportError as error:
        return str(error)
    return ""


class _Worker:
    """A process that compiles, one variant at a time."""

    def __init__(self):
        # Why: not multiprocessing. A fork breaks once CUDA runs, and a spawn imports the caller's script again.
        path = os.pathsep.join(place or os.getcwd() for place in sys.path)
        # Its own target, which the compiler fixes when it is imported, is that of its first variant.
        environment = {name: value for name, value in os.environ.items() if name != "CUTE_DSL_ARCH"}
        self.process = subprocess.Popen(
            [sys.executable, "-c", "from flashattn_hopper.matrix import build; build.serve()"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,  # errors are part of the answer
            env={**environment, "PYTHONPATH": path},
        )

    def ask(self, variant) -> Used:
        pickle.dump(variant, self.process.stdin)
        self.process.stdin.flush()
        return Used(*pickle.load(self.process.stdout))

    def close(self) -> int:
        self.process.kill()
        return self.process.wait()


def serve() -> None:
    """The worker's end: pickled variants on standard input, a pickled tuple for each on standard output."""
    answer = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what compilers print must not mix with the answer
    while True:
        try:
            variant = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        pickle.dump(tuple(_compiled(variant)), answer)
        answer.flush()


def _compiled(variant) -> Used:
    try:
        kernels = _cubin.sizes_of(jit.compile_cubin(*variant))
    except Exception as error:
        return Used(error=f"{type(error).__name__}: {error}")
    return Used(max(kernel.registers for kernel in kernels), max(kernel.frame for kernel in kernels))
