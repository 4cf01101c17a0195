"""The trainer's process: `python -m treadle_trainer.main --config FILE`."""

import logging
import uuid
from functools import partial
from pathlib import Path

import grpc.aio

from treadle.trainer.v1 import trainer_service_pb2_grpc as rpc
from treadle_payloads.files import FileStore
from treadle_runtime import config as configuration
from treadle_runtime import plugins, server, tracker
from treadle_runtime.channel import connect
from treadle_trainer.adapters.experience_client import ExperienceClient
from treadle_trainer.adapters.local_checkpoints import LocalCheckpoints
from treadle_trainer.adapters.payload_reader import StoredPayloads
from treadle_trainer.adapters.refit_client import RefitClient
from treadle_trainer.checkpoints import NoValidCheckpointError
from treadle_trainer.config import TrainerConfig
from treadle_trainer.core.schedule import Schedule
from treadle_trainer.core.step import StepSettings
from treadle_trainer.loop import Trainer
from treadle_trainer.ports import Backend
from treadle_trainer.recipe import Recipe, Surroundings
from treadle_trainer.servicer import SERVICE, TrainerServicer

log = logging.getLogger(__name__)

NO_VALID_CHECKPOINT = 3
"""Exit status where every checkpoint of the run is damaged; restarting cannot help."""


async def main(config: TrainerConfig) -> None:
    """Serves until the run is complete."""
    recipe = recipe_of(config)
    async with (
        connect(config.experience_address) as experience,
        connect(config.refit_address) as refit,
    ):
        trainer = Trainer(recipe, surroundings_of(config, experience, refit))
        servicer = TrainerServicer(trainer.status)
        service = server.Service(
            name="trainer",
            listen=config.listen,
            register=partial(rpc.add_TrainerServiceServicer_to_server, servicer),
            proto_services=(SERVICE,),
            background=(trainer.run,),
            drain=trainer.drain,
        )
        try:
            await server.serve(service)
        except server.ServiceFailedError as error:
            if isinstance(error.__cause__, NoValidCheckpointError):
                log.critical("%s", error.__cause__.message)
                raise SystemExit(NO_VALID_CHECKPOINT) from error
            raise


def recipe_of(config: TrainerConfig) -> Recipe:
    """Builds the plugins; raises PluginError."""
    optimizer = config.optimizer

    def build_backend(folder: Path) -> Backend:
        parameters = optimizer.backend_parameters
        return plugins.build("treadle.backends", config.backend, folder=folder, **parameters)

    return Recipe(
        run_id=config.run.id,
        holder=uuid.uuid4().hex,
        start=config.run.model,
        checkpoint_every=config.checkpoint_every,
        advantage=plugins.build("treadle.advantages", config.advantage),
        loss=plugins.build("treadle.losses", config.loss),
        schedule=Schedule(optimizer.learning_rate, optimizer.warmup_steps),
        settings=StepSettings(config.microbatch_tokens, optimizer.max_grad_norm),
        build_backend=build_backend,
        publish_every=config.publish_every,
        no_progress_s=config.no_progress_s,
    )


def surroundings_of(
    config: TrainerConfig, experience: grpc.aio.Channel, refit: grpc.aio.Channel
) -> Surroundings:
    """The adapters of a run's directory, and the peers."""
    directory = config.run.dir
    transport = plugins.build("treadle.weight_transports", config.transport, run_dir=directory)
    return Surroundings(
        experience=ExperienceClient(experience, config.run.id),
        refit=RefitClient(refit, config.run.id),
        sender=transport.sender(config.run.id),
        payloads=StoredPayloads(FileStore(directory / "payloads")),
        store=LocalCheckpoints(directory / "checkpoints"),
        tracker=tracker.of_service(config.run, "trainer"),
    )


if __name__ == "__main__":
    loaded = configuration.load(TrainerConfig)
    server.run(loaded, "trainer", partial(main, loaded))
