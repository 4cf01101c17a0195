"""What an adaptive window saves: heavy-tailed tasks in virtual time, decided by the real core.

Replicas with slots play episodes whose length is log-normal; a trainer claims, trains for a fixed
time and publishes. Each load runs over the same lengths with a fixed window, with an adaptive one,
and with the least fixed one: the smallest `max_lag` that reaches `SPEED_GOAL` of the fixed speed.

Speed counts on every load. Lag counts where the least window shows that there is lag to save: at
`SAVING` of the fixed one's or below. Each measure is the worst load's mean over the seeds; stderr
has them all. Prints one JSON object a measure; exits non-zero where one misses its goal.
"""

import argparse
import functools
import hashlib
import heapq
import itertools
import math
import random
import sys
from bisect import bisect_left
from dataclasses import dataclass, field, replace
from statistics import fmean

from treadle_core.episodes import Termination
from treadle_core.tickets import Sampling, Ticket
from treadle_experience.core import checkpoints, results, steps, tickets, versions
from treadle_experience.core.rules import Rules
from treadle_experience.core.run import TRAINING, Run
from treadle_experience.core.state import Attempt, Result, training_task_id
from treadle_runtime.measures import Measure, report

LAG_GOAL, SPEED_GOAL, SAVING = 0.7, 0.97, 0.6
REPLICAS = 4


@dataclass(frozen=True)
class Load:
    """The task: times are virtual seconds; the mean episode takes one."""

    sigma: float
    """Of the logarithm of an episode's length."""
    headroom: float
    """Episodes that the slots could play for each one that the trainer takes, or a little more."""
    train_s: float
    max_lag: int
    later: float | None = None
    """`sigma` of the second half of the run, where it differs."""
    steps: int = 300
    tasks_per_step: int = 8
    group_size: int = 4

    @property
    def slots(self) -> int:
        """Of each replica."""
        taken = self.tasks_per_step * self.group_size / self.train_s
        return math.ceil(self.headroom * taken / REPLICAS)


KNOWN = (
    Load(sigma=1.0, headroom=1.3, train_s=6, max_lag=8),
    Load(sigma=1.6, headroom=1.3, train_s=12, max_lag=16),
    Load(sigma=1.0, headroom=1.3, train_s=12, max_lag=4),
    Load(sigma=1.3, headroom=1.3, train_s=2, max_lag=8),
)
"""Among the loads that the constants of the window were chosen on."""

HELD_OUT = (
    Load(sigma=1.15, headroom=1.5, train_s=9, max_lag=6),
    Load(sigma=0.9, headroom=1.1, train_s=4, max_lag=12),
    Load(sigma=0.8, headroom=1.4, train_s=10, max_lag=8, later=1.4),
)
"""Not among them."""


Event = tuple[float, int, str, object]
"""When, a number that keeps equal times in order, a method of World, and its argument."""


@dataclass
class World:
    """One run in virtual time."""

    load: Load
    adaptive: bool
    seed: int
    now: float = 0.0
    epoch: int = 0
    version: int = 0
    lags: list[int] = field(default_factory=list[int])
    events: list[Event] = field(default_factory=list["Event"])
    numbers: "itertools.count[int]" = field(default_factory=itertools.count)
    free: dict[str, int] = field(default_factory=dict[str, int])
    waiting_since: float | None = 0.0
    """When the trainer began to wait for its next batch; None while it trains."""
    wait_s: float = 0.0

    def __post_init__(self) -> None:
        load = self.load
        rules = Rules(
            run_id="bench",
            steps=load.steps,
            tasks_per_step=load.tasks_per_step,
            group_size=load.group_size,
            max_lag=load.max_lag,
            retries=0,
            deadline_s=1e9,
            lease_s=1e9,
            sampling=Sampling(1.0, 16),
            adaptive=self.adaptive,
        )
        self.run = Run(rules, {TRAINING: lambda cursor: {"number": cursor}})
        self.run.load(())
        self.free = {f"r{i}": load.slots for i in range(REPLICAS)}
        self.epoch, _ = checkpoints.acquire(self.run, holder="trainer", checkpoint_digest="")
        self.commit(0)
        self.publish(0)

    def play(self) -> None:
        """Runs until the last step is trained."""
        while self.run.state.trained_step < self.load.steps:
            self.lease()
            self.claim()
            self.now, _, kind, what = heapq.heappop(self.events)
            getattr(self, kind)(what)
            self.run.take()

    def lease(self) -> None:
        """Every replica fills its slots, in turn."""
        for replica, free in self.free.items():
            if free:
                leased = tickets.lease(
                    self.run,
                    replica_id=replica,
                    served_version=self.version,
                    max_tickets=free,
                    slots=self.load.slots,
                )
                self.free[replica] -= len(leased)
                for ticket in leased:
                    self.at(self.now + self.length(ticket), "end", (replica, ticket, self.version))
                if len(leased) < free:  # there is no more for the others either
                    return

    def length(self, ticket: Ticket) -> float:
        """Virtual seconds, a function of seed and episode; their mean is 1."""
        load = self.load
        half = load.steps * load.tasks_per_step // 2
        late = ticket.task_id > training_task_id(half)
        sigma = load.later if late and load.later is not None else load.sigma
        draw = random.Random(f"{self.seed}/{ticket.episode_id}")  # noqa: S311, no secret
        return draw.lognormvariate(-(sigma**2) / 2, sigma)

    def end(self, what: tuple[str, Ticket, int]) -> None:
        """An episode ends; its tokens are of every version from its start to now."""
        replica, ticket, first = what
        self.free[replica] += 1
        results.complete(
            self.run,
            replica_id=replica,
            attempt=Attempt(ticket.episode_id, ticket.attempt),
            result=result(tuple(range(first, self.version + 1))),
            inline=b"",
        )

    def claim(self) -> None:
        """The trainer takes its batch, where it waits for one and there is one."""
        if self.waiting_since is None:
            return
        step = self.run.state.trained_step + 1
        claim = steps.claim(self.run, trainer_epoch=self.epoch, step=step)
        if claim.tasks:
            self.lags += [step - 1 - oldest for task in claim.tasks for _, oldest in task.episodes]
            self.wait_s = self.now - self.waiting_since
            self.waiting_since = None
            self.at(self.now + self.load.train_s, "trained", step)

    def trained(self, step: int) -> None:
        """A step ends: reported, committed every tenth time, and published."""
        steps.report(
            self.run,
            trainer_epoch=self.epoch,
            step=step,
            metrics={"wait_s": self.wait_s, "train_s": self.load.train_s},
            trace_id="",
        )
        if step % 10 == 0:
            self.commit(step)
        self.publish(step)
        self.waiting_since = self.now

    def commit(self, step: int) -> None:
        """A checkpoint."""
        head = self.run.state.head()
        checkpoints.commit(
            self.run,
            trainer_epoch=self.epoch,
            digest=hashlib.sha256(str(step).encode()).hexdigest(),
            parent_digest=head.digest if head else "",
            step=step,
            path=str(step),
        )

    def publish(self, step: int) -> None:
        """Installed everywhere at once."""
        self.version = versions.announce(
            self.run, trainer_epoch=self.epoch, step=step, request_id=f"v{step}", trace_id=""
        )
        versions.commit(
            self.run, trainer_epoch=self.epoch, number=self.version, weights_digest="0" * 16
        )

    def at(self, when: float, kind: str, what: object) -> None:
        """Something to happen."""
        heapq.heappush(self.events, (when, next(self.numbers), kind, what))


