"""Who may talk: tokens, kept as digests, that end with their session."""

import secrets
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from hmac import compare_digest

from treadle_gateway.errors import RefusedError

SESSION_HEADER = "x-treadle-session"
"""Names the session where the path does not; the token is the credential all the same."""

ENDED_KEPT = 65536
"""Ended sessions that are remembered, so that their clients are told what happened."""


def new_token() -> str:
    """256 random bits."""
    return secrets.token_urlsafe(32)


def digest_of(token: str) -> bytes:
    """What is kept of a token. It is random, so that no slow hash is needed."""
    return sha256(token.encode("utf-8", "surrogateescape")).digest()


def tokens_of(headers: Mapping[str, str]) -> tuple[str, ...]:
    """The tokens that a request shows: as bearer, as API key, or one of each."""
    shown: list[str] = []
    scheme, _, bearer = headers.get("Authorization", "").partition(" ")
    if scheme.lower() == "bearer" and bearer.strip():
        shown.append(bearer.strip())
    if key := headers.get("x-api-key", "").strip():
        shown.append(key)
    return tuple(shown)


@dataclass(slots=True)
class Register:
    """Digests of the tokens of sessions, open and ended."""

    _by_session: dict[str, bytes] = field(default_factory=dict[str, bytes], init=False)
    _by_digest: dict[bytes, str] = field(default_factory=dict[bytes, str], init=False)
    _ended: OrderedDict[bytes, str] = field(default_factory=OrderedDict[bytes, str], init=False)

    def open(self, session: str, digest: bytes) -> None:
        """Lets the holder of a token into a session."""
        self._by_session[session] = digest
        self._by_digest[digest] = session

    def revoke(self, session: str) -> None:
        """Lets nobody in any more; unknown sessions are ignored."""
        digest = self._by_session.pop(session, None)
        if digest is not None:
            del self._by_digest[digest]
            self._ended[digest] = session
            while len(self._ended) > ENDED_KEPT:
                self._ended.popitem(last=False)

    def session(self, tokens: tuple[str, ...], named: str) -> str:
        """The session that one of `tokens` is for, which is `named` unless that is empty.

        Raises RefusedError: unauthenticated, also for the token of another session than the named
        one; ended where the token was for a session that is over.
        """
        digests = [digest_of(token) for token in tokens]
        if named in self._by_session:
            if any(compare_digest(self._by_session[named], digest) for digest in digests):
                return named
        elif not named:
            for digest in digests:  # looked up by digest: time tells nothing of the token
                if digest in self._by_digest:
                    return self._by_digest[digest]
        over = [self._ended[digest] for digest in digests if digest in self._ended]
        if over and named in ("", *over):
            raise ended()
        raise unauthenticated(shown=bool(tokens))


def ended() -> RefusedError:
    """What the client of a session that is over is told."""
    return RefusedError("ended", "session ended", code="session_ended")


def unauthenticated(*, shown: bool) -> RefusedError:
    """What a stranger is told; the same for a session that does not exist."""
    said = "the token is not one of this session" if shown else "no token: send it as bearer or key"
    return RefusedError("unauthenticated", said, code="invalid_api_key")
