"""Timing on a device's own clock, contestants in turn.

One measurement of one contestant (`measure`) is what triton's `do_bench` does: estimate, warm up, then time every
call alone between two events, after a write that pushes the operands out of the L2 cache. `interleave` takes several
such measurements of each contestant, in rounds, so that a drift of clocks or power meets everyone alike, and in orders
in which nobody always follows the same one.

On a CPU (tests) the same code runs with the host clock and without the flush.
"""

from __future__ import annotations

import contextlib
import faulthandler
import statistics
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

MATMUL = 8192


@dataclass(frozen=True)
class Settings:
    """How a contestant is measured. Times in milliseconds, except `rest_s`."""

    rounds: int = 3
    warmup_ms: float = 25.0
    rep_ms: float = 100.0
    rest_s: float = 0.1  # idle before each measurement, the same for everyone
    flush_bytes: int = 256 * 2**20  # more than any L2 cache

    def record(self) -> dict[str, Any]:
        return asdict(self)


QUICK = Settings(rounds=2, warmup_ms=15.0, rep_ms=60.0)


@dataclass
class Timing:
    """What one contestant took: samples in ms by round, and the host's clock readings around each round."""

    rounds: list[list[float]] = field(default_factory=list)
    spans: list[tuple[float, float]] = field(default_factory=list)  # time.monotonic() before and after

    @property
    def ms(self) -> float:
        """Median over rounds of the round's median."""
        return statistics.median(statistics.median(r) for r in self.rounds)

    @property
    def samples(self) -> list[float]:
        return sorted(s for r in self.rounds for s in r)

    def percentile(self, p: float) -> float:
        """Of all samples, by linear interpolation; `p` from 0 to 100."""
        return percentile(self.samples, p)


def percentile(values: list[float], p: float) -> float:
    values = sorted(values)
    place = (len(values) - 1) * p / 100
    low = int(place)
    high = min(low + 1, len(values) - 1)
    return values[low] + (values[high] - values[low]) * (place - low)


class HostClock:
    """Times calls that run on the CPU."""

    def __init__(self, settings: Settings):
        self.settings = settings

    def batch(self, fn: Callable[[], Any], count: int) -> float:
        """Milliseconds per call of `count` calls in a row."""
        start = time.perf_counter()
        for _ in range(count):
            fn()
        return (time.perf_counter() - start) * 1e3 / count

    def each(self, fn: Callable[[], Any], count: int) -> list[float]:
        """Milliseconds of each of `count` calls."""
        return [self.batch(fn, 1) for _ in range(count)]


class DeviceClock:
    """Times calls that run on a CUDA device, by events on the current stream."""

    def __init__(self, settings: Settings, device="cuda"):
        self.settings = settings
        self.flush = torch.empty(settings.flush_bytes // 4, dtype=torch.int32, device=device)

    def batch(self, fn: Callable[[], Any], count: int) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(count):
            self.flush.zero_()
            fn()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / count

    def each(self, fn: Callable[[], Any], count: int) -> list[float]:
        events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(count)]
        for start, end in events:
            # Why: besides emptying the cache, the write keeps the device busy while the host prepares the call, so
            # that the time between the events holds no launch gap as long as the host takes less than the write.
            self.flush.zero_()
            start.record()
            fn()
            end.record()
        torch.cuda.synchronize()
        return [start.elapsed_time(end) for start, end in events]


def clock_for(device: str, settings: Settings):
    return DeviceClock(settings, device) if torch.device(device).type == "cuda" else HostClock(settings)


def measure(fn: Callable[[], Any], clock) -> list[float]:
    """Milliseconds of single calls of `fn`, as many as fit `rep_ms`, after `warmup_ms` of them."""
    fn()
    estimate = max(clock.batch(fn, 5), 1e-6)
    clock.batch(fn, max(1, int(clock.settings.warmup_ms / estimate)))
    return clock.each(fn, max(1, int(clock.settings.rep_ms / estimate)))


def orders(count: int) -> list[list[int]]:
    """Orders of `count` contestants: a Williams design, in all of which each follows every other one equally often.
    The first ones already leave nobody behind the same neighbour.

    Why: clocks and power may depend on what ran before. Rounds that only begin with another contestant leave everyone
    behind the same neighbour.
    """
    first = [(place + 1) // 2 if place % 2 else -(place // 2) for place in range(count)]
    rows = [[(place + shift) % count for place in first] for shift in range(count)]
    return rows if count % 2 == 0 else [each for row in rows for each in (row, row[::-1])]


def interleave(
    contestants: Mapping[str, Callable[[], Any]],
    clock,
    sessions: Mapping[str, Callable[[], contextlib.AbstractContextManager]] | None = None,
) -> dict[str, Timing | Exception]:
    """Measure all in turn, `rounds` times; a contestant that raises is left out from then on and returns its error.

    Args:
        contestants: name -> call without arguments.
        clock: from `clock_for`.
        sessions: name -> context manager to hold while that contestant is measured.
    """
    results: dict[str, Timing | Exception] = {name: Timing() for name in contestants}
    names, rows = list(contestants), orders(len(contestants))
    for turn in range(clock.settings.rounds):
        for name in map(names.__getitem__, rows[turn % len(rows)]):
            timing = results[name]
            if isinstance(timing, Exception):
                continue
            time.sleep(clock.settings.rest_s)
            session = (sessions or {}).get(name, contextlib.nullcontext)
            begin = time.monotonic()
            try:
                with session():
                    timing.rounds.append(measure(contestants[name], clock))
            except Exception as error:
                results[name] = error
                continue
            timing.spans.append((begin, time.monotonic()))
    return results


@contextlib.contextmanager
def limited(seconds: float, what: str):
    """Ends the process, naming `what`, with the stacks of all threads, if the block takes longer: a hanging kernel."""
    say = threading.Timer(0.95 * seconds, lambda: print(f"\nstill at {what}", file=sys.__stderr__, flush=True))
    say.daemon = True
    say.start()
    # Why faulthandler: its clock needs no interpreter lock, which a launch that never returns may hold.
    faulthandler.dump_traceback_later(seconds, exit=True, file=sys.__stderr__)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()
        say.cancel()


def matmul_ceiling(clock, device: str = "cuda", size: int = MATMUL, dtype=torch.bfloat16) -> float:
    """TFLOP/s of one size x size x size product of random operands: what the matrix units give at best here."""
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    if dtype == torch.float8_e4m3fn:
        one = torch.ones((), device=device)
        product = lambda: torch._scaled_mm(a, b.t(), one, one, out_dtype=torch.bfloat16, use_fast_accum=True)
    else:
        out = torch.empty_like(a)
        product = lambda: torch.matmul(a, b, out=out)
    timing = interleave({"matmul": product}, clock)["matmul"]
    if isinstance(timing, Exception):
        raise timing
    return tflops(2.0 * size**3, timing.ms)


def tflops(flops: float, ms: float) -> float:
    return flops / ms / 1e9
