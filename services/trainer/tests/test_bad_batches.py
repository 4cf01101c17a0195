"""Bad data never ends a run: it is handed back with its reasons, and the step is claimed again."""

import logging
from dataclasses import replace

import numpy as np
import pytest

from treadle_core.faults import FaultReason
from treadle_payloads.codec import encode_payload
from treadle_payloads.store import PayloadReference
from treadle_trainer.adapters.in_memory import MemoryExperience
from treadle_trainer.core.culprits import culprits
from treadle_trainer.core.step import StepSettings
from treadle_trainer.loop import MOST_HAND_BACKS
from treadle_trainer.training import StepFailedError

pytestmark = pytest.mark.component

LOST, QUARANTINED = FaultReason.PAYLOAD_LOST, FaultReason.QUARANTINED
MIXED = (1.0, 0.0)
ABSENT = PayloadReference.of(b"nobody has these bytes")
JUNK = b"no payload"
UNFIT = {
    "payload-missing": ({"payload": ABSENT, "inline": None}, LOST, ABSENT.sha256),
    "payload-corrupt": ({"inline": JUNK}, LOST, "payload"),
    "no-payload": ({"payload": PayloadReference.of(JUNK), "inline": JUNK}, QUARANTINED, "payload"),
    "unregistered-version": ({"versions": (2,)}, QUARANTINED, "versions"),
    "other-length": ({"num_tokens": 1}, QUARANTINED, "num_tokens"),
    "other-mask": ({"num_trained": 1}, QUARANTINED, "num_trained"),
}


def spoil(run, number, change):
    """Changes the first episode of a task of step 1."""
    tasks = list(run.experience.batches[0])
    first, *others = tasks[number].episodes
    tasks[number] = replace(tasks[number], episodes=(change(first), *others))
    run.experience.batches[0] = tuple(tasks)


def put(run, number, segment):
    """Makes the first episode of a task of step 1 one of this segment alone."""
    data = encode_payload([segment])
    content = {
        "payload": PayloadReference.of(data),
        "inline": data,
        "num_tokens": segment.num_tokens,
        "num_trained": segment.num_trained,
    }
    spoil(run, number, lambda episode: replace(episode, **content))


@pytest.mark.parametrize("unfit", UNFIT)
async def test_an_episode_that_is_not_what_was_recorded_is_handed_back(make_run, unfit, caplog):
    changes, reason, told = UNFIT[unfit]
    run = make_run(1)
    good = run.experience.batches[0][0].episodes[0]
    run.experience.again = lambda episode: replace(good, attempt=episode.attempt)
    spoil(run, 0, lambda episode: replace(episode, **changes))
    with caplog.at_level(logging.ERROR):
        await run.finish(run.trainer())
    ((step, fault),) = run.experience.faults
    assert (step, fault.episode_id, fault.attempt, fault.reason) == (1, "1-0-0", 1, reason)
    assert told in fault.message
    assert fault.message in caplog.text
    (handed_back, trained) = run.rows()
    assert handed_back["name"] == "handed_back"
    assert (handed_back["lost"], handed_back["quarantined"]) == (reason is LOST, reason is not LOST)
    # A lost episode is played again; a quarantined one takes its task along.
    assert trained["num_episodes"] == (6 if reason is LOST else 2)
    assert run.published_steps() == [0, 1]


async def test_all_bad_episodes_of_a_batch_are_handed_back_at_once(make_run):
    run = make_run(1, rewards=(MIXED, MIXED, MIXED))
    good = {e.episode_id: e for task in run.experience.batches[0] for e in task.episodes}
    run.experience.again = lambda e: replace(good[e.episode_id], attempt=e.attempt)
    spoil(run, 0, lambda episode: replace(episode, inline=None, payload=ABSENT))
    spoil(run, 2, lambda episode: replace(episode, versions=(7,)))
    await run.finish(run.trainer())
    found = [(fault.episode_id, fault.reason) for _, fault in run.experience.faults]
    assert found == [("1-0-0", LOST), ("1-2-0", QUARANTINED)]
    assert [step for step, _, _ in run.experience.reports] == [1]


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        pytest.param({"vocab_size": 5}, "token_ids: expected < 5", id="beyond-the-vocabulary"),
        pytest.param({"microbatch_tokens": 7}, "<= 7 in a segment", id="longer-than-a-micro-batch"),
    ],
)
async def test_an_episode_that_no_step_can_take_is_quarantined(
    make_run, backend_class, settings, told
):
    class Small(backend_class):
        vocab_size = settings.get("vocab_size", 24)

    run = make_run(1)
    changed = StepSettings(settings.get("microbatch_tokens", 512), 1.0)
    # All of its episodes are such, so that no batch is left, and the run ends without a step.
    await run.finish(run.trainer(build_backend=Small, settings=changed))
    assert {fault.reason for _, fault in run.experience.faults} == {QUARANTINED}
    assert all(told in fault.message for _, fault in run.experience.faults)
    assert run.experience.reports == []


