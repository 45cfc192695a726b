"""The contestants: ours and other attention kernels behind two calls, without and with a graph: `call` and `graph`.

Tensors are (B, S, H, D) for all, K and V may have fewer heads; `window` is (left, right) in keys, (None, None) for
none. A contestant that cannot run here says why in `available()`; one that cannot run a cell raises, and the row
records the message. Nothing is imported before it is asked for.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib
import importlib.metadata
from pathlib import Path

import torch

NO_WINDOW = (None, None)
NOTHING = contextlib.nullcontext()


class Contestant:
    """One row of `PEERS`. `needs` are modules that must import; `distribution` names the package for its version."""

    name = ""
    title = ""
    needs: tuple[str, ...] = ()
    distribution = ""
    no_backward = ""  # why there are no gradients of it at all

    def available(self) -> str | None:
        """None if it can be tried on this machine, else the reason."""
        for module in self.needs:
            try:
                importlib.import_module(module)
            except Exception as error:  # Why: a package that fails to load its libraries is as absent as a missing one.
                return f"unavailable: import {module}: {first_line(error)}"
        return None

    def version(self) -> str:
        try:
            return importlib.metadata.version(self.distribution)
        except importlib.metadata.PackageNotFoundError:
            return "unknown"

    def takes(self, cell) -> bool:
        """Whether it takes part in a cell of a suite at all."""
        return True

    def session(self, deterministic: bool = False) -> contextlib.AbstractContextManager:
        """What to hold around a series of calls, entered outside the timed region."""
        return contextlib.nullcontext()

    def layout(self, x):
        """(B, S, H, D) as the view this contestant takes, and back."""
        return x

    def native(self, q, k, v, causal=False, window=NO_WINDOW, scale=None):
        """One forward pass inside `session()`, tensors and output in this contestant's own layout."""
        raise NotImplementedError

    def call(self, q, k, v, causal=False, window=NO_WINDOW, scale=None):
        """One forward pass inside `session()`. Returns the output, (B, S, Hq, Dv)."""
        return self.layout(self.native(*map(self.layout, (q, k, v)), causal, window, scale))

    def train(self, q, k, v, causal=False, window=NO_WINDOW, scale=None, deterministic=False):
        """`native` of tensors that want a gradient, for a backward that may have to repeat bit by bit."""
        if deterministic:
            raise NotImplementedError(f"{self.title or self.name}: no deterministic backward")
        return self.native(q, k, v, causal, window, scale)

    def graph(self, q, k, v, causal=False, window=NO_WINDOW, scale=None, deterministic=False):
        """One forward pass inside `session()` with the graph kept: (leaves, output), both in its own layout."""
        leaves = [self.layout(x).detach().requires_grad_() for x in (q, k, v)]
        with torch.enable_grad():
            out = self.train(*leaves, causal, window, scale, deterministic)
        if not out.requires_grad:
            raise RuntimeError("records no graph")
        return leaves, out


class Ours(Contestant):
    name = "ours"
    title = "flashattn_hopper"
    needs = ("flashattn_hopper.api",)
    distribution = "flashattn-hopper"
    backend = "auto"
    train_backend = "sm90"  # Why: by name it is never the reference in silence

    def __init__(self, backend: str = ""):
        if backend:
            self.backend = self.train_backend = backend

    def native(self, q, k, v, causal=False, window=NO_WINDOW, scale=None, **options):
        from flashattn_hopper import hopper_attention

        edges = {} if window == NO_WINDOW else {"window_size": window}
        options.setdefault("backend", self.backend)
        return hopper_attention(q, k, v, causal=causal, softmax_scale=scale, **edges, **options)

    def train(self, q, k, v, causal=False, window=NO_WINDOW, scale=None, deterministic=False):
        return self.native(q, k, v, causal, window, scale, deterministic=deterministic, backend=self.train_backend)