def result(sampled_by: tuple[int, ...]) -> Result:
    """As light as can be."""
    return Result(
        reward=1.0,
        termination=Termination.FINISHED,
        metrics={},
        turn_rewards=(),
        num_tokens=2,
        num_trained=1,
        versions=sampled_by,
        traceparent="",
        sha256="0" * 64,
        size=1,
        inlined=True,
    )


@functools.cache
def played(load: Load, seeds: int, *, adaptive: bool = False) -> tuple[float, float]:
    """Mean lag, in steps, and mean speed, in steps per virtual second, over the seeds."""
    worlds = [World(load, adaptive=adaptive, seed=seed) for seed in range(seeds)]
    for world in worlds:
        world.play()
    speeds = [load.steps / world.now for world in worlds]
    return fmean(fmean(world.lags) for world in worlds), fmean(speeds)


def least(load: Load, seeds: int, speed: float) -> tuple[Load, float]:
    """The load with the smallest `max_lag` whose fixed window reaches `speed`, and its lag."""
    loads = [replace(load, max_lag=max_lag) for max_lag in range(load.max_lag + 1)]
    at = bisect_left(loads, speed, key=lambda each: played(each, seeds)[1], hi=load.max_lag)
    return loads[at], played(loads[at], seeds)[0]


def ratios(load: Load, seeds: int) -> tuple[float, float, bool]:
    """Lag and speed of the adaptive window over the fixed one's, and whether the lag counts."""
    lag, speed = played(load, seeds)
    smallest, least_lag = least(load, seeds, SPEED_GOAL * speed)
    adaptive_lag, adaptive_speed = played(load, seeds, adaptive=True)
    counts = least_lag <= SAVING * lag
    sys.stderr.write(
        f"sigma {load.sigma}{f' then {load.later}' if load.later else ''}, headroom "
        f"{load.headroom}, train_s {load.train_s}, max_lag {load.max_lag}"
        f"{', held out' if load in HELD_OUT else ''}: lag {lag:.2f} -> {adaptive_lag:.2f} "
        f"({adaptive_lag / lag:.2f}; least {least_lag / lag:.2f} at max_lag {smallest.max_lag}"
        f"{'' if counts else ', so that lag does not count'}), speed {adaptive_speed / speed:.3f}, "
        f"{load.train_s * speed:.2f} of the time training with the fixed window\n"
    )
    return adaptive_lag / lag, adaptive_speed / speed, counts


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=2)
    seeds = parser.parse_args().seeds
    found = [ratios(load, seeds) for load in KNOWN + HELD_OUT]
    lag = max(lag for lag, _, counts in found if counts)
    speed = min(speed for _, speed, _ in found)
    return report(
        [
            Measure("adaptive_lag_over_fixed", lag, "ratio", f"<= {LAG_GOAL}"),
            Measure("adaptive_speed_over_fixed", speed, "ratio", f">= {SPEED_GOAL}"),
        ]
    )


if __name__ == "__main__":
    sys.exit(main())
