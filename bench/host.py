"""What a call costs the host: time of one eager call (without a graph, with one, with its backward; beside it a
function that does nothing), of a variant's first call, and how often anything compiles.

    python bench/host.py [--calls] [--first] [--lengths] [--peers cudnn,fa2] [--out DIR]      all three by default

Writes bench/results/<gpu>/host.json. Eager calls are tiny, so that the device is never the one waited for; they are
issued in batches without a synchronization between, few enough that the launch queue never fills.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import itertools
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence

import peers
import record
import torch

SHAPE = (1, 128, 1, 64)  # (B, S, H, D)
CALLS = 200  # per batch; the launch queue holds 1024
TRAIN_CALLS = 50  # forward and backward are several launches each
ROUNDS = 30
LENGTHS = range(64, 301)
CACHE_VARIABLE = "FLASHATTN_HOPPER_CACHE_DIR"
BUNDLE_VARIABLE = "FLASHATTN_HOPPER_AOT"


def per_call(fn: Callable[[], object], sync: Callable[[], None], calls: int = CALLS, rounds: int = ROUNDS) -> dict:
    """Host microseconds of one call: least and median over rounds of `calls` calls each."""
    for _ in range(3):
        fn()
    found = []
    for _ in range(rounds):
        sync()
        begin = time.perf_counter()
        for _ in range(calls):
            fn()
        found.append((time.perf_counter() - begin) * 1e6 / calls)
        sync()
    return {"min_us": round(min(found), 2), "median_us": round(statistics.median(found), 2)}


def eager_calls(contestants: Sequence[peers.Contestant], device: str, **repeat) -> list[dict]:
    """One row for each contestant and mode: `no_grad`, or with the autograd graph recorded (and dropped)."""
    sync = torch.cuda.synchronize if torch.device(device).type == "cuda" else lambda: None
    rows = []
    for recorded in (False, True):
        q, k, v = (torch.randn(SHAPE, device=device, dtype=torch.bfloat16, requires_grad=recorded) for _ in range(3))
        for contestant in contestants:
            row = {"contestant": contestant.name, "mode": "graph" if recorded else "no_grad"}
            guard = contextlib.nullcontext() if recorded else torch.no_grad()
            try:
                with contestant.session(), guard:
                    # Each in its own layout: a view that a caller of it would not make is not timed.
                    call = functools.partial(contestant.native, *map(contestant.layout, (q, k, v)), causal=True)
                    if recorded and not call().requires_grad:
                        raise RuntimeError("records no graph")
                    rows.append(row | per_call(call, sync, **repeat))
            except Exception as error:
                rows.append(row | {"failed": peers.first_line(error)})
    return rows


# Backward passes of CUDA tensors run in a thread of autograd's own, which is woken for each; or in the caller's, with
# torch.autograd.set_multithreading_enabled(False).
THREADS = {"train": True, "train_one_thread": False}


def train_calls(contestants: Sequence[peers.Contestant], device: str, calls: int = TRAIN_CALLS, **repeat) -> list[dict]:
    """One row for each contestant and mode of `THREADS`: a forward and its backward. The backend is the backward
    suite's."""
    sync = torch.cuda.synchronize if torch.device(device).type == "cuda" else lambda: None
    q, k, v, dout = (torch.randn(SHAPE, device=device, dtype=torch.bfloat16) for _ in range(4))
    rows = []
    for (mode, threads), contestant in itertools.product(THREADS.items(), contestants):
        row = {"contestant": contestant.name, "mode": mode}
        try:
            with contestant.session(), torch.autograd.set_multithreading_enabled(threads):
                leaves = [contestant.layout(x).detach().requires_grad_() for x in (q, k, v)]
                arriving = contestant.layout(dout)

                def step(contestant=contestant, leaves=leaves, arriving=arriving):
                    torch.autograd.grad(contestant.train(*leaves, causal=True), leaves, arriving)

                rows.append(row | per_call(step, sync, calls, **repeat))
        except Exception as error:
            rows.append(row | {"failed": contestant.no_backward or peers.first_line(error)})
    return rows


class Nothing(peers.Contestant):
    """What torch itself takes for a function of q, k and v with gradients, written in Python: nothing is computed,
    allocated or launched."""

    name = "torch"
    title = "an autograd.Function that does nothing"

    def version(self):
        return torch.__version__

    class Function(torch.autograd.Function):
        @staticmethod
        def forward(ctx, q, k, v):
            ctx.set_materialize_grads(False)
            ctx.save_for_backward(q, k, v)
            return q.detach(), k.detach()

        @staticmethod
        def backward(ctx, dout, _):
            assert len(ctx.saved_tensors) == 3  # reading them is a part of it
            return dout, dout, dout

    def native(self, q, k, v, causal=False, window=peers.NO_WINDOW, scale=None):
        if torch.is_grad_enabled():
            return self.Function.apply(q, k, v)[0]
        return q.detach()


