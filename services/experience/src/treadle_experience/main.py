"""Starts the experience service: `python -m treadle_experience.main --config FILE`."""

import asyncio
import logging
from collections.abc import Mapping
from functools import partial

from treadle_core.errors import InvalidFieldError, WrongRunError
from treadle_experience.adapters.sqlite import FILE_NAME
from treadle_experience.config import ExperienceConfig
from treadle_experience.core.errors import LedgerFullError
from treadle_experience.core.filters import Filter
from treadle_experience.core.run import TRAINING, Read, Run
from treadle_experience.effects import Effects
from treadle_experience.keeper import FULL_RETRY_S, Keeper
from treadle_experience.ports import Ledger, TaskSource
from treadle_experience.servicer import SERVICE_NAME, ExperienceServicer
from treadle_payloads.files import FileStore
from treadle_runtime import config, server
from treadle_runtime.plugins import PluginConfig, build
from treadle_runtime.tracker import of_service

log = logging.getLogger(__name__)

_COUNTS_EVERY_S = 5.0


async def main(settings: ExperienceConfig) -> None:
    """Serves the run until the process is told to stop."""
    run = Run(settings.rules(), _sources(settings), filter=_filter(settings))
    # Before the ledger: who stands by must not fence who serves.
    await server.claim(settings.listen)
    store = FileStore(settings.run.dir / "payloads")
    tracker = of_service(settings.run, "experience")
    effects = Effects(run.state, store, tracker)
    keeper = await _keeper(run, _ledger(settings), effects)
    servicer = ExperienceServicer(keeper, run.rules, store)
    try:
        await server.serve(
            server.Service(
                name="experience",
                listen=settings.listen,
                register=servicer.register,
                proto_services=(SERVICE_NAME,),
                background=(keeper.write, keeper.sweep, partial(_log_counts, effects, keeper)),
                drain=keeper.drain,
                is_able=lambda: keeper.is_able,
            )
        )
    finally:
        effects.log_counts(keeper.row())
        keeper.close()


async def _keeper(run: Run, ledger: Ledger, effects: Effects) -> Keeper:
    """Takes the ledger over; on a full disk, waits for room before it listens."""
    told = False
    while True:
        try:
            # In a thread, so that a long journal is no silence.
            return await asyncio.to_thread(Keeper, run, ledger, on_durable=effects.follow)
        except WrongRunError as error:
            raise InvalidFieldError(
                "run.id", limit=f"{error.limit}, whose ledger lies in run.dir", value=error.value
            ) from error
        except LedgerFullError as error:
            if not told:
                log.error("waiting for room: %s", error.message)  # noqa: TRY400
                told = True
        await asyncio.sleep(FULL_RETRY_S)


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


def _ledger(settings: ExperienceConfig) -> Ledger:
    plugin = settings.ledger
    provided: dict[str, str] = {}
    if plugin.name == "sqlite" and "path" not in plugin.parameters:
        provided["path"] = str(settings.run.dir / FILE_NAME)
    return build("treadle.ledgers", plugin, **provided)


if __name__ == "__main__":
    settings = config.load(ExperienceConfig)
    server.run(settings, "experience", partial(main, settings))
