"""Starts the experience service: `python -m treadle_experience.main --config FILE`."""

import asyncio
from collections.abc import Mapping
from functools import partial

from treadle_experience.adapters.sqlite import FILE_NAME
from treadle_experience.config import ExperienceConfig
from treadle_experience.core.run import TRAINING, Read, Run
from treadle_experience.effects import Effects
from treadle_experience.keeper import Keeper
from treadle_experience.ports import Ledger, TaskSource
from treadle_experience.servicer import SERVICE_NAME, ExperienceServicer
from treadle_payloads.files import FileStore
from treadle_runtime import config, server
from treadle_runtime.plugins import PluginConfig, build
from treadle_runtime.tracker import JsonlTracker

_COUNTS_EVERY_S = 5.0


async def main(settings: ExperienceConfig) -> None:
    """Serves the run until the process is told to stop."""
    run = Run(settings.rules(), _sources(settings))
    store = FileStore(settings.run.dir / "payloads")
    tracker = JsonlTracker(settings.run.dir / "metrics" / "experience.jsonl")
    effects = Effects(run.state, store, tracker)
    keeper = Keeper(run, _ledger(settings), on_durable=effects.follow)
    servicer = ExperienceServicer(keeper, run.rules, store)
    try:
        await server.serve(
            server.Service(
                name="experience",
                listen=settings.listen,
                register=servicer.register,
                proto_services=(SERVICE_NAME,),
                background=(keeper.write, keeper.sweep, partial(_log_counts, effects)),
                drain=keeper.drain,
            )
        )
    finally:
        effects.log_counts()
        keeper.close()


async def _log_counts(effects: Effects) -> None:
    while True:
        await asyncio.sleep(_COUNTS_EVERY_S)
        effects.log_counts()


def _sources(settings: ExperienceConfig) -> Mapping[str, Read]:
    chosen = {TRAINING: settings.source}
    if settings.evaluation:
        chosen |= {each.name: each.source for each in settings.evaluation.sets}
    return {name: _source(plugin).read for name, plugin in chosen.items()}


def _source(plugin: PluginConfig) -> TaskSource:
    return build("treadle.task_sources", plugin)


def _ledger(settings: ExperienceConfig) -> Ledger:
    plugin = settings.ledger
    provided: dict[str, str] = {}
    if plugin.name == "sqlite" and "path" not in plugin.parameters:
        provided["path"] = str(settings.run.dir / FILE_NAME)
    return build("treadle.ledgers", plugin, **provided)


if __name__ == "__main__":
    settings = config.load(ExperienceConfig)
    server.run(settings, "experience", partial(main, settings))
