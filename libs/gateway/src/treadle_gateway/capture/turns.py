"""A turn: what one request asked of the policy, and what it sampled.

Shapes: P = tokens of a whole prompt, N = tokens sampled in one turn.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from treadle_agents.record import Generated
from treadle_core.episodes import MAX_LOGPROB
from treadle_core.errors import InvalidFieldError
from treadle_core.media import MediumSpan
from treadle_core.tickets import Sampling
from treadle_gateway.capture.labels import Path
from treadle_gateway.conversation import Finish, Message, Reply, Usage

State: TypeAlias = Literal["running", "finished", "delivered", "cut"]
"""Finished: fully generated, and perhaps never seen by its client. Delivered: it is an action."""

UNFINISHED, UNDELIVERED, EMPTY, GREEDY = "unfinished", "undelivered", "empty", "greedy"
OTHER_LABEL = "other_label"
"""Why a turn is not trained, beside the causes that its caller names."""


@dataclass(slots=True, eq=False)
class Turn:
    """One prompt and what was sampled behind it. Its tokens go on from those of `base`."""

    base: "Turn | None"
    new_ids: NDArray[np.int32]
    """Tokens of the prompt behind those of `base`."""
    sampling: Sampling
    depth: int
    """Messages of its conversation, the reply counted."""
    head: bytes
    """Key of what stands before the messages."""
    wanted: bytes
    """Key of how the reply is wanted."""
    number: int
    """Place among the turns of the session, from 0."""
    path: Path
    began: float
    """Seconds, on the caller's clock."""
    cause: str
    """Why it is not trained; empty where nothing speaks against it."""
    told: "Callable[[Turn, Message], None]"
    """Called with what was said, so that it is found in later requests."""
    media: tuple[MediumSpan, ...] = ()
    """Where images are in `new_ids`."""
    state: State = field(default="running", init=False)
    reply: Reply | None = field(default=None, init=False)
    """For whoever asks again; None before it is made, and once it is delivered."""
    said: Message | None = field(default=None, init=False)
    """The message of the reply; of a turn that was cut, what its caller knows of it."""
    closed: bool = field(default=False, init=False)
    """A stop token was sampled last."""
    open: bool = field(default=False, init=False)
    """Only room was lacking in the middle of its words: it may be gone on with token by token."""
    _onward: "Turn | None" = field(default=None, init=False)
    prompt_tokens: int = field(init=False)
    """P."""
    tokens: int = field(init=False)
    """Of prompt and reply together, so far."""
    _pieces: list[Generated] = field(default_factory=list[Generated], init=False)

    def __post_init__(self) -> None:
        """Counts the prompt."""
        self.prompt_tokens = self.tokens = self.cached + self.new_ids.size

    @property
    def label(self) -> str:
        """What kind of conversation it belongs to: `main`, `subagent`, `compaction`, ..."""
        return self.path.label

    @property
    def cached(self) -> int:
        """Tokens of the prompt that stand since an earlier turn."""
        return self.base.tokens if self.base else 0

    @property
    def added(self) -> list[NDArray[np.int32]]:
        """Its own tokens: those of the prompt, then those sampled."""
        return [self.new_ids, *(piece.token_ids for piece in self._pieces)]

    @property
    def prompt_ids(self) -> NDArray[np.int32]:
        """The whole prompt, [P]."""
        return self.prompt_from(0)

    def prompt_from(self, start: int) -> NDArray[np.int32]:
        """The prompt behind its first `start` tokens, [P - start]; takes time as that is long."""
        size = self.prompt_tokens - start
        parts, missing, turn = [self.new_ids], size - self.new_ids.size, self.base
        while turn and missing > 0:
            parts += turn.added[::-1]
            missing -= turn.tokens - turn.cached
            turn = turn.base
        ids = np.concatenate(parts[::-1])
        return ids[ids.size - size :]

    @property
    def prompt_media(self) -> tuple[MediumSpan, ...]:
        """Where images are in the prompt."""
        spans: list[MediumSpan] = []
        turn: Turn | None = self
        while turn:
            if turn.media:
                spans += moved(turn.media, turn.cached)[::-1]
            turn = turn.base
        return tuple(spans[::-1])

    def stands(self, before: "Turn | None") -> int:
        """Leading tokens of the prompt that are known to be those of the prompt of `before`."""
        if before is not None and before is self.base:
            return before.prompt_tokens
        return self.cached if before is not None and before.base is self.base else 0

    @property
    def sampled(self) -> Generated | None:
        """All that was sampled so far, [N]; None for nothing. Raises InvalidFieldError."""
        if self.state == "running" and self._pieces:
            return _joined(self._pieces)
        return self._pieces[0] if self._pieces else None

    @property
    def taken(self) -> bool:
        """Its own path goes on from its reply, to something that a client may know of."""
        return self._onward is not None and self._onward.state in ("running", "delivered")

    @property
    def untrained(self) -> str:
        """Why it is not trained; empty where it is."""
        if self.state == "running":
            return UNFINISHED
        if self.state == "finished":
            return self.cause or UNDELIVERED
        if not self._pieces:
            return self.cause or EMPTY
        if self.cause or not self.path.trained:
            return self.cause or OTHER_LABEL
        return GREEDY if self.sampling.temperature == 0 else ""

    def followed(self, turn: "Turn") -> None:
        """The conversation goes on from its reply with `turn`."""
        if turn.path is self.path and not self.taken:
            self._onward = turn

    def forget(self) -> None:
        """Nobody asks any more what went on from it."""
        self._onward = None

    def heard(self, piece: Generated) -> None:
        """Takes more of what the policy samples."""
        self._expect("running")
        if piece.token_ids.size:
            self._pieces.append(piece)
            self.tokens += piece.token_ids.size

    def finish(
        self,
        message: Message,
        finish: Finish,
        *,
        id: str,  # noqa: A002, the wire's word
        created: int,
        stop: str = "",
        reasoning_tokens: int = 0,
    ) -> Reply:
        """Everything is sampled: makes the reply. `id` is unique for ever, `created` in seconds.

        Raises InvalidFieldError where the engine broke its contract; nothing of that is kept.
        """
        self._expect("running")
        sampled = self._settle()
        self.closed = finish != "length" and not stop
        self.open = not (self.closed or stop or message.calls) and bool(message.text.strip())
        self.reply = Reply(
            id=id,
            created=created,
            message=message,
            finish=finish,
            usage=Usage(
                prompt=self.prompt_tokens,
                cached=self.cached,
                sampled=self.tokens - self.prompt_tokens,
                reasoning=reasoning_tokens,
            ),
            stop=stop,
            token_ids=tuple(sampled.token_ids.tolist()) if sampled else (),
            logprobs=tuple(sampled.logprobs.tolist()) if sampled else (),
        )
        self.state = "finished"
        self._tell(message)
        return self.reply

    def delivered(self) -> None:
        """The wire took the last byte of the reply, or it came back: it is an action now."""
        if self.state != "delivered":
            self._expect("finished")
            self.state = "delivered"
            self.reply = None

    def cut(self, cause: str, message: Message | None = None) -> None:
        """Ends a turn that was cancelled or failed; what was sampled is kept, untrained.

        `cause` is counted up to its first colon. `message` is what was said so far, if known: a
        client that keeps just that goes on from its tokens. What is fully generated stays so.
        """
        if self.state != "running":
            return
        try:
            self._settle()
        except InvalidFieldError:
            message = None
        self.state = "cut"
        self.cause = cause.partition(":")[0]
        if message is not None:
            self._tell(message)

    def late(self, piece: Generated) -> None:
        """Takes what was sampled before the turn was cut; where its words are known, too late."""
        if self.state == "cut" and self.said is None and piece.token_ids.size:
            with suppress(InvalidFieldError):  # the engine broke its contract: not kept
                self._pieces = [_joined([*self._pieces, piece])]
                self.tokens += piece.token_ids.size

    def _tell(self, message: Message) -> None:
        self.said = message
        self.told(self, message)

    def _settle(self) -> Generated | None:
        """Makes one piece of all. Raises InvalidFieldError, and then keeps nothing."""
        pieces, self._pieces, self.tokens = self._pieces, [], self.prompt_tokens
        if not pieces:
            return None
        sampled = _joined(pieces)
        self._pieces = [sampled]
        self.tokens += sampled.token_ids.size
        return sampled

    def _expect(self, state: State) -> None:
        if self.state != state:
            raise InvalidFieldError("turn", limit=state, value=self.state)


