"""The attentions that the training job can run: hopper_attention, or torch's own for comparison."""

from __future__ import annotations

import torch
import torch.nn.functional as F

import flashattn_hopper

from .config import RunConfig
from .model import Attend


def hopper_options(config: RunConfig) -> dict:
    """hopper_attention's keywords for this run.

    Why: precision="auto" is the tensors' 16-bit dtype and refuses float32; a float32 run asks for it by name.
    """
    named = config.precision if config.precision in ("fp8", "fp32") else "auto"
    return {"causal": True, "precision": named, "backend": config.backend}


def hopper(config: RunConfig) -> Attend:
    options = hopper_options(config)
    return lambda q, k, v: flashattn_hopper.hopper_attention(q, k, v, **options)


def sdpa(config: RunConfig) -> Attend:
    grouped = config.heads != config.kv_heads

    def attend(q, k, v):
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped).transpose(1, 2)

    return attend


ATTEND = {"hopper": hopper, "sdpa": sdpa}


def explain(config: RunConfig, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> str:
    """Which kernels run for this batch, and why."""
    if config.attention == "sdpa":
        return "torch.nn.functional.scaled_dot_product_attention (--attention sdpa)"
    return str(flashattn_hopper.explain(q, k, v, **hopper_options(config)))
