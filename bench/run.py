"""Measure suites: ours and the peers in one process, in turn, cell by cell; one JSON file for each GPU and suite.

    python bench/run.py forward [--quick] [--only d128.causal] [--peers cudnn,fa3,fa4,fa2] [--out DIR]
    python bench/run.py backward memory
    python bench/run.py fp8 quantizer
    python bench/run.py sm80_forward sm80_backward --peers fa2

Each cell draws fresh random operands. Every contestant first runs once, which compiles it, and is compared with
float64 (`tasks.py`); a wrong or failing one is recorded with its message and not timed. Then all are timed in turn
over several rounds. The file is rewritten after every cell, so that a run cut short keeps what it has.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import math
import sys
import time
import traceback
import warnings
from collections.abc import Mapping, Sequence

import fp8
import memory
import peers
import quantizer
import record
import suites
import timing
import torch
from plot import by_cell, rates, ratio
from tasks import TASKS

from flashattn_hopper.spec.problem import BWD, FWD

# A backward needs more host time, up to half a millisecond on a slow host; the longer write before it hides that (see
# DeviceClock.each).
SETTINGS = {
    FWD: (timing.Settings(), timing.QUICK),
    BWD: (
        timing.Settings(warmup_ms=15.0, rep_ms=60.0, flush_bytes=2**31),
        timing.Settings(rounds=2, warmup_ms=10.0, rep_ms=40.0, flush_bytes=2**31),
    ),
}
# FP8 kernels alone, from tensors, and peers in one suite: less time for each.
BRIEF = timing.Settings(rounds=3, warmup_ms=15.0, rep_ms=60.0), timing.QUICK
OF_SUITE = {"fp8": BRIEF}
LINEUPS = {"fp8": fp8.lineup}
CEILINGS = {"fp8": ("fp8", {"dtype": torch.float8_e4m3fn})}
CELL_SECONDS = 240  # the first call of some peers compiles for a minute
CONTEXT_LOST = 3  # exit status


def ours_plans(cell: suites.Cell, device: str, backend: str = "") -> list:
    """What our planner chooses for the cell, (spec, compiled traits, tile): the forward, then the timed phase's."""
    from flashattn_hopper import planner

    capability = planner.capability_of(torch.device(device))
    if cell.dtype == "fp8":
        return fp8.plans(cell, capability)
    ours = peers.Ours(backend)
    backend = ours.backend if cell.phase == FWD else ours.train_backend
    phases = dict.fromkeys((FWD, cell.phase))
    traits = [dataclasses.replace(cell.traits, phase=phase) for phase in phases]
    return [planner.plan(t, capability, backend, cell.shape) for t in traits]


def ours_ran(cell: suites.Cell, device: str, backend: str = "") -> dict[str, str | None]:
    """Which of our kernels serves the cell, and its tile."""
    spec, _, tile = ours_plans(cell, device, backend)[-1]
    return {"kernel": spec.name, "tile": None if tile is None else record.source(tile)}


