"""Trainers that come back: epochs, lineage, recorded batches, and what replicas may go on with."""

import pytest

from treadle_core.errors import InvalidFieldError
from treadle_core.versions import VersionState
from treadle_experience.core import checkpoints, tickets, versions
from treadle_experience.core.errors import (
    CheckpointRequiredError,
    StaleAttemptError,
    StepOutOfOrderError,
    TrainerFencedError,
    UnknownCheckpointError,
    VersionEndedError,
    VersionNotFoundError,
    WrongParentError,
)
from treadle_experience.core.state import EpisodeState, TaskState


def train_and_publish(world, *steps: int) -> list[list[str]]:
    trained = []
    for step in steps:
        trained.append(world.train(step))
        world.publish(step)
    return trained


def test_a_holder_that_asks_twice_gets_its_epoch_again(make_world) -> None:
    world = make_world().start()
    head = world.state.head().digest
    position = world.state.position

    world.acquire("trainer")

    assert (world.epoch, world.state.position) == (1, position)
    world.acquire("second", head)
    assert world.epoch == 2
    world.acquire("trainer")
    assert world.epoch == 1  # which is fenced
    with pytest.raises(TrainerFencedError):
        world.claim(1)


def test_a_run_with_checkpoints_is_acquired_only_with_one_that_can_be_restored(make_world) -> None:
    world = make_world().start()
    first = world.state.head().digest
    train_and_publish(world, 1)
    world.checkpoint(1)
    train_and_publish(world, 2)
    world.checkpoint(2)

    with pytest.raises(CheckpointRequiredError):
        world.acquire("second")
    for digest in (first, "f" * 64):
        with pytest.raises(UnknownCheckpointError):
            world.acquire("second", digest)


def test_steps_beyond_the_checkpoint_get_their_recorded_batches_again(make_world) -> None:
    world = make_world(max_lag=3).start()
    world.train(1)
    digest = world.checkpoint(1)
    trained = train_and_publish(world, 2, 3)

    step = world.acquire("second", digest)

    assert step == 1
    assert world.state.trained_step == 1
    assert world.state.task_counts[TaskState.CONSUMED] == 2
    assert world.state.task_counts[TaskState.CLAIMED] == 4
    assert [[t.task_id for t in world.claim(2).tasks]] == trained[:1]
    world.report(2)
    assert [[t.task_id for t in world.claim(3).tasks]] == trained[1:]


def test_a_restore_to_the_older_of_two_checkpoints_takes_consumed_steps_back(make_world) -> None:
    world = make_world(max_lag=3).start()
    world.train(1)
    older = world.checkpoint(1)
    train_and_publish(world, 2)
    newer = world.checkpoint(2)

    world.acquire("second", older)

    assert world.state.task_counts[TaskState.CONSUMED] == 2
    assert [c.digest for c in world.state.restorable()] == [older]
    members = world.claim(2).tasks
    assert all(episode.inline is not None for task in members for episode, _ in task.episodes)
    world.report(2)
    again = world.checkpoint(2, "again")
    assert [c.digest for c in world.state.restorable()] == [again, older]
    assert newer not in world.state.lineage
    assert world.account().trained_twice() == set()


def test_a_trainer_that_repeats_its_steps_exactly_commits_the_same_checkpoint_again(
    make_world,
) -> None:
    world = make_world(max_lag=3).start()
    world.train(1)
    older = world.checkpoint(1, "one")
    train_and_publish(world, 2)
    world.checkpoint(2, "two")
    world.acquire("second", older)
    world.claim(2)
    world.report(2)

    again = world.checkpoint(2, "two")
    world.train(3)
    world.checkpoint(3, "three")

    assert world.state.lineage[-3:-1] == [older, again]
    assert world.state.task_counts[TaskState.CONSUMED] == 6
    account = world.account()
    assert (account.missing(), account.trained_twice()) == (set(), set())


def test_a_restore_keeps_tasks_episodes_versions_and_cursor(make_world) -> None:
    world = make_world(max_lag=3).start()
    digest = world.state.head().digest
    train_and_publish(world, 1, 2)
    before = (world.state.cursor, set(world.state.episodes), world.state.newest_version)

    world.acquire("second", digest)

    assert (world.state.cursor, set(world.state.episodes), world.state.newest_version) == before
    assert all(v.state is VersionState.COMMITTED for v in world.state.versions.values())


def test_a_replica_that_goes_back_loses_what_it_may_no_longer_run_uncharged(make_world) -> None:
    world = make_world(max_lag=0, retries=0).start()
    digest = world.state.head().digest
    train_and_publish(world, 1)
    running = world.lease(2)
    world.acquire("second", digest)
    restored = world.publish(0)

    _, revoked = tickets.renew(
        world.run,
        replica_id="r1",
        served_version=restored,
        attempts=[tickets.Attempt(t.episode_id, t.attempt) for t in running],
    )

    assert len(revoked) == len(running)
    assert {world.state.episodes[t.episode_id].state for t in running} == {EpisodeState.WAITING}
    assert world.lease(restored) == []
    assert world.claim(1).tasks
    world.report(1)
    again = world.lease(world.publish(1))
    assert {(t.episode_id, t.attempt) for t in again} == {(t.episode_id, 2) for t in running}


