"""A trainer of several ranks as processes, on batches in memory: the program of its tests.

    python ranks_program.py DIRECTORY RANKS TIMEOUT_S [WHAT]

WHAT happens once, in step 2: `slow-claim`, the batch takes thrice the timeout; `kill` or `stop`,
the last rank is killed, or stands still, as it reads; `kill-leader` or `stop-leader`, rank 0 is.
`stop-at-the-end`: followers stand still instead of ending.
Rank 0 prints, as JSON, how many versions it published and the parameters that it came to.
"""

import asyncio
import importlib.util
import json
import logging
import os
import signal
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from safetensors.torch import save_file

from treadle_payloads.files import FileStore
from treadle_trainer import following, launch
from treadle_trainer.adapters.orders import OrderedFollowers, Orders
from treadle_trainer.core.advantages.grpo import Grpo

NUM_STEPS = 4


def conftest():
    """The module of that name beside this file."""
    spec = importlib.util.spec_from_file_location("fixtures", Path(__file__).parent / "conftest.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def write_policy(directory):
    """The policy to start from."""
    (directory / "policy").mkdir(exist_ok=True)
    logits = torch.randn(24, 24, generator=torch.Generator().manual_seed(2))
    save_file({"table": logits}, directory / "policy" / "model.safetensors")


def run_of(fixtures, directory, folder):
    """The run that is trained, with what it leaves in `folder`."""
    store = FileStore(directory / "payloads")
    batches = [fixtures.batch(fixtures.group, store, step + 1) for step in range(NUM_STEPS)]
    return fixtures.Run(folder, directory / "policy", store, batches)


class Hurt:
    """Payloads in whose reading a rank is hurt, once in the life of the directory."""

    def __init__(self, payloads, directory, signum):
        self._payloads, self._mark, self._signum = payloads, directory / "hurt", signum

    def read(self, episodes):
        if episodes[0].episode_id.startswith("2-") and not self._mark.exists():
            self._mark.touch()
            os.kill(os.getpid(), self._signum)
        return self._payloads.read(episodes)


def slow(experience, seconds):
    """Experience whose second batch takes some time."""
    claim = experience.claim

    async def late(*, trainer_epoch, step, wait_s):
        if step == 2:
            await asyncio.sleep(seconds)
        return await claim(trainer_epoch=trainer_epoch, step=step, wait_s=wait_s)

    experience.claim = late


async def main(directory, ranks, timeout_s, what):
    fixtures = conftest()
    place = launch.place_of(os.environ, ranks)
    folder = directory / f"rank-{place.rank}"
    folder.mkdir(exist_ok=True)
    (folder / "pid").write_text(str(os.getpid()))
    if place.rank == 0:
        write_policy(directory)
    run = run_of(fixtures, directory, folder)
    recipe = run.trainer()._recipe
    signals = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}
    action, _, whom = what.partition("-")
    victim = {"": place.size - 1, "leader": 0}.get(whom)
    if action in signals and place.rank == victim:
        run.payloads = Hurt(run.payloads, directory, signals[action])
    if place.rank:
        launch.end_with_leader(os.environ)
        told = launch.told_store(os.environ, place)
        orders = Orders(told, rank=place.rank, size=place.size, timeout_s=timeout_s)
        await asyncio.to_thread(following.follow, recipe, orders, run.payloads)
        if what == "stop-at-the-end":
            os.kill(os.getpid(), signal.SIGSTOP)
        return
    if what == "slow-claim":
        slow(run.experience, 3 * timeout_s)
    await lead(run, place, timeout_s)


async def lead(run, place, timeout_s):
    launch.stay_on_loopback()
    children = None
    if not place.told:
        children = launch.Children(place.size, (sys.executable, *sys.argv))
    followers = OrderedFollowers(
        children.store if children else lambda: launch.told_store(os.environ, place),
        size=place.size,
        timeout_s=timeout_s,
        advantage=Grpo(),
        check=children.check if children else lambda: None,
    )
    trainer = run.trainer()
    trainer._with = replace(trainer._with, followers=followers)
    work = partial(run.finish, trainer)
    await (children.beside(work) if children else work())
    table = trainer._loaded.parameters()["table"].flatten().tolist()
    sys.stdout.write(json.dumps([len(run.refit.committed), table]))


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    words = sys.argv[1:]
    torch.set_num_threads(1)
    asyncio.run(main(Path(words[0]), int(words[1]), float(words[2]), (words[3:] or ["plain"])[0]))
