"""Loss curves of training runs, ours beside torch's own attention: a figure and the losses at the end.

    python -m flashattn_hopper train --attention hopper --seed 0 --out runs/hopper-0    (and sdpa, and other seeds)
    python bench/curves.py runs/*/run.json --keep NAME    results/<gpu>/train-NAME.json, what the figure needs of them
    python bench/curves.py NAME                           docs/figures/train-NAME.svg from that file, and a table

The same seed means the same weights and the same batches; what other attention kernels change then is rounding. The
yardstick for it is what another seed changes.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import plot

HERE = Path(__file__).resolve().parent
FIGURES = HERE.parent / "docs" / "figures"
KEPT = ("losses", "val", "train_loss", "val_loss", "tokens_per_second", "unigram", "explanation", "parameters")
SMOOTH = 10  # steps


def kept(run: Mapping) -> dict:
    """Settings, machine and curve of one run."""
    curve = {name: run[name] for name in KEPT}
    curve["losses"] = [round(loss, 4) for loss in curve["losses"]]
    return {"config": run["config"], "machine": run["machine"]} | curve


def label(run: Mapping) -> str:
    config = run["config"]
    return f"{config['attention']} {config['precision']}, seed {config['seed']}"


def smooth(losses: Sequence[float], width: int = SMOOTH) -> list[float]:
    """Mean of each step and those before it, at most `width`."""
    return [sum(part) / len(part) for part in (losses[max(0, i - width + 1) : i + 1] for i in range(len(losses)))]


def draw(runs: Sequence[Mapping], path: Path) -> None:
    import matplotlib
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    colors = {"hopper": plot.STYLES["ours"].color, "sdpa": plot.STYLES["cudnn"].color}
    colors["hopper fp8"] = plot.STYLES["ours_int8"].color
    dashes = dict(zip(dict.fromkeys(run["config"]["seed"] for run in runs), ("-", "--", ":")))
    with matplotlib.rc_context(plot.RC):
        figure = Figure(figsize=(7, 4), layout="constrained")
        FigureCanvasSVG(figure)
        axes = figure.add_subplot()
        for run in runs:
            config = run["config"]
            color = colors.get(f"{config['attention']} {config['precision']}", colors[config["attention"]])
            style = {"color": color, "linestyle": dashes[config["seed"]]}
            axes.plot(range(1, len(run["losses"]) + 1), smooth(run["losses"]), linewidth=1, label=label(run), **style)
        config = runs[0]["config"]
        axes.set(xlabel=f"step, mean of the last {SMOOTH}", ylabel="training loss, nats per byte")
        size = f"{config['batch']} x {config['seqlen']} bytes per step, {runs[0]['parameters'] / 1e6:.0f} M parameters"
        axes.set_title(f"{runs[0]['machine']['gpu']}; {size}")
        axes.legend()
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, metadata={"Date": None})


def table(runs: Sequence[Mapping]) -> str:
    """The last tenth of training and the last validation, run by run."""
    lines = ["| attention | training loss | validation loss |", "| --- | --- | --- |"]
    lines += [f"| {label(run)} | {run['train_loss']:.4f} | {run['val_loss']:.4f} |" for run in runs]
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", nargs="+", help="run.json files with --keep, otherwise a name that was kept")
    parser.add_argument("--keep", metavar="NAME")
    parser.add_argument("--results", type=Path, default=plot.RESULTS)
    parser.add_argument("--figures", type=Path, default=FIGURES)
    o = parser.parse_args(argv)
    names = o.what
    if o.keep:
        runs = [kept(json.loads(Path(name).read_text())) for name in o.what]
        runs.sort(key=lambda run: (run["config"]["seed"], run["config"]["attention"]))
        (o.results / f"train-{o.keep}.json").write_text(json.dumps(runs, indent=1) + "\n")
        names = [o.keep]
    for name in names:
        runs = json.loads((o.results / f"train-{name}.json").read_text())
        draw(runs, o.figures / f"train-{name}.svg")
        print(table(runs))
    return 0


if __name__ == "__main__":
    sys.exit(main())