def test_a_late_request_from_before_an_install_ends_nothing(make_world) -> None:
    world = make_world(max_lag=0).start()
    train_and_publish(world, 1)
    running = world.lease(2)

    late = world.lease(1)

    assert late == []
    assert {world.state.episodes[t.episode_id].state for t in running} == {EpisodeState.ISSUED}


def test_a_result_sampled_by_an_older_step_than_admission_allows_is_fenced(make_world) -> None:
    world = make_world(max_lag=0).start()
    digest = world.state.head().digest
    train_and_publish(world, 1)
    ticket = world.lease(2, 1)[0]
    world.acquire("second", digest)
    restored = world.publish(0)

    with pytest.raises(StaleAttemptError):
        world.complete(ticket, versions=[2, restored])

    episode = world.state.episodes[ticket.episode_id]
    assert (episode.state, episode.charged) == (EpisodeState.WAITING, 0)


def test_payloads_go_when_both_restorable_checkpoints_have_consumed_them(make_world) -> None:
    world = make_world(max_lag=3).start()

    def held() -> list[int]:
        return [
            step
            for step, batch in world.state.steps.items()
            for task_id in batch.task_ids[:1]
            if world.state.tasks[task_id].episodes[0].inline is not None
        ]

    world.train(1)
    world.checkpoint(1)
    after_one = held()
    world.train(2)
    world.checkpoint(2)

    assert (after_one, held()) == ([1], [2])


def test_a_checkpoint_is_committed_once_and_only_on_the_head(make_world, tools) -> None:
    world = make_world().start()
    world.train(1)
    head = world.state.head()
    arguments = {
        "trainer_epoch": world.epoch,
        "digest": tools.digest("new"),
        "parent_digest": head.digest,
        "step": 1,
        "path": "checkpoints/1",
    }
    first = checkpoints.commit(world.run, **arguments)
    position = world.state.position

    assert checkpoints.commit(world.run, **arguments) == first
    assert world.state.position == position
    with pytest.raises(InvalidFieldError, match="path"):
        checkpoints.commit(world.run, **arguments | {"path": "elsewhere"})
    with pytest.raises(WrongParentError):
        checkpoints.commit(world.run, **arguments | {"digest": tools.digest("other")})
    for step in (0, 2):
        with pytest.raises(StepOutOfOrderError):
            checkpoints.commit(
                world.run,
                **arguments
                | {
                    "digest": tools.digest("other"),
                    "parent_digest": arguments["digest"],
                    "step": step,
                },
            )
    with pytest.raises(TrainerFencedError):
        checkpoints.commit(world.run, **arguments | {"trainer_epoch": 7})


def test_versions_are_announced_once_a_request_and_end_once(make_world) -> None:
    world = make_world().start()
    announce = {"trainer_epoch": 1, "step": 0, "request_id": "again", "trace_id": ""}

    number = versions.announce(world.run, **announce)

    assert (number, versions.announce(world.run, **announce)) == (2, 2)
    world.train(1)
    with pytest.raises(InvalidFieldError, match="step"):
        versions.announce(world.run, **announce | {"step": 1})
    with pytest.raises(StepOutOfOrderError):
        versions.announce(world.run, **announce | {"step": 2, "request_id": "early"})
    newer = world.publish(0)
    with pytest.raises(VersionEndedError):
        versions.commit(world.run, trainer_epoch=1, number=number, weights_digest="0" * 16)
    versions.abort(world.run, number=number, message="overtaken")
    versions.abort(world.run, number=number, message="overtaken")
    with pytest.raises(VersionEndedError):
        versions.abort(world.run, number=newer, message="too late")
    for call in (
        lambda: versions.abort(world.run, number=9, message=""),
        lambda: versions.commit(world.run, trainer_epoch=1, number=9, weights_digest="0" * 16),
    ):
        with pytest.raises(VersionNotFoundError):
            call()


def test_a_version_that_was_in_flight_ends_with_its_trainer(make_world) -> None:
    world = make_world().start()
    announce = {"trainer_epoch": 1, "step": 0, "request_id": "zombie", "trace_id": ""}
    number = versions.announce(world.run, **announce)

    world.acquire("second", world.state.head().digest)

    for epoch, error in ((1, TrainerFencedError), (2, VersionEndedError)):
        with pytest.raises(error):
            versions.commit(world.run, trainer_epoch=epoch, number=number, weights_digest="0" * 16)