def moved(media: Sequence[MediumSpan], by: int) -> list[MediumSpan]:
    """The spans behind so many tokens more."""
    return [replace(span, start=span.start + by) for span in media]


_LEAST, _MOST = np.minimum.reduce, np.maximum.reduce
"""As `min` and `max` of an array, without what these do for every other kind of it."""


def _joined(pieces: list[Generated]) -> Generated:
    """One piece, checked as a segment will be. Raises InvalidFieldError."""
    token_ids = _concatenated(pieces, "token_ids", np.int32)
    logprobs = _concatenated(pieces, "logprobs", np.float32)
    policy_version = _concatenated(pieces, "policy_version", np.int32)
    context_version = _concatenated(pieces, "context_version", np.int32)
    for name, array in (
        ("token_ids", token_ids),
        ("policy_version", policy_version),
        ("context_version", context_version),
    ):
        if (least := _LEAST(array)) < 0:
            raise InvalidFieldError(f"generated.{name}", limit=">= 0", value=least)
    # A NaN is the least and the most, and compares with nothing.
    if not (_LEAST(logprobs) > -np.inf and _MOST(logprobs) <= MAX_LOGPROB):
        worst = logprobs[~(logprobs <= MAX_LOGPROB) | ~np.isfinite(logprobs)][0]
        raise InvalidFieldError("generated.logprobs", limit="finite and <= 0", value=worst)
    return Generated(token_ids, logprobs, policy_version, context_version, pieces[-1].length)


def _concatenated(pieces: list[Generated], name: str, dtype: type[Any]) -> NDArray[Any]:
    arrays: list[NDArray[Any]] = [getattr(piece, name) for piece in pieces]
    for piece, array in zip(pieces, arrays, strict=True):
        if array.shape != piece.token_ids.shape or array.ndim != 1:
            size, shape = list(piece.token_ids.shape), list(array.shape)
            raise InvalidFieldError(f"generated.{name}", limit=f"shape {size}", value=shape)
    whole = arrays[0] if len(arrays) == 1 else np.concatenate(arrays)
    return whole.astype(dtype, copy=False)
