"""Whoever waits is rung for whenever there is something for it that was not there before."""

import contextlib
import random

import pytest

from treadle_core.errors import TreadleError
from treadle_core.faults import FaultReason
from treadle_experience import ringing
from treadle_experience.core import steps, tickets
from treadle_experience.core.state import Attempt
from treadle_runtime.doorbell import Topic

ACTIONS = ("lease", "complete", "fail", "give back", "step", "hand back", "restore")


class Driven:
    """A world in which something happens at random, and what was rung for it."""

    def __init__(self, world, seed: int) -> None:
        self.world, self.random = world.start(), random.Random(seed)  # noqa: S311, a schedule
        self.held = []
        self.world.save()

    @property
    def step(self) -> int:
        return self.world.state.trained_step + 1

    def answers(self) -> dict[Topic, bool]:
        """Whether another replica would get a ticket or an end, and the trainer a batch."""
        run = self.world.fresh_run()
        run.load(self.world.journal)
        version = run.state.newest_version
        leased = tickets.lease(
            run, replica_id="r9", served_version=version, max_tickets=1, slots=1000
        )
        again = self.world.fresh_run()
        again.load(self.world.journal)
        claim = steps.claim(again, trainer_epoch=self.world.epoch, step=self.step)
        return {
            Topic.TICKETS: bool(leased) or steps.is_complete(run),
            Topic.BATCHES: bool(claim.tasks) or claim.complete,
        }

    def happen(self, action: str) -> set[Topic]:
        """Does it, where that is possible; returns what was rung."""
        world, before = self.world, len(self.world.journal)
        with contextlib.suppress(TreadleError):
            self._do(action)
        world.save()
        return {topic for each in world.journal[before:] for topic in ringing.topics(each)}

    def _do(self, action: str) -> None:
        world = self.world
        if action == "lease":
            self.held += world.lease(world.state.newest_version, self.random.randint(1, 4))
        elif action in ("complete", "fail", "give back") and self.held:
            ticket = self.held.pop(self.random.randrange(len(self.held)))
            if action == "complete":
                world.complete(ticket, versions=[world.state.newest_version])
            elif action == "fail":
                world.fail(ticket)
            else:
                attempt = world.state.episodes[ticket.episode_id].attempt
                tickets.give_back(
                    world.run,
                    replica_id="r1",
                    attempts=[Attempt(ticket.episode_id, attempt)],
                )
        elif action == "step" and world.claim(self.step).tasks:
            step = self.step
            world.report(step)
            if self.random.random() < 0.5:
                world.checkpoint(step)
            world.publish(step)
        elif action == "hand back":
            claim = world.claim(self.step)
            if claim.tasks:
                episode, _ = self.random.choice(self.random.choice(claim.tasks).episodes)
                reason = self.random.choice(list(FaultReason))
                world.hand_back(self.step, (episode, reason))
        elif action == "restore" and self.random.random() < 0.2:
            head = world.state.head()
            world.acquire("another", head.digest)


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("window", ["fixed", "adaptive"])
def test_what_was_not_there_before_is_rung_for(make_world, tools, seed, window) -> None:
    rules = {"steps": 5, "retries": 1, "max_lag": seed % 3, "adaptive": window == "adaptive"}
    if seed % 2:
        rules["evaluation"] = tools.evaluation(limit=2)
    driven = Driven(make_world(**rules), seed)
    before, changes = driven.answers(), 0
    for _ in range(80):
        action = driven.random.choice((*ACTIONS, "lease", "complete", "complete", "step"))

        rung = driven.happen(action)

        after = driven.answers()
        for topic, there in after.items():
            if there and not before[topic]:
                changes += 1
                assert topic in rung, f"after {action}: nobody waiting for {topic} is told"
        before = after
    assert changes > 3


def test_what_one_takes_rings_for_nobody_else(make_world) -> None:
    world = make_world().start()
    world.save()

    world.lease(1)

    assert not any(ringing.topics(transition) for transition in world.run.take())