class Sdpa(Contestant):
    """One backend of torch's scaled_dot_product_attention."""

    backend = ""

    def available(self) -> str | None:
        if not torch.cuda.is_available():
            return "unavailable: no CUDA device"
        return super().available()

    @contextlib.contextmanager
    def session(self, deterministic: bool = False):
        from torch.nn.attention import SDPBackend, sdpa_kernel

        with sdpa_kernel(getattr(SDPBackend, self.backend)), torch_deterministic() if deterministic else NOTHING:
            yield

    def layout(self, x):
        return x.transpose(1, 2)

    def native(self, q, k, v, causal=False, window=NO_WINDOW, scale=None):
        if window != NO_WINDOW:
            raise NotImplementedError("scaled_dot_product_attention takes no window")
        gqa = q.shape[1] != k.shape[1]
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale, enable_gqa=gqa)

    def train(self, q, k, v, causal=False, window=NO_WINDOW, scale=None, deterministic=False):
        return self.native(q, k, v, causal, window, scale)  # the session has said it


class Cudnn(Sdpa):
    name = "cudnn"
    title = "cuDNN (torch SDPA)"
    backend = "CUDNN_ATTENTION"

    def version(self) -> str:
        return str(torch.backends.cudnn.version())


class Fa2(Sdpa):
    name = "fa2"
    title = "FlashAttention-2 (torch SDPA)"
    backend = "FLASH_ATTENTION"

    def version(self) -> str:
        return f"torch {torch.__version__}"


class Fa3(Contestant):
    name = "fa3"
    title = "FlashAttention-3"
    needs = ("fa3_fwd_interface",)
    distribution = "fa3-fwd"
    no_backward = "the package fa3-fwd has no backward"

    def native(self, q, k, v, causal=False, window=NO_WINDOW, scale=None):
        from fa3_fwd_interface import flash_attn_func

        window = tuple(-1 if edge is None else edge for edge in window)
        return first(flash_attn_func(q, k, v, softmax_scale=scale, causal=causal, window_size=window))


class Fa4(Contestant):
    name = "fa4"
    title = "FlashAttention-4 (CuTe DSL)"
    needs = ("flash_attn.cute.interface",)
    distribution = "flash-attn-4"

    def native(self, q, k, v, causal=False, window=NO_WINDOW, scale=None, **options):
        from flash_attn.cute.interface import flash_attn_func

        return first(flash_attn_func(q, k, v, softmax_scale=scale, causal=causal, window_size=window, **options))

    def train(self, q, k, v, causal=False, window=NO_WINDOW, scale=None, deterministic=False):
        return self.native(q, k, v, causal, window, scale, **({"deterministic": True} if deterministic else {}))


class Flex(Contestant):
    name = "flex"
    title = "FlexAttention (compiled)"
    needs = ("torch.nn.attention.flex_attention", "triton")

    def version(self) -> str:
        return f"torch {torch.__version__}"

    @staticmethod
    @functools.cache
    def compiled():
        from torch.nn.attention.flex_attention import flex_attention

        # Why: dynamic=False gives each shape a kernel of its own, the fastest form it has.
        # Trap: past the limit of recompilations torch runs the uncompiled form without a word.
        torch._dynamo.config.recompile_limit = 256
        return torch.compile(flex_attention, dynamic=False)

    @staticmethod
    @functools.lru_cache(maxsize=4)
    def block_mask(causal, window, seqlen_q, seqlen_k, device):
        from torch.nn.attention.flex_attention import create_block_mask

        left, right = (seqlen_k if edge is None else edge for edge in window)
        right = min(right, 0) if causal else right

        def keep(batch, head, q_idx, kv_idx):
            diagonal = q_idx + seqlen_k - seqlen_q
            return (kv_idx <= diagonal + right) & (kv_idx >= diagonal - left)

        return create_block_mask(keep, None, None, seqlen_q, seqlen_k, device=device)

    def layout(self, x):
        return x.transpose(1, 2)

    def native(self, q, k, v, causal=False, window=NO_WINDOW, scale=None):
        masked = causal or window != NO_WINDOW
        mask = self.block_mask(causal, window, q.shape[2], k.shape[2], str(q.device)) if masked else None
        gqa = q.shape[1] != k.shape[1]
        return self.compiled()(q, k, v, block_mask=mask, scale=scale, enable_gqa=gqa)


