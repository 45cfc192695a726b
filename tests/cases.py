"""The correctness matrix of a kernel, generated from its KernelSpec, and inputs that are hard for its algorithm.

    cases_for(spec)         dtype x headdim x mask in full; all pairs of lengths, heads, windows and the other features
    variants(spec)          every (spec, compiled traits, tile, arch) that the spec promises
    refusals_for(spec)      what it does not declare, and so must refuse
    hard_inputs(...)        rises, spikes and plateaus of the scores that an online softmax can get wrong
    LAYOUTS                 the same values behind other strides

Lengths come from the tile of the row that is tested, so another tile moves the edges that are tested.
"""

from __future__ import annotations

import importlib
import itertools
import zlib
from dataclasses import dataclass, replace

import torch

from flashattn_hopper import _toolchain
from flashattn_hopper.arguments import TORCH_DTYPES
from flashattn_hopper.kernels.sm80 import specs as sm80
from flashattn_hopper.spec.arch import SM90
from flashattn_hopper.spec.kernel import KernelSpec
from flashattn_hopper.spec.problem import DTYPES, Shape, Traits
from flashattn_hopper.spec.tile import ROW_PAD, BwdTile, FwdTile, Sm80BwdTile, Sm80FwdTile, Tile

# Where the GPU tests run and what they ask for.
DEVICE, BACKEND = "cuda", "sm90"

# Beside the compiled headdims: what is padded up to each of them, in one dimension or in both.
PADDED = (*((d, d) for d in (8, 40, 72, 80, 104, 136, 160, 176, 200, 248)), (64, 128), (160, 96), (192, 64))

# The Hopper forward can be cut in more ways than its table uses; these keep every switch of FwdTile tested.
OTHER_TILES = (
    FwdTile(64, 64),
    FwdTile(128, 128),
    FwdTile(192, 64, schedule="dynamic"),
    FwdTile(128, 64, schedule="dynamic", output="v", ping_pong=False),
    FwdTile(128, 112, output="own"),
    FwdTile(128, 80, output="v"),
)


@dataclass(frozen=True)
class Case:
    """One call of hopper_attention and its inputs, `spread` times normal in q. `window` in keys, None is open."""

    traits: Traits  # as asked for, before padding
    shape: Shape
    window: tuple[int | None, int | None] | None = None
    spread: int = 1

    @property
    def id(self) -> str:
        s = self.shape
        edges = "" if self.window is None else "-w" + "_".join("open" if e is None else str(e) for e in self.window)
        heads = f"h{s.num_heads_q}x{s.num_heads_kv}"
        return f"{self.traits.slug}-b{s.batch}-{heads}-q{s.seqlen_q}-k{s.seqlen_k}{edges}-x{self.spread}"

    @property
    def mask(self) -> dict:
        """Keyword arguments of the mask, for hopper_attention and the oracle."""
        return mask_arguments(self.traits.mask, self.window)

    def tensors(self, device=None):
        """q, k, v, contiguous, the same at every call."""
        s, t = self.shape, self.traits
        device = DEVICE if device is None else device
        generator = torch.Generator(device).manual_seed(zlib.crc32(self.id.encode()))
        make = lambda seqlen, heads, headdim: torch.randn(
            s.batch, seqlen, heads, headdim, generator=generator, device=device
        )
        q = make(s.seqlen_q, s.num_heads_q, t.headdim) * self.spread
        k, v = (make(s.seqlen_k, s.num_heads_kv, d) for d in (t.headdim, t.headdim_v))
        return [x.to(TORCH_DTYPES[t.dtype]) for x in (q, k, v)]


def mask_arguments(mask: str, window=None) -> dict:
    return {"full": {}, "causal": {"causal": True}, "window": {"window_size": window}}[mask]


def device_code(*names):
    """Modules of flashattn_hopper.kernels, such as "sm80.copies".

    Trap: the first import of cutlass fixes the target that a process can load kernels for, so it is this GPU's.
    """
    here = sm80.FORWARD.on(torch.cuda.get_device_capability()) if torch.cuda.is_available() else None
    _toolchain.import_cute((here.arch if here else SM90).target)
    return [importlib.import_module(f"flashattn_hopper.kernels.{name}") for name in names]


