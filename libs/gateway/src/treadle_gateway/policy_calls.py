"""The replica's end of a policy line: has the engine sample what a worker asks for."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any, TypeAlias
from weakref import WeakValueDictionary

import numpy as np
from numpy.typing import NDArray

from treadle_agents.images.picture import Picture
from treadle_agents.record import Generated
from treadle_core.errors import Kind, TreadleError
from treadle_gateway.frames import Say
from treadle_gateway.ports import Prompt
from treadle_gateway.records import (
    PolicyError,
    error_to_list,
    ids_from_bytes,
    pieces_to_list,
    sampling_from_map,
    spans_from_list,
)
from treadle_runtime.workers.framing import FrameError, Packer

log = logging.getLogger(__name__)

Heard: TypeAlias = Callable[[Generated], None]
"""Takes a piece of what is sampled."""
Generate: TypeAlias = Callable[[Prompt, Heard], Awaitable[None]]
"""Samples one turn after a prompt, and has each piece heard as it comes. Cancelling it stops it."""


class PolicyCalls:
    """The calls of one worker. Keeps the last prompt of each session, since the next adds to it."""

    def __init__(self, generate: Generate, packer: Packer[Say]) -> None:
        self._generate = generate
        self._packer = packer
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._prompts: dict[str, NDArray[np.int32]] = {}
        self._pictures: dict[str, dict[str, Picture]] = {}
        self._known = WeakValueDictionary[str, Picture]()
        """Images of all sessions, so that no content is kept twice."""

    def begin(self, key: int, session: str, stands: int, ids: bytes, *told: Any) -> None:
        """Takes a GENERATE. Raises FrameError where fewer tokens are known than should stand."""
        sampling, apart_s, media = told
        before = self._prompts.get(session, _NOTHING)
        if not 0 <= stands <= before.size:
            raise FrameError(limit=f"at most {before.size} tokens that stand", value=stands)
        token_ids = np.concatenate([before[:stands], ids_from_bytes(ids)])
        token_ids.flags.writeable = False  # the next prompt is made of it
        self._prompts[session] = token_ids
        prompt = Prompt(
            session,
            token_ids,
            sampling_from_map(sampling),
            spans_from_list(media),
            self.pictures(session),
        )
        saying = _Saying(self._packer, key, apart_s)
        task = self._tasks[key] = asyncio.create_task(self._call(prompt, saying))
        task.add_done_callback(partial(self._ended, key, saying))

    def show(self, session: str, data: bytes) -> None:
        """Takes a PICTURE. Raises NotAnImageError."""
        picture = Picture.of(data)
        picture = self._known.setdefault(picture.medium.sha256, picture)
        self._pictures.setdefault(session, {})[picture.medium.sha256] = picture

    def pictures(self, session: str) -> Mapping[str, Picture]:
        """The images that a session was shown, by sha256."""
        return self._pictures.get(session, {})

    def stop(self, key: int) -> None:
        """Takes a STOP; a call that is over is ignored."""
        if task := self._tasks.get(key):
            task.cancel()

    def forget(self, session: str) -> None:
        """The session is over."""
        self._prompts.pop(session, None)
        self._pictures.pop(session, None)

    def close(self) -> None:
        """The worker is gone."""
        for task in self._tasks.values():
            task.cancel()

    def _ended(self, key: int, saying: "_Saying", task: asyncio.Task[None]) -> None:
        del self._tasks[key]
        if task.cancelled():  # perhaps before it began
            saying.end(Say.DONE)

    async def _call(self, prompt: Prompt, saying: "_Saying") -> None:
        try:
            await self._generate(prompt, saying.add)
        except TreadleError as error:
            saying.end(Say.FAILED, *error_to_list(error))
        except Exception as error:
            log.exception("a generation failed")
            failed = PolicyError(Kind.UNAVAILABLE, f"a fault: {type(error).__name__}", "", None)
            saying.end(Say.FAILED, *error_to_list(failed))
        else:
            saying.end(Say.DONE)


_NOTHING = np.zeros(0, np.int32)


class _Saying:
    """What is said of one call. Pieces that come too soon behind another wait and go as one."""

    def __init__(self, packer: Packer[Say], key: int, apart_s: float) -> None:
        """`apart_s`: least seconds from the beginning to a piece, and from one to the next."""
        self._packer = packer
        self._key = key
        self._apart_s = apart_s
        self._loop = asyncio.get_running_loop()
        self._due = self._loop.time() + apart_s
        self._held: list[Generated] = []
        self._timer: asyncio.TimerHandle | None = None

    def add(self, piece: Generated) -> None:
        """Says a piece, now or when it is due."""
        self._held.append(piece)
        if self._timer is not None:
            return
        if self._loop.time() >= self._due:
            self._flush()
        else:
            self._timer = self._loop.call_at(self._due, self._flush)

    def end(self, say: Say, *fields: Any) -> None:
        """Says all that is held, and how it ended."""
        self._flush()
        self._packer.send(say, self._key, *fields)

    def _flush(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._held:
            self._packer.send(Say.PIECE, self._key, *pieces_to_list(self._held))
            self._held.clear()
            self._due = self._loop.time() + self._apart_s
