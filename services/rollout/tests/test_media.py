"""What a policy was shown: stored before its result is reported, and named by it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from treadle_agents.loop import Outcome
from treadle_core.episodes import FailureClass, Segment, Termination
from treadle_core.errors import InvalidFieldError, Kind
from treadle_core.media import MAX_MEDIA, Medium, MediumSpan
from treadle_core.tickets import Ticket
from treadle_payloads.codec import decode_payload
from treadle_payloads.files import FileStore
from treadle_payloads.media import media_from_wire
from treadle_payloads.store import INLINE_LIMIT
from treadle_rollout import wire
from treadle_rollout.adapters.memory_experience import MemoryExperience
from treadle_rollout.attempts import AttemptRunner, AttemptSettings
from treadle_rollout.core.results import result_of, shown
from treadle_rollout.players import Played
from treadle_runtime.errors import RemoteError

CAT_BYTES, DOG_BYTES = b"cat" * 100, b"dog" * 100
CAT, DOG = Medium.of(CAT_BYTES, "image/png"), Medium.of(DOG_BYTES, "image/jpeg")
MEDIA = {DOG: DOG_BYTES, CAT: CAT_BYTES}


def segment(*media: Medium) -> Segment:
    """One token of each medium, then one that the policy said."""
    sampled = np.arange(len(media) + 1) == len(media)
    versions = np.where(sampled, 1, -1).astype(np.int32)
    return Segment(
        token_ids=np.zeros(sampled.size, np.int32),
        sampled=sampled,
        trained=sampled,
        logprobs=np.where(sampled, -0.5, 0).astype(np.float32),
        policy_version=versions,
        context_version=versions,
        media=tuple(MediumSpan(each.sha256, place, 1) for place, each in enumerate(media)),
    )


@dataclass
class Shows:
    """Player whose every episode shows the same."""

    segments: tuple[Segment, ...]
    media: Mapping[Medium, bytes]
    free: int = 1

    async def play(self, ticket: Ticket) -> Played:
        outcome = Outcome(1.0, Termination.FINISHED, {}, ())
        return Played(self.segments, outcome, media=self.media)


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., Any]:
    async def begin(
        tickets: list[Ticket],
        player: Shows,
        *,
        inline_bytes: int = INLINE_LIMIT,
        refusals: tuple[RemoteError, ...] = (),
    ) -> tuple[MemoryExperience, FileStore, list[str]]:
        ledger, store = MemoryExperience(tickets), FileStore(tmp_path)
        ledger.refusals.extend(refusals)
        await ledger.lease(served_version=1, max_tickets=99, slots=99, wait_s=1)
        settings = AttemptSettings("run", delivery_s=30, inline_bytes=inline_bytes)
        runner = AttemptRunner(settings, ledger, player, store)
        return ledger, store, [await runner.run(each) for each in tickets]

    return begin


def stored(store: FileStore) -> set[str]:
    return {sha256 for sha256, _ in store.objects()}


async def test_a_group_stores_what_it_was_shown_once_and_each_result_names_it(
    run: Callable[..., Any], ticket: Callable[..., Ticket]
) -> None:
    tickets = [ticket(f"e{n}") for n in range(16)]
    player = Shows((segment(), segment(CAT, DOG), segment(CAT)), MEDIA)

    ledger, store, ended = await run(tickets, player)

    assert set(ended) == {"completed"}
    assert [result.media for result in ledger.results.values()] == [(CAT, DOG)] * 16
    assert stored(store) == {CAT.sha256, DOG.sha256}
    inline = ledger.results["e0"].inline
    assert CAT_BYTES not in inline
    assert [each.media for each in decode_payload(inline)] == [
        each.media for each in player.segments
    ]


async def test_a_payload_that_is_not_inline_lies_beside_its_media(
    run: Callable[..., Any], ticket: Callable[..., Ticket]
) -> None:
    ledger, store, _ = await run([ticket("e")], Shows((segment(CAT),), MEDIA), inline_bytes=0)

    result = ledger.results["e"]
    assert (result.inline, result.media) == (None, (CAT,))
    assert stored(store) == {CAT.sha256, result.payload.sha256}  # DOG was never shown


async def test_a_report_after_a_medium_went_missing_puts_it_again(
    run: Callable[..., Any], ticket: Callable[..., Ticket]
) -> None:
    missing = RemoteError(Kind.NOT_FOUND, "PAYLOAD_MISSING", "result.media[0]")

    ledger, store, ended = await run(
        [ticket("e")], Shows((segment(CAT),), MEDIA), refusals=(missing,)
    )

    assert (ended, ledger.complete_calls) == (["completed"], 2)
    assert stored(store) == {CAT.sha256}


async def test_an_episode_whose_media_nobody_has_failed_and_is_not_reported(
    run: Callable[..., Any], ticket: Callable[..., Ticket]
) -> None:
    ledger, store, ended = await run([ticket("e")], Shows((segment(CAT, DOG),), {CAT: CAT_BYTES}))

    assert ended == [f"failed_{FailureClass.INFRASTRUCTURE}"]
    ((_, failure),) = ledger.failures
    assert DOG.sha256 in failure.message
    assert stored(store) == set()


def test_more_media_than_an_episode_may_have_are_refused() -> None:
    many = [Medium.of(str(n).encode(), "image/png") for n in range(MAX_MEDIA + 1)]

    with pytest.raises(InvalidFieldError, match="at most 256 entries"):
        shown([segment(*many)], dict.fromkeys(many, b""))


def test_what_was_shown_first_is_named_first_and_what_was_not_is_left_out() -> None:
    cow = Medium.of(b"cow", "image/gif")

    found = shown([segment(DOG), segment(CAT, DOG)], {cow: b"cow", **MEDIA})

    assert list(found.items()) == [(DOG, DOG_BYTES), (CAT, CAT_BYTES)]


def test_a_result_says_on_the_wire_where_its_media_lie() -> None:
    placed = replace(CAT, node="unix:/node", epoch=3)
    outcome = Outcome(1.0, Termination.FINISHED, {}, ())
    result = result_of([segment(CAT)], outcome, data=b"", traceparent="", media=[placed])

    message = wire.result_to_wire(result)

    assert media_from_wire(message.media, "media") == (placed,)
