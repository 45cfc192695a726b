"""FP8 calls of the library against those of Python, bit by bit: the same kernels on the same operands.

python parity.py LIBRARY, with FLASHATTN_HOPPER_AOT naming its folder. Status 77 without a GPU, or without torch.
"""

import ctypes
import sys
from ctypes import POINTER, byref, c_char_p, c_float, c_int, c_int32, c_int64, c_size_t, c_void_p
from dataclasses import replace
from itertools import product

try:
    import torch
except ImportError:
    print("skipped: no torch here")
    sys.exit(77)
from flashattn_hopper import ops_fp8, runner_fp8

OK, NOT_IN_LIBRARY, SKIPPED = 0, 3, 77
BF16, FP16, FP8, OPEN = 1, 2, 1, -1
CODES = {None: 0, True: 1, False: 2}  # of int8_qk; None: none are asked for
MASKS = {"full": (None, None), "causal": (None, 0), "window": (100, 7)}
# headdim, headdim_v
DIMS = (64, 64), (128, 128), (256, 256), (96, 96), (192, 192), (192, 128)
# batch, seqlen_q, seqlen_k, heads, heads_kv
SHAPES = (2, 300, 300, 4, 2), (1, 1, 385, 3, 3), (1, 1300, 1200, 2, 1)


class Problem(ctypes.Structure):
    _fields_ = [
        ("size", c_size_t),
        *((name, c_int) for name in ("pass_", "dtype")),
        *((name, c_int32) for name in ("device", "arch", "batch", "seqlen_q", "seqlen_k", "num_heads_q")),
        *((name, c_int32) for name in ("num_heads_kv", "headdim", "headdim_v")),
        *((f"{name}_strides", c_int64 * 3) for name in ("q", "k", "v", "dout")),
        *((f"window_{side}", c_int64) for side in ("left", "right")),
        ("softmax_scale", c_float),
        ("deterministic", c_int32),
        ("backend", c_char_p),
        *((name, c_int) for name in ("precision", "qk_codes")),
        *((name, c_int32) for name in ("hadamard", "smooth_k")),
        ("gradients", c_int),
    ]


class Workspace(ctypes.Structure):
    _fields_ = [(name, c_size_t) for name in ("bytes", "alignment", "zeroed")]


class Forward(ctypes.Structure):
    _fields_ = [(name, c_void_p) for name in ("q", "k", "v", "out", "lse", "workspace")]


def opened(path):
    library = ctypes.CDLL(path)
    library.fah_plan_create.argtypes = POINTER(Problem), POINTER(c_void_p)
    library.fah_plan_workspace.argtypes = c_void_p, POINTER(Workspace)
    library.fah_forward.argtypes = c_void_p, POINTER(Forward), c_void_p
    library.fah_plan_destroy.argtypes = (c_void_p,)
    library.fah_last_error.restype = c_char_p
    return library


def new_problem(library):
    problem = Problem()
    library.fah_problem_init(byref(problem))
    # Why: a header of another version would have another size, and be found out here.
    assert problem.size == ctypes.sizeof(Problem), (problem.size, ctypes.sizeof(Problem))
    assert problem.qk_codes == CODES[None], problem.qk_codes
    return problem


def by_library(library, q, k, v, mask, recipe):
    """(out, lse), or None where the library was built without the variants."""
    problem, plan, need = new_problem(library), c_void_p(), Workspace()
    problem.precision, problem.dtype = FP8, BF16 if q.dtype == torch.bfloat16 else FP16
    if recipe["int8_qk"] is not None:  # else what fah_problem_init set
        problem.qk_codes = CODES[recipe["int8_qk"]]
    problem.hadamard, problem.smooth_k = recipe["hadamard"], recipe["smooth_k"]
    problem.batch, problem.seqlen_q, problem.num_heads_q, problem.headdim = q.shape
    _, problem.seqlen_k, problem.num_heads_kv, problem.headdim_v = v.shape
    problem.window_left, problem.window_right = (OPEN if edge is None else edge for edge in MASKS[mask])
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        getattr(problem, f"{name}_strides")[:] = tensor.stride()[:3]
    status = library.fah_plan_create(byref(problem), byref(plan))
    if status == NOT_IN_LIBRARY:
        return None
    assert status == OK, library.fah_last_error()
    assert library.fah_plan_workspace(plan, byref(need)) == OK
    workspace = torch.full((need.bytes,), 0xFF, dtype=torch.uint8, device="cuda")
    workspace[: need.zeroed] = 0
    out = q.new_empty(*q.shape[:3], v.shape[3])
    lse = q.new_empty(q.shape[0], q.shape[2], q.shape[1], dtype=torch.float32)
    args = Forward(*(tensor.data_ptr() for tensor in (q, k, v, out, lse, workspace)))
    status = library.fah_forward(plan, byref(args), torch.cuda.current_stream().cuda_stream)
    assert status == OK, library.fah_last_error()
    library.fah_plan_destroy(plan)
    return out, lse


def by_python(q, k, v, mask, recipe):
    scalars = q.shape[3] ** -0.5, *MASKS[mask], False, "auto"
    problem = ops_fp8.problem_fp8(q, k, v, scalars)
    if recipe["int8_qk"] is not None:
        problem = replace(problem, traits=replace(problem.traits, int8_qk=recipe["int8_qk"]))
    attend = runner_fp8.bind(runner_fp8.plan(problem, "auto", q.device), problem, q.dtype, q.device)
    out, _, lse = attend(runner_fp8.quantize(q, k, v, **recipe))
    return out, lse


def operands(shape, dims, dtype):
    """k and v are halves of one tensor where that is possible; all keys of a head have something in common."""
    batch, seqlen_q, seqlen_k, heads, heads_kv = shape
    q = torch.randn(batch, seqlen_q, heads, dims[0], device="cuda")
    k, v = (torch.randn(batch, seqlen_k, heads_kv, width, device="cuda") for width in dims)
    k += 2 * torch.randn(batch, 1, heads_kv, dims[0], device="cuda")
    if dims[0] == dims[1]:
        k, v = torch.stack((k, v), 2).to(dtype).unbind(2)
    return q.to(dtype), k.to(dtype), v.to(dtype)


def main(path):
    library = opened(path)
    new_problem(library)
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        print("skipped: no Hopper GPU here")
        return SKIPPED
    compared, differ = {None: 0, True: 0, False: 0}, 0
    choices = {"hadamard": (True, False), "smooth_k": (True, False), "int8_qk": CODES}
    recipes = [dict(zip(choices, one)) for one in product(*choices.values())]
    for shape, dims, dtype, mask, recipe in product(SHAPES, DIMS, (torch.bfloat16, torch.float16), MASKS, recipes):
        tensors = operands(shape, dims, dtype)
        found = by_library(library, *tensors, mask, recipe)
        if found is None:
            continue
        wanted = by_python(*tensors, mask, recipe)
        compared[recipe["int8_qk"]] += 1
        if not all(torch.equal(a, b) for a, b in zip(found, wanted)):
            differ += 1
            print(f"differs: {shape} {dims} {dtype} {mask} {recipe}", file=sys.stderr)
    total, by_default = sum(compared.values()), compared[None]
    print(f"{total} calls compared, {by_default} of them by default codes, {differ} differ")
    if total == 0:
        print("skipped: no FP8 in this library")
        return SKIPPED
    return int(differ > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
