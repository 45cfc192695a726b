"""What a run leaves behind: a table on the terminal, the loss curve as PNG, everything as JSON."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

from rich.table import Table

from .config import DTYPES
from .environment import describe
from .job import Outcome

PNG, JSON = "loss.png", "run.json"


def summary(outcome: Outcome) -> Table:
    """Losses and speed."""
    table = Table(title="result", title_justify="left", show_header=False)
    rows = (
        ("train loss", f"{outcome.train_loss:.3f} nats/byte (last tenth of {len(outcome.losses)} steps)"),
        ("val loss", f"{outcome.val_loss:.3f} nats/byte (files not trained on)"),
        ("byte frequencies alone", f"{outcome.unigram:.3f} nats/byte"),
        ("speed", f"{outcome.tokens_per_second:,.0f} tokens/s"),
        ("training time", f"{outcome.seconds:.1f} s"),
    )
    for row in rows:
        table.add_row(*row)
    return table


def errors(outcome: Outcome) -> Table:
    """Errors of layer 0's attention against float64, ours beside plain PyTorch's."""
    config = outcome.config
    name = {"hopper": "hopper_attention", "sdpa": "torch's scaled_dot_product_attention"}[config.attention]
    beside = "the same dtype" if config.precision in DTYPES else f"{config.dtype}".removeprefix("torch.")
    table = Table(
        title=f"{name} in {config.precision}, layer 0 on a validation batch after training:\n"
        f"distance from float64, beside that of plain PyTorch (matmul, softmax, matmul) in {beside}",
        title_justify="left",
        caption="size, rms: root mean square over the tensor",
        caption_justify="left",
    )
    for column in ("", "size", "max error", "plain's", "ratio", "rms error", "plain's", "ratio"):
        table.add_column(column, justify="right" if column else "left")
    for row in outcome.errors:
        cells = (row.scale, row.ours_max, row.plain_max), (row.ours_rms, row.plain_rms)
        first, second = ([f"{x:.2e}" for x in group] for group in cells)
        table.add_row(row.name, *first, f"{row.ratio_max:.2f}", *second, f"{row.ratio_rms:.2f}")
    return table


def write_json(outcome: Outcome, folder: Path) -> Path:
    """The whole run: settings, machine, losses, errors."""
    record = asdict(outcome)
    record.update(
        train_loss=outcome.train_loss,
        val_loss=outcome.val_loss,
        errors=[asdict(row) | {"ratio_max": row.ratio_max, "ratio_rms": row.ratio_rms} for row in outcome.errors],
        machine=describe(),
    )
    path = folder / JSON
    path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    return path


def write_png(outcome: Outcome, folder: Path) -> Path:
    """The loss curve, with validation and the byte-frequency baseline."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    config = outcome.config
    figure = Figure(figsize=(7, 4), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.plot(range(1, len(outcome.losses) + 1), outcome.losses, linewidth=1, label="train")
    axes.plot(*zip(*outcome.val), marker="o", linewidth=1, label="validation")
    axes.axhline(outcome.unigram, color="grey", linestyle="--", linewidth=1, label="byte frequencies alone")
    axes.set(xlabel="step", ylabel="loss, nats per byte")
    axes.set_title(
        f"{config.attention} attention, {config.device}, {config.precision}: "
        f"{outcome.parameters / 1e6:.1f} M parameters, "
        f"{config.batch} x {config.seqlen} bytes per step",
        fontsize=9,
    )
    axes.legend()
    path = folder / PNG
    figure.savefig(path)
    return path


def write(outcome: Outcome) -> tuple[Path, Path]:
    """PNG and JSON into the run's folder."""
    folder = Path(outcome.config.out)
    folder.mkdir(parents=True, exist_ok=True)
    return write_png(outcome, folder), write_json(outcome, folder)