# The matrix


def variants(spec: KernelSpec):
    """Every distinct variant that `spec` can be asked to compile, each once."""
    found = {}
    for traits in _products(spec, spec.headdims):
        for features in _subsets(spec.features - spec.invariant_to):
            compiled = spec.compiled(replace(traits, **dict.fromkeys(features, True)))
            for row in spec.tiles.rows_for(compiled):
                found[spec, compiled, row.tile, spec.arch] = None
    return list(found)


def other_variants(spec: KernelSpec):
    """OTHER_TILES, each with one of the masks."""
    masks = itertools.cycle(spec.masks)
    return [(spec, Traits(spec.phase, "bf16", 128, 128, next(masks)), tile, spec.arch) for tile in OTHER_TILES]


def variant_id(variant) -> str:
    _, traits, tile, _ = variant
    return f"{traits.slug}-{tile_id(tile)}"


def tile_id(tile: Tile) -> str:
    if isinstance(tile, Sm80BwdTile):
        own = "" if tile.summed else f"-dq{tile.query_m}x{tile.query_n}"
        switches = "-late" * tile.late + "-staggered" * tile.staggered + "-v4" * tile.vector
        step = "" if tile.step is None else f"-step{tile.step}"
        return f"{tile.tile_m}x{tile.tile_n}-w{tile.num_warps}-{tile.split}{step}{own}{switches}"
    if isinstance(tile, Sm80FwdTile):
        return f"{tile.tile_m}x{tile.tile_n}-w{tile.num_warps}-s{tile.num_stages}{'-rq' * tile.q_in_registers}"
    if isinstance(tile, BwdTile):
        own = "-ordered" if tile.ordered else "" if tile.summed else f"-dq{tile.query_n}"
        return f"{tile.tile_m}x{tile.tile_n}{own}{'-late' * tile.late}"
    switches = "-pp" * tile.ping_pong + "-up" * tile.rising
    return f"{tile.tile_m}x{tile.tile_n}-{tile.schedule}-q{tile.q_stages}-{tile.output}{switches}"


def cases_for(spec: KernelSpec) -> list[Case]:
    found = {}
    for traits in _products(spec, dict.fromkeys((*spec.headdims, *PADDED))):
        if spec.padded(traits) is None:
            continue  # too wide: refusals_for has those
        padded = (traits.headdim, traits.headdim_v) not in spec.headdims
        asked = [replace(traits, **dict.fromkeys(words, True)) for words in _subsets(() if padded else spec.features)]
        # Of features that compile to the same code the first stands for all: they are one more factor.
        for compiled, first in {spec.compiled(one): one for one in reversed(asked)}.items():
            for row in spec.tiles.rows_for(compiled):
                for choice in all_pairs(_factors(spec, first, row, few=padded)):
                    found[_case(first, **choice)] = None
    return list(found)


def refusals_for(spec: KernelSpec) -> list[Traits]:
    """One set of traits for everything that `spec` does not declare."""
    base = next(iter(_products(spec, spec.headdims)))
    widest = max(spec.headdims)[0] + spec.multiple
    found = [replace(base, dtype=dtype) for dtype in DTYPES if dtype not in spec.dtypes]
    found += [replace(base, **{word: True}) for word in sorted({"gqa", "deterministic"} - spec.features)]
    found += [replace(base, headdim=d, headdim_v=e) for d, e in ((widest, 64), (64, widest), (12, 64), (64, 4))]
    return found


def _products(spec, headdims):
    for dtype, dims, mask in itertools.product(sorted(spec.dtypes), headdims, spec.masks):
        yield Traits(spec.phase, dtype, *dims, mask)


def _subsets(words):
    words = sorted(words)
    return itertools.chain.from_iterable(itertools.combinations(words, n) for n in range(len(words) + 1))


