"""What refit learns of the newest committed version without the trainer that published it."""

import asyncio
import logging

from treadle_core.errors import TreadleError
from treadle_refit.core.publication import Publication
from treadle_refit.ports import Committed
from treadle_weights.digests import weights_digest
from treadle_weights.transport import Stored, WeightTransport

log = logging.getLogger(__name__)


async def recovered(
    transport: WeightTransport, run_id: str, newest: Committed, now: float
) -> Publication | None:
    """The newest committed version where it lies whole and is what the ledger committed.

    None where there is none, and where the trainer has to be asked for it.
    """
    if not newest.version:
        return None
    try:
        stored = await asyncio.to_thread(transport.find, run_id, newest.version)
    except (TreadleError, OSError) as error:
        log.warning("version %d cannot be loaded from where it lies: %s", newest.version, error)
        return None
    if stored is None or not _is_committed(stored, newest):
        return None
    log.info("version %d lies at %s", newest.version, stored.arena.path)
    return Publication(
        version=newest.version,
        step=0,
        trainer_epoch=0,
        request_id="",
        trace_id="",
        layout=stored.layout,
        arena=stored.arena,
        opened_at=now,
        digests=stored.digests,
    )


def _is_committed(stored: Stored, newest: Committed) -> bool:
    found = weights_digest(stored.digests)
    if newest.weights_digest in ("", found):
        return True
    log.warning(
        "version %d at %s has digest %s, and %s was committed",
        newest.version,
        stored.arena.path,
        found,
        newest.weights_digest,
    )
    return False
