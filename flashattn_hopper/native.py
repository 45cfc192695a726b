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
from dataclasses import astuple, replace
from functools import cache
from itertools import groupby, product
from math import prod
from pathlib import Path
from typing import NamedTuple

from . import _toolchain, aot, buffers, jit
from ._version import __version__
from .catalog import CATALOG
from .kernels.sm90.specs import QUANTIZER
from .spec.kernel import KernelSpec
from .spec.problem import BWD, FP8, FWD, HALF, MASKS, PHASES, QuantizeTraits, Shape, Traits, int8_by_default
from .spec.tile import ROW_PAD

DTYPES = (*sorted(HALF), *FP8)
FEATURES = ("deterministic", "fp16_out", "gqa", "int8_qk")  # that a problem of the native library may have
WANTED = ("all", "dq", "dkdv")  # gradients
# What native/src/launch.cpp can pass, by the names of kernels/common/operands.py; of an FP8 forward, `q`, `k` and `v`
# are the codes that the quantizer wrote.
OPERANDS = (
    *("q", "k", "v", "do", "o", "lse", "dlse", "dq", "dk", "dv", "workspace"),
    *("softmax_scale", "window_left", "window_right", "num_ctas", "tickets"),
    *("q_codes", "k_codes", "v_codes", "restored_lse", "counters"),
    *(name for name in buffers.NAMES if name != "workspace"),
)
CODES = {"q": "q_codes", "k": "k_codes", "v": "v_codes"}
KEPT = 128  # bytes that what is kept between quantizer and attention is aligned to
CASES = 6000  # of the planner, sampled for the tests


def served() -> list[KernelSpec]:
    """The kernels that the native library offers, in the order of the catalog."""
    return [spec for spec in CATALOG if spec.arch is not None]


def on_each_arch(spec: KernelSpec) -> Iterator[KernelSpec]:
    """`spec` as it is on each of its archs."""
    for arch, tiles in ((spec.arch, spec.tiles), *spec.ports):
        yield replace(spec, arch=arch, tiles=tiles, ports=())


def choices(spec: KernelSpec) -> Iterator[tuple[Traits, int, aot.Variant]]:
    """(what is asked, least seqlen_k, the variant): of those that match a call, the first is the planner's choice."""
    switches = [word for word in FEATURES if word in spec.features and word != "gqa"]
    for dims, dtype, mask, *on, wanted in product(
        spec.headdims, sorted(spec.dtypes), spec.masks, *[(False, True)] * len(switches), wanted_of(spec.phase)
    ):
        asked = Traits(spec.phase, dtype, *dims, mask, **dict(zip(switches, on)))
        compiled = spec.compiled(ordered(asked, wanted))
        for row in spec.tiles.rows_for(compiled):
            yield asked, row.min_seqlen, aot.Variant(spec, compiled, only(row.tile, wanted), spec.arch)


def wanted_of(phase: str) -> tuple[str, ...]:
    return WANTED if phase == BWD else WANTED[:1]


def ordered(traits: Traits, wanted: str) -> Traits:
    """As runner.prepare_backward: tiles of the deterministic order have a kernel for dQ alone."""
    return traits if wanted == "all" else replace(traits, deterministic=True)


def only(tile, wanted: str):
    return tile if wanted == "all" else replace(tile, wanted=wanted)


def wanted_by(tile) -> str:
    return getattr(tile, "wanted", "all")


@cache
def quantizers() -> dict[aot.Variant, None]:
    """Compiled for exact head dimensions, which the rotation is made of."""
    return dict.fromkeys(variant for variant in aot.catalog_variants() if variant.spec is QUANTIZER)


def default_codes() -> list[tuple[int, bool]]:
    """(headdim, int8_qk): what `int8_by_default` answers up to this headdim, from the row before on."""
    widest = max(variant.traits.headdim for variant in quantizers())
    return [(max(dims), int8_qk) for int8_qk, dims in groupby(range(1, widest + 1), int8_by_default)]


# ------------------------------------------------------------------------------------------------------------- tables