def _factors(spec, traits, row, few):
    """What is combined in pairs; `few` leaves out most values, for headdims that share a compiled variant."""
    m, n = row.tile.tile_m, row.tile.tile_n
    query_n = None if getattr(row.tile, "summed", True) else row.tile.query_n
    if query_n is not None:
        m = ROW_PAD  # dQ in a kernel of its own has taller tiles, which end where those of m rows end too
    lengths_q = (1, m + 1, 3 * m + 17) if few else (1, m - 1, m, m + 1, 3 * m + 17)
    base = -(-row.min_seqlen // n) * n  # whole tiles that reach the row's bound
    lengths_k = (base + n - 1, base + n + 1, base + 5 * n + 13)
    if not few:
        lengths_k += (max(row.min_seqlen, 1), base + n)
        lengths_k += () if query_n in (None, n) else (query_n, query_n + 1)
    compiled = spec.compiled(traits)
    reaches_row = lambda length: spec.tiles.find(compiled, length) == row.tile
    same_code = lambda on: (
        not (on and "deterministic" not in spec.features)
        and compiled == spec.compiled(replace(traits, deterministic=on))
    )
    # Beside the diagonal, narrower and wider than a tile, open on one side, wider than any sequence.
    windows = ((0, 0), (n // 2, 0), (n + 7, n // 2), (None, 9), (2 * n + m, None), (3, 2**40))
    return {
        "seqlen_q": lengths_q,
        "seqlen_k": tuple(filter(reaches_row, lengths_k)),
        "heads": ((3, 3), (4, 2), (7, 1), (12, 4))[few:] if "gqa" in spec.features else ((1, 1), (3, 3)),
        "window": (windows[2:4] if few else windows) if traits.mask == "window" else (None,),
        "deterministic": tuple(on for on in (False, True) if not few and same_code(on)) or (traits.deterministic,),
        "batch": (2,) if few else (1, 3),
        "spread": (1, 8),
    }


def _case(traits, seqlen_q, seqlen_k, heads, window, deterministic, batch, spread):
    traits = replace(traits, gqa=heads[0] != heads[1], deterministic=deterministic)
    return Case(traits, Shape(batch, seqlen_q, seqlen_k, *heads), window, spread)


def all_pairs(factors: dict[str, tuple]) -> list[dict]:
    """Choices of one value per factor in which every two values of different factors meet at least once.

    Starts from the product of the two largest factors; each further factor takes, row by row, the value that meets most
    that it has not met yet, and gets rows of its own for what is left.
    """
    names = sorted(factors, key=lambda name: -len(factors[name]))
    rows = [dict(zip(names[:2], pair)) for pair in itertools.product(*(factors[name] for name in names[:2]))]
    for i, name in enumerate(names[2:], 2):
        # other factor, its value -> values of this factor that it still has to meet
        missing = {(other, x): list(factors[name]) for other in names[:i] for x in factors[other]}

        def take(row, value, name=name, missing=missing):
            row[name] = value
            for pair in row.items():
                if value in missing.get(pair, ()):
                    missing[pair].remove(value)

        for turn, row in enumerate(rows):
            # On a tie the values take turns.
            order = factors[name][turn % len(factors[name]) :] + factors[name][: turn % len(factors[name])]
            take(row, max(order, key=lambda y: sum(y in missing[pair] for pair in row.items())))
        while left := next(((pair, values[0]) for pair, values in missing.items() if values), None):
            (other, x), value = left
            row = {n: factors[n][len(rows) % len(factors[n])] for n in names[:i]} | {other: x}
            take(row, value)
            rows.append(row)
    return rows


# Memory layouts


def _inside(x, shape, index):
    """A copy of x inside a larger tensor of NaN."""
    view = x.new_full(shape, float("nan"))[index]
    return view.copy_(x)


def _misaligned(x):
    return x.new_full((x.numel() + 1,), float("nan"))[1:].view(x.shape).copy_(x)


def _stray_strides(x):
    """Strides that mean nothing, where the extent is 1, are odd ones."""
    return x.as_strided(x.shape, [step if n > 1 else 7 for n, step in zip(x.shape, x.stride())])


LAYOUTS = {
    "contiguous": lambda x: x,
    "heads_first": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "sequence_first": lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
    "packed": lambda x: _inside(x, (*x.shape[:2], 3, *x.shape[2:]), (slice(None), slice(None), 1)),
    "packed_rows": lambda x: _inside(x, (*x.shape[:3], 3 * x.shape[3]), (..., slice(x.shape[3], 2 * x.shape[3]))),
    "padded": lambda x: _inside(x, (*x.shape[:3], x.shape[3] + 8), (..., slice(x.shape[3]))),
    "odd": lambda x: _inside(x, (*x.shape[:3], x.shape[3] + 1), (..., slice(x.shape[3]))),
    "every_other": lambda x: _inside(x, (*x.shape[:3], 2 * x.shape[3]), (..., slice(None, None, 2))),
    "misaligned": _misaligned,
    "stray_strides": _stray_strides,
}


# Hard inputs


def hard_profiles(seqlen: int, tile_n: int) -> dict[str, torch.Tensor]:
    """Scores in nats along the keys, by name: float64 (seqlen,).

    88 nats are 2**127: a rise of more within one tile leaves the float range of a softmax that does not look at the
    tile's maximum first. 10 and 28 nats are where an optimistic FP16 and BF16 tile moves its bias.
    """
    j = torch.arange(seqlen, dtype=torch.float64)
    found = {}
    for step, width in ((12, 32), (20, tile_n), (48, tile_n), (100, 16), (100, tile_n // 2), (130, tile_n)):
        stairs = step * (j // width)
        found[f"stairs {step}/{width} rising right"] = stairs
        found[f"stairs {step}/{width} rising left"] = stairs.flip(0)
    for at in (0, tile_n + 5, 2 * tile_n, seqlen - 1):
        found[f"spike at {at}"] = torch.where(j == at, 200.0, 0.0)
    tiles_from_right = (seqlen - 1 - j) // tile_n
    found["one spike a tile, rising left"] = torch.where(j % tile_n == 7, 150.0 * tiles_from_right, 0.0)
    found["saw"] = 30.0 * (j % 37) / 37
    found["steep saw"] = 150.0 * (j % 3)
    found["alternating"] = 1000.0 * (j % 2)
    tails = torch.distributions.Cauchy(0.0, 8.0).icdf((0.5 + 97 * j) % seqlen / seqlen * 0.998 + 0.001)
    found["heavy tails"] = tails.clamp(-3000, 3000)
    for level in (0.0, 128.0, 2e4):
        found[f"equal {level:g}"] = torch.full_like(j, level)
    return found


def hard_inputs(traits: Traits, tile: Tile, device=None):
    """(q, k, v, names): a batch entry for each profile, and its negative as second head; Sq and Sk a few tiles long.

    Every element of q and k is a small integer, so a score is exact in float32 in whatever order it is summed, and an
    error is the softmax's. Noise of about 2 nats lies over each profile, except over equal scores.
    """
    device = DEVICE if device is None else device
    seqlen = 5 * tile.tile_n + 13
    profiles = hard_profiles(seqlen, tile.tile_n)
    generator = torch.Generator().manual_seed(1)
    integers = lambda *shape: torch.randint(-2, 3, shape, generator=generator).double()
    q = integers(len(profiles), seqlen, 2, traits.headdim)
    k = integers(len(profiles), seqlen, 1, traits.headdim)
    v = torch.randn(len(profiles), seqlen, 1, traits.headdim_v, generator=generator)
    q[:, :, 0, 0], q[:, :, 1, 0] = 32, -32
    for entry, (name, nats) in zip(k, profiles.items()):
        if name.startswith("equal"):
            entry.zero_()
        entry[:, 0, 0] = (nats * traits.headdim**0.5 / 32).round()
    return *(x.to(device, TORCH_DTYPES[traits.dtype]) for x in (q, k, v)), list(profiles)
