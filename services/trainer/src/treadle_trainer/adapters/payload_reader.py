"""PayloadReader over the ledger's inline bytes and a payload store."""

from collections.abc import Sequence

from treadle_core.episodes import Segment
from treadle_core.errors import (
    InvalidFieldError,
    PayloadCorruptError,
    PayloadMissingError,
    TreadleError,
)
from treadle_payloads.codec import decode_payload
from treadle_payloads.store import Buffer, PayloadStore
from treadle_trainer.core.claims import ClaimedEpisode
from treadle_trainer.ports import Read


class StoredPayloads:
    """Reads what is not inline from `store`, together."""

    def __init__(self, store: PayloadStore) -> None:
        self._store = store

    def read(self, episodes: Sequence[ClaimedEpisode]) -> list[Read]:
        stored = [episode.payload for episode in episodes if episode.inline is None]
        fetched = self._store.fetch(stored)
        return [_decoded(each, fetched.get(each.payload.sha256)) for each in episodes]


def _decoded(episode: ClaimedEpisode, fetched: Buffer | TreadleError | None) -> Read:
    try:
        if episode.inline is not None:
            episode.payload.check(episode.inline)
            return _segments(episode, episode.inline)
        if fetched is None or isinstance(fetched, PayloadMissingError | PayloadCorruptError):
            return fetched or PayloadMissingError("the payload store says nothing of it")
    except (PayloadCorruptError, InvalidFieldError) as error:
        return error
    if isinstance(fetched, TreadleError):
        raise fetched
    return _segments(episode, fetched)


def _segments(episode: ClaimedEpisode, data: Buffer) -> tuple[Segment, ...] | InvalidFieldError:
    try:
        return decode_payload(data)
    except InvalidFieldError as error:
        field = f"{episode.episode_id}.{error.field}"
        return InvalidFieldError(field, limit=error.limit, value=error.value)
