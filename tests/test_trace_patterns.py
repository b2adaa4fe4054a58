"""Names become patterns that cover exactly the names they claim."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diagkit.trace.patterns import Pattern, compress, expand

ATTENTION = [f"model.layers.{i}.self_attn.{p}_proj.weight" for i in range(28) for p in "qkvo"]
MLP = [f"model.layers.{i}.mlp.{p}_proj.weight" for i in range(28) for p in ("gate", "up", "down")]
NORMS = [f"model.layers.{i}.{p}_layernorm.weight" for i in range(28) for p in ("input", "post_attention")]

CASES = [
    ("one name", ["lm_head.weight"], ["lm_head.weight"]),
    ("projections of all layers", ATTENTION, ["model.layers.{0..27}.self_attn.{q,k,v,o}_proj.weight ×112"]),
    ("words before a shared word", NORMS, ["model.layers.{0..27}.{input,post_attention}_layernorm.weight ×56"]),
    (
        "a whole decoder",
        ["model.embed_tokens.weight", *ATTENTION, *MLP, *NORMS, "model.norm.weight", "lm_head.weight"],
        [
            "model.embed_tokens.weight",
            "model.layers.{0..27}.self_attn.{q,k,v,o}_proj.weight ×112",
            "model.layers.{0..27}.mlp.{gate,up,down}_proj.weight ×84",
            "model.layers.{0..27}.{input,post_attention}_layernorm.weight ×56",
            "model.norm.weight",
            "lm_head.weight",
        ],
    ),
    ("a hole in the numbers", ["l.0.w", "l.1.w", "l.2.w", "l.5.w"], ["l.{0..2,5}.w ×4"]),
    ("two neighbours stay two numbers", ["l.0.w", "l.1.w"], ["l.{0,1}.w ×2"]),
    ("numbers in any order", ["l.2.w", "l.0.w", "l.1.w"], ["l.{0..2}.w ×3"]),
    ("one layer lacks a projection", ["l.0.q_p", "l.0.k_p", "l.1.q_p"], ["l.{0,1}.q_p ×2", "l.0.k_p"]),
    (
        "biases of some projections only",
        [f"l.{i}.{p}_proj.{w}" for w, ps in (("weight", "qko"), ("bias", "qk")) for i in range(3) for p in ps],
        ["l.{0..2}.{q,k,o}_proj.weight ×9", "l.{0..2}.{q,k}_proj.bias ×6"],
    ),
    ("weight and bias", ["norm.weight", "norm.bias"], ["norm.{weight,bias} ×2"]),
    ("strangers are not joined", ["m.embed_tokens.w", "m.norm.w"], ["m.embed_tokens.w", "m.norm.w"]),
    ("a word alone and the same word after another", ["a.norm.w", "a.q_norm.w"], ["a.norm.w", "a.q_norm.w"]),
    ("low-rank adapters", ["q.lora_A.w", "q.lora_B.w"], ["q.lora_{A,B}.w ×2"]),
    ("numbers at the end of a word", [f"net.conv{i}.w" for i in range(1, 5)], ["net.conv{1..4}.w ×4"]),
    ("a number is no family", ["net.conv1.w", "net.bn1.w"], ["net.conv1.w", "net.bn1.w"]),
    ("experts in layers", [f"l.{i}.e.{e}.w" for i in range(3) for e in range(8)], ["l.{0..2}.e.{0..7}.w ×24"]),
    ("uneven experts", ["l.0.e.0.w", "l.1.e.0.w", "l.1.e.1.w"], ["l.{0,1}.e.0.w ×2", "l.1.e.1.w"]),
    ("leading zeros are no numbers", ["l.00.w", "l.01.w", "l.02.w"], ["l.00.w", "l.01.w", "l.02.w"]),
    ("a tie that is listed twice counts once", ["emb.w", "head.w", "emb.w"], ["emb.w", "head.w"]),
    ("a module of unequal depth", ["a.0", "a.1", "a.0.w"], ["a.{0,1} ×2", "a.0.w"]),
    ("braces and commas in a name", ["a{0..2}", "b,c", "d\\e"], ["a\\{0..2\\}", "b\\,c", "d\\\\e"]),
    ("no name at all", [], []),
    ("an empty name", [""], [""]),
]  # fmt: skip


@pytest.mark.parametrize(("names", "expected"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])
def test_names_become_these_patterns(names: list[str], expected: list[str]) -> None:
    assert [str(pattern) for pattern in compress(names)] == expected


@pytest.mark.parametrize("names", [case[1] for case in CASES], ids=[case[0] for case in CASES])
def test_patterns_cover_the_names_and_no_other(names: list[str]) -> None:
    check_exact(names)


MODEL_LIKE = ["0", "1", "2", "10", "01", "q_proj", "k_proj", "_proj", "proj", "weight", "bias", "conv1", "bn1"]
HOSTILE = ["a{b", "}", ",", "\\", "", "\x001", "ä_x"]
SEGMENT = st.sampled_from([*MODEL_LIKE, *HOSTILE])


@given(st.lists(st.lists(SEGMENT, min_size=1, max_size=4).map(".".join), max_size=40))
def test_no_set_of_names_is_covered_too_much_or_too_little(names: list[str]) -> None:
    check_exact(names)


@given(st.lists(st.text(alphabet="a1_.{},\\\0é", max_size=8), max_size=12))
def test_nor_any_hostile_text(names: list[str]) -> None:
    check_exact(names)


def test_a_name_of_absurd_depth_stays_as_it_is() -> None:
    deep = ".".join(["0"] * 10_000)
    assert compress([deep, "a.0", "a.1"]) == [Pattern(deep, (deep,)), Pattern("a.{0,1}", ("a.0", "a.1"))]


def test_an_open_brace_is_an_error() -> None:
    with pytest.raises(ValueError, match="not closed"):
        list(expand("a.{0,1"))


def test_a_huge_range_is_not_written_out_before_it_is_asked_for() -> None:
    names = expand("l.{0..999999999999}.w")
    assert [next(names), next(names)] == ["l.0.w", "l.1.w"]


@pytest.mark.alone
def test_ten_thousand_names_take_less_than_a_second() -> None:
    one = "model.layers.{}.mlp.experts.{}.{}_proj.weight"
    names = [one.format(i, e, p) for i in range(26) for e in range(128) for p in ("gate", "up", "down")]
    started = time.perf_counter()
    (pattern,) = compress(names)
    assert time.perf_counter() - started < 1.0
    assert str(pattern) == "model.layers.{0..25}.mlp.experts.{0..127}.{gate,up,down}_proj.weight ×9984"


def check_exact(names: list[str]) -> None:
    patterns = compress(names)
    covered = [name for pattern in patterns for name in pattern.names]
    assert sorted(covered) == sorted(set(names))  # every name once, under one pattern
    for pattern in patterns:
        assert sorted(expand(pattern.text)) == sorted(pattern.names)
