"""What one run of the training job is: its settings, the defaults of each device, and how a device is picked."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from .. import planner
from ..catalog import CATALOG
from ..spec.problem import FWD, Traits
from .model import GPTConfig

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
PRECISIONS = ("auto", "fp16", "bf16", "fp8")
ATTENTIONS = ("hopper", "sdpa")

DEFAULTS: dict[str, dict] = {
    "cpu": {"steps": 300, "seqlen": 256, "batch": 8, "layers": 4, "dim": 192, "heads": 3, "kv_heads": 1, "lr": 3e-3},
    "cuda": {"steps": 300, "seqlen": 1024, "batch": 16, "layers": 8, "dim": 768, "heads": 6, "kv_heads": 2, "lr": 1e-3},
}


@dataclass(frozen=True)
class RunConfig:
    """Settings of one run, all resolved. `backend` is hopper_attention's; `why` says how the device was picked."""

    device: str
    precision: str
    attention: str
    steps: int
    seqlen: int
    batch: int
    layers: int
    dim: int
    heads: int
    kv_heads: int
    lr: float
    seed: int
    compile: bool
    backend: str
    why: str
    out: str

    @property
    def gpt(self) -> GPTConfig:
        return GPTConfig(self.layers, self.dim, self.heads, self.kv_heads, self.seqlen)

    @property
    def dtype(self) -> torch.dtype:
        """What the model computes in. fp8 concerns attention alone: the rest runs in bf16 beside it."""
        return DTYPES.get(self.precision, torch.bfloat16)

    def as_dict(self) -> dict:
        return asdict(self)


def capability(device: str) -> tuple[int, int] | None:
    return torch.cuda.get_device_capability() if device == "cuda" else None


def default_precision(device: str) -> str:
    """float32 on a CPU, 16 bit on a GPU.

    Why: bf16 autocast is faster only on CPUs with bf16 instructions, and what a CPU shows should be exact.
    """
    if device == "cpu":
        return "fp32"
    return "bf16" if capability(device) >= (8, 0) else "fp16"


def pick_backend(device: str, traits: Traits) -> tuple[str, str]:
    """hopper_attention's `backend` for this device, and the reason.

    Why: a CUDA tensor never reaches the PyTorch reference by itself, so that nobody trains on it unknowingly. This job
    must run on any GPU; it asks for the reference by name where the catalog has no kernel, and says so.
    """
    if device == "cpu":
        return "auto", "no CUDA GPU" if not torch.cuda.is_available() else "--device cpu"
    found = capability(device)
    name = torch.cuda.get_device_name()
    if any(spec.refuses(traits, found) is None for spec in CATALOG):
        return "auto", name
    refusals = planner.refusals(traits, found)
    return "reference", f"{name}: " + "; ".join(f"{spec}: {reason}" for spec, reason in refusals.items())


def resolve(
    *,
    device: str = "auto",
    precision: str = "auto",
    attention: str = "hopper",
    seed: int = 0,
    compile: bool = False,
    out: str | Path | None = None,
    **sizes,
) -> RunConfig:
    """A complete RunConfig: what is None or absent in `sizes` comes from the device's row of DEFAULTS.

    Raises:
        ValueError: a setting is out of range, or names a device that this machine has not.
    """
    for name, value, allowed in (
        ("device", device, ("auto", *DEFAULTS)),
        ("precision", precision, (*PRECISIONS, *DTYPES)),
        ("attention", attention, ATTENTIONS),
    ):
        if value not in allowed:
            raise ValueError(f"{name}={value!r}: allowed are {', '.join(allowed)}")
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("device='cuda': torch sees no CUDA GPU here (python -m flashattn_hopper info)")
    if attention == "sdpa" and precision == "fp8":
        raise ValueError("attention='sdpa', precision='fp8': torch's attention has no fp8")
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if precision == "auto":
        precision = default_precision(device)
    given = {name: value for name, value in sizes.items() if value is not None}
    if "heads" in given and "kv_heads" not in given:
        given["kv_heads"] = given["heads"]
    settings = DEFAULTS[device] | given
    for name in ("steps", "batch", "lr"):
        if settings[name] <= 0:
            raise ValueError(f"{name}={settings[name]}: must be positive")
    gpt = GPTConfig(**{name: settings[name] for name in ("layers", "dim", "heads", "kv_heads", "seqlen")})
    traits = Traits(FWD, precision, gpt.headdim, gpt.headdim, "causal", gqa=gpt.heads != gpt.kv_heads)
    backend, why = pick_backend(device, traits)
    out = Path("runs", f"{device}-{precision}-{attention}") if out is None else Path(out)
    return RunConfig(
        device, precision, attention, seed=seed, compile=compile, backend=backend, why=why, out=str(out), **settings
    )
