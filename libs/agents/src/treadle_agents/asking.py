"""Asking code that is not ours: plain or async, with whatever it raises turned into its failure."""

import asyncio
import contextlib
import inspect
from collections.abc import Awaitable, Callable, Generator
from typing import Any

from treadle_agents.env import PolicyError
from treadle_agents.failures import EpisodeError, describe
from treadle_core.episodes import FailureClass

InThread = Callable[[Callable[[], Any]], Awaitable[Any]]
"""Runs a blocking call elsewhere; `asyncio.to_thread`, or a pool's."""


async def ask(in_thread: InThread, method: Callable[..., Any], *arguments: Any) -> Any:
    """Calls a method of an agent, plain or async. Raises EpisodeError for whatever it raises."""
    with environment():
        if inspect.iscoroutinefunction(method):
            return await method(*arguments)
        answer, error = await in_thread(lambda: _attempt(method, *arguments))
        if error is not None:
            raise error
        return await answer if inspect.isawaitable(answer) else answer


async def ask_before_the_policy(
    in_thread: InThread, method: Callable[..., Any], *arguments: Any
) -> Any:
    """Like `ask`, where the policy has not said anything that could be its failure."""
    try:
        return await ask(in_thread, method, *arguments)
    except EpisodeError as error:
        if error.failure_class is not FailureClass.POLICY:
            raise
        raise EpisodeError(FailureClass.ENVIRONMENT, error.message) from error


def _attempt(method: Callable[..., Any], *arguments: Any) -> tuple[Any, BaseException | None]:
    """Returns what was raised: a future takes no StopIteration, and a loop ends at SystemExit."""
    try:
        return method(*arguments), None
    except BaseException as error:  # noqa: BLE001, raised again by the caller
        return None, error


@contextlib.contextmanager
def environment() -> Generator[None]:
    """Turns whatever an agent raises into EpisodeError, except our own cancellation."""
    try:
        yield
    except (EpisodeError, GeneratorExit):
        raise
    except PolicyError as error:
        raise EpisodeError(FailureClass.POLICY, describe(error)) from error
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        raise EpisodeError(FailureClass.ENVIRONMENT, describe(error)) from error
    except BaseException as error:
        raise EpisodeError(FailureClass.ENVIRONMENT, describe(error)) from error
