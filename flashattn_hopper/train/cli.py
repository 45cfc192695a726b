"""`python -m flashattn_hopper`: train, explain, info, bundle, wheel. matrix/cli.py adds its own."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

import flashattn_hopper

from .. import aot, kernel_wheel
from . import report
from .config import ATTENTIONS, DEFAULTS, DTYPES, PRECISIONS, RunConfig, resolve
from .environment import describe
from .job import Outcome
from .job import train as run_job

REFUSED = 2  # exit code: what was asked for cannot run here, and nothing was trained

app = typer.Typer(
    name="flashattn-hopper",
    help="Exact attention for LLM training on Hopper GPUs.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
console = Console(highlight=False)
complaints = Console(stderr=True, highlight=False)

# Why: typer before 0.19 knows no Literal, and Optional[...] because Python 3.10 evaluates these annotations.
Precision = Enum("Precision", {name: name for name in PRECISIONS}, type=str)
Attention = Enum("Attention", {name: name for name in ATTENTIONS}, type=str)
Device = Enum("Device", {name: name for name in ("auto", *DEFAULTS)}, type=str)
Dtype = Enum("Dtype", {name: name for name in DTYPES}, type=str)


def _default(name: str) -> str:
    return ", ".join(f"{row[name]:g} on {device}" for device, row in DEFAULTS.items())


def _size(name: str, text: str):
    return typer.Option(help=f"{text} (default: {_default(name)})", show_default=False)


def refuse(message: object) -> typer.Exit:
    complaints.print(f"[bold red]refused:[/] {escape(str(message))}", soft_wrap=True)
    return typer.Exit(REFUSED)


class Display:
    """The terminal during a run: what runs and why, then a progress bar with the latest losses."""

    def __init__(self, config: RunConfig):
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        self.progress = Progress(*columns, TimeRemainingColumn(), console=console)
        self.task = self.progress.add_task("step", total=config.steps)

    def start(self, outcome: Outcome):
        config, corpus = outcome.config, outcome.corpus
        console.print(
            f"[bold]device[/]     {config.device} ({config.why}), {config.precision}\n"
            f"[bold]text[/]       the Python standard library's source: {corpus['train_bytes']:,} bytes of "
            f"{corpus['train_files']} files to train on, {corpus['val_bytes']:,} bytes of {corpus['val_files']} others "
            "to validate\n"
            f"[bold]model[/]      {outcome.parameters / 1e6:.1f} M parameters: {config.layers} layers, "
            f"dim {config.dim}, {config.heads} heads of {config.gpt.headdim}, {config.kv_heads} for keys and values; "
            f"{config.batch} x {config.seqlen} bytes per step\n"
            "[bold]attention[/]  " + escape(outcome.explanation.replace("\n", "\n           ")),
            soft_wrap=True,
        )
        self.progress.start()

    def step(self, outcome: Outcome):
        losses = f"train {outcome.losses[-1]:.3f}" + (f"  val {outcome.val_loss:.3f}" if outcome.val else "")
        done = len(outcome.losses)
        self.progress.update(self.task, completed=done, description=losses)
        if not console.is_terminal and outcome.val and outcome.val[-1][0] == done:
            console.print(f"step {done} of {outcome.config.steps}: {losses}")  # a bar is no use in a log file

    def stop(self):
        if self.progress.live.is_started:
            self.progress.stop()


@app.command()
def train(
    precision: Annotated[
        Precision, typer.Option(help="auto: float32 on a CPU, bf16 on a GPU (fp16 before Ampere)")
    ] = Precision.auto,
    device: Annotated[Device, typer.Option(help="auto: a CUDA GPU if torch sees one")] = Device.auto,
    attention: Annotated[Attention, typer.Option(help="sdpa: torch's own, to compare loss curves")] = Attention.hopper,
    steps: Annotated[int | None, _size("steps", "optimizer steps")] = None,
    seqlen: Annotated[int | None, _size("seqlen", "bytes per sequence")] = None,
    batch: Annotated[int | None, _size("batch", "sequences per step")] = None,
    layers: Annotated[int | None, _size("layers", "transformer blocks")] = None,
    dim: Annotated[int | None, _size("dim", "width of the model")] = None,
    heads: Annotated[int | None, _size("heads", "query heads")] = None,
    kv_heads: Annotated[int | None, _size("kv_heads", "heads of keys and values; as --heads if that is given")] = None,
    lr: Annotated[float | None, _size("lr", "peak learning rate")] = None,
    seed: Annotated[int, typer.Option(help="of weights and batches")] = 0,
    compile: Annotated[bool, typer.Option(help="torch.compile the model")] = False,
    out: Annotated[
        Path | None,
        typer.Option(help="folder for loss.png and run.json (default: runs/<device>-<precision>-<attention>)"),
    ] = None,
):
    """Train a byte-level GPT on the Python standard library's source, through hopper_attention."""
    sizes = {
        "steps": steps,
        "seqlen": seqlen,
        "batch": batch,
        "layers": layers,
        "dim": dim,
        "heads": heads,
        "kv_heads": kv_heads,
        "lr": lr,
    }
    chosen = {"precision": precision.value, "device": device.value, "attention": attention.value}
    try:
        config = resolve(**chosen, **sizes, seed=seed, compile=compile, out=out)
    except ValueError as error:
        raise refuse(error) from error
    display = Display(config)
    try:
        outcome = run_job(config, on_start=display.start, on_step=display.step)
    except (NotImplementedError, ImportError) as error:  # not offered; or the GPU kernels' compiler is missing
        raise refuse(error) from error
    finally:
        display.stop()
    console.print(report.summary(outcome))
    console.print(report.errors(outcome))
    for path in report.write(outcome):
        console.print(f"wrote {path}", soft_wrap=True)


