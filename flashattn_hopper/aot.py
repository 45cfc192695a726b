"""Compiles listed variants ahead of time into a bundle (_bundle.py). Needs no GPU and no torch.

A variant is named `<target>:<backend>:<traits slug>`, such as sm_90a:sm90:bwd.bf16.d128.causal; one name stands for all
tiles that the catalog chooses among by sequence length. A list holds names or patterns of them (`*`, `?`, `[...]`), one
a line, with `#` before comments; it is a file or one of PRESETS.

    bundle(out, variants)    one shared library for each variant: what FLASHATTN_HOPPER_AOT reads
    objects(out, variants)   one object file for each, for the native library that CMake links (docs/native.md)
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict, replace
from fnmatch import fnmatchcase
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

from . import _bundle, _cache, _toolchain, jit
from ._version import __version__
from .catalog import CATALOG
from .kernels.sm90.specs import FORWARD_FP8, QUANTIZER
from .spec.arch import ArchSpec
from .spec.kernel import KernelSpec
from .spec.problem import BWD, QuantizeTraits, Traits, int8_by_default

_SMALL = ("bf16",), (64, 128), ("full", "causal")
_TRAINING = ("bf16", "fp16"), (64, 128), ("full", "causal")
_ARCHS = ("sm_80:sm80", "sm_86:sm80", "sm_89:sm80", "sm_90a:sm90")


def _grid(dtypes, headdims, masks) -> tuple[str, ...]:
    return tuple(f"{arch}:*.{dtype}.d{d}.{mask}" for arch, dtype, d, mask in product(_ARCHS, dtypes, headdims, masks))


def _fp8(dtypes, headdims, masks) -> tuple[str, ...]:
    """precision="fp8" by its defaults: the forwards, and what makes their operands."""
    codes = {d: ".int8_qk" * int8_by_default(d) for d in headdims}
    out = {"bf16": "", "fp16": ".fp16_out"}
    forwards = (f"fwd.fp8.d{d}.{mask}{out[dtype]}{codes[d]}" for dtype, d, mask in product(dtypes, headdims, masks))
    quantizers = (f"quantize.{dtype}.d{d}.hadamard{codes[d]}.smooth_k" for dtype, d in product(dtypes, headdims))
    return tuple(f"sm_90a:sm90:{slug}" for slug in (*forwards, *quantizers))


PRESETS: dict[str, tuple[str, ...]] = {
    # The least that has both kinds of kernels, and both passes.
    "smoke": ("sm_80:sm80:*.bf16.d64.causal", "sm_90a:sm90:*.bf16.d64.causal"),
    "small": _grid(*_SMALL) + _fp8(*_SMALL),
    "training": _grid(*_TRAINING) + _fp8(*_TRAINING),
    "hopper": ("sm_90a:sm90:*",),
    "all": ("*",),
}


class Variant(NamedTuple):
    """What jit.compiled takes."""

    spec: KernelSpec
    traits: Traits | QuantizeTraits
    tile: Any
    arch: ArchSpec

    @property
    def name(self) -> str:
        part = getattr(self.tile, "wanted", "all")
        return f"{self.arch.target}:{self.spec.backend}:{self.traits.slug}" + ("" if part == "all" else f":{part}")


def catalog_variants() -> list[Variant]:
    """Every variant that a call can ask for, on any arch of the catalog. `:dq` and `:dkdv` are for calls that want only
    those gradients."""
    found = {}
    for spec in CATALOG:
        for arch, tiles in ((spec.arch, spec.tiles), *spec.ports):
            if arch is not None:
                found.update(dict.fromkeys(_variants_on(replace(spec, arch=arch, tiles=tiles, ports=()))))
    features = product(sorted(QUANTIZER.dtypes), FORWARD_FP8.headdims, *[(False, True)] * 3)
    for dtype, dims, *recipe in features:
        found[Variant(QUANTIZER, QuantizeTraits(dtype, *dims, *recipe), None, QUANTIZER.arch)] = None
    return list(found)


def _variants_on(spec):
    switches = sorted(spec.features - spec.invariant_to)
    for dtype, dims, mask, *on in product(
        sorted(spec.dtypes), spec.headdims, spec.masks, *[(False, True)] * len(switches)
    ):
        asked = Traits(spec.phase, dtype, *dims, mask, **dict(zip(switches, on)))
        compiled = spec.compiled(asked)
        for row in spec.tiles.rows_for(compiled):
            yield Variant(spec, compiled, row.tile, spec.arch)
        if spec.phase == BWD:
            alone = spec.compiled(replace(asked, deterministic=True))  # as runner.prepare_backward
            for row, wanted in product(spec.tiles.rows_for(alone), ("dq", "dkdv")):
                yield Variant(spec, alone, replace(row.tile, wanted=wanted), spec.arch)


def select(patterns: Iterable[str]) -> list[Variant]:
    """The variants of the catalog that a pattern matches, each once. Raises ValueError for one that matches none."""
    known, chosen = catalog_variants(), {}
    for pattern in patterns:
        matching = [variant for variant in known if fnmatchcase(variant.name, pattern)]
        if not matching:
            raise ValueError(f"{pattern!r} names no variant of the catalog; such as {known[0].name} are known")
        chosen.update(dict.fromkeys(matching))
    return list(chosen)


def patterns_of(wanted: str) -> list[str]:
    """The lines of a list: the name of one in PRESETS, or of a file. Raises ValueError where it is neither."""
    if wanted in PRESETS:
        return list(PRESETS[wanted])
    try:
        lines = Path(wanted).read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise ValueError(f"{wanted!r} is neither one of {', '.join(PRESETS)} nor a file ({error.strerror})") from None
    patterns = [line for line in (raw.partition("#")[0].strip() for raw in lines) if line]
    if not patterns:
        raise ValueError(f"{wanted} lists no variant")
    return patterns


def bundle(out: Path, variants: Iterable[Variant], processes: int | None = None) -> jit.Stats:
    """Write a bundle of `variants` into the folder `out`; those that are there already are not compiled again.

    Raises: RuntimeError where one cannot be compiled or written; ImportError where the compiler is not installed.
    """
    if _toolchain.linker() is None:
        raise RuntimeError("a bundle needs a C compiler to link with (cc, gcc, clang or $CC)")
    out, variants = out.absolute(), list(variants)
    out.mkdir(parents=True, exist_ok=True)  # not as a cache, which is its owner's alone
    cache = _cache.Cache(out)
    done = jit.fill(cache, variants, processes)
    libraries = {}
    for variant in variants:
        libraries[variant] = cache.find(jit.entry_of(*variant).name)
        if libraries[variant] is None:
            raise RuntimeError(f"{variant.name} could not be written to {out}; the log says why")
    write_manifest(out, variants, libraries)
    for lock in out.glob(".*.lock"):
        with suppress(OSError):
            lock.unlink()
    return done


def objects(out: Path, variants: Iterable[Variant], processes: int | None = None) -> dict[Variant, Path]:
    """Write an object file of each variant into `out`. Raises as `bundle`."""
    out, variants = out.absolute(), list(variants)
    out.mkdir(parents=True, exist_ok=True)
    jit.export(out, variants, processes)
    files = {variant: jit.object_file(out, jit.entry_of(*variant)) for variant in variants}
    missing = [variant.name for variant, file in files.items() if not file.exists()]
    if missing:
        raise RuntimeError(f"not in {out}, though compiled: {', '.join(missing)}")
    return files


def write_manifest(out: Path, variants: list[Variant], libraries: dict[Variant, Path]) -> Path:
    """The manifest of a bundle in `out`; complete, or not there at all."""
    digests = {library: _bundle.digest(library) for library in dict.fromkeys(libraries.values())}
    entries = [
        {
            **describe(variant),
            "library": os.path.relpath(libraries[variant], out),
            "sha256": digests[libraries[variant]],
        }
        for variant in variants
    ]
    manifest = {"format": _bundle.FORMAT, "package": __version__, "variants": entries}
    out.mkdir(parents=True, exist_ok=True)
    path, unfinished = out / _bundle.MANIFEST, out / f".{_bundle.MANIFEST}.{os.getpid()}"
    unfinished.write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")
    os.replace(unfinished, path)
    return path


def describe(variant: Variant) -> dict:
    """A variant as data: its key and what decides it, its facts, and how it is called."""
    entry = jit.entry_of(*variant)
    tile = variant.tile
    return {
        "name": variant.name,
        "key": entry.key,
        "symbol": entry.symbol,
        "spec": variant.spec.name,
        "traits": asdict(variant.traits),
        "tile": None if tile is None else {"kind": type(tile).__name__, **asdict(tile)},
        "arch": variant.arch.target,
        "operands": jit.operand_names(*variant),
        "fingerprint": jit.fingerprint(*variant),
    }
