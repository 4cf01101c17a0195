"""Whatever bytes come, the answer is an object or a refusal."""

import contextlib
import json
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from treadle_gateway.errors import RefusedError
from treadle_gateway.wires.body import MAX_DEPTH, parsed

REFUSED = {
    "expected JSON, got nothing": {"empty": b"", "only-spaces": b" \n\t "},
    "expected JSON": {
        "cut-off": b"{",
        "more-behind-it": b'{"a": 1} x',
        "endless-integer": b'{"a": ' + b"9" * 5000 + b"}",
        "byte-order-mark": b"\xef\xbb\xbf{}",
        "raw-nul": b'{"a": "\x00"}',
    },
    "expected an object, got an array": {"array-at-the-root": b"[]"},
    "expected an object, got a bare value": {"text-at-the-root": b'"text"'},
    "expected an object": {"null-at-the-root": b"null"},
    "got NaN": {"nan": b'{"a": NaN}'},
    "got -Infinity": {"infinity": b'{"a": -Infinity}'},
    "expected finite numbers": {"number-too-large": b'{"a": 1e999}'},
    "'n' twice": {"name-twice": b'{"n": 1, "n": 2}'},
    "'b' twice": {"name-twice-below": b'{"a": [{"b": 1, "b": 1}]}'},
    "a depth of at most 64": {
        "deep": b'{"a":' + b"[" * 65 + b"]" * 65 + b"}",
        "bottomless": b'{"a":' * 100_000,
    },
    "expected UTF-8, got byte 0xff": {"not-utf-8": b'{"a": "\xff"}'},
    "expected UTF-8": {
        "surrogate-in-utf-8": b'{"a": "\xed\xa0\x80"}',
        "utf-16": b"\xff\xfe{\x00}\x00",
    },
    "a.1: expected text without NUL": {"nul": rb'{"a": ["x", "\u0000"]}'},
    "a.b: expected text": {"half-a-pair": rb'{"a": {"b": "\ud800"}}'},
    "expected text": {"half-a-pair-in-a-name": rb'{"\udc00": 1}'},
}
"""Bodies by the words with which they are refused."""


@pytest.mark.parametrize(
    ("body", "words"),
    [
        pytest.param(body, words, id=name)
        for words, bodies in REFUSED.items()
        for name, body in bodies.items()
    ],
)
def test_what_is_no_request_is_refused(body: bytes, words: str) -> None:
    with pytest.raises(RefusedError) as refused:
        parsed(body)
    assert refused.value.kind == "invalid"
    assert words in refused.value.message


def test_odd_but_whole_text_is_kept_as_it_is() -> None:
    said = {"a": "<|im_end|> \u202e \ufeff e\u0301 \U0001f600", "b": "\\u0000 \\ud800"}
    assert parsed(json.dumps(said).encode()) == said
    assert parsed(json.dumps(said, ensure_ascii=False).encode()) == said


def test_the_deepest_body_that_is_allowed_is_read() -> None:
    inner = MAX_DEPTH - 1
    assert parsed(b'{"a":' + b"[" * inner + b"]" * inner + b"}")


def test_what_the_policy_said_to_a_tool_may_come_back_as_the_client_understood_it() -> None:
    block = rb'{"type": "tool_use", "input": {"data": "\u0000 \ud800"}}'
    assert parsed(b'{"content": [' + block + b"]}")
    with pytest.raises(RefusedError):
        parsed(rb'{"content": [{"type": "text", "input": "\u0000"}]}')


def test_a_body_over_the_limit_is_too_large() -> None:
    with pytest.raises(RefusedError) as refused:
        parsed(b'{"a": "' + b"x" * 100 + b'"}', max_bytes=100)
    assert refused.value.kind == "too_large"


def test_a_body_of_countless_values_is_refused_before_it_is_read() -> None:
    body = b'{"a": [' + b"[]," * 600_000 + b"[]]}"
    started = time.process_time()
    with pytest.raises(RefusedError) as refused:
        parsed(body)
    assert refused.value.kind == "too_large"
    assert time.process_time() - started < 2.0


def test_commas_in_a_long_text_are_no_values() -> None:
    said = {"a": ',[{"\\' * 400_000}
    assert parsed(json.dumps(said).encode()) == said


def test_an_endless_string_is_counted_in_one_pass() -> None:
    started = time.process_time()
    with pytest.raises(RefusedError):
        parsed(b'{"a": "' + rb"\"," * 1_100_000)
    assert time.process_time() - started < 3.0


@given(st.binary(max_size=200))
def test_no_bytes_do_more_than_be_refused(body: bytes) -> None:
    with contextlib.suppress(RefusedError):
        assert isinstance(parsed(body), dict)


_TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=8)
_JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | _TEXT,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(_TEXT, inner, max_size=4),
    max_leaves=20,
)


@settings(max_examples=20)
@given(st.dictionaries(_TEXT, _JSON, max_size=4))
def test_every_object_is_read_as_json_states_it(said: dict[str, object]) -> None:
    assert parsed(json.dumps(said).encode()) == said
