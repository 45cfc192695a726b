"""One cell -> what came of it: computed and held against float64, compiled and read, or refused."""

from __future__ import annotations

import contextlib
import itertools
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from .. import hopper_attention, jit, oracle, planner
from ..arguments import TORCH_DTYPES, WORDS
from ..kernels.sm90.specs import QUANTIZER
from ..planner import Capability, capability_of
from ..quantize import dequantize, quantize_fp8
from ..spec.arch import CPU
from ..spec.problem import BWD, FWD, QuantizeTraits, Traits, int8_by_default
from .build import Crew, Job, compilation, missing_compiler
from .cells import COMPILE, REFUSED, RUN, Call, Cell, calls, fate, variants

PASSED, FAILED, COMPILED = "passed", "failed", "compiled-only"
STATUSES = (PASSED, FAILED, COMPILED, REFUSED)
INPUTS = TORCH_DTYPES | {"fp8": torch.bfloat16}
# Features of FP8 that inputs of another dtype ask for, and one that codes do: other than the default, without gradient.
OUTPUTS = {"fp16_out": torch.float16, "fp32_out": torch.float32}
CODES = ("int8_qk",)
# What a cell can be asked with; a feature that is not here is refused, and not run without.
FEATURES = {FWD: {"gqa", "deterministic", *OUTPUTS, *CODES}, BWD: {"gqa", "deterministic", *OUTPUTS}}


@dataclass(frozen=True)
class Result:
    """`reason` says why a cell failed or was refused.

    `share` is the part of the allowed error that the worst output of all calls used, `multiple` that output's error in
    errors of plain PyTorch (None where plain PyTorch makes none), `worst` its name.
    `registers` per thread and `local` bytes per thread (spills) are the most of any variant of a compiled cell.
    """

    cell: Cell
    status: str
    reason: str = ""
    share: float | None = None
    multiple: float | None = None
    worst: str = ""
    calls: int = 0
    registers: int | None = None
    local: int | None = None


def here() -> Capability:
    """Compute capability of this machine's GPU, None without one."""
    return capability_of(torch.device("cuda")) if torch.cuda.is_available() else None


def run_all(
    cells: Sequence[Cell],
    capability: Capability,
    *,
    most_calls: int | None = None,
    processes: int | None = None,
    on_start: Callable[[int], Any] = lambda total: None,
    on_step: Callable[[], Any] = lambda: None,
) -> list[Result]:
    """The result of every cell, in order, from its first `most_calls` calls (None: all). What the GPU runs, runs here;
    beside it `processes` compile, and run what a CPU runs.

    `on_start` gets the number of steps: cells to run and variants to compile. `on_step` may come from any thread.
    """
    absent = missing_compiler()
    fates = {cell: fate(cell, capability) for cell in cells}
    found = {cell: Result(cell, REFUSED, reason) for cell, (what, reason) in fates.items() if what == REFUSED}
    mine = [cell for cell, (what, _) in fates.items() if what == RUN and cell.arch != CPU]
    jobs = {
        cell: [Job(run, (cell, most_calls))] for cell, (what, _) in fates.items() if (what, cell.arch) == (RUN, CPU)
    }
    for cell in [cell for cell, (what, _) in fates.items() if what == COMPILE]:
        if absent:
            found[cell] = Result(cell, REFUSED, absent)
        else:
            jobs[cell] = [compilation(variant) for variant in variants(cell)]
    with Crew(itertools.chain.from_iterable(jobs.values()), processes) as crew:
        on_start(len(crew.futures) + len(mine))
        crew.when_done(on_step)
        _warm(mine, processes)
        with _one_thread():
            for cell in mine:
                found[cell] = run(cell, most_calls)
                on_step()
        found |= {cell: _collected(cell, crew, asked) for cell, asked in jobs.items()}
    return [found[cell] for cell in cells]


