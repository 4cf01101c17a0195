import pytest

from treadle_gateway.access import Register, digest_of, new_token, tokens_of
from treadle_gateway.errors import RefusedError
from treadle_gateway.terms import Access


def register(**sessions: str) -> Register:
    made = Register()
    for session, token in sessions.items():
        made.open(session, digest_of(token))
    return made


@pytest.mark.parametrize(
    ("headers", "tokens"),
    [
        ({}, ()),
        ({"Authorization": "Bearer a"}, ("a",)),
        ({"Authorization": "bearer  a "}, ("a",)),
        ({"x-api-key": " a "}, ("a",)),
        ({"Authorization": "Bearer a", "x-api-key": "b"}, ("a", "b")),
        ({"Authorization": "Basic a"}, ()),
        ({"Authorization": "a", "x-api-key": ""}, ()),
    ],
)
def test_a_token_is_a_bearer_or_a_key(headers: dict[str, str], tokens: tuple[str, ...]) -> None:
    assert tokens_of(headers) == tokens


def test_tokens_are_long_and_never_the_same() -> None:
    tokens = {new_token() for _ in range(100)}
    assert len(tokens) == 100
    assert min(map(len, tokens)) >= 43  # 256 bits in base64


def test_a_token_opens_its_session_with_and_without_its_name() -> None:
    made = register(one="a", two="b")
    assert made.session(("a",), "one") == made.session(("x", "a"), "") == "one"
    assert made.session(("b",), "") == "two"


@pytest.mark.parametrize(
    ("tokens", "named", "kind"),
    [
        ((), "one", "unauthenticated"),
        ((), "", "unauthenticated"),
        (("b",), "one", "unauthenticated"),
        (("a",), "three", "unauthenticated"),
        (("c",), "", "ended"),
        (("c",), "three", "ended"),
        (("c",), "one", "unauthenticated"),
        (("x",), "three", "unauthenticated"),
    ],
)
def test_who_has_no_token_of_an_open_session_is_let_into_none(
    tokens: tuple[str, ...], named: str, kind: str
) -> None:
    made = register(one="a", two="b", three="c")
    made.revoke("three")
    with pytest.raises(RefusedError) as refused:
        made.session(tokens, named)
    assert refused.value.kind == kind


def test_nothing_that_is_kept_holds_a_token() -> None:
    token = new_token()
    made = register(one=token)
    assert token not in repr(made)
    made.revoke("one")
    assert token not in repr(made)
    assert token not in repr(Access("one", token, {}))