class Cutlass(Contestant):
    """CUTLASS's Hopper FMHA example, which CMake builds from the package nvidia-cutlass (docs/native.md)."""

    name = "cutlass"
    title = "CUTLASS example 88"
    no_backward = "the example's backward does not compile for BF16"
    library = Path(__file__).resolve().parents[1] / "build" / "peers" / "libcutlass_fmha.so"
    outcomes = ("done", "the example refuses these lengths or this head dimension", "the launch failed")

    def available(self) -> str | None:
        if not self.library.exists():
            return f"unavailable: no {self.library.name}; cmake -DFLASHATTN_HOPPER_PEER=ON builds it"
        try:
            self.loaded  # noqa: B018
        except OSError as error:
            return f"unavailable: {first_line(error)}"
        return None

    def version(self) -> str:
        return f"CUTLASS {self.loaded.cutlass_fmha_version().decode()}"

    @functools.cached_property
    def loaded(self):
        library = ctypes.CDLL(str(self.library))
        library.cutlass_fmha_version.restype = ctypes.c_char_p
        library.cutlass_fmha_forward.argtypes = [ctypes.c_int] * 6 + [ctypes.c_void_p] * 6
        return library

    def native(self, q, k, v, causal=False, window=NO_WINDOW, scale=None):
        (batch, seqlen_q, heads, headdim), seqlen_k = q.shape, k.shape[1]
        if window != NO_WINDOW or q.dtype != torch.bfloat16 or k.shape != v.shape or k.shape[2:] != q.shape[2:]:
            raise NotImplementedError("the example takes BF16, as many heads of keys as of queries, and no window")
        if (causal and seqlen_q != seqlen_k) or (scale is not None and abs(scale * headdim**0.5 - 1) > 1e-6):
            raise NotImplementedError("causal from the top left, and softmax_scale 1 / sqrt(headdim)")
        if not (q.is_contiguous() and k.is_contiguous() and v.is_contiguous()):
            raise NotImplementedError("contiguous tensors only, as this peer calls it")
        out = torch.empty_like(q)
        lse = torch.empty(batch, heads, seqlen_q, dtype=torch.float32, device=q.device)
        stream = torch.cuda.current_stream(q.device).cuda_stream
        addresses = [x.data_ptr() for x in (q, k, v, out, lse)]
        outcome = self.loaded.cutlass_fmha_forward(
            causal, batch, heads, seqlen_q, seqlen_k, headdim, *addresses, stream
        )
        if outcome:
            raise RuntimeError(self.outcomes[outcome])
        return out


OURS = Ours()
PEERS: dict[str, Contestant] = {peer.name: peer for peer in (Cudnn(), Fa3(), Fa4(), Fa2(), Flex(), Cutlass())}
DEFAULT = ("cudnn", "fa3", "fa4", "fa2")


def lineup(names: str, backend: str = "") -> tuple[Contestant, ...]:
    """Ours, with `backend` where it is named, then those of the comma-separated `names`."""
    return Ours(backend) if backend else OURS, *parse(names)


def parse(names: str) -> tuple[Contestant, ...]:
    """Peers of a comma-separated list; "" or "none" is none. Raises ValueError for an unknown name."""
    words = [word for word in names.split(",") if word not in ("", "none")]
    unknown = [word for word in words if word not in PEERS]
    if unknown:
        raise ValueError(f"unknown peer {', '.join(unknown)}; known are {', '.join(PEERS)}")
    return tuple(PEERS[word] for word in words)


@contextlib.contextmanager
def torch_deterministic():
    """torch's switch for operators that repeat bit by bit, without its filling of fresh memory, which takes time."""
    before = torch.are_deterministic_algorithms_enabled(), torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0])
        torch.utils.deterministic.fill_uninitialized_memory = before[1]


def first(result):
    """The output where a function returns (output, ...)."""
    return result[0] if isinstance(result, tuple | list) else result


def first_line(error: BaseException) -> str:
    """`TypeName: first line of the message`, short enough for a table."""
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0] if text else ''}"[:200].rstrip(": ")
