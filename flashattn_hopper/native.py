"""What CMake calls to build the native library (docs/native.md): object files, and the catalog as C++ tables.

    python -m flashattn_hopper.native where                                    paths and versions, as CMake code
    python -m flashattn_hopper.native export --out DIR --list SMALL            object files, tables, cases for the tests
    python -m flashattn_hopper.native manifest --out DIR --list SMALL --library FILE   a bundle of the linked library

The tables are the answers of the catalog, not rules to be followed again: for each kernel and arch what it takes, and
for each of these, in order of preference, the variant with its facts. Needs no GPU and no torch.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path

from . import _toolchain, aot, jit
from ._version import __version__
from .catalog import CATALOG
from .spec.kernel import KernelSpec
from .spec.problem import BWD, HALF, MASKS, PHASES, Traits
from .spec.tile import ROW_PAD

DTYPES = tuple(sorted(HALF))
# What native/src/launch.cpp can pass, by the names of kernels/common/operands.py.
OPERANDS = (
    *("q", "k", "v", "do", "o", "lse", "dlse", "dq", "dk", "dv", "workspace"),
    *("softmax_scale", "window_left", "window_right", "num_ctas", "tickets"),
)
CASES = 6000  # of the planner, sampled for the tests


def served() -> list[KernelSpec]:
    """The kernels that the native library offers, in the order of the catalog."""
    return [spec for spec in CATALOG if spec.arch is not None and spec.dtypes <= HALF]


def on_each_arch(spec: KernelSpec) -> Iterator[KernelSpec]:
    """`spec` as it is on each of its archs."""
    for arch, tiles in ((spec.arch, spec.tiles), *spec.ports):
        yield replace(spec, arch=arch, tiles=tiles, ports=())


def choices(spec: KernelSpec) -> Iterator[tuple[Traits, int, aot.Variant]]:
    """(what is asked, least seqlen_k, the variant): of those that match a call, the first is the planner's choice."""
    switches = [word for word in ("deterministic",) if word in spec.features]
    for dims, dtype, mask, *on in product(
        spec.headdims, sorted(spec.dtypes), spec.masks, *[(False, True)] * len(switches)
    ):
        asked = Traits(spec.phase, dtype, *dims, mask, **dict(zip(switches, on)))
        compiled = spec.compiled(asked)
        for row in spec.tiles.rows_for(compiled):
            yield asked, row.min_seqlen, aot.Variant(spec, compiled, row.tile, spec.arch)


# ------------------------------------------------------------------------------------------------------------- tables


def tables(variants: list[aot.Variant]) -> str:
    """C++ for native/src/catalog.cpp: the catalog, in which `variants` are linked and all others are names."""
    linked = {variant: _linked(variant) for variant in variants if variant.spec.name in {s.name for s in served()}}
    text = [f"// Written by flashattn_hopper.native {__version__}.", 'extern "C" {']
    text += [f"int {symbol}(void*, const TVMFFIAny*, int32_t, TVMFFIAny*);" for symbol, _ in linked.values()]
    text += ["}", "", f"constexpr int64_t kRowPad = {ROW_PAD};", ""]
    kernels = []
    for spec in served():
        ports = []
        for here in on_each_arch(spec):
            name = f"k_{_word(spec.name)}_{here.arch.target}"
            rows = [_choice(*choice, linked) for choice in choices(here)]
            text += [f"constexpr Choice {name}[] = {{", *[f"    {row}," for row in rows], "};"]
            exact = here.arch.target.endswith("a")
            ports.append(f"{{{_capability(here.arch.capability)}, {_bool(exact)}, {name}, {len(rows)}}}")
        text += [f"constexpr Port k_{_word(spec.name)}[] = {{{', '.join(ports)}}};", ""]
        kernels.append(
            f"{{{_text(spec.name)}, {_text(spec.backend)}, Pass::{spec.phase}, {_set(spec.dtypes, DTYPES)}, "
            f"{_set(spec.masks, MASKS)}, {_bool('deterministic' in spec.features)}, {_bool('gqa' in spec.features)}, "
            f"{spec.multiple}, {_text(spec.on_request)}, k_{_word(spec.name)}, {len(ports)}}}"
        )
    text += ["constexpr Kernel kKernels[] = {", *[f"    {kernel}," for kernel in kernels], "};", ""]
    return "\n".join(text)


def _linked(variant):
    return f"__tvm_ffi_{jit.entry_of(*variant).symbol}", jit.operand_names(*variant)


def _choice(asked, min_seqlen, variant, linked):
    tile, headdim = variant.tile, variant.traits.headdim
    symbol, operands = linked.get(variant, ("nullptr", ()))
    least, per_row = (tile.workspace_floats(rows, headdim) if asked.phase == BWD else 0 for rows in (0, 1))
    if unknown := {name for name in operands if name is not None}.difference(OPERANDS):
        raise RuntimeError(f"{variant.name} takes {', '.join(sorted(unknown))}, which the native library cannot pass")
    names = ", ".join("Operand::" + ("none" if name is None else f"{name}_") for name in operands)
    facts = (
        *(asked.headdim, asked.headdim_v, f"DType::{asked.dtype}", f"Mask::{asked.mask}", _bool(asked.deterministic)),
        *(min_seqlen, _text(variant.name), _text(str(tile)), per_row - least, least),
        *(symbol, f"{{{names}}}", len(operands)),
    )
    return f"{{{', '.join(map(str, facts))}}}"


