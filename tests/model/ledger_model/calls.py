"""Calls of the service's clients: what is common to replicas and trainers."""

import hashlib
from dataclasses import dataclass, field
from random import Random
from typing import Any

import numpy as np

from ledger_model.clock import VirtualLoop
from ledger_model.journal import Journal
from ledger_model.oracle import BreachError, Oracle, Sent
from ledger_model.process import LostError, Process
from treadle.episode.v1 import episode_pb2
from treadle.experience.v1 import experience_service_pb2 as pb
from treadle_core.episodes import NO_VERSION, Segment
from treadle_core.errors import Kind, TreadleError
from treadle_core.media import Medium, MediumSpan
from treadle_payloads.codec import encode_payload
from treadle_payloads.media import medium_to_wire

RUN_ID = "model"
ASK_AGAIN = ("LEDGER_FULL", "WRITER_FENCED", "PAYLOAD_MISSING")
"""The call may have been decided; the same one is answered later, perhaps by a successor."""

IMAGES = (b"a picture", b"another picture", b"a third")

GIVE_UP = 0.03
"""Part of the calls whose client goes away before the answer."""


@dataclass
class World:
    """What the clients of one run share."""

    random: Random
    loop: VirtualLoop
    oracle: Oracle
    journal: Journal
    process: Process
    trace: list[tuple[float, str, str, Any]] = field(default_factory=list)
    fair: bool = False
    """Nobody misbehaves any more."""

    async def call(self, who: str, method: str, **fields: Any) -> Any:
        """Calls the service; raises LostError, or the TreadleError that it answered."""
        request = getattr(pb, f"{method}Request")(run_id=RUN_ID, **fields)
        self.note(who, method, request)
        if self.chance(GIVE_UP):
            self.loop.create_task(self._unheard(method, request))
            raise LostError
        try:
            answer = await self.process.call(method, request)
        except TreadleError as error:
            self.note(who, f"{method} ->", f"{error.reason} {error.message}")
            if error.reason in ASK_AGAIN:
                raise LostError from error
            if error.kind in (Kind.BROKEN, Kind.INVALID):
                raise BreachError(f"{method}: {error.reason} {error.message}") from error
            raise
        except LostError:
            self.note(who, f"{method} ->", "lost")
            raise
        self.note(who, f"{method} ->", answer)
        return answer

    async def _unheard(self, method: str, request: Any) -> None:
        try:
            await self.process.call(method, request)
        except (LostError, TreadleError):
            return

    def note(self, who: str, what: str, message: Any = "") -> None:
        self.trace.append((self.loop.time(), who, what, message))

    def lines(self) -> list[str]:
        """The trace as text."""
        return [f"{t:9.3f} {who:<8} {what} {_short(m)}" for t, who, what, m in self.trace]

    def chance(self, probability: float) -> bool:
        return not self.fair and happens(self.random, probability)


def happens(random: Random, probability: float) -> bool:
    """Whether it does; Hypothesis, which looks for small numbers, shrinks to that it does not."""
    return random.random() > 1 - probability


def result_of(key: tuple[str, int], versions: set[int], salt: str) -> tuple[Sent, Any]:
    """A result whose tokens were sampled by `versions`, and whose content is a function of all.

    Some payloads lie in the store; some have the same bytes as others. Some show images, which
    others show too.
    """
    sampled = sorted(versions)
    seed = hashlib.sha256(f"{key}{sampled}{salt}".encode()).digest()
    reward = None if seed[0] < 20 else float(seed[0] % 2)
    is_stored = seed[1] < 90
    if seed[2] < 25 and not salt:
        seed = hashlib.sha256(f"{sampled}".encode()).digest()
    images = tuple(image for image, byte in zip(IMAGES, seed[3:], strict=False) if byte < 50)
    policy = np.array([NO_VERSION] * (1 + len(images)) + sampled, np.int32)
    mask = policy != NO_VERSION
    segment = Segment(
        token_ids=np.resize(np.frombuffer(seed, "<u4") >> 1, policy.size).astype(np.int32),
        sampled=mask,
        trained=mask,
        logprobs=np.where(mask, -0.5, 0.0).astype(np.float32),
        policy_version=policy,
        context_version=policy,
        media=tuple(
            MediumSpan(hashlib.sha256(image).hexdigest(), place, 1)
            for place, image in enumerate(images, 1)
        ),
    )
    data = encode_payload([segment])
    digest = hashlib.sha256(data).hexdigest()
    message = episode_pb2.EpisodeResult(
        reward=reward,
        termination=episode_pb2.TERMINATION_FINISHED,
        num_tokens=policy.size,
        num_trained=len(sampled),
        versions=sampled,
        payload=episode_pb2.Payload(
            sha256=digest, size=len(data), inline=None if is_stored else data
        ),
        media=[medium_to_wire(Medium.of(image, "image/png")) for image in images],
    )
    return Sent(digest, frozenset(versions), data, reward, is_stored, images), message


def _short(message: Any) -> str:
    return " ".join(str(message).split())[:200]
