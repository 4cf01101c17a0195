"""A run that tests drive by hand: the real core, without processes."""

import contextlib
import hashlib
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
from redis import Redis

from treadle_core.episodes import FailureClass, Termination
from treadle_core.faults import Fault, FaultReason
from treadle_core.tickets import Sampling, Ticket
from treadle_experience.adapters.redis_ledger import RedisLedger
from treadle_experience.core import checkpoints, faults, results, steps, tickets, versions
from treadle_experience.core.audit import Account, reconcile
from treadle_experience.core.filters import Filter
from treadle_experience.core.rules import EvaluationRules, EvaluationSet, Rules
from treadle_experience.core.run import Run
from treadle_experience.core.state import Attempt, Episode, Result, RunState
from treadle_experience.core.tickets import Failure
from treadle_experience.core.transitions import Transition
from treadle_runtime import failpoints
from treadle_runtime.testing import RedisProcess

FAST = "/dev/shm" if Path("/dev/shm").is_dir() else None  # noqa: S108

RULES = Rules(
    run_id="run",
    steps=1000,
    tasks_per_step=2,
    group_size=2,
    max_lag=1,
    retries=1,
    deadline_s=60.0,
    lease_s=10.0,
    sampling=Sampling(1.0, 16),
)


def evaluation_rules(
    *, every: int = 2, share: float = 0.5, limit: int = 3, exact: bool = False
) -> EvaluationRules:
    chosen = EvaluationSet("greedy", limit, Sampling(0.0, 16), exact)
    return EvaluationRules(every, share, (chosen,))