def _warm(cells, processes) -> None:
    """Why: where they are called first, kernels are compiled one after the other; here side by side."""
    try:
        jit.warmup([one for cell in cells for one in launched(cell)], processes)
    except (RuntimeError, ImportError):
        pass  # no disk cache, no compiler or a kernel that does not compile: the cells themselves will say


def launched(cell: Cell) -> list[tuple]:
    """What the calls of a cell launch: its variants; before a backward, the forward; before an FP8 forward, what makes
    its operands."""
    spec, traits = cell.spec, cell.traits
    made = variants(cell)
    if traits.phase == BWD:
        forward = replace(traits, phase=FWD)
        plans = [planner.plan(forward, spec.arch.capability, spec.backend, call.shape) for call in calls(cell)]
        made += [(*plan, plan.spec.arch) for plan in plans]
    elif traits.dtype == "fp8" and not _codes(traits):
        dims = traits.headdim, traits.headdim_v
        operands = QuantizeTraits(WORDS[_input_dtype(traits)], *dims, int8_qk="int8_qk" in traits.features)
        made.append((QUANTIZER, operands, None, QUANTIZER.arch))
    return list(dict.fromkeys(made))


@contextlib.contextmanager
def _one_thread():
    """Why: small tensors, beside workers. A thread pool would mostly wait for the other cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _collected(cell, crew, jobs) -> Result:
    try:
        answers = [crew.answer(job) for job in jobs]
    except RuntimeError as error:
        return Result(cell, FAILED, str(error))
    if cell.arch == CPU:
        return answers[0]
    error = next((used.error for used in answers if used.error), "")
    if error:
        return Result(cell, FAILED, error)
    registers, local = (max(getattr(used, name) for used in answers) for name in ("registers", "local"))
    return Result(cell, COMPILED, registers=registers, local=local)


def run(cell: Cell, most_calls: int | None = None) -> Result:
    """The calls of a cell on the device that it is for, held against float64."""
    if unknown := cell.traits.features - FEATURES[cell.traits.phase]:
        return Result(cell, REFUSED, f"the matrix has no call for {', '.join(sorted(unknown))}")
    device = "cpu" if cell.arch == CPU else "cuda"
    worst, asked = Result(cell, PASSED, share=0.0, multiple=0.0), calls(cell)[:most_calls]
    for call in asked:
        try:
            one = _held(cell, call, device)
        except (NotImplementedError, ImportError) as error:
            return Result(cell, REFUSED, str(error))
        except Exception as error:
            return Result(cell, FAILED, f"{_shown(call)}: {type(error).__name__}: {error}")
        if one.status == FAILED:
            return one
        worst = max(worst, one, key=lambda result: result.share)
    return Result(cell, PASSED, share=worst.share, multiple=worst.multiple, worst=worst.worst, calls=len(asked))


def _held(cell: Cell, call: Call, device: str) -> Result:
    """One call and its worst output."""
    q, k, v, dout, dlse = _operands(cell.traits, call, device)
    flows = {"dout": dout, "dlse": dlse} if cell.traits.phase == BWD else {}
    outputs = _computed(cell, call, (q, k, v), *flows.values())
    if cell.traits.deterministic:
        again = _computed(cell, call, (q, k, v), *flows.values())
        if differing := [name for name, x in outputs.items() if not _same(x, again[name])]:
            return Result(cell, FAILED, f"{_shown(call)}: {', '.join(differing)} differ between two equal calls")
    exact = oracle.attention(q, k, v, **call.mask, **flows)
    usual = _usual(cell.traits, (q, k, v), {**call.mask, **flows})
    worst = Result(cell, PASSED, share=-1.0)
    for name, actual in outputs.items():
        verdict = oracle.judge(
            actual, getattr(exact, name), getattr(usual, name), q.dtype, name, _terms(cell.traits, exact, usual, name)
        )
        if verdict.wrong:
            multiple = _finite(verdict.multiple)
            return Result(cell, FAILED, f"{_shown(call)}: {name}: {verdict.wrong}", multiple=multiple, worst=name)
        share = verdict.error / verdict.allowed if verdict.allowed else 0.0
        if share > worst.share:
            worst = Result(cell, PASSED, share=share, multiple=_finite(verdict.multiple), worst=name)
    return worst


def _same(x, y) -> bool:
    """Equal, a NaN to a NaN."""
    return x.shape == y.shape and bool(torch.isclose(x, y, rtol=0, atol=0, equal_nan=True).all())


def _operands(traits: Traits, call: Call, device: str):
    """q, k, v, dout, dlse: normal numbers, the same at every call."""
    s = call.shape
    generator = torch.Generator(device).manual_seed(zlib.crc32(repr((traits, call)).encode()))
    make = lambda *shape: torch.randn(shape, generator=generator, device=device)
    dtype = _input_dtype(traits)
    q, dout = (make(s.batch, s.seqlen_q, s.num_heads_q, d).to(dtype) for d in (traits.headdim, traits.headdim_v))
    k, v = (make(s.batch, s.seqlen_k, s.num_heads_kv, d).to(dtype) for d in (traits.headdim, traits.headdim_v))
    dlse = make(s.batch, s.num_heads_q, s.seqlen_q)
    return q, k, v, dout, dlse.double() if traits.dtype == "fp64" else dlse


def _input_dtype(traits: Traits) -> torch.dtype:
    return next((OUTPUTS[word] for word in OUTPUTS if word in traits.features), INPUTS[traits.dtype])


def _computed(cell: Cell, call: Call, operands, *flows) -> dict[str, torch.Tensor]:
    """The outputs by name: out and lse, or with `flows` (dout and dlse) the gradients."""
    traits = cell.traits
    leaves = [x.detach().requires_grad_(bool(flows)) for x in operands]
    if codes := _codes(traits):
        leaves = quantize_fp8(*operands, qk_dtype=codes)
    out, lse = hopper_attention(
        *leaves,
        **call.mask,
        precision=traits.dtype,
        return_lse=True,
        deterministic=traits.deterministic,
        backend=cell.spec.backend,
    )
    if not flows:
        return {"out": out, "lse": lse}
    return dict(zip(("dq", "dk", "dv"), torch.autograd.grad((out, lse), leaves, flows)))


def _usual(traits: Traits, operands, arguments) -> oracle.Dense:
    """Plain PyTorch's outputs."""
    if traits.dtype == "fp8":
        # It knows no FP8 attention: this is float32 on what the 8-bit codes stand for.
        wide = [x.float() for x in operands]
        operands = [dequantize(x) for x in quantize_fp8(*wide, qk_dtype=_codes(traits))]
    return oracle.plain(*operands, **arguments)


