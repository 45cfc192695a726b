"""Measure a suite: ours and the peers in one process, in turn, cell by cell; one JSON file for each GPU and suite.

    python bench/run.py forward [--quick] [--only d128.causal] [--peers cudnn,fa3,fa4,fa2] [--out DIR]

Each cell draws fresh random operands. Every contestant first runs once, which compiles it, and is compared with
float64 on a sample of rows; a wrong or failing one is recorded with its message and not timed. Then all are timed in
turn over several rounds. The file is rewritten after every cell, so that a run cut short keeps what it has.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
import traceback
import warnings
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import peers
import record
import suites
import timing
import torch
from plot import by_cell, rates, ratio

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
# Relative error (Frobenius norm, against float64) above which a result counts as wrong and is not timed. Output and
# probabilities rounded once each to the dtype give about one unit in the last place; ten of those is a defect.
WRONG = {"bf16": 2e-2, "fp16": 4e-3, "fp32": 1e-4}


class Operands(NamedTuple):
    q: torch.Tensor  # (B, S, Hq, D)
    k: torch.Tensor  # (B, S, Hk, D)
    v: torch.Tensor  # (B, S, Hk, Dv)


def operands(cell: suites.Cell, device: str) -> Operands:
    def draw(heads, dim):
        return torch.randn(cell.batch, cell.seqlen, heads, dim, device=device, dtype=DTYPES[cell.dtype])

    heads, kv_heads = cell.num_heads_q, cell.num_heads_kv
    return Operands(draw(heads, cell.headdim), draw(kv_heads, cell.headdim), draw(kv_heads, cell.headdim_v))


def forward_error(cell: suites.Cell, ops: Operands, out: torch.Tensor, heads: int = 4, rows: int = 16):
    """(largest absolute, relative Frobenius) error of a sample of rows against float64.

    The sample has the first and the last query and random ones between, in `heads` random (batch, head) pairs.
    """
    expected = (cell.batch, cell.seqlen, cell.num_heads_q, cell.headdim_v)
    if tuple(out.shape) != expected:
        raise ValueError(f"output of shape {tuple(out.shape)}, expected {expected}")
    device, seqlens = out.device, cell.shape.seqlens
    i = torch.randint(cell.seqlen, (rows,), device=device)
    i[0], i[-1] = 0, cell.seqlen - 1
    visible = cell.band.keep(i[:, None], torch.arange(cell.seqlen, device=device), seqlens)
    worst, off, norm = 0.0, 0.0, 0.0
    for pair in torch.randint(cell.batch * cell.num_heads_q, (heads,)).tolist():
        batch, head = divmod(pair, cell.num_heads_q)
        kv_head = head // (cell.num_heads_q // cell.num_heads_kv)
        q, k, v = ops.q[batch, i, head], ops.k[batch, :, kv_head], ops.v[batch, :, kv_head]
        scores = q.double() @ k.double().T * cell.softmax_scale
        reference = scores.masked_fill(~visible, -math.inf).softmax(-1) @ v.double()
        difference = out[batch, i, head].double() - reference
        largest = difference.abs().max().item()
        # Trap: max(0.0, nan) is 0.0 in Python; a NaN must stay one.
        worst = largest if math.isnan(largest) else max(worst, largest)
        off += difference.square().sum().item()
        norm += reference.square().sum().item()
        if math.isnan(off):
            break
    return worst, math.sqrt(off / norm) if norm else math.sqrt(off)


# What a suite's phase checks of a contestant's result. A backward suite adds its own entry.
ERRORS = {"fwd": forward_error}


def ours_plan(cell: suites.Cell, device: str):
    """What our planner chooses for the cell: (spec, compiled traits, tile)."""
    from flashattn_hopper import planner

    return planner.plan(cell.traits, planner.capability_of(torch.device(device)), "auto", cell.shape)


def ours_ran(cell: suites.Cell, device: str) -> dict[str, str | None]:
    """Which of our kernels serves the cell, and its tile."""
    spec, _, tile = ours_plan(cell, device)
    return {"kernel": spec.name, "tile": None if tile is None else record.source(tile)}


def first_call(contestant, cell, ops, call):
    """Run once and judge: (errors, None) or (None, why not)."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            with contestant.session():
                out = call()
            worst, relative = ERRORS[cell.phase](cell, ops, out)
        except Exception as error:
            # Why: torch SDPA says in warnings why a backend refuses, and only "no available kernel" in the error.
            reasons = [str(w.message).split(" (Triggered")[0] for w in said if issubclass(w.category, UserWarning)]
            return None, " | ".join([peers.first_line(error), *reasons])[:400]
    if not relative <= WRONG[cell.dtype]:
        return None, f"wrong result: relative error {relative:.1e} against float64"
    return {"max_error": float(f"{worst:.3g}"), "rel_error": float(f"{relative:.3g}")}, None


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
    ops = operands(cell, device)
    calls, judged, failed = {}, {}, {}
    for contestant in contestants:
        call = bind(contestant, cell, ops)
        errors, why = first_call(contestant, cell, ops, call)
        if why is None:
            calls[contestant.name], judged[contestant.name] = call, errors
        else:
            failed[contestant.name] = why
    sessions = {contestant.name: contestant.session for contestant in contestants}
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


