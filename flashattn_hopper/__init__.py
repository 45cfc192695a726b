"""Exact attention for LLM training on Hopper GPUs; a tiled PyTorch reference everywhere else.

Public names are loaded on first use: importing the package needs no GPU, no GPU compiler and not even torch.
An exported program that contains the operators needs `import flashattn_hopper.ops` before it is loaded.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from ._version import __version__

if TYPE_CHECKING:
    from .api import Explanation, explain, hopper_attention
    from .ops import SAC_SAVE_OPS
    from .quantize import BlockScaled, dequantize, quantize_fp8

_HOME = {
    "hopper_attention": "api",
    "explain": "api",
    "Explanation": "api",
    "SAC_SAVE_OPS": "ops",
    "BlockScaled": "quantize",
    "dequantize": "quantize",
    "quantize_fp8": "quantize",
}

__all__ = [
    "SAC_SAVE_OPS",
    "BlockScaled",
    "Explanation",
    "__version__",
    "dequantize",
    "explain",
    "hopper_attention",
    "quantize_fp8",
]


def __getattr__(name: str):
    try:
        home = _HOME[name]
    except KeyError:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}") from None
    value = globals()[name] = getattr(import_module(f".{home}", __name__), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
