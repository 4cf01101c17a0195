"""Calls as JSON, read while they are written: every piece of the text once, as it was said."""

import json
from random import Random

import pytest

from treadle_gateway.markup.readers.block import Argued, Ended, Named
from treadle_gateway.markup.readers.json_calls import JsonCalls

SCRAPS = ["a", '"', "\\", "{", "}", "[", "]", ",", ":", " ", "\n", "é", "🙂", "null", "\u2028"]


def value(random: Random, depth: int):
    """Any JSON value."""
    kind = random.randrange(6 if depth else 4)
    if kind == 0:
        return random.choice([0, -1.5, 10**20, True, False, None])
    if kind < 4:
        return "".join(random.choices(SCRAPS, k=random.randrange(8)))
    if kind == 4:
        return [value(random, depth - 1) for _ in range(random.randrange(4))]
    return {f"{n}{random.choice(SCRAPS)}": value(random, depth - 1) for n in range(3)}


def read(block: JsonCalls, pieces) -> list[tuple[str, str]]:
    """Names and arguments of the calls; each is named, argued and ended."""
    steps = [step for piece in pieces for step in block.feed(piece)] + block.end()
    calls: list[tuple[str, str]] = []
    open_call = False
    for step in steps:
        match step:
            case Named(name):
                assert not open_call
                calls.append((name, ""))
                open_call = True
            case Argued(text):
                assert open_call
                calls[-1] = (calls[-1][0], calls[-1][1] + text)
            case Ended():
                assert open_call
                open_call = False
    assert not open_call
    return calls


def split(random: Random, text: str) -> list[str]:
    cuts = sorted(random.choices(range(len(text) + 1), k=random.randrange(12)))
    return [text[one:two] for one, two in zip([0, *cuts], [*cuts, len(text)], strict=True)]


def said(random: Random, name: str) -> tuple[str, str, bool]:
    """A call as a policy may say it, its arguments, and whether those are JSON text in JSON."""
    given = value(random, 3)
    indent, escape = random.choice((None, 1)), random.choice((True, False))
    raw = json.dumps(given, indent=indent, ensure_ascii=escape)
    if random.random() < 0.2:
        arguments = given if isinstance(given, str) else raw
        return f'{{"arguments": {raw}, "name": "{name}"}}', arguments, isinstance(given, str)
    more = random.choice(("", ', "id": "x}"', "\n" if isinstance(given, dict) else ""))
    return f'{{ "name" : "{name}", "parameters":{raw}{more}}}', raw, isinstance(given, str)


@pytest.mark.parametrize("seed", range(10))
def test_arguments_are_told_as_they_were_said_wherever_the_pieces_fall(seed: int) -> None:
    random = Random(seed)  # noqa: S311
    for _ in range(40):
        calls = [said(random, f"n{number}") for number in range(random.randrange(1, 4))]
        around, between = random.choice((("", "\n"), ("[]", ", "), ("", "; "), ("\n\n", "")))
        text = between.join(call[0] for call in calls).join(around or ("", ""))
        expected = [(f"n{number}", call[1]) for number, call in enumerate(calls)]

        assert read(JsonCalls(), split(random, text)) == expected
        if not any(call[2] for call in calls):
            assert read(JsonCalls(whole=True), split(random, text)) == expected


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        pytest.param('{"name": "f"}', [("f", "{}")], id="no-arguments"),
        pytest.param('{"name": "f", "arguments": ', [("f", "")], id="cut-before-the-arguments"),
        pytest.param('{"name": "f", "arguments": {"a', [("f", '{"a')], id="cut-within"),
        pytest.param('{"name": "f", "arguments": {"a": "\\', [("f", '{"a": "\\')], id="escape"),
        pytest.param('{"name": "f", "other": {"a": 1', [("f", ', "other": {"a": 1')], id="other"),
        pytest.param(
            '{"type": "function", "function": {"name": "f", "arguments": {"a": 1}}}',
            [("f", '{"a": 1}')],
            id="wrapped",
        ),
        pytest.param('{"function": "f", "parameters": {}}', [("f", "{}")], id="named-otherwise"),
        pytest.param('{"name": 3, "arguments": {}}', [], id="a-name-that-is-none"),
        pytest.param('["f"]', [], id="no-object"),
        pytest.param("f()", [], id="no-json"),
        pytest.param("", [], id="nothing"),
    ],
)
def test_what_is_odd_or_cut_off_is_kept_as_far_as_it_names_a_call(text: str, calls) -> None:
    assert read(JsonCalls(), text) == calls
