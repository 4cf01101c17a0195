"""Policy of a worker: asks the replica over the socket for what its engine samples."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import Any

from treadle_agents.images.picture import Picture
from treadle_gateway.frames import Say
from treadle_gateway.ports import Asked, Listener
from treadle_gateway.records import (
    error_from_list,
    generated_from_list,
    ids_to_bytes,
    sampling_to_map,
    spans_to_list,
)
from treadle_runtime.workers.framing import FrameError, Packer


@dataclass(slots=True)
class PolicyLine:
    """As Policy, at the other end of the socket. Listeners are told while a frame is read."""

    packer: Packer[Say]
    max_context: int
    _keys: "count[int]" = field(default_factory=count, init=False)
    _calls: dict[int, Listener] = field(default_factory=dict[int, Listener], init=False)

    def show(self, session: str, picture: Picture) -> None:
        """As Policy.show."""
        self.packer.send(Say.PICTURE, session, picture.data)

    def begin(self, asked: Asked, listener: Listener) -> Callable[[], None]:
        """As Policy.begin."""
        key = next(self._keys)
        self._calls[key] = listener
        self.packer.send(
            Say.GENERATE,
            key,
            asked.session,
            asked.stands,
            ids_to_bytes(asked.token_ids),
            sampling_to_map(asked.sampling),
            asked.apart_s,
            spans_to_list(asked.media),
        )
        return partial(self._stop, key)

    def hear(self, say: Say, fields: list[Any]) -> None:
        """Takes a PIECE, DONE or FAILED."""
        key, *told = fields
        if say is Say.PIECE:
            self._calls[key].heard(generated_from_list(told))
        elif say is Say.DONE or say is Say.FAILED:
            self._calls.pop(key).ended(error_from_list(told) if told else None)
        else:
            raise FrameError(limit="what the policy says", value=say.name)

    def _stop(self, key: int) -> None:
        if key in self._calls:
            self.packer.send(Say.STOP, key)
