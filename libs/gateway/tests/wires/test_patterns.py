"""Patterns that may take for ever are told from those that only look so."""

import re
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from treadle_gateway.wires.patterns import check_pattern

LABEL = r"[a-zA-Z0-9](?:[a-zA-Z0-9-]{0,61}[a-zA-Z0-9])?"


@pytest.mark.parametrize(
    "pattern",
    [
        "",
        "^abc$",
        r"^\d{4}-\d{2}-\d{2}T\d{2}:\d{2}(?::\d{2}(?:\.\d+)?)?(?:Z|[+-]\d{2}:?\d{2})$",
        r"^[0-9a-f]{8}-[0-9a-f]{4}-[1-8][0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}$",
        rf"^(?:{LABEL}\.)+[a-zA-Z]{{2,}}$",
        r"^(?!\.)(?!.*\.\.)([A-Za-z0-9_'+\-\.]*)[A-Za-z0-9_+-]@([A-Za-z0-9][A-Za-z0-9\-]*\.)+[A-Za-z]{2,}$",
        r"^(?:[A-Za-z0-9+/]{4})*(?:[A-Za-z0-9+/]{2}==|[A-Za-z0-9+/]{3}=)?$",
        r"^(\w+\.)*\w+$",
        r"^[a-z]+(-[a-z]+)*$",
        r"^(/[^/]+)+$",
        r"^(?:(?:25[0-5]|2[0-4]\d|1?\d?\d)(?:\.(?!$)|$)){4}$",
        r"^([0-9a-fA-F]{1,4}:){7}[0-9a-fA-F]{1,4}$",
        r"^(foo|bar|baz)+$",
        r"^\p{L}[\p{L}\p{N}_]*(?:\s\p{L}+)*$",
        r"^(?<year>\d+)(?:[\x20-\x7e]|\u{1F600})*\u00e9$",
        r"^[^\s@]+@[^\s@]+\.[^\s@]+$",
        r"a{2,}b{0,5000}",
        r"^\s*\w+\s*(,\s*\w+\s*)*$",
        r"[]-]\]\}{",
        "(a|b|c|d|e|f|g|h)*z",
    ],
)
def test_an_honest_pattern_passes(pattern: str) -> None:
    assert check_pattern(pattern) == ""


@pytest.mark.parametrize(
    "pattern",
    [
        "(a+)+$",
        "(a*)*b",
        "([a-zA-Z]+)*$",
        "(a|aa)+$",
        "(a|a?)+$",
        "(.*a){11}",
        "^(([a-z])+.)+[A-Z]([a-z])+$",
        r"^([a-zA-Z0-9_.-])+@(([a-zA-Z0-9-])+\.)+([a-zA-Z0-9]{2,4})+$",
        r"^(\d+|\w+)*$",
        r"(\w+\s?)*$",
        r"(x+x+)+y",
        r"(?:a?b?)*c",
        r"(\s*,\s*)*x",
        r"(?=(a+)+$)b",
        r"((a{1,20})*)b",
        r"([^\d]|\D)*x",
        "(?:(?:(?:a+)b?)+)+c",
    ],
)
def test_a_pattern_that_may_take_for_ever_is_refused_at_once(pattern: str) -> None:
    started = time.process_time()
    assert "loop within a loop" in check_pattern(pattern)
    assert time.process_time() - started < 0.5


@pytest.mark.parametrize(
    ("pattern", "words"),
    [
        pytest.param("a" * 1025, "more than 1024", id="long"),
        pytest.param("(a{1000}){1000}", "counts beyond", id="counts-of-counts"),
        pytest.param("a{999999999}", "counts beyond", id="count"),
        pytest.param("(" * 40 + ")" * 40, "groups within each other", id="groups"),
        pytest.param(r"(a)\1", "reference to a group", id="reference"),
        pytest.param("(a", "without an end", id="open-group"),
        pytest.param("a)", "never began", id="closed-group"),
        pytest.param("[a", "ends too early", id="open-set"),
        pytest.param("a\\", "ends too early", id="open-escape"),
        pytest.param("*", "quantifier of nothing", id="nothing-to-repeat"),
        pytest.param("(|()*b)+", "quantifier of nothing", id="an-empty-group"),
        pytest.param("(?#x)", "unknown kind", id="unknown-group"),
        pytest.param("[z-a]", "backwards", id="backwards"),
    ],
)
def test_what_is_no_fit_pattern_is_refused_with_the_reason(pattern: str, words: str) -> None:
    assert words in check_pattern(pattern)


@pytest.mark.parametrize(
    "pattern",
    [
        pytest.param("(" * 30 + "a{1,9}" + "){2}" * 30, id="counts-in-groups"),
        pytest.param("(" * 30 + "a?" + ")?" * 30, id="options-in-groups"),
        pytest.param("(" + "|".join("a" for _ in range(300)) + ")*", id="many-alternatives"),
        pytest.param("(" + "a?" * 300 + ")*", id="many-options"),
        pytest.param("a{0,9}" * 170, id="many-counts"),
        pytest.param("[a-z]*" * 170, id="many-loops"),
        pytest.param("(" + "[a-z]*-" * 140 + ")*", id="many-loops-in-a-loop"),
    ],
)
def test_the_check_itself_is_quick(pattern: str) -> None:
    started = time.process_time()
    check_pattern(pattern)
    assert time.process_time() - started < 2.0


@given(st.text(st.sampled_from(r"ab|()*+?{}[]^$\d-,1 2.:=!<>"), max_size=24))
def test_any_text_is_checked_without_a_fault(pattern: str) -> None:
    assert isinstance(check_pattern(pattern), str)


@given(st.text(st.sampled_from("ab|()*+?."), max_size=9))
def test_a_pattern_that_passes_is_quick_in_a_matcher_that_goes_back(pattern: str) -> None:
    if check_pattern(pattern):
        return
    try:
        matcher = re.compile(f"(?:{pattern})$")
    except (re.error, RecursionError):
        return
    started = time.process_time()
    for text in ("a" * 40 + "!", "ab" * 20 + "!", "b" * 40 + "!"):
        matcher.match(text)
    assert time.process_time() - started < 1.0