def bind(contestant, cell, ops):
    def call():
        with torch.no_grad():
            return contestant.call(*ops, cell.causal, cell.window_size, cell.softmax_scale)

    return call


def identity(cell: suites.Cell) -> dict:
    return {
        "slug": cell.traits.slug,
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
        text.append(f"err {ours['rel_error']:.1e} {ours.get('tile') or ''}")
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
def contestants_for(names: str) -> tuple[list[peers.Contestant], dict[str, str]]:
    """(those to run, name -> version or the reason why not). Ours is first."""
    ready, said = [], {}
    for contestant in (peers.OURS, *peers.parse(names)):
        reason = contestant.available()
        said[contestant.name] = reason or contestant.version()
        if reason is None:
            ready.append(contestant)
    return ready, said


def warm(cells: Sequence[suites.Cell], device: str) -> None:
    """Compile our variants in parallel through the disk cache, so that the cells find them ready."""
    from flashattn_hopper import jit

    plans = [ours_plan(cell, device) for cell in cells]
    jit.warmup((spec, traits, tile, spec.arch) for spec, traits, tile in plans if tile is not None)


def file_name(suite: str, quick: bool, only: str) -> str:
    """A part of a suite has a file of its own: the committed file is always a whole run."""
    return suite + ("-quick" if quick else "") + ("-only" if only else "")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("suite", choices=tuple(suites.SUITES))
    parser.add_argument("--quick", action="store_true", help="fewer lengths, fewer rounds")
    parser.add_argument("--only", default="", metavar="TEXT", help="cells whose slug and shape contain TEXT")
    parser.add_argument("--peers", default=",".join(peers.DEFAULT), help=f"of {', '.join(peers.PEERS)}; or none")
    parser.add_argument("--out", default=str(record.RESULTS), metavar="DIR", help="default: bench/results")
    parser.add_argument("--revision", help="for a copy of the tree without git's history, which is asked otherwise")
    parser.add_argument("--seed", type=int, default=0)
    o = parser.parse_args(argv)
    cells = suites.SUITES[o.suite].select(o.quick, o.only)
    if not cells:
        parser.error(f"no cell of {o.suite} contains {o.only!r}")
    if not torch.cuda.is_available():
        print("bench/run.py measures on a CUDA device, and torch sees none here", file=sys.stderr)
        return 2

    device, begin = "cuda", time.monotonic()
    torch.manual_seed(o.seed)
    settings = timing.QUICK if o.quick else timing.Settings()
    ready, said = contestants_for(o.peers)
    for name, text in said.items():
        print(f"{name}: {text}", flush=True)
    results = record.environment(device, o.revision) | {
        "suite": o.suite,
        "quick": o.quick,
        "only": o.only,
        "settings": settings.record(),
        "contestants": said,
    }
    if peers.OURS in ready:
        try:
            warm(cells, device)
        except Exception:
            traceback.print_exc()  # the cells say it again, each for itself
    clock = timing.clock_for(device, settings)
    results["ceiling"] = {"what": f"{timing.MATMUL}³ bf16 product", "tflops": round(timing.matmul_ceiling(clock), 1)}
    ceiling = results["ceiling"]["tflops"]
    print(f"ready after {time.monotonic() - begin:.0f} s; ceiling {ceiling:.0f} TFLOP/s", flush=True)
    path = record.path_for(o.out, results["gpu"]["name"], file_name(o.suite, o.quick, o.only))
    results["rows"] = []
    with record.Monitor(device) as monitor:
        for cell in cells:
            rows = run_cell(
                cell,
                ready,
                clock,
                device,
                ceiling=ceiling,
                monitor=monitor,
                num_sms=results["gpu"]["num_sms"],
                describe=ours_ran,
            )
            results["rows"] += rows
            results["seconds"] = round(time.monotonic() - begin)
            record.save(results, path)
            print(cell_line(rows), flush=True)
    print("\n" + table(results["rows"]))
    print(f"{path}  ({results['seconds']} s)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