@app.command()
def explain(
    seqlen_q: Annotated[int, typer.Option(help="queries per sequence")] = 1024,
    seqlen_k: Annotated[int | None, typer.Option(help="keys per sequence; None: as seqlen-q")] = None,
    batch: int = 1,
    heads: Annotated[int, typer.Option(help="query heads")] = 8,
    kv_heads: Annotated[int | None, typer.Option(help="heads of keys and values; None: as heads")] = None,
    headdim: int = 128,
    headdim_v: Annotated[int | None, typer.Option(help="None: as headdim")] = None,
    dtype: Annotated[Dtype, typer.Option(help="of q, k, v")] = Dtype.bf16,
    precision: Annotated[str, typer.Option(help="hopper_attention's precision")] = "auto",
    causal: bool = False,
    window_left: Annotated[int | None, typer.Option(help="keys before the diagonal; None: all")] = None,
    window_right: Annotated[int | None, typer.Option(help="keys behind the diagonal; None: all")] = None,
    deterministic: bool = False,
    backend: Annotated[str, typer.Option(help="auto, sm90, sm80 or reference")] = "auto",
    device: Annotated[Device, typer.Option(help="auto: a CUDA GPU if torch sees one")] = Device.auto,
):
    """Say which kernels would run for tensors of this shape on this machine, and why."""
    where = device.value if device is not Device.auto else "cuda" if torch.cuda.is_available() else "cpu"
    seqlen_k, kv_heads, headdim_v = seqlen_k or seqlen_q, kv_heads or heads, headdim_v or headdim
    shapes = (seqlen_q, heads, headdim), (seqlen_k, kv_heads, headdim), (seqlen_k, kv_heads, headdim_v)
    window = None if window_left is None and window_right is None else (window_left, window_right)
    options = {
        "causal": causal,
        "window_size": window,
        "precision": precision,
        "deterministic": deterministic,
        "backend": backend,
    }
    try:
        q, k, v = (torch.empty(batch, *shape, dtype=DTYPES[dtype.value], device=where) for shape in shapes)
        console.print(str(flashattn_hopper.explain(q, k, v, **options)), markup=False, soft_wrap=True)
    except (ValueError, TypeError, RuntimeError, ImportError) as error:  # NotImplementedError is a RuntimeError
        raise refuse(error) from error


@app.command()
def info():
    """Versions, GPU, driver and the kernel cache: paste this into a bug report."""
    table = Table(show_header=False, box=None)
    for name, value in describe().items():
        table.add_row(name, value)
    console.print(table, soft_wrap=True)


Preset = Annotated[str, typer.Option(help=f"one of {', '.join(aot.PRESETS)}")]
List = Annotated[Path | None, typer.Option(help="in place of a preset: a file of variants, one a line")]
Processes = Annotated[int | None, typer.Option(min=1, help="compilers at a time (default: one a core)")]


def _listed(preset: str, list: Path | None, what: str) -> list[aot.Variant]:
    variants = aot.select(aot.patterns_of(preset if list is None else str(list)))
    console.print(f"[bold]{what}[/]  {len(variants)} variants, about 5 s of one core each", soft_wrap=True)
    return variants


@app.command()
def bundle(
    out: Annotated[Path, typer.Option(help="folder to write; FLASHATTN_HOPPER_AOT then names it")],
    preset: Preset = "small",
    list: List = None,
    processes: Processes = None,
):
    """Compile kernels ahead of time, for machines that are not to compile any. Needs no GPU."""
    try:
        done = aot.bundle(out, _listed(preset, list, "bundle"), processes)
    except (ValueError, ImportError, RuntimeError) as error:
        raise refuse(error) from error
    console.print(
        f"{done.compiles} compiled in {done.seconds_compiling:.0f} s of compiler time; export FLASHATTN_HOPPER_AOT="
        f"{escape(str(out.absolute()))}",
        soft_wrap=True,
    )


@app.command()
def wheel(
    out: Annotated[Path, typer.Option(help="folder to write; OUT/bundle keeps what the wheel is packed from")],
    preset: Preset = "small",
    list: List = None,
    processes: Processes = None,
):
    """Compile kernels ahead of time into a wheel, for machines that install it. Needs no GPU."""
    try:
        built = kernel_wheel.build(out, _listed(preset, list, "wheel"), processes)
    except (ValueError, ImportError, RuntimeError) as error:
        raise refuse(error) from error
    console.print(
        f"{built.done.compiles} compiled in {built.done.seconds_compiling:.0f} s of compiler time; "
        f"pip install {escape(str(built.wheel))}",
        soft_wrap=True,
    )