async def test_a_segment_whose_first_token_is_trained_is_quarantined(make_run, make_segment):
    segment = make_segment(np.random.default_rng(0), prompt=0)
    run = make_run(1)
    put(run, 0, segment)
    await run.finish(run.trainer())
    ((_, fault),) = run.experience.faults
    assert fault.reason is QUARANTINED
    assert "trained[0]" in fault.message


def poison(backend_class, token):
    """A backend for which a sequence with this token makes the loss no number."""

    class Poisoned(backend_class):
        def logprobs(self, microbatch):
            logprobs, entropy = super().logprobs(microbatch)
            if (microbatch.token_ids == token).any():
                logprobs = logprobs * float("nan")
            return logprobs, entropy

    return Poisoned


def mark(run, number, token, make_segment):
    """Writes a token that nothing else holds into an episode of a task."""
    segment = make_segment(np.random.default_rng(0))
    segment.token_ids[0] = token
    put(run, number, segment)


async def test_the_tasks_that_make_a_step_no_number_are_found_and_quarantined(
    make_run, make_segment, backend_class
):
    run = make_run(1, rewards=(MIXED,) * 7)
    for number in (1, 5):
        mark(run, number, 1, make_segment)
    await run.finish(run.trainer(build_backend=poison(backend_class, 1)))
    named = [fault.episode_id for _, fault in run.experience.faults]
    assert named == ["1-1-0", "1-1-1", "1-5-0", "1-5-1"]
    assert all("is nan" in fault.message for _, fault in run.experience.faults)

    # The failed try and the search left no trace in gradient or parameters.
    clean = make_run(1, "clean", rewards=(MIXED,) * 7)
    tasks = clean.experience.batches[0]
    clean.experience.batches[0] = tuple(t for t in tasks if t.task_id not in ("1-1", "1-5"))
    await clean.finish(clean.trainer())
    assert run.weights() == clean.weights()


async def test_a_step_that_no_batch_would_make_a_number_ends_the_trainer(make_run, backend_class):
    class Poisoned(backend_class):
        def clip_gradient(self, max_norm):
            return float("nan")

    run = make_run(1, rewards=(MIXED, MIXED))
    with pytest.raises(StepFailedError) as raised:
        await run.trainer(build_backend=Poisoned).run()
    assert "1-0-0/1" in raised.value.message
    assert "1-1-1/1" in raised.value.message
    assert run.experience.reports == []
    assert run.experience.faults == []
    assert run.published_steps() == [0]


async def test_a_step_whose_batches_are_all_bad_ends_the_trainer_loudly(make_run):
    run = make_run(1, payload=ABSENT, inline=None)
    with pytest.raises(StepFailedError, match="cannot be trained on: 1-0-0/9"):
        await run.trainer().run()
    assert len(run.experience.faults) == MOST_HAND_BACKS * 6
    assert run.experience.reports == []


async def test_a_batch_whose_members_all_leave_is_no_step_and_the_next_one_takes_its_number(
    make_run, make_segment
):
    run = make_run(3)
    gone, second, third = run.experience.batches
    for number in range(len(gone)):
        spoil(run, number, lambda episode: replace(episode, versions=(7,)))

    await run.finish(run.trainer())

    steps = [row for row in run.rows() if row["name"] == "step"]
    clean = make_run(3, "clean")
    clean.experience.batches = [second, third]
    await clean.finish(clean.trainer())
    expected = [row for row in clean.rows() if row["name"] == "step"]
    assert [row["step"] for row in steps] == [1, 2]
    for name in ("members_digest", "weights_digest", "learning_rate"):
        assert [row.get(name) for row in steps] == [row.get(name) for row in expected]
    assert run.published_steps() == [0, 1, 2]
    assert run.experience.lineage[-1].step == 2


async def test_a_hand_back_of_a_fenced_trainer_is_refused(make_run):
    class Overtaken(MemoryExperience):
        async def hand_back(self, **kwargs):
            self.trainer_epoch += 1
            await super().hand_back(**kwargs)

    run = make_run(1, payload=ABSENT, inline=None)
    run.experience.__class__ = Overtaken
    with pytest.raises(Exception, match="newer trainer"):
        await run.trainer().run()


@pytest.mark.parametrize("bad", [{0}, {6}, {2, 3}, {0, 5, 6}, set(range(7))], ids=str)
def test_halving_finds_exactly_who_is_bad(bad):
    def is_bad(part):
        return bool(bad & set(part))

    assert culprits(range(7), is_bad=is_bad, max_probes=64) == sorted(bad)


def test_who_is_bad_only_together_is_to_blame_together():
    assert culprits(range(4), is_bad=lambda part: {1, 2} <= set(part), max_probes=64) == [*range(4)]


def test_a_search_takes_no_more_than_its_probes_and_blames_what_is_left_whole():
    calls = []

    def is_bad(part):
        calls.append(part)
        return True

    assert culprits(range(64), is_bad=is_bad, max_probes=10) == [*range(64)]
    assert len(calls) <= 10
