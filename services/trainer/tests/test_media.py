"""Segments that show media: read without their bytes, counted, and left out of the loss."""

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
import torch

from treadle.episode.v1 import episode_pb2
from treadle.experience.v1 import experience_service_pb2 as pb
from treadle_core.episodes import Group
from treadle_core.errors import InvalidFieldError
from treadle_core.faults import FaultReason
from treadle_core.media import Medium, MediumSpan
from treadle_payloads.codec import encode_payload
from treadle_payloads.store import PayloadReference
from treadle_trainer import wire
from treadle_trainer.core.advantages.grpo import Grpo
from treadle_trainer.core.claims import Claim
from treadle_trainer.core.losses.ppo_clip import PpoClip
from treadle_trainer.core.step import StepSettings, train_step
from treadle_trainer.core.weighing import weigh

CAT = Medium.of(b"nobody stores these bytes", "image/png")
SPANS = (MediumSpan(CAT.sha256, 1, 2),)


def showing(segment):
    return replace(segment, media=SPANS)


def with_media(group, number):
    """The group, with a segment more that shows a medium for each of the first `number`."""
    episodes = [
        replace(each, segments=(*each.segments, showing(each.segments[0])), media=(CAT,))
        if place < number
        else each
        for place, each in enumerate(group.episodes)
    ]
    return Group(group.task_id, tuple(episodes))


def step(backend, groups, **ranks):
    return train_step(
        backend,
        groups,
        advantage=Grpo(),
        loss=PpoClip(),
        settings=StepSettings(microbatch_tokens=128, max_grad_norm=1.0),
        learning_rate=1e-2,
        **ranks,
    )


def test_a_segment_with_media_is_counted_and_changes_nothing(backend_class, table, make_group):
    rng = np.random.default_rng(3)
    telling, silent = make_group(rng, [1.0, 0.0, None]), make_group(rng, [1.0, 1.0])
    first, second = backend_class(table), backend_class(table)

    plain = step(first, [telling, silent])
    shown = step(second, [with_media(telling, 3), with_media(silent, 2)])

    # Of the silent group, and of the episode without a reward, nothing would have entered anyway.
    assert shown == replace(plain, num_media=2)
    torch.testing.assert_close(second.table, first.table, rtol=0, atol=0)
    assert not torch.equal(first.table, backend_class(table).table)


def test_a_step_of_media_alone_updates_nothing(backend_class, table, make_segment, make_group):
    group = make_group(np.random.default_rng(4), [1.0, 0.0])
    episodes = [
        replace(each, segments=tuple(map(showing, each.segments)), media=(CAT,))
        for each in group.episodes
    ]
    backend = backend_class(table)

    result = step(backend, [Group("t", tuple(episodes))])

    assert (result.num_trained, result.loss, result.num_media) == (0, 0.0, 3)
    assert torch.equal(backend.table, backend_class(table).table)
    assert weigh(Group("t", tuple(episodes)), Grpo()) == []


class Pair:
    """One of two ranks that are threads of this process."""

    size = 2

    def __init__(self, rank, board, barrier):
        self.rank, self._board, self._barrier = rank, board, barrier

    def gather(self, said):
        self._board[self.rank] = said
        self._barrier.wait(30)
        found = list(self._board)
        self._barrier.wait(30)
        return found

    def add_up(self, tensor):
        tensor.copy_(torch.stack(self.gather(tensor.clone())).sum(0))


def test_ranks_count_the_media_of_all(backend_class, table, make_group):
    group = with_media(make_group(np.random.default_rng(5), [1.0, 0.0, 0.0, 1.0]), 3)
    board, barrier = [None, None], threading.Barrier(2)

    def one(rank):
        mine = [
            each if place % 2 == rank else replace(each, segments=(), media=())
            for place, each in enumerate(group.episodes)
        ]
        ranks = Pair(rank, board, barrier)
        return step(backend_class(table), [Group("t", tuple(mine))], ranks=ranks)

    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(one, range(2)))

    assert [each.num_media for each in found] == [3, 3]


def changed(run, segments, **fields):
    """Makes the first episode of step 1 one of these segments."""
    data = encode_payload(segments)
    tasks = list(run.experience.batches[0])
    first, *others = tasks[0].episodes
    content = {
        "payload": PayloadReference.of(data),
        "inline": data,
        "num_tokens": sum(each.num_tokens for each in segments),
        "num_trained": sum(each.num_trained for each in segments),
    }
    tasks[0] = replace(tasks[0], episodes=(replace(first, **content, **fields), *others))
    run.experience.batches[0] = tuple(tasks)


async def test_an_episode_with_media_is_trained_on_without_their_bytes_and_told(
    make_run, make_segment, caplog
):
    rng = np.random.default_rng(6)
    run = make_run(1)
    longer = showing(make_segment(rng, 700))  # than any micro-batch: it enters none
    changed(run, [make_segment(rng), longer], media=(CAT,))

    await run.finish(run.trainer())

    (row,) = run.rows()
    assert (row["name"], row["media_segments"]) == ("step", 1)
    assert row["trained_tokens"] > 0
    assert run.experience.faults == []
    assert "1 segments show media" in caplog.text


@pytest.mark.parametrize(
    ("media", "field"),
    [
        pytest.param((), "segments[0].media[0].sha256", id="not-named"),
        pytest.param((CAT, Medium.of(b"dog", "image/png")), "media[1].sha256", id="not-shown"),
    ],
)
async def test_an_episode_that_shows_others_than_its_result_names_is_quarantined(
    make_run, make_segment, media, field
):
    run = make_run(1)
    changed(run, [showing(make_segment(np.random.default_rng(7)))], media=media)

    await run.finish(run.trainer())

    ((_, fault),) = run.experience.faults
    assert (fault.reason, fault.episode_id) == (FaultReason.QUARANTINED, "1-0-0")
    assert f"1-0-0.{field}" in fault.message


def test_a_claim_keeps_its_media_on_the_way_to_another_rank(make_run):
    run = make_run(1)
    (task, *_) = run.experience.batches[0]
    placed = replace(CAT, node="unix:/node", epoch=4)
    episodes = tuple(replace(each, media=(placed,)) for each in task.episodes)
    claim = Claim((replace(task, episodes=episodes),))

    assert wire.claim_from_wire(wire.claim_to_wire(claim)) == claim


def test_a_claim_with_a_medium_that_cannot_be_is_refused_by_episode_and_field():
    result = episode_pb2.EpisodeResult(
        termination=episode_pb2.TERMINATION_FINISHED,
        payload=episode_pb2.Payload(sha256="ab" * 32, size=9),
        media=[episode_pb2.Medium(sha256=CAT.sha256, size=1, media_type="text/html")],
    )
    task = pb.ClaimedTask(task_id="t", episodes=[pb.ClaimedEpisode(episode_id="e", result=result)])

    with pytest.raises(InvalidFieldError) as refused:
        wire.claim_from_wire(pb.ClaimStepResponse(tasks=[task]))

    assert refused.value.field == "e.media[0].media_type"
