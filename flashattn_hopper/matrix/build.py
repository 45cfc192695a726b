"""Jobs in worker processes: variants that are compiled and read, cells that a CPU runs. Needs no GPU."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any, NamedTuple

from .. import _cubin, _toolchain, jit


class Job(NamedTuple):
    """A function of a module, called with `arguments` by a worker. Equal jobs are done once."""

    function: Callable
    arguments: tuple


class Used(NamedTuple):
    """What the kernels of one variant use: the most `registers` of a thread at launch, and the `local` memory of a
    thread in bytes, where spilled registers go. `error` is the compiler's, "" where there is none."""

    registers: int = 0
    local: int = 0
    error: str = ""


def compilation(variant: tuple) -> Job:
    """The job `(spec, traits, tile, arch)` -> `Used`."""
    spec, *rest = variant
    return Job(compiled, (replace(spec, tiles=None), *rest))  # the table is not needed to compile


class Crew:
    """`jobs`, each done once however many ask for it, by as many processes as there are cores or `processes`.

    Used as a context. On leaving, what has not started is dropped and every worker ends.
    """

    def __init__(self, jobs: Iterable[Job], processes: int | None = None):
        distinct = list(dict.fromkeys(jobs))
        count = max(1, min(len(distinct), processes or len(os.sched_getaffinity(0))))
        self.pool = ThreadPoolExecutor(count)
        self.mine = threading.local()
        self.workers: list[_Worker] = []
        self.futures: dict[Job, Future] = {job: self.pool.submit(self._done, job) for job in distinct}

    def __enter__(self) -> Crew:
        return self

    def __exit__(self, *_):
        self.pool.shutdown(wait=False, cancel_futures=True)
        for worker in self.workers:
            worker.close()
        self.pool.shutdown()

    def when_done(self, call: Callable[[], None]) -> None:
        """`call` once for each job, from another thread, when it is done."""
        for future in self.futures.values():
            future.add_done_callback(lambda _: call())

    def answer(self, job: Job) -> Any:
        """Waits for the job. Raises RuntimeError where its process died of it."""
        return self.futures[job].result()

    def _done(self, job: Job) -> Any:
        worker = getattr(self.mine, "worker", None)
        if worker is None:
            worker = self.mine.worker = _Worker()
            self.workers.append(worker)
        try:
            return worker.ask(job)
        except (EOFError, OSError):
            self.mine.worker = None  # the next job gets a new one
            raise RuntimeError(f"its process ended with status {worker.close()}") from None


def missing_compiler() -> str:
    """Why nothing can be compiled here; "" where it can."""
    try:
        _toolchain.find()
    except ImportError as error:
        return str(error)
    return ""


class _Worker:
    """A process that does one job at a time."""

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
            # One thread each: small tensors, beside workers on every core.
            env={**environment, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        )

    def ask(self, job: Job) -> Any:
        pickle.dump(job, self.process.stdin)
        self.process.stdin.flush()
        return pickle.load(self.process.stdout)

    def close(self) -> int:
        self.process.kill()
        return self.process.wait()


def serve() -> None:
    """The worker's end: pickled jobs on standard input, a pickled answer for each on standard output."""
    answer = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what compilers print must not mix with the answer
    while True:
        try:
            job = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        pickle.dump(job.function(*job.arguments), answer)
        answer.flush()


def compiled(*variant) -> Used:
    """What a variant uses, compiled here."""
    try:
        kernels = _cubin.sizes_of(jit.compile_cubin(*variant))
    except Exception as error:
        return Used(error=f"{type(error).__name__}: {error}")
    return Used(max(kernel.registers for kernel in kernels), max(kernel.frame for kernel in kernels))