def digest_of(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def make_result(
    payload: bytes = b"payload", *, versions: Iterable[int] = (1,), **changes
) -> Result:
    result = Result(
        reward=1.0,
        termination=Termination.FINISHED,
        metrics={"calls": 2.0},
        turn_rewards=(0.0, 1.0),
        num_tokens=4,
        num_trained=2,
        versions=tuple(sorted(set(versions))),
        traceparent="",
        sha256=hashlib.sha256(payload).hexdigest(),
        size=len(payload),
        inlined=True,
    )
    return replace(result, **changes)


@dataclass
class World:
    """A run, its journal, and one well-behaved trainer."""

    rules: Rules = RULES
    num_tasks: int = 1_000_000
    journal: list[Transition] = field(default_factory=list)
    epoch: int = 0
    filter: Filter | None = None

    def __post_init__(self) -> None:
        self.run = self.fresh_run()
        self.run.load(())

    def fresh_run(self) -> Run:
        names = [each.name for each in self.rules.evaluation.sets] if self.rules.evaluation else []
        held_out = dict.fromkeys(names, lambda cursor: {"held_out": cursor})
        return Run(self.rules, {"": self.read, **held_out}, filter=self.filter)

    def read(self, cursor: int) -> dict[str, int] | None:
        return {"number": cursor} if cursor < self.num_tasks else None

    @property
    def state(self) -> RunState:
        return self.run.state

    def save(self) -> list[Transition]:
        self.journal += self.run.take()
        return self.journal

    def reload(self) -> RunState:
        """A second process that reads the same journal."""
        run = self.fresh_run()
        run.load(self.save())
        return run.state

    def account(self) -> Account:
        return reconcile(self.save(), self.state)

    def start(self) -> "World":
        """What a trainer does before its first claim."""
        self.acquire("trainer")
        self.checkpoint(0)
        self.publish(0)
        return self

    def acquire(self, holder: str, digest: str = "") -> int:
        self.epoch, step = checkpoints.acquire(self.run, holder=holder, checkpoint_digest=digest)
        return step

    def checkpoint(self, step: int, name: str = "") -> str:
        head = self.state.head()
        digest = digest_of(name or f"{self.epoch}/{step}")
        checkpoints.commit(
            self.run,
            trainer_epoch=self.epoch,
            digest=digest,
            parent_digest=head.digest if head else "",
            step=step,
            path=f"checkpoints/{digest[:8]}",
        )
        return digest

    def publish(self, step: int) -> int:
        number = versions.announce(
            self.run,
            trainer_epoch=self.epoch,
            step=step,
            request_id=f"request-{self.state.num_versions}",
            trace_id="",
        )
        versions.commit(
            self.run, trainer_epoch=self.epoch, number=number, weights_digest=f"{number:016x}"
        )
        return number

    def lease(
        self, version: int, most: int = 1000, *, replica: str = "r1", slots: int = 1000
    ) -> list[Ticket]:
        return tickets.lease(
            self.run,
            replica_id=replica,
            served_version=version,
            max_tickets=most,
            slots=slots,
        )

    def complete(
        self,
        ticket: Ticket,
        *,
        versions: Iterable[int] = (1,),
        replica: str = "r1",
        payload: bytes | None = None,
        **changes,
    ) -> bool:
        inline = f"{ticket.episode_id}/{ticket.attempt}".encode() if payload is None else payload
        return results.complete(
            self.run,
            replica_id=replica,
            attempt=attempt_of(ticket),
            result=make_result(inline, versions=versions, **changes),
            inline=inline,
        )

    def fail(self, ticket: Ticket, *, replica: str = "r1") -> bool:
        failure = Failure(FailureClass.ENVIRONMENT, "it raised")
        return tickets.fail(
            self.run, replica_id=replica, attempt=attempt_of(ticket), failure=failure
        )

    def claim(self, step: int) -> steps.Claim:
        return steps.claim(self.run, trainer_epoch=self.epoch, step=step)

    def report(self, step: int, **metrics: float) -> None:
        steps.report(
            self.run,
            trainer_epoch=self.epoch,
            step=step,
            metrics={"loss": 0.5} | metrics,
            trace_id="",
        )

    def fault(self, episode: Episode, reason: FaultReason) -> Fault:
        return Fault(episode.episode_id, episode.attempt, reason, "it said so")

    def hand_back(self, step: int, *said: tuple[Episode, FaultReason]) -> None:
        faults.hand_back(
            self.run,
            trainer_epoch=self.epoch,
            step=step,
            faults=[self.fault(*each) for each in said],
        )

    def ticket(self, episode: Episode, attempt: int) -> Ticket:
        """The ticket of an attempt that was issued before."""
        task = self.state.tasks[episode.task_id]
        return Ticket(
            episode.episode_id,
            attempt,
            task.task_id,
            episode.index,
            task.spec,
            self.rules.sampling,
            self.rules.deadline_s,
        )

    def train(self, step: int) -> list[str]:
        """Runs all there is on the newest version, then claims and trains `step`."""
        version = self.state.newest_version
        for ticket in self.lease(version):
            self.complete(ticket, versions=[version])
        claim = self.claim(step)
        assert claim.tasks, f"step {step} is not ready"
        self.report(step)
        return [task.task_id for task in claim.tasks]


def attempt_of(ticket: Ticket) -> Attempt:
    return Attempt(ticket.episode_id, ticket.attempt)


@pytest.fixture
def make_world() -> Callable[..., World]:
    """Makes a World whose rules differ from RULES by the keywords given."""

    def make(*, num_tasks: int = 1_000_000, filter_: Filter | None = None, **changes) -> World:
        return World(rules=replace(RULES, **changes), num_tasks=num_tasks, filter=filter_)

    return make


@pytest.fixture
def tools():
    """The functions of this file, for tests that need them apart from a World."""

    class Tools:
        result = staticmethod(make_result)
        digest = staticmethod(digest_of)
        attempt = staticmethod(attempt_of)
        evaluation = staticmethod(evaluation_rules)
        rules = RULES

    return Tools


@pytest.fixture(scope="session")
def redis_server():
    """One Redis server for all tests that do not break it."""
    if not RedisProcess.is_installed():
        pytest.skip("NO redis-server ON PATH: the Redis ledger is not tested")
    with tempfile.TemporaryDirectory(prefix="treadle-redis-", dir=FAST) as directory:
        server = RedisProcess(Path(directory)).start()
        yield server
        server.kill()


@pytest.fixture
def redis(redis_server):
    """The same, empty."""
    with Redis.from_url(redis_server.url) as client:
        client.flushall()
    return redis_server


@pytest.fixture
def server(tmp_path):
    """A server that a test may break."""
    process = RedisProcess(tmp_path / "redis")
    yield process
    process.kill()


@pytest.fixture
def open_ledger(tmp_path, server):
    """Opens the run's ledger, as one process after the other would."""
    with contextlib.ExitStack() as opened:

        def open_(**changes) -> RedisLedger:
            ledger = RedisLedger(tmp_path / "run", server.url, **changes)
            return opened.enter_context(contextlib.closing(ledger))

        yield open_


@pytest.fixture
def failing():
    """Arms failpoints for the time of a test."""
    yield lambda name: failpoints.arm({failpoints.ENVIRONMENT: f"{name}=raise"})
    failpoints.arm({})
