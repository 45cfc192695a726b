"""What the user passed -> what is asked. The only module that raises for bad input.

A wrong type is a TypeError, a wrong value a ValueError; a legal wish that nothing serves yet is a NotImplementedError.
Traced by torch.compile: no branch here depends on batch, sequence length or strides unless it is about to raise.
"""

from __future__ import annotations

import numbers
from typing import NamedTuple

import torch

from .planner import BACKENDS
from .quantize import E4M3, QK_DTYPES, TILE, BlockScaled
from .spec.mask import Band
from .spec.problem import DTYPES, FWD, AttentionProblem, Shape, Traits

PRECISIONS = ("auto", *DTYPES)
TORCH_DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32, "fp64": torch.float64}
WORDS = {dtype: word for word, dtype in TORCH_DTYPES.items()}
DEVICES = ("cpu", "cuda", "meta")
LAYOUT = "(batch, seqlen, heads, headdim)"
_FLOAT32 = torch.finfo(torch.float32)


class DtypeError(TypeError, ValueError):
    """A dtype that cannot be computed with. Why both bases: callers file a tensor's dtype under either."""


class Request(NamedTuple):
    """The validated keyword arguments and dtypes of one call."""

    dtype: str  # what is computed in, a word of spec.problem.DTYPES
    out_dtype: torch.dtype
    softmax_scale: float
    window_left: int | None  # keys; None is open
    window_right: int | None
    deterministic: bool
    backend: str

    @property
    def compute_dtype(self) -> torch.dtype:
        """What q, k and v are cast to. FP8 is quantized from the dtype that the output comes back in."""
        return TORCH_DTYPES.get(self.dtype, self.out_dtype)


def check(q, k, v, causal, window_size, softmax_scale, precision, return_lse, deterministic, backend) -> Request:
    """Validate one call of `hopper_attention`; see there for the arguments and what is raised."""
    operands = (("q", q), ("k", k), ("v", v))
    scaled = are_scaled(q, k, v)
    for name, tensor in operands:
        _check_tensor(name, tensor.data if scaled else tensor)
    for name, flag in (("causal", causal), ("return_lse", return_lse), ("deterministic", deterministic)):
        if not isinstance(flag, bool):
            raise TypeError(f"{name}: expected True or False, got {_shown(flag)}")
    _check_word("precision", precision, PRECISIONS)
    _check_word("backend", backend, BACKENDS)
    _check_devices(q, k, v)
    _check_shapes(q, k, v)
    if scaled:
        for name, operand in operands:
            _check_scaled(name, operand)
        dtype, out_dtype = _scaled_dtypes(q, k, v, precision)
    else:
        dtype, out_dtype = _dtypes(q, k, v, precision)
    left, right = _window(causal, window_size)
    return Request(
        dtype,
        out_dtype,
        q.shape[3] ** -0.5 if softmax_scale is None else _scale(softmax_scale),
        left,
        right,
        deterministic or torch.are_deterministic_algorithms_enabled(),
        backend,
    )


def are_scaled(q, k, v) -> bool:
    """Whether q, k and v are BlockScaled. Raises TypeError where only some are."""
    scaled = [isinstance(x, BlockScaled) for x in (q, k, v)]
    if any(scaled) and not all(scaled):
        found = ", ".join(f"{name} {type(x).__name__}" for name, x in (("q", q), ("k", k), ("v", v)))
        raise TypeError(f"q, k, v: all three are BlockScaled or none is, got {found}; quantize_fp8 makes all three")
    return all(scaled)


def problem_of(
    q_shape, k_shape, v_shape, dtype, softmax_scale, window_left, window_right, deterministic
) -> AttentionProblem:
    """The forward problem of tensors with these shapes, computed in `dtype` (a word of spec.problem.DTYPES)."""
    batch, seqlen_q, num_heads_q, headdim = q_shape
    _, seqlen_k, num_heads_kv, headdim_v = v_shape
    band = Band(window_left, window_right)
    gqa = num_heads_q != num_heads_kv
    traits = Traits(FWD, dtype, headdim, headdim_v, band.kind, gqa, deterministic)
    shape = Shape(batch, seqlen_q, seqlen_k, num_heads_q, num_heads_kv)
    return AttentionProblem(traits, shape, band, softmax_scale)


def word_of(dtype: torch.dtype) -> str:
    """The precision word of a torch dtype. Raises DtypeError for one that nothing computes in."""
    word = WORDS.get(dtype)
    if word is None:
        raise DtypeError(f"{_dtype(dtype)}: expected one of {', '.join(map(_dtype, WORDS))}")
    return word


# One tensor


