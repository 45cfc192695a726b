"""Exercise the argument checks of a compiled kernel on a machine without a GPU.

`FakeCuda(t)` exports a CPU tensor that claims to live on a CUDA device. The kernel's host code then checks dtype, rank,
shared extents, divisibility and alignment, and fails at the first CUDA call for want of a driver: with that error every
argument was accepted.

Trap: never where a driver is present. The kernel would be launched on a host pointer.
"""

import ctypes

import torch

_CUDA = 2  # DLPack's device type
_CODES = {  # DLPack's (type code, bits)
    torch.float64: (2, 64),
    torch.float32: (2, 32),
    torch.float16: (2, 16),
    torch.bfloat16: (4, 16),
    torch.int32: (0, 32),
    torch.int64: (0, 64),
    torch.uint8: (1, 8),
    torch.float8_e4m3fn: (10, 8),
}


class _Device(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int32), ("id", ctypes.c_int32))


class _DataType(ctypes.Structure):
    _fields_ = (("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16))


class _Tensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device", _Device),
        ("ndim", ctypes.c_int32),
        ("dtype", _DataType),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


class _Managed(ctypes.Structure):
    _fields_ = (("tensor", _Tensor), ("context", ctypes.c_void_p), ("deleter", ctypes.c_void_p))


_new_capsule = ctypes.pythonapi.PyCapsule_New
_new_capsule.restype, _new_capsule.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]


class FakeCuda:
    """A CPU tensor that exports itself as one on CUDA device `index`."""

    def __init__(self, tensor: torch.Tensor, index: int = 0):
        extents = ctypes.c_int64 * tensor.dim()
        self._keep = tensor, extents(*tensor.shape), extents(*tensor.stride())
        code, bits = _CODES[tensor.dtype]
        described = _Tensor(
            *(tensor.data_ptr(), _Device(_CUDA, index), tensor.dim(), _DataType(code, bits, 1)),
            *(self._keep[1], self._keep[2], 0),
        )
        self._managed = _Managed(described, None, None)

    def __dlpack_device__(self):
        return _CUDA, self._managed.tensor.device.id

    def __dlpack__(self, **_):
        return _new_capsule(ctypes.addressof(self._managed), b"dltensor", None)


def disguised(value):
    """`value` with every tensor in it as a FakeCuda, tuples and named tuples included."""
    if isinstance(value, torch.Tensor):
        return FakeCuda(value)
    if isinstance(value, tuple):
        parts = [disguised(part) for part in value]
        return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
    return value


def accepts(function, *operands) -> str:
    """ "accepted", or the text of the error that names the refused operand."""
    if torch.cuda.is_available():
        raise RuntimeError("fake CUDA tensors are for machines without a GPU")
    try:
        function(*map(disguised, operands))
    except (TypeError, ValueError, RuntimeError) as error:
        return "accepted" if "InsufficientDriver" in str(error) else f"{type(error).__name__}: {error}"
    raise AssertionError("the kernel ran without a GPU")
