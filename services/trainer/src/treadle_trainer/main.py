"""The trainer's process: `python -m treadle_trainer.main --config FILE`."""

import asyncio
import logging
import os
import sys
import uuid
from dataclasses import replace
from functools import partial
from pathlib import Path

import grpc.aio

from treadle.trainer.v1 import trainer_service_pb2_grpc as rpc
from treadle_payloads.stores import open_store
from treadle_runtime import config as configuration
from treadle_runtime import doorbell, plugins, server, tracker
from treadle_runtime.channel import connect
from treadle_runtime.doorbell import Doorbell, Topic
from treadle_runtime.doorbells.poll import PollDoorbell
from treadle_trainer import following, launch
from treadle_trainer.adapters.experience_client import ExperienceClient
from treadle_trainer.adapters.local_checkpoints import LocalCheckpoints
from treadle_trainer.adapters.orders import OrderedFollowers, Orders
from treadle_trainer.adapters.payload_reader import StoredPayloads
from treadle_trainer.adapters.process_group import use_gpu
from treadle_trainer.adapters.refit_client import RefitClient
from treadle_trainer.checkpoints import NoValidCheckpointError
from treadle_trainer.config import ShapingConfig, TrainerConfig
from treadle_trainer.core.kl import Kl
from treadle_trainer.core.objective import Objective
from treadle_trainer.core.schedule import Schedule
from treadle_trainer.core.shaping import Overlong, Shaping
from treadle_trainer.core.step import StepSettings
from treadle_trainer.launch import Children, Place
from treadle_trainer.loop import Trainer
from treadle_trainer.ports import Backend, Followers, PayloadReader
from treadle_trainer.prefetch import DEPTH, Prefetched, Prefetching
from treadle_trainer.recipe import Recipe, Surroundings
from treadle_trainer.servicer import SERVICE, TrainerServicer

log = logging.getLogger(__name__)

NO_VALID_CHECKPOINT = 3
"""Exit status where every checkpoint of the run is damaged; restarting cannot help."""


async def main(config: TrainerConfig) -> None:
    """Serves until the run is complete."""
    recipe = recipe_of(config)
    place = launch.place_of(os.environ, config.ranks)
    children = None
    if place.size > 1 and not place.told:
        children = Children(place.size, (sys.executable, "-m", __spec__.name, *sys.argv[1:]))
    async with (
        connect(config.experience_address) as experience,
        connect(config.refit_address) as refit,
        doorbell.of_run(config.run, hears=[Topic.BATCHES]) as bell,
    ):
        prefetching = prefetching_of(config, recipe, place, experience, bell)
        payloads = prefetching.prefetched
        surroundings = surroundings_of(config, experience, refit, bell, payloads)
        if place.size > 1:
            followers = followers_of(config, recipe, place, children)
            surroundings = replace(surroundings, followers=followers)
        trainer = Trainer(recipe, surroundings)
        train = partial(prefetching.beside, trainer.run)
        servicer = TrainerServicer(trainer.status)
        service = server.Service(
            name="trainer",
            listen=config.listen,
            insecure_dev=config.run.insecure_dev,
            register=partial(rpc.add_TrainerServiceServicer_to_server, servicer),
            proto_services=(SERVICE,),
            background=(partial(children.beside, train) if children else train,),
            drain=trainer.drain,
        )
        try:
            await server.serve(service)
        except server.ServiceFailedError as error:
            if isinstance(error.__cause__, NoValidCheckpointError):
                log.critical("%s", error.__cause__.message)
                raise SystemExit(NO_VALID_CHECKPOINT) from error
            raise


async def follow(config: TrainerConfig) -> None:
    """Follows rank 0 to its end."""
    place = launch.place_of(os.environ, config.ranks)
    launch.end_with_leader(os.environ)
    orders = Orders(
        launch.told_store(os.environ, place),
        rank=place.rank,
        size=place.size,
        timeout_s=config.rank_timeout_s,
    )
    recipe = recipe_of(config)
    bell = PollDoorbell(run_id=config.run.id)
    async with connect(config.experience_address) as experience:
        prefetching = prefetching_of(config, recipe, place, experience, bell)
        work = partial(following.follow, recipe, orders, prefetching.prefetched)
        await prefetching.beside(partial(asyncio.to_thread, work))


def prefetching_of(
    config: TrainerConfig,
    recipe: Recipe,
    place: Place,
    experience: grpc.aio.Channel,
    bell: Doorbell,
) -> Prefetching:
    """Where a rank reads payloads, and what has it read them ahead."""
    client = ExperienceClient(experience, config.run.id, bell)
    payloads = StoredPayloads(open_store(config.run))
    return Prefetching(
        Prefetched(payloads, config.prefetch_bytes),
        partial(client.preview, max_steps=DEPTH),
        rank=place.rank,
        size=place.size,
        advantage=recipe.advantage,
    )


def followers_of(
    config: TrainerConfig, recipe: Recipe, place: Place, children: Children | None
) -> Followers:
    """Those that `children` starts, or else those that torchrun has started."""
    if children:
        launch.stay_on_loopback()
    return OrderedFollowers(
        children.store if children else partial(launch.told_store, os.environ, place),
        size=place.size,
        timeout_s=config.rank_timeout_s,
        advantage=recipe.advantage,
        check=children.check if children else lambda: None,
    )


def recipe_of(config: TrainerConfig) -> Recipe:
    """Builds the plugins; raises PluginError."""
    optimizer = config.optimizer

    def build_backend(folder: Path) -> Backend:
        use_gpu()
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
        settings=StepSettings(
            config.microbatch_tokens,
            optimizer.max_grad_norm,
            objective_of(config),
            shaping_of(config.shaping),
        ),
        build_backend=build_backend,
        publish_every=config.publish_every,
        no_progress_s=config.no_progress_s,
    )


def objective_of(config: TrainerConfig) -> Objective:
    """Builds the plugins; raises PluginError, or InvalidFieldError for what is at odds."""
    correction, kl = config.correction, config.kl
    return Objective(
        aggregation=plugins.build("treadle.aggregations", config.aggregation),
        form=config.form,
        correction=plugins.build("treadle.corrections", correction) if correction else None,
        kl=Kl(kl.coefficient, kl.estimator, kl.reference) if kl else None,
        entropy_bonus=config.entropy_bonus,
    )


def shaping_of(config: ShapingConfig | None) -> Shaping:
    """What the recipe has made of rewards."""
    if config is None:
        return Shaping()
    overlong = Overlong(**config.overlong.model_dump()) if config.overlong else None
    return Shaping(overlong, config.stop_properly, config.clip)


def surroundings_of(
    config: TrainerConfig,
    experience: grpc.aio.Channel,
    refit: grpc.aio.Channel,
    bell: Doorbell,
    payloads: PayloadReader,
) -> Surroundings:
    """The adapters of a run's directory, and the peers."""
    directory = config.run.dir
    transport = plugins.build("treadle.weight_transports", config.transport, run_dir=directory)
    return Surroundings(
        experience=ExperienceClient(experience, config.run.id, bell),
        refit=RefitClient(refit, config.run.id),
        sender=transport.sender(config.run.id),
        payloads=payloads,
        store=LocalCheckpoints(directory / "checkpoints"),
        tracker=tracker.of_service(config.run, "trainer"),
    )


if __name__ == "__main__":
    loaded = configuration.load(TrainerConfig)
    rank = int(os.environ.get("RANK", "0"))
    if rank:
        server.run(loaded, f"trainer.{rank}", partial(follow, loaded))
    else:
        server.run(loaded, "trainer", partial(main, loaded))
