"""`python -m flashattn_hopper matrix`, beside the commands of train/cli.py."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from ..spec.arch import device_word
from ..train.cli import app, console, refuse
from . import merge, page, report
from .cells import arch_names, cells
from .run import here, run_all

QUICK_CALLS = 2

__all__ = ["app"]


@app.command()
def matrix(
    arch: Annotated[
        list[str] | None, typer.Option(help=f"one of {', '.join(arch_names())}; may be repeated (default: all)")
    ] = None,
    kernel: Annotated[
        list[str] | None,
        typer.Option(help="a kernel of the catalog, such as sm90.forward; may be repeated (default: all)"),
    ] = None,
    quick: Annotated[
        bool, typer.Option(help="one head dimension and few features, one compiled cell a kernel")
    ] = False,
    json: Annotated[Path | None, typer.Option(help="write every cell to this file")] = None,
    html: Annotated[Path | None, typer.Option(help="write a heat map to this file, for a browser")] = None,
    add: Annotated[
        list[Path] | None,
        typer.Option(help="a JSON file of another machine, whose cells this one need not repeat; may be repeated"),
    ] = None,
    processes: Annotated[
        int | None, typer.Option(min=1, help="processes that compile, and run what a CPU runs (default: one a core)")
    ] = None,
    revision: Annotated[str | None, typer.Option(help="for a copy of the tree without git's history")] = None,
):
    """Hold every kernel of the catalog against float64; what cannot run on this machine is compiled and read.

    Exit status: 0 nothing failed, 1 a cell failed, 2 the request was refused.
    """
    capability = here()
    try:
        added = [merge.read(path) for path in add or ()]
        wanted = merge.left(cells(arch, quick, capability, kernels=kernel), added, capability)
        _check_folders(json, html)
    except ValueError as error:
        raise refuse(error) from error
    gpu = "no GPU" if capability is None else device_word(capability)
    console.print(f"[bold]matrix[/]  {len(wanted)} cells; this machine has {gpu}", soft_wrap=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("run and compile", total=None)
        results = run_all(
            wanted,
            capability,
            most_calls=QUICK_CALLS if quick else None,
            processes=processes,
            on_start=lambda total: progress.update(task, total=total),
            on_step=lambda: progress.advance(task),
        )
    found = merge.assembled([report.record(results, quick, revision), *added])
    console.print(report.table(found))
    for line in report.notes(found):
        console.print(line, soft_wrap=True)
    for path, write in ((json, report.write_json), (html, page.write_html)):
        if path is not None:
            write(found, path)
            console.print(f"wrote {escape(str(path))}", soft_wrap=True)
    console.print(report.summary(found))
    raise typer.Exit(report.exit_status(found))


def _check_folders(*paths) -> None:
    """Why now: a full matrix takes long, and its last step should not be what fails."""
    for path in paths:
        if path is not None and not path.absolute().parent.is_dir():
            raise ValueError(f"{path}: there is no such folder")
