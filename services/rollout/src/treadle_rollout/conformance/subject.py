"""What an engine's author provides, and what all checks share."""

import asyncio
import functools
from collections.abc import AsyncGenerator, Awaitable
from contextlib import asynccontextmanager
from typing import Protocol, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from treadle_agents.record import Generated
from treadle_core.tickets import Sampling
from treadle_rollout.ports import Engine, GenerationRequest

TOLERANCE = 1e-4
"""Largest difference of two log-probabilities of one token that counts as none."""

DEADLINE_S = 60.0
"""A check that takes longer has failed."""

Ids: TypeAlias = NDArray[np.int32]


class ConformanceError(AssertionError):
    """An engine broke a promise of the port."""


class NotApplicableError(Exception):
    """The check says nothing about this subject; why."""


class Subject(Protocol):
    """An engine to check, and an independent account of what its policy computes."""

    @property
    def has_model(self) -> bool:
        """Its policy is a model that attends to cached keys."""
        ...

    @property
    def vocabulary(self) -> int:
        """Prompts are made of token ids below this; at least 8."""
        ...

    def engine(
        self, *, slots: int, max_context: int, stop_tokens: tuple[int, ...] = (), seed: int = 0
    ) -> Engine:
        """A new engine that serves nothing yet."""
        ...

    def weights(self, version: int) -> NDArray[np.uint8]:
        """Bytes of a version, as they lie in `arrival`; versions differ visibly."""
        ...

    def poisoned(self) -> tuple[NDArray[np.uint8], int] | None:
        """Version 1, but a prompt that holds the token gets no finite log-probability."""
        ...

    def logprobs(self, version: int, token_ids: Ids, temperature: float) -> NDArray[np.float32]:
        """Log-probability of each token after the first, by a fresh forward, [T - 1]."""
        ...

    def logits(self, version: int, token_ids: Ids) -> NDArray[np.float32]:
        """What the policy gives for the token after the last, by a fresh forward, [V]."""
        ...


class Check(Protocol):
    """One promise; its name says which."""

    __name__: str

    def __call__(self, subject: Subject) -> Awaitable[None]: ...


E = TypeVar("E", bound=BaseException)


def of_a_model(check: Check) -> Check:
    """Marks a check of forwards and cached keys: not applicable where there are none."""

    @functools.wraps(check)
    async def checked(subject: Subject) -> None:
        if not subject.has_model:
            raise NotApplicableError("needs a model: it checks a forward or cached keys")
        await check(subject)

    return checked


async def run(check: Check, subject: Subject, *, deadline_s: float = DEADLINE_S) -> None:
    """Runs one check with its deadline. Raises NotApplicableError, or whatever is broken."""
    async with asyncio.timeout(deadline_s):
        await check(subject)


@asynccontextmanager
async def serving(
    subject: Subject,
    *,
    slots: int,
    max_context: int,
    version: int = 1,
    stop_tokens: tuple[int, ...] = (),
    seed: int = 0,
) -> AsyncGenerator[Engine]:
    """An engine that serves `version`, closed at the end."""
    engine = subject.engine(
        slots=slots, max_context=max_context, stop_tokens=stop_tokens, seed=seed
    )
    try:
        await install(engine, subject, version)
        yield engine
    finally:
        await engine.close()


async def install(engine: Engine, subject: Subject, version: int) -> None:
    """Delivers and installs a version."""
    engine.arrival[:] = subject.weights(version)
    await engine.install(version)


def prompt(subject: Subject, size: int, *, seed: int = 0) -> Ids:
    """Token ids, [size]."""
    rng = np.random.default_rng(seed)
    return rng.integers(subject.vocabulary, size=size).astype(np.int32)


def request(
    session: str, token_ids: Ids, max_tokens: int, *, temperature: float = 1.0
) -> GenerationRequest:
    """A turn to sample."""
    return GenerationRequest(session, token_ids, Sampling(temperature, max_tokens))


def require(kept: bool, promise: str) -> None:  # noqa: FBT001
    """Raises ConformanceError naming the promise, unless it was kept."""
    if not kept:
        raise ConformanceError(promise)


async def raises(kind: type[E], call: Awaitable[object]) -> E:
    """Awaits a call that must fail with `kind`; returns the error."""
    try:
        outcome = await call
    except kind as error:
        return error
    raise ConformanceError(f"{kind.__name__} was expected, not {outcome}")


def check_turn(subject: Subject, token_ids: Ids, turn: Generated, temperature: float) -> None:
    """Shapes agree, and each token has the log-probability of the version that it states."""
    check_shapes(turn)
    whole = np.concatenate([token_ids, turn.token_ids])
    for version in np.unique(turn.policy_version):
        fresh = subject.logprobs(int(version), whole, temperature)[token_ids.size - 1 :]
        own = turn.policy_version == version
        check_logprobs(int(version), fresh[own], turn.logprobs[own])


def check_shapes(turn: Generated) -> None:
    """A turn has tokens, its arrays agree, and no token attends to keys of another version."""
    size = turn.token_ids.size
    require(size > 0, "a turn has a token")
    for array, dtype in (
        (turn.token_ids, np.int32),
        (turn.logprobs, np.float32),
        (turn.policy_version, np.int32),
        (turn.context_version, np.int32),
    ):
        require(array.shape == (size,) and array.dtype == dtype, "arrays are [N] and typed")
    require(
        np.array_equal(turn.policy_version, turn.context_version),
        "a token attends to keys of its own version alone",
    )


def check_logprobs(version: int, fresh: NDArray[np.float32], stated: NDArray[np.float32]) -> None:
    """What tokens of `version` state, [N], is what a fresh forward gives, [N]."""
    worst = float(np.abs(fresh - stated).max())
    require(worst <= TOLERANCE, f"log-probabilities of version {version} are off by {worst:.2g}")
