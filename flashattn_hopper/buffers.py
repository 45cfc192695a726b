"""What lies between the FP8 quantizer and the attention kernel: kind and shape of each buffer. Knows no tensors."""

from __future__ import annotations

TILE = 128  # keys that share a scale: the key tile of the FP8 forward
CHUNK, MOST_CHUNKS = 128, 64  # as in kernels/sm90/quantize.py
# As in QuantizeOperands; k_mean and logit_offset are for smooth_k only.
NAMES = ("q8", "k8", "v8", "q_descale", "k_descale", "v_descale", "k_mean", "logit_offset", "workspace")
BYTES = {"qk": 1, "v": 1, "float32": 4}  # of an element of each kind: codes of q and k, codes of v, the rest


def of(q: tuple[int, ...], v: tuple[int, ...], smooth_k: bool) -> dict[str, tuple[str, tuple[int, ...]]]:
    """(kind, shape) of NAMES, in their order, for q (B, Sq, Hq, D) and v (B, Sk, Hk, Dv)."""
    (batch, seqlen_q, heads, headdim), (_, seqlen_k, heads_kv, headdim_v) = q, v
    tiles = -(-seqlen_k // TILE)
    made = {
        "q8": ("qk", (batch, seqlen_q, heads, headdim)),
        "k8": ("qk", (batch, seqlen_k, heads_kv, headdim)),
        "v8": ("v", (batch, heads_kv, headdim_v, tiles * TILE)),
        "q_descale": ("float32", (batch, heads, seqlen_q)),
        "k_descale": ("float32", (batch, heads_kv, tiles)),
        "v_descale": ("float32", (batch, heads_kv, 1)),
    }
    if smooth_k:
        made["k_mean"] = "float32", (batch, heads_kv, headdim)
        made["logit_offset"] = "float32", (batch, heads, seqlen_q)
    chunks = min(-(-seqlen_k // CHUNK), MOST_CHUNKS)
    made["workspace"] = "float32", (workspace_floats(batch * heads_kv, chunks, headdim),)
    return made


def workspace_floats(heads: int, chunks: int, headdim: int) -> int:
    """float32 of the quantizer's workspace, `heads` in all of the batch."""
    return -(-heads * chunks // 4) * 4 + heads * chunks * headdim
