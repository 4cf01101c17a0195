"""Publishing parameters: a number from the ledger, bytes to the engines, a commit."""

import asyncio
import logging
import uuid
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from numpy.typing import NDArray
from torch import Tensor

from treadle_core.errors import TreadleError
from treadle_runtime.failpoints import failpoint
from treadle_trainer.ports import VERSION_ENDED, NewVersion, Refit
from treadle_weights.digests import tensor_digest, weights_digest
from treadle_weights.layouts import Layout, whole
from treadle_weights.transport import Arena, ArenaFullError, WeightSender

log = logging.getLogger(__name__)

Compute = Callable[..., Awaitable[Any]]
"""Calls a function with arguments in the worker thread."""

_MOST_TRIES = 8
_FIRST_DELAY_S = 0.05
_LONGEST_DELAY_S = 2.0
_ROOM_S = 1.0
"""How often a full disk is tried again."""


@dataclass(frozen=True, slots=True)
class Published:
    """A version that is committed."""

    version: int
    weights_digest: str
    """Of all its tensors, 16 hex digits."""


class Publisher:
    """Publishes a trainer's parameters as versions."""

    def __init__(self, refit: Refit, sender: WeightSender, compute: Compute) -> None:
        self._refit = refit
        self._sender = sender
        self._compute = compute
        self._last: Published | None = None
        self._digests: dict[str, int] = {}

    @property
    def version(self) -> int:
        """Newest version that was published; 0 for none."""
        return self._last.version if self._last else 0

    async def publish(
        self,
        parameters: Mapping[str, Tensor],
        *,
        trainer_epoch: int,
        step: int,
        trace_id: str,
        same: bool = False,
    ) -> Published:
        """Publishes `parameters`, which nobody writes meanwhile.

        `same`: they are those of the version published last, so that no bytes need to move.

        A version that ends before it is committed is followed by the same parameters under the
        next number. Raises TreadleError with the peer's reason, VERSION_ENDED when that goes on.
        """
        base = self._last if same else None
        new = NewVersion(
            trainer_epoch=trainer_epoch,
            step=step,
            request_id="",
            layout=layout_of(parameters),
            trace_id=trace_id,
            alias_of=base.version if base else 0,
            weights_digest=base.weights_digest if base else "",
        )
        for attempt in range(_MOST_TRIES):
            try:
                return await self._try(replace(new, request_id=uuid.uuid4().hex), parameters)
            except TreadleError as error:
                if error.reason != VERSION_ENDED or attempt == _MOST_TRIES - 1:
                    raise
                log.warning("step %d is published anew: %s", step, error.message)
            await asyncio.sleep(min(_FIRST_DELAY_S * 2**attempt, _LONGEST_DELAY_S))
        raise AssertionError

    async def _try(self, new: NewVersion, parameters: Mapping[str, Tensor]) -> Published:
        failpoint("trainer.version.before_open")
        opened = await self._refit.open_version(new)
        failpoint("trainer.version.after_open")
        digests = self._digests
        if not opened.aliased:
            digests = await self._with_room(self._fill, opened.arena, new.layout, parameters)
        failpoint("trainer.version.before_send")
        try:
            sent = await self._refit.send_version(
                trainer_epoch=new.trainer_epoch, version=opened.version, digests=digests
            )
        except TreadleError as error:
            # The bytes of an alias are those of a version that engines may still load.
            if error.reason == VERSION_ENDED and not opened.aliased:
                await self._compute(self._sender.discard, opened.arena)
            raise
        failpoint("trainer.version.after_send")
        await self._with_room(self._sender.keep, opened.arena)
        if sent.left_behind:
            log.warning("version %d left %d engines behind", opened.version, sent.left_behind)
        self._digests = digests
        self._last = Published(opened.version, weights_digest(digests))
        return self._last

    async def _with_room(self, call: Callable[..., Any], *arguments: Any) -> Any:
        """Computes; where there is no room, again and again until there is."""
        while True:
            try:
                return await self._compute(call, *arguments)
            except ArenaFullError as error:
                log.error("no version until there is room: %s", error.message)  # noqa: TRY400
            await asyncio.sleep(_ROOM_S)

    def _fill(
        self, arena: Arena, layout: Layout, parameters: Mapping[str, Tensor]
    ) -> dict[str, int]:
        return self._sender.send(arena, layout, _arrays(parameters))


def layout_of(parameters: Mapping[str, Tensor]) -> Layout:
    """All of them whole, one after the other."""
    return whole(
        {
            name: (str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
            for name, tensor in parameters.items()
        }
    )


def parameters_digest(parameters: Mapping[str, Tensor]) -> str:
    """As the `weights_digest` of a version that holds them."""
    layout = layout_of(parameters)
    places = {place.tensor: place for place in layout.rectangles}
    arrays = _arrays(parameters)
    return weights_digest({name: tensor_digest(array, places[name]) for name, array in arrays})


def _arrays(parameters: Mapping[str, Tensor]) -> Iterator[tuple[str, NDArray[Any]]]:
    """The parameters on the host, one at a time."""
    for name, tensor in parameters.items():
        yield name, tensor.cpu().numpy()
