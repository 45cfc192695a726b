"""Which tile is fastest: every candidate measured, a ranking, and rows ready to paste into kernels/sm90/specs.py.

    python bench/tune.py --headdim 128 [--headdim-v 128] [--mask full,causal] [--seqlen 512,4096] [--set output=own]
    python bench/tune.py --dtype fp8 [--int8] --headdim 128

Candidates are `FwdTile.candidates` and the tiles of the present table. They are compiled in parallel
processes through the disk cache, checked against float64 on small ragged shapes, then measured in turn: all of them
briefly, and the `--finalists` of each length again with the settings of bench/run.py.
"""

from __future__ import annotations

import argparse
import itertools
import math
import sys
from collections.abc import Mapping, Sequence

import fp8
import peers
import record
import suites
import tasks
import timing
import torch

from flashattn_hopper.kernels.common.operands import FwdOperands
from flashattn_hopper.kernels.sm90.specs import FORWARD, FORWARD_FP8
from flashattn_hopper.spec.problem import FWD, Traits
from flashattn_hopper.spec.tile import FwdTile, Row

BANDS = {"full": suites.FULL, "causal": suites.CAUSAL, "window": suites.window(1024)}
BRIEF = timing.Settings(rounds=1, warmup_ms=10.0, rep_ms=30.0, rest_s=0.02)
# Ragged, with an even and with an odd number of query tiles at every tile_m.
CHECKED = (1000, 850)
CHECK_SECONDS = 120  # a tile that hangs ends the process; compiling one that `warm` could not is in it
# Two tiles this close are the same within the noise of a run; the rows then prefer the one that serves more lengths.
TOLERANCE = 0.01


def spec_of(traits: Traits):
    return FORWARD_FP8 if traits.dtype == "fp8" else FORWARD


def candidates(traits: Traits) -> tuple[FwdTile, ...]:
    """The present table's tiles first, then every other one worth measuring."""
    spec = spec_of(traits)
    present = (row.tile for row in spec.tiles.rows_for(traits))
    return tuple(dict.fromkeys((*present, *FwdTile.candidates(spec.arch, traits))))


class Launcher:
    """Runs any tile of the forward kernel, without the planner. One stream only: all launches share the tickets."""

    def __init__(self, traits: Traits, band, num_ctas: int, device: str = "cuda"):
        self.traits, self.band, self.num_ctas = traits, band, num_ctas
        self.tickets = torch.zeros(2, dtype=torch.int32, device=device)
        self.functions = {}

    def __call__(self, tile: FwdTile, q, k, v):
        """One forward pass: q, k, v are (B, S, H, D), as the caller holds them. Returns out, (B, S, Hq, Dv)."""
        function = self.functions.get(tile)
        if function is None:
            function = self.functions[tile] = compiled(self.traits, tile)
        out = q.new_empty(*q.shape[:3], v.shape[3])
        lse = torch.empty(q.shape[0], q.shape[2], q.shape[1], device=q.device, dtype=torch.float32)
        function(self.operands(tile, q, k, v, out, lse))
        return out

    def operands(self, tile: FwdTile, q, k, v, out, lse) -> FwdOperands:
        """What the compiled function takes, with None for what this variant has not."""
        window, dynamic = self.traits.mask == "window", tile.schedule == "dynamic"
        return FwdOperands(
            q,
            k,
            v,
            out.data_ptr(),
            lse.data_ptr(),
            self.traits.headdim**-0.5,
            window_left=self.band.left if window else None,
            window_right=self.band.right if window else None,
            num_ctas=self.num_ctas if dynamic else None,
            tickets=self.tickets.data_ptr() if dynamic else None,
        )


class CodesLauncher:
    """The same of the FP8 forward: operands are quantized when they are first seen, outside of what is timed."""

    def __init__(self, traits: Traits, band):
        self.traits, self.band, self.seen = traits, band, {}

    def __call__(self, tile: FwdTile, q, k, v):
        bound = self.seen.get((tile, id(q))) or self.bind(tile, q, k, v)
        return bound[1](bound[2], False)[0]

    def bind(self, tile, q, k, v):
        from flashattn_hopper import planner, runner_fp8

        spec, int8 = spec_of(self.traits), self.traits.int8_qk
        cell = suites.Cell(*q.shape[:3], k.shape[2], q.shape[3], v.shape[3], self.band, "fp8")
        codes = next((codes for (_, of), (_, _, codes) in self.seen.items() if of == id(q)), None)
        if codes is None:
            codes = runner_fp8.quantize(q, k, v, int8_qk=int8)
        chosen = planner.Plan(spec, spec.compiled(self.traits), tile)
        attend = runner_fp8.bind(chosen, fp8.problem_of(cell, int8), q.dtype, q.device)
        # Holding q keeps another tensor from having its id.
        return self.seen.setdefault((tile, id(q)), (q, attend, codes))


