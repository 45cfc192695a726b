"""What a compiled kernel uses, read from its cubin on a machine without a GPU.

    usage = inspect(jit.compile_cubin(...))        # one Usage
    usages = inspect_all(jit.compile_cubin(...))   # one for each kernel, by the name of the method that it is
    sizes = sizes_of(jit.compile_cubin(...))       # the same without instructions

Registers, stack frame and block size come from the ELF file itself; instruction counts need nvdisasm, at least as new
as the compiler (`pip install nvidia-cuda-nvdisasm`, a CUDA toolkit, or $NVDISASM).
"""

from __future__ import annotations

import collections
import os
import re
import shutil
import struct
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

# Attributes in the .nv.info sections, then two types of ELF sections.
_REGISTERS, _FRAME, _STACK, _BLOCK = 0x2F, 0x11, 0x12, 0x10
_SYMTAB, _NOBITS = 2, 8
# How the compiler calls a kernel: kernel_cutlass_METHOD_..., and how nvdisasm starts its instructions.
_METHOD = re.compile(r"kernel_cutlass_([a-z]+)_")
_SECTION = re.compile(r"\s*\.section\s+\.text\.([^,\s]+)")
_INSTRUCTION = re.compile(r"\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_]*(?:\.\w+)*)")


class Usage(NamedTuple):
    """One kernel. `opcodes` counts instructions by their full name; `count("LDL")` sums one family."""

    name: str
    registers: int  # per thread, at launch
    frame: int  # bytes of local memory per thread
    stack: int
    block: tuple[int, int, int]
    opcodes: collections.Counter

    def count(self, family: str) -> int:
        """Instructions that are called `family` or `family.<anything>`."""
        return sum(n for name, n in self.opcodes.items() if name == family or name.startswith(family + "."))

    @property
    def threads(self) -> int:
        return self.block[0] * self.block[1] * self.block[2]

    @property
    def local_memory(self) -> dict[str, int]:
        """What spilled registers show as; empty is good."""
        found = {"frame": self.frame, "LDL": self.count("LDL"), "STL": self.count("STL")}
        return {name: n for name, n in found.items() if n}


def inspect(cubin: bytes) -> Usage:
    """The usage of the only kernel in `cubin`. Raises LookupError where nvdisasm is missing or kernels are several."""
    found = _usages(cubin, _opcodes(cubin))
    if len(found) != 1:
        raise LookupError(f"one kernel was expected, found {sorted(usage.name for usage in found)}")
    return found[0]


def inspect_all(cubin: bytes) -> dict[str, Usage]:
    """Method name (such as "main") -> usage, for every kernel in `cubin`. Raises LookupError as `inspect` does."""
    return _by_method(_usages(cubin, _opcodes(cubin)))


def sizes_of(cubin: bytes) -> list[Usage]:
    """Every kernel in `cubin`, with empty `opcodes`: needs no tool."""
    return _usages(cubin, collections.defaultdict(collections.Counter))


def _by_method(found):
    by_method = {match[1] if (match := _METHOD.match(usage.name)) else usage.name: usage for usage in found}
    if len(by_method) != len(found):
        raise LookupError(f"two kernels of one name among {sorted(usage.name for usage in found)}")
    return by_method


def _usages(cubin, opcodes):
    return [
        Usage(name, facts["registers"], facts["frame"], facts["stack"], facts["block"], opcodes[name])
        for name, facts in _elf(cubin).items()
    ]


def find_nvdisasm() -> str | None:
    wheels = [Path(p, "nvidia", d, "bin", "nvdisasm") for p in sys.path for d in ("cu14", "cu13", "cuda_nvdisasm")]
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH") or "/usr/local/cuda"
    places = [os.environ.get("NVDISASM"), *wheels, Path(home, "bin", "nvdisasm"), shutil.which("nvdisasm")]
    return next((str(p) for p in places if p and os.path.isfile(p)), None)


def _opcodes(cubin):
    """Kernel name -> how often each instruction stands in it."""
    tool = find_nvdisasm()
    if tool is None:
        raise LookupError("no nvdisasm: pip install nvidia-cuda-nvdisasm, or set NVDISASM")
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run([tool, "-c", file.name], capture_output=True, text=True, check=True).stdout
    return count_instructions(text)


def count_instructions(disassembly: str) -> dict[str, collections.Counter]:
    """The same from nvdisasm's text; instructions stand behind the `.section` line of their kernel."""
    found, name = collections.defaultdict(collections.Counter), None
    for line in disassembly.splitlines():
        if match := _SECTION.match(line):
            name = match[1]
        elif match := _INSTRUCTION.match(line):
            found[name][match[1]] += 1
    return found


def _elf(blob):
    """Kernel name -> registers, frame, stack, block."""
    if blob[:4] != b"\x7fELF":
        raise ValueError("not an ELF file")
    (offset,) = struct.unpack_from("<Q", blob, 40)
    entry_size, count, names_at = struct.unpack_from("<HHH", blob, 58)
    sections = [struct.unpack_from("<IIQQQQIIQQ", blob, offset + i * entry_size) for i in range(count)]
    text_at = lambda section, at: blob[section[4] + at : blob.index(b"\0", section[4] + at)].decode()
    names = [text_at(sections[names_at], s[0]) for s in sections]
    content = lambda s: b"" if s[1] == _NOBITS else blob[s[4] : s[4] + s[5]]
    symbols = {}
    for s in sections:
        if s[1] == _SYMTAB:
            for i in range(s[5] // 24):
                symbols[i] = text_at(sections[s[6]], struct.unpack_from("<I", blob, s[4] + 24 * i)[0])
    found = {name.removeprefix(".text."): {} for name in names if name.startswith(".text.")}
    words = {_REGISTERS: "registers", _FRAME: "frame", _STACK: "stack"}
    for name, s in zip(names, sections):
        for kind, value in _attributes(content(s)) if name.startswith(".nv.info") else ():
            if name == ".nv.info" and kind in words and len(value) == 8:
                symbol, number = struct.unpack("<II", value)
                if symbols.get(symbol) in found:
                    found[symbols[symbol]][words[kind]] = number
            elif kind == _BLOCK and len(value) == 12:
                found[name.removeprefix(".nv.info.")]["block"] = struct.unpack("<III", value)
    return found


def _attributes(blob):
    at = 0
    while at + 4 <= len(blob):
        form, kind, size = struct.unpack_from("<BBH", blob, at)
        at += 4
        if form == 4:  # otherwise `size` is the value itself
            yield kind, blob[at : at + size]
            at += size