def first_call(task, contestant):
    """Run once and judge: (call, what is known of its result, None) or (None, None, why not)."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            with task.session(contestant):
                call = task.bind(contestant)
                result = call()
            # Outside the session: torch's deterministic mode refuses the products of float64.
            judged, why = task.judge(contestant, result)
            del result
            if why is not None:
                return None, None, why
            with task.session(contestant):
                extra = task.extra_bytes(contestant)
        except Exception as error:
            # Why: torch SDPA says in warnings why a backend refuses, and only "no available kernel" in the error.
            reasons = [str(w.message).split(" (Triggered")[0] for w in said if issubclass(w.category, UserWarning)]
            return None, None, " | ".join([peers.first_line(error), *dict.fromkeys(reasons)])[:400]
    return call, judged | ({} if extra is None else {"extra_bytes": extra}), None


def run_cell(
    cell: suites.Cell,
    contestants: Sequence[peers.Contestant],
    clock,
    device: str,
    *,
    ceiling: float | None = None,
    monitor: record.Monitor | None = None,
    num_sms: int | None = None,
    describe=None,
) -> list[dict]:
    """Measure one cell: one row for each contestant, those that failed included.

    `describe(cell, device)` names kernel and tile of the contestant called "ours".
    """
    task = TASKS[cell.task](cell, device)
    calls, judged, failed = {}, {}, {}
    for contestant in contestants:
        call, known, why = first_call(task, contestant)
        if why is None:
            calls[contestant.name], judged[contestant.name] = call, known
        else:
            failed[contestant.name] = why
    sessions = {contestant.name: functools.partial(task.session, contestant) for contestant in contestants}
    with torch.no_grad():
        timings = timing.interleave(calls, clock, sessions) if calls else {}
    rows = []
    for contestant in contestants:
        name = contestant.name
        row = {"contestant": name, **identity(cell)}
        taken = timings.get(name)
        if isinstance(taken, Exception):
            failed[name] = peers.first_line(taken)
        if name in failed:
            rows.append(row | {"failed": failed[name]})
            continue
        row |= speed(cell, taken, ceiling) | judged[name]
        if name == peers.OURS.name and describe is not None:
            row |= describe(cell, device)
        if monitor is not None:
            row |= readings(cell, taken, monitor, num_sms)
        rows.append(row)
    return rows


def identity(cell: suites.Cell) -> dict:
    return {
        "slug": cell.slug,
        "batch": cell.batch,
        "seqlen": cell.seqlen,
        "heads": cell.num_heads_q,
        "kv_heads": cell.num_heads_kv,
        "window": None if cell.window_size == peers.NO_WINDOW else list(cell.window_size),
    }


def speed(cell: suites.Cell, taken: timing.Timing, ceiling: float | None) -> dict:
    rate = timing.tflops(cell.flops, taken.ms)
    return {
        "ms": round(taken.ms, 5),
        "p20": round(taken.percentile(20), 5),
        "p80": round(taken.percentile(80), 5),
        "samples": len(taken.samples),
        "tflops": round(rate, 1),
        "share": round(rate / ceiling, 3) if ceiling else None,
    }


def readings(cell: suites.Cell, taken: timing.Timing, monitor: record.Monitor, num_sms: int | None) -> dict:
    """Clock and power while this contestant ran, and what a 128 x 128 tile of scores took of one multiprocessor.

    Why: a faster kernel at the power limit runs at a lower clock; cycles say what the code does, TFLOP/s what it gives.
    """
    seen = monitor.during(taken.spans)
    sm_clock = seen.get("clocks.sm")
    row = {"sm_mhz": sm_clock, "power_w": seen.get("power.draw")}
    if sm_clock and num_sms:
        tiles = cell.batch * cell.num_heads_q * cell.pairs / 128**2
        row["cycles_per_tile"] = round(taken.ms * 1e3 * sm_clock * num_sms / tiles)
    return row


# ------------------------------------------------------------------------------------------------------ text
def cell_line(rows: Sequence[Mapping]) -> str:
    """One cell as it finishes."""
    row = rows[0]
    text = [f"{row['slug']:<24} b{row['batch']:<3} s{row['seqlen']:<6} h{row['heads']}:{row['kv_heads']:<3}"]
    for row in rows:
        value = "failed" if row.get("failed") else f"{row['tflops']:.0f}"
        text.append(f"{row['contestant']} {value:>6}")
    best = ratio(rows)
    text.append(f"ours/best {best:.2f}" if best else "")
    ours = next((r for r in rows if r["contestant"] == peers.OURS.name), None)
    if ours and not ours.get("failed"):
        text.append(f"err {ours['rel_error']:.1e} {ours.get('tile') or ours.get('kernel') or ''}")
    extra = [f"{r['contestant']} {r['extra_bytes'] / 2**20:.0f}" for r in rows if r.get("extra_bytes") is not None]
    text.append(f"extra MiB: {', '.join(extra)}" if extra else "")
    lines = ["  ".join(t for t in text if t)]
    lines += [f"    {row['contestant']}: {row['failed']}" for row in rows if row.get("failed")]
    return "\n".join(lines)


def table(rows: Sequence[Mapping]) -> str:
    """The final table in TFLOP/s: ours, each peer, ours over the best peer; then the geometric mean and the losses."""
    names = list(dict.fromkeys(row["contestant"] for row in rows))
    head = ["variant", "B", "S", "heads", *names, "ours/best"]
    lines, ratios = [head], []
    for group in by_cell(rows):
        found, share = rates(group), ratio(group)
        row = group[0]
        ratios += [share] if share else []
        lines.append(
            [
                row["slug"],
                str(row["batch"]),
                str(row["seqlen"]),
                f"{row['heads']}:{row['kv_heads']}",
                *(f"{found[name]:.0f}" if name in found else "–" for name in names),
                f"{share:.2f}" if share else "–",
            ]
        )
    widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
    text = [
        "  ".join([line[0].ljust(widths[0]), *(word.rjust(width) for word, width in zip(line[1:], widths[1:]))])
        for line in lines
    ]
    if ratios:
        mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
        ahead = sum(r > 1 for r in ratios)
        text.append(f"ours/best: geometric mean {mean:.3f}, ahead in {ahead} of {len(ratios)}, least {min(ratios):.2f}")
    return "\n".join(text)


# ------------------------------------------------------------------------------------------------------ main
def contestants_for(names: str, phase: str = FWD, lineup=peers.lineup) -> tuple[list[peers.Contestant], dict[str, str]]:
    """(those to run, name -> version or the reason why not). Ours is first."""
    ready, said = [], {}
    for contestant in lineup(names):
        reason = contestant.available()
        if phase == BWD and reason is None and contestant.no_backward:
            reason = f"unavailable: {contestant.no_backward}"
        said[contestant.name] = reason or contestant.version()
        if reason is None:
            ready.append(contestant)
    return ready, said


def warm(cells: Sequence[suites.Cell], device: str, backend: str = "") -> None:
    """Compile our variants in parallel through the disk cache, so that the cells find them ready."""
    from flashattn_hopper import jit

    plans = [plan for cell in cells for plan in ours_plans(cell, device, backend)]
    jit.warmup((spec, traits, tile, spec.arch) for spec, traits, tile in plans if spec.arch is not None)


def try_to_warm(cells: Sequence[suites.Cell], device: str, backend: str = "") -> None:
    try:
        warm(cells, device, backend)
    except Exception:
        traceback.print_exc()  # the cells say it again, each for itself


def context_lost(device: str) -> str | None:
    """Why nothing more can run on the device, or None. After an illegal access every later call fails too."""
    if torch.device(device).type != "cuda":
        return None
    try:
        torch.zeros(1, device=device).item()
    except Exception as error:
        return peers.first_line(error)
    return None


def file_name(suite: str, quick: bool, part: str) -> str:
    """A part of a suite has a file of its own: the committed file is always a whole run."""
    return suite + ("-quick" if quick else "") + ("-only" if part else "")


def measure_cells(cells, ready, clock, device: str, describe, results: dict, path, begin: float) -> str | None:
    """All cells in turn into `results`, saved and told after each. Returns why it stopped early, or None."""
    ceiling, num_sms = results["ceiling"]["tflops"], results["gpu"]["num_sms"]
    with record.Monitor(device) as monitor:
        extras = {"ceiling": ceiling, "monitor": monitor, "num_sms": num_sms, "describe": describe}
        for cell in cells:
            here = [contestant for contestant in ready if contestant.takes(cell)]
            try:
                with timing.limited(CELL_SECONDS, cell.key):
                    rows = run_cell(cell, here, clock, device, **extras)
            except Exception as error:
                traceback.print_exc()
                rows = [{"contestant": c.name, **identity(cell), "failed": peers.first_line(error)} for c in here]
            results["rows"] += rows
            results["seconds"] = round(time.monotonic() - begin)
            record.save(results, path)
            print(cell_line(rows), flush=True)
            if any(row.get("failed") for row in rows) and (lost := context_lost(device)):
                return f"stopped at {cell.key}, whose first failure is the cause; go on with --skip or --peers: {lost}"
    return None


def run_suite(name: str, o, device: str) -> int:
    """One suite from start to table; the exit status."""
    suite, begin = suites.SUITES[name], time.monotonic()
    cells = suite.select(o.quick, o.only, o.skip)
    torch.manual_seed(o.seed)
    settings = OF_SUITE.get(name, SETTINGS[suite.phase])[o.quick]
    lineup = LINEUPS.get(name, functools.partial(peers.lineup, backend=suite.backend))
    ready, said = contestants_for(o.peers, suite.phase, lineup)
    for contestant, text in said.items():
        print(f"{contestant}: {text}", flush=True)
    results = record.environment(device, o.revision) | {
        "suite": name,
        "quick": o.quick,
        "only": o.only,
        "skip": o.skip,
        "settings": settings.record(),
        "contestants": said,
        "rows": [],
    }
    if any(contestant.name == peers.OURS.name for contestant in ready):
        try_to_warm(cells, device, suite.backend)
    clock = timing.clock_for(device, settings)
    kind, keywords = CEILINGS.get(name, ("bf16", {}))
    ceiling = round(timing.matmul_ceiling(clock, **keywords), 1)
    results["ceiling"] = {"what": f"{timing.MATMUL}³ {kind} product", "tflops": ceiling}
    print(
        f"ready after {time.monotonic() - begin:.0f} s; {len(cells)} cells; ceiling {ceiling:.0f} TFLOP/s", flush=True
    )
    path = record.path_for(o.out, results["gpu"]["name"], file_name(name, o.quick, o.only + o.skip))
    describe = functools.partial(ours_ran, backend=suite.backend)
    why = measure_cells(cells, ready, clock, device, describe, results, path, begin)
    print("\n" + table(results["rows"]))
    print(f"{path}  ({results['seconds']} s)")
    if why:
        print(why, file=sys.stderr)
    return CONTEXT_LOST if why else 0


def run_memory(o, device: str) -> int:
    """The suite that measures memory instead of time: ours alone, one long sequence after the other."""
    begin, cells = time.monotonic(), memory.cells(o.quick)
    torch.manual_seed(o.seed)
    ready, said = contestants_for("none", BWD)
    results = record.environment(device, o.revision) | {"suite": "memory", "quick": o.quick, "contestants": said}
    results["rows"] = []
    if peers.OURS in ready:
        try_to_warm(cells, device)
    path = record.path_for(o.out, results["gpu"]["name"], file_name("memory", o.quick, ""))
    for cell in cells:
        with timing.limited(CELL_SECONDS, cell.key):
            row = {"contestant": peers.OURS.name, **identity(cell)} | memory.row(cell, peers.OURS, device, ours_ran)
        results["rows"].append(row)
        results["seconds"] = round(time.monotonic() - begin)
        record.save(results, path)
        print(memory.line(row), flush=True)
        if row.get("failed") and (lost := context_lost(device)):
            print(f"stopped at {cell.key}: {lost}", file=sys.stderr)
            return CONTEXT_LOST
    print(f"{path}  ({results['seconds']} s)")
    return 0


def run_quantizer(o, device: str) -> int:
    """The suite that measures bytes in place of operations: the FP8 quantizer beside a copy."""
    from flashattn_hopper import jit, runner_fp8

    begin, cells = time.monotonic(), quantizer.cells(o.quick)
    torch.manual_seed(o.seed)
    # A dozen allocations and a launch: the longer write before a call hides its host time, as for a backward.
    settings = dataclasses.replace(BRIEF[o.quick], flush_bytes=2**31)
    results = record.environment(device, o.revision) | {"suite": "quantizer", "quick": o.quick, "rows": []}
    results |= {"settings": settings.record(), "contestants": {"ours": peers.OURS.version(), "copy": "torch"}}
    try:
        plans = dict.fromkeys(fp8.quantizer(cell) for cell in cells)
        jit.warmup((spec, traits, tile, spec.arch) for spec, traits, tile in plans)
    except Exception:
        traceback.print_exc()  # the cells say it again, each for itself
    clock = timing.clock_for(device, settings)
    path = record.path_for(o.out, results["gpu"]["name"], file_name("quantizer", o.quick, ""))
    for cell in cells:
        with timing.limited(CELL_SECONDS, cell.key):
            found = quantizer.rows(cell, clock, device, runner_fp8.quantize)
        results["rows"] += found
        results["seconds"] = round(time.monotonic() - begin)
        record.save(results, path)
        print(quantizer.line(found), flush=True)
        if found[0].get("failed") and (lost := context_lost(device)):
            print(f"stopped at {cell.key}: {lost}", file=sys.stderr)
            return CONTEXT_LOST
    print(f"{path}  ({results['seconds']} s)")
    return 0


OTHERS = {"memory": run_memory, "quantizer": run_quantizer}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    names = (*suites.SUITES, *OTHERS)
    parser.add_argument("suite", choices=names, nargs="+", help="%(choices)s; several run one after the other")
    parser.add_argument("--quick", action="store_true", help="fewer lengths, fewer rounds")
    parser.add_argument("--only", default="", metavar="TEXT", help="cells whose slug and shape contain TEXT")
    parser.add_argument("--skip", default="", metavar="TEXT", help="not those whose slug and shape contain TEXT")
    parser.add_argument("--peers", default=",".join(peers.DEFAULT), help=f"of {', '.join(peers.PEERS)}; or none")
    parser.add_argument("--out", default=str(record.RESULTS), metavar="DIR", help="default: bench/results")
    parser.add_argument("--revision", help="for a copy of the tree without git's history, which is asked otherwise")
    parser.add_argument("--seed", type=int, default=0)
    o = parser.parse_args(argv)
    for name in o.suite:
        if name in suites.SUITES and not suites.SUITES[name].select(o.quick, o.only, o.skip):
            parser.error(f"no cell of {name} contains {o.only!r} without {o.skip!r}")
    if not torch.cuda.is_available():
        print("bench/run.py measures on a CUDA device, and torch sees none here", file=sys.stderr)
        return 2
    for name in o.suite:
        status = OTHERS[name](o, "cuda") if name in OTHERS else run_suite(name, o, "cuda")
        if status:
            return status
    return 0


if __name__ == "__main__":
    sys.exit(main())