def tables(variants: list[aot.Variant]) -> str:
    """C++ for native/src/catalog.cpp: the catalog, in which `variants` are linked and all others are names."""
    linked = {variant: _linked(variant) for variant in variants}
    text = [f"// Written by flashattn_hopper.native {__version__}.", 'extern "C" {']
    text += [f"int {symbol}(void*, const TVMFFIAny*, int32_t, TVMFFIAny*);" for symbol, _ in linked.values()]
    text += ["}", "", f"constexpr int64_t kRowPad = {ROW_PAD};"]
    text += [
        f"constexpr int64_t kTile = {buffers.TILE}, kChunk = {buffers.CHUNK}, kMostChunks = {buffers.MOST_CHUNKS};"
    ]
    text += ["", "constexpr Quantizer kQuantizers[] = {"]
    text += [f"    {_quantizer(variant, linked)}," for variant in quantizers()]
    text += ["};", "", "constexpr DefaultCodes kDefaultCodes[] = {"]
    text += [f"    {{{headdim}, {_bool(int8_qk)}}}," for headdim, int8_qk in default_codes()]
    text += ["};", ""]
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
            f"{_set(spec.masks, MASKS)}, {_set(spec.features.intersection(FEATURES), FEATURES)}, {spec.multiple}, "
            f"{_text(spec.on_request)}, k_{_word(spec.name)}, {len(ports)}}}"
        )
    text += ["constexpr Kernel kKernels[] = {", *[f"    {kernel}," for kernel in kernels], "};", ""]
    return "\n".join(text)


def _linked(variant):
    names = jit.operand_names(*variant)
    if variant.spec.dtypes <= FP8:
        names = tuple(CODES.get(name, name) for name in names)
    return f"__tvm_ffi_{jit.entry_of(*variant).symbol}", names


def _variant(variant, linked):
    symbol, operands = linked.get(variant, ("nullptr", ()))
    if unknown := {name for name in operands if name is not None}.difference(OPERANDS):
        raise RuntimeError(f"{variant.name} takes {', '.join(sorted(unknown))}, which the native library cannot pass")
    names = ", ".join("Operand::" + ("none" if name is None else f"{name}_") for name in operands)
    return f"{{{_text(variant.name)}, {symbol}, {{{names}}}, {len(operands)}}}"


def _quantizer(variant, linked):
    traits = variant.traits
    recipe = map(_bool, (traits.hadamard, traits.smooth_k, traits.int8_qk))
    dims = f"{traits.headdim}, {traits.headdim_v}"
    return f"{{{dims}, DType::{traits.dtype}, {', '.join(recipe)}, {_variant(variant, linked)}}}"


