"""PayloadReader over the ledger's inline bytes and a payload store."""

from treadle_core.episodes import Segment
from treadle_core.errors import InvalidFieldError
from treadle_payloads.codec import decode_payload
from treadle_payloads.store import PayloadStore
from treadle_trainer.core.claims import ClaimedEpisode


class StoredPayloads:
    """Reads what is not inline from `store`."""

    def __init__(self, store: PayloadStore) -> None:
        self._store = store

    def read(self, episode: ClaimedEpisode) -> tuple[Segment, ...]:
        data = episode.inline
        if data is None:
            data = self._store.get(episode.payload)
        else:
            episode.payload.check(data)
        try:
            return decode_payload(data)
        except InvalidFieldError as error:
            raise InvalidFieldError(
                f"{episode.episode_id}.{error.field}", limit=error.limit, value=error.value
            ) from error
