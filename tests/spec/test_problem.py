"""Traits, their slug, and the other half of a problem: no torch, no GPU."""

import itertools

import pytest

from flashattn_hopper.spec.mask import Band, Seqlens
from flashattn_hopper.spec.problem import BWD, DTYPES, FWD, MASKS, PHASES, AttentionProblem, Shape, Traits

SPACE = list(itertools.product(PHASES, DTYPES, ((64, 64), (128, 128), (192, 128)), MASKS, (False, True), (False, True)))


def every_traits():
    for phase, dtype, dims, mask, gqa, deterministic in SPACE:
        yield Traits(phase, dtype, *dims, mask, gqa=gqa, deterministic=deterministic)


def test_slug_round_trip():
    assert all(Traits.parse(traits.slug) == traits for traits in every_traits())


def test_slugs_are_distinct_and_plain():
    slugs = [traits.slug for traits in every_traits()]
    assert len(set(slugs)) == len(slugs) == len(SPACE)
    assert all(slug.replace(".", "").isalnum() for slug in slugs)


def test_slug_spelling():
    assert Traits(FWD, "bf16", 128, 128, "causal", gqa=True).slug == "fwd.bf16.d128.causal.gqa"
    assert Traits(BWD, "fp16", 192, 128, deterministic=True).slug == "bwd.fp16.d192x128.full.deterministic"


@pytest.mark.parametrize(
    "text",
    (
        "",
        "fwd.bf16.d128",
        "fwd.bf16.128.full",
        "fwd.bf16.dx.full",
        "fwd.bf16.d128x128.full",  # one spelling for each variant
        "fwd.bf16.d128.full.gqa.deterministic",
        "fwd.bf16.d128.full.gqa.gqa",
        "fwd.bf16.d128.full.sink",
        "fwd.bf16.d128.full.headdim",  # a field, but no feature
        "fwd.bf16.d128.full.mask",
        "fwd.fp4.d128.full",
        "up.bf16.d128.full",
        "fwd.bf16.d128.sparse",
    ),
)
def test_parse_refuses_what_is_no_slug(text):
    with pytest.raises(ValueError, match="is not a traits slug"):
        Traits.parse(text)


@pytest.mark.parametrize("field,value", (("phase", "up"), ("dtype", "int8"), ("mask", "sparse")))
def test_traits_name_what_is_allowed(field, value):
    with pytest.raises(ValueError, match=f"{field}='{value}': allowed are .*"):
        Traits(**({"phase": FWD, "dtype": "bf16", "headdim": 64, "headdim_v": 64} | {field: value}))


def test_features_are_the_words_after_the_mask():
    for traits in every_traits():
        assert set(traits.slug.split(".")[4:]) == traits.features
        assert ("gqa" in traits.features, "deterministic" in traits.features) == (traits.gqa, traits.deterministic)


def test_shape():
    shape = Shape(2, 5, 7, 4, 2)
    assert shape.seqlens == Seqlens(5, 7) and not shape.empty
    for field in ("batch", "seqlen_q", "seqlen_k", "num_heads_q"):
        arguments = {"batch": 2, "seqlen_q": 5, "seqlen_k": 7, "num_heads_q": 4, "num_heads_kv": 2} | {field: 0}
        assert Shape(**arguments).empty


def test_for_phase_changes_the_phase_alone():
    problem = AttentionProblem(Traits(FWD, "bf16", 64, 64, "causal"), Shape(1, 2, 3, 4, 4), Band(None, 0), 0.125)
    backward = problem.for_phase(BWD)
    assert backward.traits == Traits(BWD, "bf16", 64, 64, "causal")
    assert backward.for_phase(FWD) == problem and hash(backward.for_phase(FWD)) == hash(problem)
