"""Starts the experience service: `python -m treadle_experience.main --config FILE`."""

import asyncio
import contextlib
import logging
from collections.abc import Mapping
from functools import partial

from treadle_core.errors import InvalidFieldError, TreadleError, WrongRunError
from treadle_experience.config import ExperienceConfig
from treadle_experience.core.errors import (
    LedgerAwayError,
    LedgerFullError,
    LedgerHeldError,
    LedgerLostError,
)
from treadle_experience.core.filters import Filter
from treadle_experience.core.run import TRAINING, Read, Run
from treadle_experience.custody import Custody
from treadle_experience.effects import Effects
from treadle_experience.keeper import Keeper
from treadle_experience.ledgers import build_ledger
from treadle_experience.payloads import inline_limit
from treadle_experience.ports import Ledger, SharedLedger, TaskSource
from treadle_experience.servicer import SERVICE_NAME, ExperienceServicer
from treadle_payloads.stores import open_store
from treadle_runtime import config, doorbell, server
from treadle_runtime.doorbell import Doorbell
from treadle_runtime.plugins import PluginConfig, build
from treadle_runtime.tracker import of_service

log = logging.getLogger(__name__)

_COUNTS_EVERY_S = 5.0
_BEAT_S = 1.0
_WAIT_S = 0.05
"""How often one that stands by looks whether it may write."""


async def main(settings: ExperienceConfig) -> None:
    """Serves the run until the process is told to stop."""
    async with doorbell.of_run(settings.run) as bell:
        await _serve(settings, bell)


async def _serve(settings: ExperienceConfig, bell: Doorbell) -> None:
    run = Run(settings.rules(), _sources(settings), filter=_filter(settings))
    # Before the ledger: who stands by must not fence who serves.
    await server.claim(settings.listen, insecure_dev=settings.run.insecure_dev)
    store = open_store(settings.run)
    tracker = of_service(settings.run, "experience")
    effects = Effects(run.state, tracker, bell)
    ledger = build_ledger(settings.ledger, settings.run.dir)
    # From before there is a keeper: to load a long journal is no silence.
    beating = [asyncio.ensure_future(_beat(ledger))] if isinstance(ledger, SharedLedger) else []
    keeper = await _keeper(run, ledger, effects)
    limit = inline_limit(settings.tasks_per_step * settings.group_size)
    custody = Custody(keeper, store, effects.released, limit=limit)
    servicer = ExperienceServicer(keeper, run.rules, custody)
    try:
        await server.serve(
            server.Service(
                name="experience",
                listen=settings.listen,
                insecure_dev=settings.run.insecure_dev,
                register=servicer.register,
                proto_services=(SERVICE_NAME,),
                background=(
                    keeper.write,
                    keeper.sweep,
                    custody.release,
                    custody.sweep,
                    partial(_log_counts, effects, keeper),
                    *(lambda task=task: task for task in beating),
                ),
                drain=partial(_drain, keeper, custody),
                is_able=lambda: keeper.is_able,
            )
        )
    finally:
        effects.log_counts(keeper.row())
        if isinstance(ledger, SharedLedger):
            with contextlib.suppress(TreadleError):  # it is followed already, or will be, later
                ledger.resign()
        keeper.close()
        custody.close()


async def _keeper(run: Run, ledger: Ledger, effects: Effects) -> Keeper:
    """Takes the ledger over; waits before it listens, for room, for its server, for who writes."""
    told = ""
    while True:
        try:
            # In a thread, so that a long journal is no silence.
            return await asyncio.to_thread(Keeper, run, ledger, on_durable=effects.follow)
        except WrongRunError as error:
            raise InvalidFieldError(
                "run.id", limit=f"{error.limit}, whose ledger lies in run.dir", value=error.value
            ) from error
        except LedgerLostError as error:
            # Whoever starts it again finds the same.
            raise InvalidFieldError(
                "ledger", limit=f"the ledger of run {run.rules.run_id}", value=error.message
            ) from error
        except (LedgerFullError, LedgerAwayError, LedgerHeldError) as error:
            if isinstance(ledger, SharedLedger) and isinstance(error, LedgerHeldError):
                with contextlib.suppress(LedgerAwayError):
                    await asyncio.to_thread(ledger.follow)
            if told != error.reason:
                log.error("waiting: %s", error.message)  # noqa: TRY400
                told = error.reason
        await asyncio.sleep(_WAIT_S)


async def _drain(keeper: Keeper, custody: Custody) -> None:
    await keeper.drain()
    await custody.finish()


async def _beat(ledger: SharedLedger) -> None:
    """Says that this process writes, forever. Raises WriterFencedError once another does."""
    while True:
        # A server that is away, or full, is the business of the appends.
        with contextlib.suppress(LedgerAwayError, LedgerFullError):
            await asyncio.to_thread(ledger.beat)
        await asyncio.sleep(_BEAT_S)


async def _log_counts(effects: Effects, keeper: Keeper) -> None:
    while True:
        await asyncio.sleep(_COUNTS_EVERY_S)
        effects.log_counts(keeper.row())


def _sources(settings: ExperienceConfig) -> Mapping[str, Read]:
    chosen = {TRAINING: settings.source}
    if settings.evaluation:
        chosen |= {each.name: each.source for each in settings.evaluation.sets}
    return {name: _source(plugin).read for name, plugin in chosen.items()}


def _source(plugin: PluginConfig) -> TaskSource:
    return build("treadle.task_sources", plugin)


def _filter(settings: ExperienceConfig) -> Filter | None:
    return build("treadle.filters", settings.filter) if settings.filter else None


if __name__ == "__main__":
    settings = config.load(ExperienceConfig)
    server.run(settings, "experience", partial(main, settings))