def compiled(traits: Traits, tile: FwdTile):
    from flashattn_hopper import jit

    spec = spec_of(traits)
    return jit.compiled(spec, spec.compiled(traits), tile, spec.arch)


def chosen(traits: Traits, keep: Mapping[str, object]) -> list[FwdTile]:
    """Candidates whose fields are those of `keep`."""
    return [tile for tile in candidates(traits) if all(getattr(tile, k) == v for k, v in keep.items())]


def warm(variants: Sequence[Traits], keep: Mapping[str, object]) -> None:
    """Compile all candidates in parallel processes. One that fails is found again, and named, by `check`."""
    from flashattn_hopper import jit

    try:
        done = jit.warmup(
            (spec_of(t), spec_of(t).compiled(t), tile, spec_of(t).arch) for t in variants for tile in chosen(t, keep)
        )
        print(f"compiled {done.compiles} in {done.seconds_compiling:.0f} s of processor time", flush=True)
    except RuntimeError as error:
        print(error, flush=True)


def check(launcher: Launcher, tile: FwdTile, cell: suites.Cell, device: str = "cuda") -> str | None:
    """None if `tile` computes `cell` right, else what is wrong."""
    ops = tasks.operands(cell, device)
    try:
        with timing.limited(CHECK_SECONDS, record.source(tile)):
            _, relative = tasks.forward_error(cell, ops, launcher(tile, *ops), heads=6, rows=64)
    except Exception as error:
        return peers.first_line(error)
    return None if relative <= tasks.WRONG[cell.dtype] else f"relative error {relative:.1e}"


def measure(launcher, tiles: Sequence[FwdTile], cell: suites.Cell, settings, device: str = "cuda"):
    """tile -> TFLOP/s on one cell; those that fail are left out."""
    ops = tasks.operands(cell, device)
    calls = {tile: (lambda tile=tile: launcher(tile, *ops)) for tile in tiles}
    timings = timing.interleave(calls, timing.clock_for(device, settings))
    return {
        tile: timing.tflops(cell.flops, taken.ms) for tile, taken in timings.items() if isinstance(taken, timing.Timing)
    }


def finalists(speeds: Mapping[FwdTile, float], count: int) -> list[FwdTile]:
    return sorted(speeds, key=speeds.get, reverse=True)[:count]


def segments(speeds: Mapping[int, Mapping[FwdTile, float]], tolerance: float = TOLERANCE) -> list[tuple[int, FwdTile]]:
    """[(from this length on, tile)]: the fewest changes that stay within `tolerance` of the best at every length."""
    found: list[tuple[int, FwdTile]] = []
    good: list[FwdTile] = []
    members: list[int] = []

    def close():
        if members:
            mean = lambda tile: math.prod(speeds[s][tile] for s in members)
            found.append((members[0], max(good, key=mean)))

    for seqlen in sorted(speeds):
        best = max(speeds[seqlen].values())
        near = [tile for tile, speed in speeds[seqlen].items() if speed >= best * (1 - tolerance)]
        common = [tile for tile in good if tile in near]
        if members and common:
            good = common
            members.append(seqlen)
            continue
        close()
        good, members = near, [seqlen]
    close()
    return found


def row_lines(traits: Traits, winners: Sequence[tuple[int, FwdTile]]) -> list[str]:
    """Table rows in matching order (longest bound first); the last one serves all shorter lengths."""
    rows = []
    for i, (seqlen, tile) in enumerate(winners):
        dims = traits.headdim if traits.headdim == traits.headdim_v else (traits.headdim, traits.headdim_v)
        # Built as a Row first: what is printed has passed its checks.
        row = Row(dims, tile, masks=(traits.mask,), min_seqlen=seqlen if i else 0)
        bound = f", min_seqlen={row.min_seqlen}" if row.min_seqlen else ""
        rows.append(f'    Row({dims}, {record.source(tile)}, masks=("{traits.mask}",){bound}),')
    return rows[::-1]