# A new process, so that nothing is warm: prints one JSON line with the seconds of each step.
PROBE = """
import json, sys, time
t = [time.perf_counter()]
import torch
q, k, v = (torch.randn({shape}, device="cuda", dtype=torch.bfloat16) for _ in range(3))
torch.cuda.synchronize(); t.append(time.perf_counter())
from flashattn_hopper import hopper_attention
import flashattn_hopper.ops; t.append(time.perf_counter())
for causal in (True, True, False):
    hopper_attention(q, k, v, causal=causal); torch.cuda.synchronize(); t.append(time.perf_counter())
from flashattn_hopper import jit
names = "torch_s", "import_s", "first_call_s", "second_call_s", "next_variant_s"
steps = dict(zip(names, (round(b - a, 4) for a, b in zip(t, t[1:]))))
print(json.dumps(dict(steps, stats=jit.stats()._asdict())))
"""


def first_calls(device: str) -> dict[str, dict]:
    """Seconds of the first call of a variant in a new process: `fresh` compiles it, `disk` finds it in the cache,
    `bundle` in a bundle, with the cache off."""
    with tempfile.TemporaryDirectory() as folder:
        environ = {**os.environ, CACHE_VARIABLE: folder, BUNDLE_VARIABLE: ""}
        found = {name: probe(environ) for name in ("fresh", "disk")}
        try:
            make_bundle(pathlib.Path(folder), device)
            found["bundle"] = probe({**environ, "FLASHATTN_HOPPER_CACHE": "0", BUNDLE_VARIABLE: folder})
        except Exception as error:
            found["bundle"] = {"failed": peers.first_line(error)}
        return found


def make_bundle(folder: pathlib.Path, device: str) -> None:
    """A bundle of the variant that PROBE calls. Where it is in `folder`, a cache, nothing is compiled."""
    from flashattn_hopper import aot, planner
    from flashattn_hopper.spec.problem import FWD, Shape, Traits

    batch, seqlen, heads, headdim = SHAPE
    asked, shape = Traits(FWD, "bf16", headdim, headdim, "causal"), Shape(batch, seqlen, seqlen, heads, heads)
    spec, traits, tile = planner.plan(asked, planner.capability_of(torch.device(device)), "auto", shape)
    aot.bundle(folder, [aot.Variant(spec, traits, tile, spec.arch)], processes=1)


def probe(environ: dict[str, str]) -> dict:
    # Run from elsewhere: the checkout's folders must not shadow installed packages.
    run = subprocess.run(
        (sys.executable, "-c", PROBE.format(shape=SHAPE)),
        capture_output=True,
        text=True,
        env=environ,
        cwd=tempfile.gettempdir(),
        timeout=300,
    )
    if run.returncode:
        return {"failed": (run.stderr.strip().splitlines() or ["no output"])[-1][:200]}
    return json.loads(run.stdout.strip().splitlines()[-1])


def over_lengths(device: str, lengths=LENGTHS) -> dict:
    """How the compile counters move while every length of `lengths` is called once: they should move once at most."""
    from flashattn_hopper import hopper_attention, jit

    before = jit.stats()._asdict()
    for seqlen in lengths:
        q, k, v = (torch.randn(1, seqlen, 2, 64, device=device, dtype=torch.bfloat16) for _ in range(3))
        hopper_attention(q, k, v, causal=True)
    after = jit.stats()._asdict()
    return {"lengths": [min(lengths), max(lengths)], "calls": len(lengths), "before": before, "after": after}


def report(results: dict) -> str:
    lines = []
    for row in results.get("calls", ()):
        value = row.get("failed") or f"{row['min_us']:8.2f} us least, {row['median_us']:8.2f} us median"
        lines.append(f"{row['contestant']:<6} {row['mode']:<16} {value}")
    for name, steps in results.get("first", {}).items():
        text = ", ".join(f"{step} {value}" for step, value in steps.items())
        lines.append(f"first call, {name}: {text}")
    if "over_lengths" in results:
        found = results["over_lengths"]
        lines.append(f"lengths {found['lengths'][0]}..{found['lengths'][1]}: {found['before']} -> {found['after']}")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--calls", action="store_true", help="eager calls")
    parser.add_argument("--first", action="store_true", help="first call of a variant, in new processes")
    parser.add_argument("--lengths", action="store_true", help="compile counters over many lengths")
    parser.add_argument("--peers", default="cudnn,fa2")
    parser.add_argument("--out", default=str(record.RESULTS), metavar="DIR", help="default: bench/results")
    parser.add_argument("--revision", help="for a copy of the tree without git's history")
    o = parser.parse_args(argv)
    if not torch.cuda.is_available():
        print("bench/host.py measures on a CUDA device, and torch sees none here", file=sys.stderr)
        return 2
    device, everything = "cuda", not (o.calls or o.first or o.lengths)
    contestants = (peers.OURS, *peers.parse(o.peers))
    reasons = {contestant.name: contestant.available() for contestant in contestants}
    results = record.environment(device, o.revision) | {
        "suite": "host",
        "shape": list(SHAPE),
        "batch_of_calls": CALLS,
        "batch_of_train_calls": TRAIN_CALLS,
        "rounds": ROUNDS,
        "contestants": {c.name: reasons[c.name] or c.version() for c in contestants},
    }
    if o.calls or everything:
        ready = [*(c for c in contestants if reasons[c.name] is None), Nothing()]
        results["calls"] = eager_calls(ready, device) + train_calls(ready, device)
    if o.first or everything:
        results["first"] = first_calls(device)
    if o.lengths or everything:
        results["over_lengths"] = over_lengths(device)
    print(report(results))
    name = "host" if everything else "host-only"
    print(record.save(results, record.path_for(o.out, results["gpu"]["name"], name)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