def _check_tensor(name, tensor):
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{name}: expected a torch.Tensor {LAYOUT}, got {_shown(tensor)}")
    if tensor.is_nested:
        raise NotImplementedError(f"{name}: nested tensors are not supported; pad to {LAYOUT}")
    if tensor.layout != torch.strided:
        raise NotImplementedError(f"{name}: layout {tensor.layout} is not supported; pass {name}.to_dense()")
    if tensor.device.type not in DEVICES:
        raise NotImplementedError(f"{name}: is on {tensor.device}; supported are cpu and cuda")


# The three together


def _check_devices(q, k, v):
    if q.device != k.device or q.device != v.device:
        raise ValueError(f"q, k, v: must be on one device, got q {q.device}, k {k.device}, v {v.device}")


def _check_shapes(q, k, v):
    problem = _shape_problem(q.shape, k.shape, v.shape)
    if problem is None:
        return
    shapes = [tuple(t.shape) for t in (q, k, v)]
    message = f"{problem}; expected {LAYOUT}, got q {shapes[0]}, k {shapes[1]}, v {shapes[2]}"
    if all(len(s) == 3 for s in shapes):
        message += ". For one sequence, pass unsqueeze(0) of each"
    elif all(len(s) == 4 for s in shapes):
        if _shape_problem(*((b, s, h, d) for b, h, s, d in shapes)) is None:
            message += ". Is this the layout of SDPA, heads before seqlen? Then pass transpose(1, 2) of each"
    raise ValueError(message)


def _shape_problem(q, k, v):
    """What is wrong with three shapes, or None."""
    if not len(q) == len(k) == len(v) == 4:
        return "q, k, v: must have 4 dimensions"
    if not (q[0] == k[0] and q[0] == v[0]):
        return "q, k, v: batch differs"
    if k[1] != v[1]:
        return "k, v: seqlen differs"
    if k[2] != v[2]:
        return "k, v: number of heads differs"
    if q[3] != k[3]:
        return "q, k: headdim differs"
    if q[3] < 1 or v[3] < 1:
        return "q, k, v: headdim must be at least 1"
    if q[2] != k[2] and (k[2] == 0 or q[2] % k[2] != 0):
        return f"q, k: {q[2]} query heads are not a multiple of {k[2]} key/value heads"
    return None


def _dtypes(q, k, v, precision):
    """(word that is computed in, dtype that the output comes back in)."""
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if tensor.dtype not in WORDS:
            _refuse_dtype(name, tensor.dtype)
    autocast = autocast_dtype(q.device.type)
    if autocast is not None:
        return (word_of(autocast) if precision == "auto" else precision), autocast
    if q.dtype != k.dtype or q.dtype != v.dtype:
        raise DtypeError(
            f"q, k, v: dtypes differ: q {_dtype(q.dtype)}, k {_dtype(k.dtype)}, v {_dtype(v.dtype)}; "
            "cast them to one dtype, or call under torch.autocast, which casts all three"
        )
    if precision != "auto":
        return precision, q.dtype
    word = WORDS[q.dtype]
    if word not in ("fp16", "bf16"):
        raise DtypeError(
            f"q, k, v: are {_dtype(q.dtype)}, which precision='auto' does not compute in; "
            f'pass precision="bf16" or "fp16" to compute in that, call under torch.autocast, '
            f"or pass precision={word!r} for the reference"
        )
    return word, q.dtype


def _refuse_dtype(name, dtype):
    if dtype.is_floating_point:
        raise NotImplementedError(f"{name}: is {_dtype(dtype)}; supported are {', '.join(map(_dtype, WORDS))}")
    raise DtypeError(f"{name}: is {_dtype(dtype)}; expected one of {', '.join(map(_dtype, WORDS))}")


def autocast_dtype(device_type: str) -> torch.dtype | None:
    """What autocast casts to on that device, or None where it is off."""
    # Trap: is_autocast_enabled("meta") raises.
    if device_type in ("cpu", "cuda") and torch.is_autocast_enabled(device_type):
        return torch.get_autocast_dtype(device_type)
    return None


# Codes with scales