def ranking(speeds: Mapping[FwdTile, float], present: FwdTile) -> str:
    best = max(speeds.values())
    return "\n".join(
        f"  {speed:7.1f}  {speed / best:5.3f}  {record.source(tile)}{'   <- table' if tile == present else ''}"
        for tile, speed in sorted(speeds.items(), key=lambda item: -item[1])
    )


def tune(traits: Traits, seqlens: Sequence[int], count: int, keep: Mapping[str, object]) -> list[str]:
    """Measure one variant; prints the rankings and returns its rows."""
    band = BANDS[traits.mask]
    heads = max(1, suites.HIDDEN // traits.headdim)
    cell_at = lambda seqlen: suites.Cell(
        max(1, suites.TOKENS // seqlen), seqlen, heads, heads, traits.headdim, traits.headdim_v, band, traits.dtype
    )
    tiles = chosen(traits, keep)
    print(f"\n{traits.slug}: {len(tiles)} candidates", flush=True)
    if traits.dtype == "fp8":
        launcher = CodesLauncher(traits, band)
    else:
        launcher = Launcher(traits, band, torch.cuda.get_device_properties("cuda").multi_processor_count)
    small = [suites.Cell(2, s, 4, 2, traits.headdim, traits.headdim_v, band, traits.dtype) for s in CHECKED]
    reasons = {tile: next(filter(None, (check(launcher, tile, cell) for cell in small)), None) for tile in tiles}
    wrong = {tile: why for tile, why in reasons.items() if why is not None}
    for tile, why in wrong.items():
        print(f"  left out: {record.source(tile)}: {why}")
    tiles = [tile for tile in tiles if tile not in wrong]
    if not tiles:
        return []
    brief = {seqlen: measure(launcher, tiles, cell_at(seqlen), BRIEF) for seqlen in seqlens}
    # A tile that is a finalist anywhere is measured everywhere, so that `segments` can compare it.
    final = list(dict.fromkeys(itertools.chain.from_iterable(finalists(s, count) for s in brief.values())))
    speeds = {}
    for seqlen in seqlens:
        present = spec_of(traits).tiles.find(traits, seqlen)
        contest = list(dict.fromkeys([*final, *([present] if present in tiles else [])]))
        found = measure(launcher, contest, cell_at(seqlen), timing.Settings())
        if not found:
            print(f"{traits.slug} S={seqlen}: no tile ran")
            continue
        speeds[seqlen] = found
        print(f"{traits.slug} S={seqlen}\n{ranking(found, present)}", flush=True)
    lines = row_lines(traits, segments(speeds))
    print("\n".join(lines), flush=True)
    return lines


def setting(text: str) -> tuple[str, object]:
    """`tile_m=192` or `output=own`, as the field's type."""
    name, _, word = text.partition("=")
    names = {"True": True, "False": False}
    if name not in FwdTile.__dataclass_fields__ or not word:
        raise argparse.ArgumentTypeError(f"{text!r}: expected FIELD=VALUE with a field of FwdTile")
    return name, names.get(word, int(word) if word.isdigit() else word)


def main(argv: Sequence[str] | None = None) -> int:
    numbers = lambda text: [int(word) for word in text.split(",")]
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--headdim", type=int, required=True)
    parser.add_argument("--headdim-v", type=int, help="default: headdim")
    parser.add_argument("--mask", default="full,causal", help=f"of {', '.join(BANDS)}; default: %(default)s")
    parser.add_argument("--seqlen", type=numbers, default=list(suites.SEQLENS), help="default: those of the suite")
    parser.add_argument("--dtype", default="bf16")
    parser.add_argument("--int8", action="store_true", help="of fp8: int8 codes of q and k")
    parser.add_argument("--finalists", type=int, default=4, help="per length, measured again; default: %(default)s")
    parser.add_argument("--set", type=setting, action="append", default=[], metavar="FIELD=VALUE", help="only tiles so")
    o = parser.parse_args(argv)
    if not torch.cuda.is_available():
        print("bench/tune.py measures on a CUDA device, and torch sees none here", file=sys.stderr)
        return 2
    torch.manual_seed(0)
    dims = o.headdim, o.headdim_v or o.headdim
    variants = [Traits(FWD, o.dtype, *dims, mask, int8_qk=o.int8) for mask in o.mask.split(",")]
    keep = dict(o.set)
    warm(variants, keep)
    lines = [tune(traits, o.seqlen, o.finalists, keep) for traits in variants]
    print("\nrows for kernels/sm90/specs.py:")
    print("\n".join(itertools.chain.from_iterable(lines)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