def _choice(asked, min_seqlen, variant, linked):
    tile, headdim = variant.tile, variant.traits.headdim
    least, per_row = (tile.workspace_floats(rows, headdim) if asked.phase == BWD else 0 for rows in (0, 1))
    facts = (
        *(asked.headdim, asked.headdim_v, f"DType::{asked.dtype}", f"Mask::{asked.mask}"),
        *(_set(asked.features, FEATURES), f"Wanted::{wanted_by(tile)}", min_seqlen, _text(str(tile))),
        *(per_row - least, least, _variant(variant, linked)),
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


class Call(NamedTuple):
    """One problem of the C interface. `recipe`: None, or of FP8 words of RECIPE and one of CODES_QK or none."""

    capability: tuple[int, int]
    backend: str
    phase: str
    dtype: str
    dims: tuple[int, int]
    mask: str
    deterministic: bool
    wanted: str
    recipe: tuple[str, ...] | None
    shape: Shape

    @property
    def traits(self) -> Traits:
        gqa = self.shape.num_heads_q != self.shape.num_heads_kv
        traits = Traits(self.phase, self.dtype, *self.dims, self.mask, gqa, self.deterministic)
        if self.recipe is None:
            return traits
        return replace(traits, dtype="fp8", int8_qk=self.int8_qk, fp16_out=self.dtype == "fp16")

    @property
    def int8_qk(self) -> bool:
        asked = next((word for word in self.recipe if word in CODES_QK), None)
        return int8_by_default(self.dims[0]) if asked is None else asked == "int8_qk"

    @property
    def fields(self) -> tuple:
        recipe = "-" if self.recipe is None else ".".join(("fp8", *self.recipe))
        return (
            *(_capability(self.capability), self.backend, self.phase, self.dtype, *self.dims, self.mask),
            *(int(self.deterministic), self.wanted, recipe, *astuple(self.shape)),
        )


RECIPE = "hadamard", "smooth_k"
CODES_QK = "int8_qk", "e4m3_qk"


def cases(variants: list[aot.Variant]) -> Iterator[str]:
    """Lines for the C++ test of the plan: a call, and what the catalog's own methods answer. An even sample of all, and
    what `variants` serve."""
    capabilities = sorted({here.arch.capability for spec in served() for here in on_each_arch(spec)})
    others = [(7, 5), (8, 8), (9, 1), (10, 3), (12, 1)]
    dims = [(d, d) for d in (8, 60, 64, 72, 80, 96, 100, 128, 160, 192, 200, 256, 264)]
    dims += [(192, 128), (64, 128), (128, 64), (256, 64), (40, 192)]
    backends = ("auto", *dict.fromkeys(spec.backend for spec in served()))
    edges = {n for spec in served() for here in on_each_arch(spec) for row in here.tiles for n in _around(row)}
    shapes = [Shape(b, sq, sk, *h) for b, sq, h in _SHAPES for sk in sorted({1, 100, 20000} | edges)]
    words = *((None, word) for word in RECIPE), (None, *CODES_QK)
    recipes = [tuple(filter(None, chosen)) for chosen in product(*words)]
    axes = (
        *([*capabilities, *others], backends, PHASES, sorted(HALF), dims, MASKS, (False, True), WANTED),
        *([None] * len(recipes) + recipes, shapes),
    )
    source = random.Random(0)
    calls = [Call(*map(source.choice, axes)) for _ in range(CASES)]
    served_here = [_served_by(*one) for one in product(variants, shapes)]
    calls += served_here + [_by_default(call) for call in served_here if call.recipe is not None]
    for call in dict.fromkeys(calls):
        yield "\t".join(map(str, (*call.fields, *_answer(call))))


_SHAPES = (1, 129, (1, 1)), (2, 300, (4, 2)), (3, 1, (5, 5))  # batch, seqlen_q, heads


def _around(row):
    return {max(1, row.min_seqlen + step) for step in (-1, 0, 1)}


def _served_by(variant, shape):
    spec, traits, tile, arch = variant
    dtype, recipe, phase = traits.dtype, None, spec.phase
    if spec is QUANTIZER:
        phase, recipe = FWD, tuple(word for word in RECIPE if getattr(traits, word))
    elif dtype == "fp8":
        dtype, recipe = "fp16" if traits.fp16_out else "bf16", RECIPE
    if recipe is not None:
        recipe += (CODES_QK[0 if traits.int8_qk else 1],)
    deterministic = getattr(traits, "deterministic", False)
    asked = phase, dtype, (traits.headdim, traits.headdim_v), getattr(traits, "mask", "causal"), deterministic
    return Call(arch.capability, spec.backend, *asked, wanted_by(tile), recipe, shape)


def _by_default(call):
    return call._replace(recipe=tuple(word for word in call.recipe if word not in CODES_QK))


def _answer(call):
    """(variant, tile, quantizer, bytes of workspace), or dashes where all refuse."""
    nothing = "-", "-", "-", "-"
    for spec in served():
        if spec.refuses(call.traits, call.capability, call.backend) is None:
            quantizer = None if call.recipe is None else _quantizer_for(call)
            if call.recipe is not None and quantizer not in quantizers():
                return nothing
            here = spec.on(call.capability)
            compiled = here.compiled(ordered(call.traits, call.wanted) if call.phase == BWD else call.traits)
            tile = here.tiles.find(compiled, call.shape.seqlen_k)
            if call.phase == BWD:
                tile = only(tile, call.wanted)
            found = aot.Variant(here, compiled, tile, here.arch)
            return found.name, tile, quantizer.name if quantizer else "-", _bytes(call, found)
    return nothing


def _quantizer_for(call):
    traits = QuantizeTraits(call.dtype, *call.dims, *(word in call.recipe for word in RECIPE), call.int8_qk)
    return aot.Variant(QUANTIZER, traits, None, QUANTIZER.arch)


def _bytes(call, variant):
    """Of workspace: what the runners allocate, apart or, for FP8, in one piece."""
    batch, seqlen_q, seqlen_k, heads, heads_kv = astuple(call.shape)
    if call.phase == BWD:
        rows = batch * heads * -(-seqlen_q // ROW_PAD) * ROW_PAD
        return 4 * variant.tile.workspace_floats(rows, variant.traits.headdim)
    tickets = 8 if getattr(variant.tile, "schedule", "") == "dynamic" else 0
    if call.recipe is None:
        return tickets
    q, v = (batch, seqlen_q, heads, call.dims[0]), (batch, seqlen_k, heads_kv, call.dims[1])
    kept = buffers.of(q, v, "smooth_k" in call.recipe).values()
    sizes = 8, 4 * batch * heads_kv, *(buffers.BYTES[kind] * prod(shape) for kind, shape in kept)
    return sum(-(-size // KEPT) * KEPT for size in sizes)


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