def _check_scaled(name, operand):
    allowed = (E4M3,) if name == "v" else tuple(QK_DTYPES.values())
    if operand.data.dtype not in allowed:
        raise DtypeError(
            f"{name}: codes are {_dtype(operand.data.dtype)}; expected {' or '.join(map(_dtype, allowed))}"
        )
    if operand.dtype not in WORDS:
        _refuse_dtype(name, operand.dtype)
    rows = operand.rows
    if rows is not None and (isinstance(rows, bool) or not isinstance(rows, int) or rows < 1):
        raise ValueError(f"{name}: rows is {_shown(rows)}; expected a positive int, or None for one scale per head")
    if (name == "v" and rows is not None) or (name == "k" and rows is not None and rows % TILE):
        what = "None" if name == "v" else f"a multiple of {TILE}, or None"
        raise ValueError(f"{name}: {rows} tokens share a scale; rows must be {what} for {name}")
    batch, seqlen, heads, headdim = operand.shape
    blocks = 1 if rows is None else -(-seqlen // rows)
    _check_companion(name, "descale", operand.descale, operand, (batch, heads, blocks))
    if operand.mean is not None:
        _check_companion(name, "mean", operand.mean, operand, (batch, heads, headdim))
    if operand.logit_offset is not None:
        _check_companion(name, "logit_offset", operand.logit_offset, operand, (batch, heads, seqlen))


def _check_companion(name, what, tensor, operand, shape):
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{name}: {what} must be a tensor, got {_shown(tensor)}")
    if tensor.dtype != torch.float32:
        raise DtypeError(f"{name}: {what} is {_dtype(tensor.dtype)}; expected float32")
    if tensor.shape != shape:
        raise ValueError(
            f"{name}: {what} has shape {tuple(tensor.shape)}; expected {shape} for data {tuple(operand.shape)} "
            f"with rows={operand.rows}"
        )
    if tensor.device != operand.device:
        raise ValueError(f"{name}: {what} is on {tensor.device}, data on {operand.device}")


def _scaled_dtypes(q, k, v, precision):
    if precision not in ("auto", "fp8"):
        raise ValueError(f'precision: {precision!r} with BlockScaled operands, which are FP8; pass "auto" or "fp8"')
    if q.data.dtype != k.data.dtype:
        raise DtypeError(f"q, k: codes differ: q {_dtype(q.data.dtype)}, k {_dtype(k.data.dtype)}")
    if q.dtype != k.dtype or q.dtype != v.dtype:
        raise DtypeError(f"q, k, v: dtypes differ: q {_dtype(q.dtype)}, k {_dtype(k.dtype)}, v {_dtype(v.dtype)}")
    if q.rotated != k.rotated:
        raise ValueError("q, k: one is rotated and the other is not; quantize both with the same `hadamard`")
    if (q.logit_offset is None) != (k.mean is None):
        raise ValueError(
            "q, k: q has the logit_offset of k's mean, or neither has one; quantize both by one quantize_fp8"
        )
    return "fp8", q.dtype


# Keyword arguments


def _check_word(name, word, allowed):
    if not isinstance(word, str):
        raise TypeError(f"{name}: expected one of {', '.join(map(repr, allowed))}, got {_shown(word)}")
    if word not in allowed:
        raise ValueError(f"{name}: allowed are {', '.join(map(repr, allowed))}, got {word!r}")


def _window(causal, window_size):
    """The band's edges; causal closes the right one on the diagonal."""
    left, right = (None, None) if window_size is None else _pair(window_size)
    if causal:
        if right:
            raise ValueError(
                f"window_size: {window_size} looks {right} keys ahead, which causal=True forbids; "
                "pass 0, -1 or None on the right, or causal=False"
            )
        right = 0
    return left, right


def _pair(window_size):
    if not isinstance(window_size, (tuple, list)):
        raise TypeError(
            f"window_size: expected None or a pair (left, right) of keys, got {_shown(window_size)}. "
            "A causal window of w tokens that counts the current one is (w - 1, 0)"
        )
    if len(window_size) != 2:
        raise ValueError(f"window_size: expected a pair (left, right) of keys, got {len(window_size)} entries")
    return _edge("left", window_size[0]), _edge("right", window_size[1])


def _edge(side, keys):
    if keys is None:
        return None
    if isinstance(keys, bool) or not isinstance(keys, (int, numbers.Integral)):
        raise TypeError(f"window_size: {side} must be an int (keys), -1 or None (open), got {_shown(keys)}")
    if keys < -1:
        raise ValueError(f"window_size: {side} is {keys}; expected at least 0, or -1 or None for an open side")
    return None if keys == -1 else int(keys)


def _scale(softmax_scale):
    if isinstance(softmax_scale, bool) or not isinstance(softmax_scale, (float, int, numbers.Real)):
        raise TypeError(f"softmax_scale: expected None or a positive number, got {_shown(softmax_scale)}")
    scale = float(softmax_scale)
    # Why this range: a kernel holds the scale in float32, where a smaller one is 0 and a larger one inf. NaN fails too.
    if not _FLOAT32.tiny <= scale <= _FLOAT32.max:
        raise ValueError(
            f"softmax_scale: {softmax_scale}: expected a finite number above 0 that float32 holds; "
            "None is 1 / sqrt(headdim)"
        )
    return scale


# Wording


def _dtype(dtype):
    return str(dtype).removeprefix("torch.")


def _shown(value):
    """A value in a message: its type, and what to pass instead of a tensor."""
    if isinstance(value, torch.Tensor):
        kind = f"a {value.dim()}-d tensor on {value.device}"
        return f"{kind}; pass a Python number or flag, read once with .item() outside the training loop"
    if isinstance(value, (bool, int, float, str)):
        return f"{type(value).__name__} {value!r}"
    return f"a {type(value).__name__}"
