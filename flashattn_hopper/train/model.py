"""A small pre-norm GPT over bytes: RMSNorm, rotary positions, grouped KV heads, SwiGLU, tied embeddings."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from .data import VOCAB

ROTARY_BASE = 10000.0
INIT_STD = 0.02

# (q, k, v) -> out: causal self-attention over (B, S, H, D); k and v may have fewer heads.
Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class GPTConfig:
    """Sizes of the model; `heads` are query heads."""

    layers: int
    dim: int
    heads: int
    kv_heads: int
    seqlen: int

    def __post_init__(self):
        for name in ("layers", "dim", "heads", "kv_heads", "seqlen"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: at least 1")
        if self.dim % self.heads or self.headdim % 2:
            raise ValueError(
                f"dim={self.dim}, heads={self.heads}: dim / heads must be an even integer (rotary positions)"
            )
        if self.heads % self.kv_heads:
            raise ValueError(f"heads={self.heads}, kv_heads={self.kv_heads}: heads must be a multiple of kv_heads")

    @property
    def headdim(self) -> int:
        return self.dim // self.heads

    @property
    def hidden(self) -> int:
        """Width of SwiGLU's hidden layer: 8/3 of dim (as many weights as a plain 4x layer), in multiples of 32."""
        return -(-8 * self.dim // (3 * 32)) * 32


class RMSNorm(nn.Module):
    def __init__(self, dim: int):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x):
        return F.rms_norm(x, self.weight.shape, self.weight)


def rotary_table(seqlen: int, headdim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin of every position's angles, float32 `(seqlen, 1, headdim / 2)`. Source: RoFormer, eq. 34."""
    frequency = ROTARY_BASE ** (-torch.arange(0, headdim, 2, dtype=torch.float64) / headdim)
    angle = torch.arange(seqlen, dtype=torch.float64)[:, None, None] * frequency
    return angle.cos().float(), angle.sin().float()


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate the pairs `(i, i + D/2)` of `(B, S, H, D)`; computed in float32, returned in x's dtype."""
    a, b = x.float().chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1).to(x.dtype)


class Core(nn.Module):
    """The attention call alone, as a module: where hooks capture q, k, v and the output's gradient."""

    def __init__(self, attend: Attend):
        super().__init__()
        self.attend = attend

    def forward(self, q, k, v):
        return self.attend(q, k, v)


class Attention(nn.Module):
    def __init__(self, config: GPTConfig, attend: Attend):
        super().__init__()
        self.split = (config.heads, config.kv_heads, config.kv_heads)
        self.headdim = config.headdim
        self.qkv = nn.Linear(config.dim, sum(self.split) * config.headdim, bias=False)
        self.out = nn.Linear(config.dim, config.dim, bias=False)
        self.core = Core(attend)

    def forward(self, x, cos, sin):
        q, k, v = self.qkv(x).unflatten(-1, (-1, self.headdim)).split(self.split, dim=-2)
        return self.out(self.core(rotate(q, cos, sin), rotate(k, cos, sin), v).flatten(-2))


class SwiGLU(nn.Module):
    def __init__(self, config: GPTConfig):
        super().__init__()
        self.up = nn.Linear(config.dim, 2 * config.hidden, bias=False)
        self.out = nn.Linear(config.hidden, config.dim, bias=False)

    def forward(self, x):
        gate, value = self.up(x).chunk(2, dim=-1)
        return self.out(F.silu(gate) * value)


class Block(nn.Module):
    def __init__(self, config: GPTConfig, attend: Attend):
        super().__init__()
        self.norm_attention, self.attention = RMSNorm(config.dim), Attention(config, attend)
        self.norm_mlp, self.mlp = RMSNorm(config.dim), SwiGLU(config)

    def forward(self, x, cos, sin):
        x = x + self.attention(self.norm_attention(x), cos, sin)
        return x + self.mlp(self.norm_mlp(x))


class GPT(nn.Module):
    """`(B, S)` bytes in, `(B, S, 256)` logits out. `attend` is the attention of every layer."""

    def __init__(self, config: GPTConfig, attend: Attend):
        super().__init__()
        self.config = config
        self.embed = nn.Embedding(VOCAB, config.dim)
        self.blocks = nn.ModuleList(Block(config, attend) for _ in range(config.layers))
        self.norm = RMSNorm(config.dim)
        cos, sin = rotary_table(config.seqlen, config.headdim)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)
        self._init_weights()

    def _init_weights(self):
        for name, weight in self.named_parameters():
            if weight.dim() == 2:
                # Why: two branches per block add to the residual stream; its variance should not grow with depth.
                residual = name.endswith("out.weight")
                nn.init.normal_(weight, std=INIT_STD / (2 * self.config.layers) ** 0.5 if residual else INIT_STD)

    def forward(self, tokens):
        seqlen = tokens.shape[1]
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x, self.cos[:seqlen], self.sin[:seqlen])
        return F.linear(self.norm(x), self.embed.weight)

    def loss(self, tokens):
        """Mean cross entropy in nats per byte of windows `(B, S + 1)`."""
        return F.cross_entropy(self(tokens[:, :-1]).flatten(0, 1).float(), tokens[:, 1:].flatten())
