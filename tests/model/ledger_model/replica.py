"""A rollout replica as the ledger sees it: it lags, dies, and comes back as a zombie."""

from dataclasses import dataclass, field
from typing import Any

from google.protobuf.duration_pb2 import Duration

from ledger_model.calls import World, result_of
from ledger_model.oracle import Sent, require
from ledger_model.process import LostError
from treadle.episode.v1 import episode_pb2
from treadle.experience.v1 import experience_service_pb2 as pb
from treadle_core.errors import TreadleError

SLOTS = 8
REFUSED = ("STALE_ATTEMPT", "UNKNOWN_EPISODE", "RESULT_CONFLICT", "UNKNOWN_VERSION")


@dataclass
class Held:
    """An attempt that the replica runs."""

    key: tuple[str, int]
    leased_step: int
    versions: set[int]
    """What its tokens were sampled by."""
    renewed: float
    """When the ledger was last known to have extended its lease."""
    deadline: float
    result: tuple[Sent, Any] | None = None
    """Finished; to be sent until it is answered."""


@dataclass
class Replica:
    """One engine and its episodes."""

    name: str
    world: World
    version: int = 0
    """What it serves; 0 before its first install."""
    silent: bool = False
    held: dict[str, Held] = field(default_factory=dict)
    delivered: list[tuple[tuple[str, int], tuple[Sent, Any]]] = field(default_factory=list)
    """What was sent before, to be sent again."""
    busy: bool = False
    complete: bool = False

    @property
    def step(self) -> int:
        return self.world.oracle.announced.get(self.version, 0)

    def install(self, version: int) -> None:
        """Between two tokens; what runs goes on."""
        self.version = version
        for held in self.held.values():
            if held.result is None:
                held.versions.add(version)

    def die(self) -> None:
        """By SIGKILL: what ran is gone, and so is what it served."""
        self.held.clear()
        self.version = 0

    async def lease(self, most: int, wait_s: int = 0) -> None:
        world, version, began = self.world, self.version, self.world.loop.time()
        try:
            answer = await world.call(
                self.name,
                "LeaseTickets",
                replica_id=self.name,
                served_version=version,
                max_tickets=most,
                slots=SLOTS,
                wait=Duration(seconds=wait_s),
            )
        except LostError:
            return
        self.complete = answer.complete
        for ticket in answer.tickets:
            world.oracle.leased(ticket)
            key = (ticket.episode_id, ticket.attempt)
            deadline = began + ticket.deadline.ToNanoseconds() / 1e9
            step = world.oracle.announced[version]
            held = Held(key, step, {version, self.version}, began, deadline)
            self.held[ticket.episode_id] = held

    async def renew(self) -> None:
        """Says what it runs, and stops what it must not go on with."""
        world, began, version = self.world, self.world.loop.time(), self.version
        asked = list(self.held.values())
        attempts = [pb.Attempt(episode_id=h.key[0], attempt=h.key[1]) for h in asked]
        try:
            answer = await world.call(
                self.name,
                "RenewLeases",
                replica_id=self.name,
                served_version=version,
                attempts=attempts,
            )
        except LostError:
            return
        revoked = {(each.episode_id, each.attempt) for each in answer.revoked}
        for held in asked:
            if held.key in revoked:
                self._explain(held, version, began)
                if self.held.get(held.key[0]) is held:
                    del self.held[held.key[0]]
            else:
                held.renewed = began

    def _explain(self, held: Held, version: int, now: float) -> None:
        """An attempt in good standing is taken away only with its task, or by a restore (I8)."""
        rules, state = self.world.process.rules, self.world.process.state
        overslept = now - held.renewed >= rules.lease_s or now >= held.deadline
        served = [self.world.oracle.announced[each] for each in {version, *held.versions} - {0}]
        went_back = min(served) < held.leased_step
        episode = state.episodes.get(held.key[0])
        ended = episode is None or episode.attempt != held.key[1] or episode.state != "issued"
        require(ended, "what is revoked is not issued", held.key)
        forgotten = self.world.oracle.is_forgotten(held.key)
        with_its_task = forgotten or (episode is not None and episode.state == "revoked")
        in_doubt = held.result is not None
        require(
            overslept or went_back or with_its_task or in_doubt,
            "only an episode that nobody renewed is lost (I8)",
            held.key,
            episode,
        )

    async def finish(self, held: Held, salt: str = "") -> None:
        """Sends a result, until it is answered or refused."""
        if held.result is None:
            held.result = result_of(held.key, held.versions - {0}, salt)
        if await self._send(held.key, held.result) and self.held.get(held.key[0]) is held:
            del self.held[held.key[0]]

    async def send_again(self) -> None:
        """A duplicate, or another result for the same attempt."""
        key, (sent, message) = self.world.random.choice(self.delivered)
        if self.world.chance(0.3):
            await self._send(key, result_of(key, set(sent.versions), "other"))
        else:
            await self._send(key, (sent, message))

    async def send_forged(self, held: Held) -> None:
        """Tokens of a version that is not registered; refused, and the attempt goes on.

        One that is committed while the call is under way may be accepted.
        """
        oracle, random = self.world.oracle, self.world.random
        unknown = max(oracle.announced, default=0) + random.randint(1, 5)
        unknown = random.choice([unknown, *sorted(set(oracle.announced) - oracle.commits)])
        forged = result_of(held.key, (held.versions - {0}) | {unknown}, "forged")
        before = oracle.acknowledged.get(held.key[0])
        oracle.sends(held.key, forged[0])
        self._upload(forged[0])
        try:
            answer = await self._complete(held.key, forged)
        except (LostError, TreadleError):
            return
        oracle.completed(held.key, forged[0], duplicate=answer.duplicate, was=before)
        self.held.pop(held.key[0], None)

    async def _send(self, key: tuple[str, int], result: tuple[Sent, Any]) -> bool:
        """Whether the result was answered, for better or worse."""
        oracle, sent = self.world.oracle, result[0]
        self.delivered.append((key, result))
        oracle.sends(key, sent)
        before = oracle.acknowledged.get(key[0])
        self._upload(sent)
        try:
            answer = await self._complete(key, result)
        except LostError:
            return False
        except TreadleError as error:
            require(error.reason in REFUSED, "a result is refused as the contract says", error)
            if oracle.acknowledged.get(key[0]) == before:
                oracle.refused(key, sent, error.reason)
            return True
        oracle.completed(key, sent, duplicate=answer.duplicate, was=before)
        return True

    def _upload(self, sent: Sent) -> None:
        journal = self.world.journal
        for data in (*sent.images, *([sent.data] if sent.is_stored else [])):
            journal.vanished.discard(journal.store.put(data).sha256)

    async def _complete(self, key: tuple[str, int], result: tuple[Sent, Any]) -> Any:
        return await self.world.call(
            self.name,
            "CompleteEpisode",
            replica_id=self.name,
            attempt=pb.Attempt(episode_id=key[0], attempt=key[1]),
            result=result[1],
        )

    async def fail(self, held: Held) -> None:
        """Reports a failure; never changes its mind afterwards."""
        self.held.pop(held.key[0], None)
        try:
            await self.world.call(
                self.name,
                "FailEpisode",
                replica_id=self.name,
                attempt=pb.Attempt(episode_id=held.key[0], attempt=held.key[1]),
                failure_class=episode_pb2.FAILURE_CLASS_ENVIRONMENT,
                message="it raised",
            )
        except LostError:
            return
        except TreadleError as error:
            require(error.reason in REFUSED, "a failure is refused as the contract says", error)
            return
        self.world.oracle.failed.add(held.key)

    async def give_back(self, most: int) -> None:
        """Hands attempts back, as a replica that drains does."""
        chosen = list(self.held.values())[:most]
        for held in chosen:
            del self.held[held.key[0]]
        try:
            await self.world.call(
                self.name,
                "ReturnTickets",
                replica_id=self.name,
                attempts=[pb.Attempt(episode_id=h.key[0], attempt=h.key[1]) for h in chosen],
            )
        except LostError:
            return
