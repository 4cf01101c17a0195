"""What is published, committed and said beside the plain run of a step."""

import asyncio
import logging
from dataclasses import replace

import pytest

from treadle_trainer import publisher
from treadle_trainer.adapters.in_memory import MemoryRefit, VersionEndedError
from treadle_trainer.core.status import Phase
from treadle_weights.transport import ArenaFullError

pytestmark = pytest.mark.component

SILENT = ((1.0, 1.0), (0.0, 0.0))
"""Rewards that say nothing: the step changes no parameter."""


@pytest.fixture
def make_partly_silent(make_run):
    """A run of so many steps, of which some change nothing."""

    def make(num_steps, silent_steps):
        run = make_run(num_steps)
        silent = make_run(num_steps, "silent", rewards=SILENT)
        for step in silent_steps:
            run.experience.batches[step - 1] = silent.experience.batches[step - 1]
        return run

    return make


async def test_only_every_so_manyth_step_and_the_last_are_published(make_run):
    run = make_run(3)
    await run.finish(run.trainer(publish_every=2))
    assert run.published_steps() == [0, 2, 3]
    rows = run.rows()
    assert [row["step"] for row in rows if "version" in row] == [2, 3]
    assert all(("version" in row) == ("weights_digest" in row) for row in rows)
    whole = make_run(3, "whole")
    await whole.finish(whole.trainer())
    assert run.weights() == whole.weights()


async def test_a_run_whose_tasks_end_unforeseen_publishes_its_last_step(make_run, monkeypatch):
    run = make_run(3)
    claim = run.experience.claim

    async def unaware(**how):
        return replace(await claim(**how), last=False)

    monkeypatch.setattr(run.experience, "claim", unaware)
    await run.finish(run.trainer(publish_every=2))
    assert run.published_steps() == [0, 2, 3]


async def test_a_step_that_changed_nothing_is_published_without_bytes(make_partly_silent):
    run = make_partly_silent(4, [2, 3])
    await run.finish(run.trainer())
    assert run.published_steps() == [0, 1, 2, 3, 4]
    assert run.refit.aliases == [(3, 2), (4, 3)]
    digests = [row["weights_digest"] for row in run.rows()]
    assert digests[0] == digests[1] == digests[2] != digests[3]
    sent = [digests for _, _, digests in run.refit.committed]
    assert sent[1] == sent[2] == sent[3] != sent[4]


async def test_what_changed_since_the_last_publication_is_no_alias(make_partly_silent):
    run = make_partly_silent(4, [2, 4])
    await run.finish(run.trainer(publish_every=2))
    assert run.published_steps() == [0, 2, 4]
    assert run.refit.aliases == []


async def test_an_alias_that_is_not_offered_is_a_version_like_any_other(make_partly_silent):
    class Forgetful(MemoryRefit):
        async def open_version(self, new):
            return await super().open_version(replace(new, alias_of=0, weights_digest=""))

    run = make_partly_silent(2, [1, 2])
    run.refit = Forgetful(run.experience, run.transport)
    await run.finish(run.trainer())
    assert run.published_steps() == [0, 1, 2]
    assert run.refit.aliases == []
    assert len({row["weights_digest"] for row in run.rows()}) == 1


async def test_an_alias_that_ends_leaves_the_bytes_of_its_base(make_partly_silent, monkeypatch):
    class Ending(MemoryRefit):
        async def send_version(self, *, trainer_epoch, version, digests):
            if version == 2:
                raise VersionEndedError("ended")
            return await super().send_version(
                trainer_epoch=trainer_epoch, version=version, digests=digests
            )

    run = make_partly_silent(1, [1])
    run.refit = Ending(run.experience, run.transport)
    trainer = run.trainer()
    task = asyncio.ensure_future(trainer.run())
    await run.until(lambda: trainer.status().phase == Phase.COMPLETE, task)
    assert run.refit.aliases == [(2, 1), (3, 1)]
    assert [path.name for path in run.directory.glob("treadle.*")] == ["treadle.memory.1"]
    run.experience.complete.set()
    await task


async def test_a_checkpoint_that_the_ledger_wants_is_committed_after_the_step(make_run):
    run = make_run(4)
    run.experience.checkpoint_now = True
    await run.finish(run.trainer(checkpoint_every=100))
    assert [checkpoint.step for checkpoint in run.experience.lineage] == [0, 1, 2, 3, 4]


async def test_no_batch_for_a_stated_time_is_an_alarm_again_and_again(make_run, caplog):
    run = make_run(1)
    run.experience.batches[0] = ()
    task = asyncio.ensure_future(run.trainer(no_progress_s=0.01).run())
    with caplog.at_level(logging.CRITICAL):
        path = run.directory / "trainer.jsonl"
        await run.until(lambda: path.exists() and len(run.rows()) >= 2, task)
    assert "no progress: after step 0, a batch has not come for" in caplog.text
    first, second, *_ = run.rows()
    assert (first["name"], first["step"], first["waited_s"]) == ("no_progress", 0, 0.01)
    assert second["waited_s"] == 0.02
    assert not task.done()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_an_end_that_does_not_come_is_an_alarm_too(make_run):
    run = make_run(1)
    trainer = run.trainer(no_progress_s=0.01)
    task = asyncio.ensure_future(trainer.run())
    await run.until(lambda: trainer.status().phase == Phase.COMPLETE, task)
    await run.until(lambda: run.rows()[-1]["name"] == "no_progress", task)
    run.experience.complete.set()
    await task


async def test_a_version_without_room_is_sent_and_kept_when_there_is_some(make_run, monkeypatch):
    monkeypatch.setattr(publisher, "_ROOM_S", 0.01)
    run, refused = make_run(2), []

    def full_at_first(name):
        call = getattr(run.sender, name)

        def tried(*arguments):
            if refused.count(name) < 2:
                refused.append(name)
                raise ArenaFullError("no space")
            return call(*arguments)

        monkeypatch.setattr(run.sender, name, tried)

    full_at_first("send")
    full_at_first("keep")
    await run.finish(run.trainer())
    assert refused == ["send", "send", "keep", "keep"]
    assert run.published_steps() == [0, 1, 2]


async def test_a_hint_that_points_elsewhere_changes_no_restore_and_is_mended(make_run):
    run = make_run(3)
    await run.finish(run.trainer())
    before, latest = run.weights(), run.directory / "checkpoints" / "latest"
    for wrong in ("step-000002\n", "../../elsewhere\n", ""):
        latest.write_text(wrong)
        await run.finish(run.trainer())
        assert run.published_steps()[-1] == 3
        assert run.weights() == before
        assert latest.read_text() == "step-000003\n"