def _set(values, words):
    return sum(1 << words.index(value) for value in values)


def _capability(capability):
    return 10 * capability[0] + capability[1]


def _bool(value):
    return "true" if value else "false"


def _text(value):
    return json.dumps(value)


def _word(name):
    return name.replace(".", "_")


# -------------------------------------------------------------------------------------------------------------- cases


def cases(variants: list[aot.Variant]) -> Iterator[str]:
    """Lines for the C++ test of the plan: a call, and what the catalog's own methods answer. An even sample of all, and
    what `variants` serve."""
    capabilities = sorted({here.arch.capability for spec in served() for here in on_each_arch(spec)})
    others = [(7, 5), (8, 8), (9, 1), (10, 3), (12, 1)]
    dims = [(d, d) for d in (8, 60, 64, 72, 96, 100, 128, 160, 192, 200, 256, 264)]
    dims += [(192, 128), (64, 128), (128, 64), (256, 64), (40, 192)]
    backends = ("auto", *dict.fromkeys(spec.backend for spec in served()))
    seqlens = sorted({1, 100} | {n for s in served() for h in on_each_arch(s) for r in h.tiles for n in _around(r)})
    grid = list(product([*capabilities, *others], backends, PHASES, DTYPES, dims, MASKS, (False, True), seqlens))
    calls = random.Random(0).sample(grid, min(CASES, len(grid)))
    for (spec, traits, _, arch), seqlen_k in product(variants, seqlens):
        if spec.name in {one.name for one in served()}:
            dims = traits.headdim, traits.headdim_v
            facts = traits.phase, traits.dtype, dims, traits.mask, traits.deterministic
            calls.append((arch.capability, spec.backend, *facts, seqlen_k))
    for capability, backend, phase, dtype, (headdim, headdim_v), mask, deterministic, seqlen_k in dict.fromkeys(calls):
        traits = Traits(phase, dtype, headdim, headdim_v, mask, deterministic=deterministic)
        answer = _answer(traits, capability, backend, seqlen_k)
        asked = (_capability(capability), backend, phase, dtype, headdim, headdim_v, mask, int(deterministic), seqlen_k)
        yield "\t".join(map(str, (*asked, *answer)))


def _around(row):
    return {max(1, row.min_seqlen + step) for step in (-1, 0, 1)}


def _answer(traits, capability, backend, seqlen_k):
    """(variant, tile, floats of workspace for one batch and head of 129 queries), or dashes where all refuse."""
    for spec in served():
        if spec.refuses(traits, capability, backend) is None:
            here = spec.on(capability)
            compiled = here.compiled(traits)
            tile = here.tiles.find(compiled, seqlen_k)
            floats = tile.workspace_floats(2 * ROW_PAD, compiled.headdim) if traits.phase == BWD else -1
            return aot.Variant(here, compiled, tile, here.arch).name, tile, floats
    return "-", "-", "-"


# ------------------------------------------------------------------------------------------------------- command line


def where() -> str:
    """CMake code with what the library is compiled and linked with."""
    tools = _toolchain.find()
    ffi = tools.ffi_library.parent.parent
    found = {
        "FAH_VERSION": __version__,
        "FAH_RUNTIME_LIBRARY": tools.runtime,
        "FAH_FFI_LIBRARY": tools.ffi_library,
        "FAH_FFI_INCLUDE": ffi / "include",
        "FAH_TOOLCHAIN": f"nvidia-cutlass-dsl {tools.dsl} ({tools.flavour}), apache-tvm-ffi {tools.ffi}",
    }
    return "".join(f'set({name} "{value}")\n' for name, value in found.items())


def export(out: Path, wanted: str, processes: int | None) -> None:
    variants = aot.select(aot.patterns_of(wanted))
    files = aot.objects(out / "objects", variants, processes)
    _write(out / "objects.rsp", "".join(f'"{file}"\n' for file in files.values()))
    _write(out / "tables.inc", tables(variants))
    _write(out / "cases.tsv", "".join(f"{line}\n" for line in cases(variants)))


def manifest(out: Path, wanted: str, library: Path) -> None:
    variants = aot.select(aot.patterns_of(wanted))
    aot.write_manifest(out, variants, dict.fromkeys(variants, library))


def _write(path: Path, text: str) -> None:
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    unfinished.write_text(text, encoding="utf-8")
    os.replace(unfinished, path)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m flashattn_hopper.native", description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("where")
    for name in ("export", "manifest"):
        command = commands.add_parser(name)
        command.add_argument("--out", type=Path, required=True)
        command.add_argument("--list", required=True, help=f"a file, or one of {', '.join(aot.PRESETS)}")
        if name == "export":
            command.add_argument("--processes", type=int)
        else:
            command.add_argument("--library", type=Path, required=True)
    asked = parser.parse_args(arguments)
    try:
        if asked.command == "where":
            print(where(), end="")
        elif asked.command == "export":
            asked.out.mkdir(parents=True, exist_ok=True)
            export(asked.out, asked.list, asked.processes)
        else:
            manifest(asked.out, asked.list, asked.library)
    except (ValueError, RuntimeError, ImportError) as error:
        sys.exit(f"flashattn_hopper: {error}")


if __name__ == "__main__":
    main()
