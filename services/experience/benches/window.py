"""What an adaptive window saves: a heavy-tailed task in virtual time, decided by the real core.

Replicas with slots play episodes whose length is log-normal; a trainer claims, trains for a fixed
time and publishes. Once with a fixed window, once with an adaptive one, over the same lengths.
Prints one JSON object a measure; exits non-zero where one misses its goal.
"""

import argparse
import hashlib
import heapq
import itertools
import json
import math
import random
import sys
from dataclasses import dataclass, field
from statistics import fmean

from treadle_core.episodes import Termination
from treadle_core.tickets import Sampling, Ticket
from treadle_experience.core import checkpoints, results, steps, tickets, versions
from treadle_experience.core.rules import Rules
from treadle_experience.core.run import TRAINING, Run
from treadle_experience.core.state import Result
from treadle_experience.core.tickets import Attempt

LAG_GOAL, SPEED_GOAL = 0.7, 0.97
REPLICAS = 4


@dataclass(frozen=True)
class Load:
    """The task: times are virtual seconds; the mean episode takes one."""

    steps: int
    max_lag: int
    sigma: float
    """Of the logarithm of an episode's length."""
    headroom: float
    """Episodes that the slots could play for each one that the trainer takes."""
    train_s: float
    tasks_per_step: int = 8
    group_size: int = 8

    @property
    def slots(self) -> int:
        """Of each replica."""
        taken = self.tasks_per_step * self.group_size / self.train_s
        return math.ceil(self.headroom * taken / REPLICAS)


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

    def length(self, ticket: Ticket) -> float:
        """Virtual seconds, a function of seed and episode; their mean is 1."""
        sigma = self.load.sigma
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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--max-lag", type=int, default=8)
    parser.add_argument("--sigma", type=float, default=1.0)
    parser.add_argument("--headroom", type=float, default=1.3)
    parser.add_argument("--train-s", type=float, default=6.0)
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args()
    load = Load(options.steps, options.max_lag, options.sigma, options.headroom, options.train_s)
    lags: list[float] = []
    speeds: list[float] = []
    for seed in range(options.seeds):
        fixed, adaptive = (World(load, adaptive=each, seed=seed) for each in (False, True))
        fixed.play()
        adaptive.play()
        lags.append(fmean(adaptive.lags) / fmean(fixed.lags))
        speeds.append(fixed.now / adaptive.now)
        sys.stderr.write(
            f"seed {seed}: lag {fmean(fixed.lags):.2f} -> {fmean(adaptive.lags):.2f}, "
            f"{load.steps / fixed.now:.4f} -> {load.steps / adaptive.now:.4f} steps/s, "
            f"{load.train_s * load.steps / fixed.now:.3f} of the time training\n"
        )
    rows = [
        ("adaptive_lag_over_fixed", fmean(lags), LAG_GOAL, fmean(lags) <= LAG_GOAL),
        ("adaptive_speed_over_fixed", fmean(speeds), SPEED_GOAL, fmean(speeds) >= SPEED_GOAL),
    ]
    for name, value, goal, holds in rows:
        row = {"measure": name, "value": round(value, 4), "unit": "ratio"}
        sys.stdout.write(json.dumps(row | {"goal": goal, "holds": holds}) + "\n")
    return 0 if all(row[3] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