def _codes(traits: Traits) -> str | None:
    """The codes of q and k that a cell is for; None: those of precision="fp8", which gradients always have."""
    int8 = "int8_qk" in traits.features
    if traits.dtype != "fp8" or traits.phase == BWD or int8 == int8_by_default(traits.headdim):
        return None
    return "int8" if int8 else "fp8"


def _terms(traits: Traits, exact: oracle.Dense, usual: oracle.Dense, name: str) -> torch.Tensor:
    """What rounding is measured by. Why more where nothing is 16 bits wide: P of a stored lse has a relative error of
    epsilon times the logit. Plain PyTorch shows it too, but in float64 it and what counts as exact make it together,
    and with one key for each query its P is 1 and its error nothing."""
    terms = exact.terms[name]
    dtype = _input_dtype(traits)
    unseen = dtype == torch.float32 and oracle.error(getattr(usual, name), getattr(exact, name)) == 0
    return terms * exact.terms["lse"].amax() if name != "lse" and (unseen or dtype == torch.float64) else terms


def _shown(call: Call) -> str:
    s = call.shape
    mask = ", ".join(f"{name}={value}" for name, value in call.mask.items()) or "no mask"
    return f"Sq {s.seqlen_q}, Sk {s.seqlen_k}, heads {s.num_heads_q}:{s.num_heads_kv}, {mask}"


def _finite(x: float) -> float | None:
    return x if x < float("inf") else None
