import asyncio
import json

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from treadle_runtime import telemetry
from treadle_trainer import loop
from treadle_trainer.adapters.in_memory import (
    FencedError,
    MemoryExperience,
    MemoryRefit,
    VersionEndedError,
)
from treadle_trainer.adapters.local_checkpoints import LocalCheckpoints
from treadle_trainer.core.status import Phase
from treadle_trainer.ports import CheckpointStoreFullError

pytestmark = pytest.mark.component

TRACEPARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


async def test_a_run_is_trained_published_and_checkpointed_to_its_end(make_run):
    run = make_run(3)
    trainer = run.trainer()
    await run.finish(trainer)
    assert [step for step, _, _ in run.experience.reports] == [1, 2, 3]
    assert run.published_steps() == [0, 1, 2, 3]
    assert [version for version, _, _ in run.refit.committed] == [1, 2, 3, 4]
    assert [checkpoint.step for checkpoint in run.experience.lineage] == [0, 2, 3]
    kept = sorted(path.name for path in (run.directory / "checkpoints").iterdir())
    assert kept == ["latest", "step-000002", "step-000003"]
    assert len({json.dumps(digests) for _, _, digests in run.refit.committed}) == 4
    status = trainer.status()
    assert (status.trainer_epoch, status.step, status.phase) == (1, 3, Phase.COMPLETE)


async def test_every_step_says_what_it_did(make_run):
    run = make_run(2)
    await run.finish(run.trainer())
    rows = run.rows()
    assert [(row["name"], row["step"], row["version"]) for row in rows] == [
        ("step", 1, 2),
        ("step", 2, 3),
    ]
    row = rows[1]
    assert row["num_episodes"] == 6
    assert row["missing_rewards"] == 1
    assert row["zero_variance_groups"] == 1
    assert row["reward"] == pytest.approx(4 / 5)
    assert row["lag_mean"] == row["lag_max"] == 1
    assert 0 < row["trained_tokens"] < row["tokens"]
    assert {"clip_fraction", "kl", "entropy", "loss", "grad_norm", "tokens_per_s"} <= set(row)
    _, reported, _ = run.experience.reports[1]
    assert reported.items() <= row.items()


async def test_only_the_newest_version_takes_memory_and_none_when_the_trainer_has_ended(make_run):
    def arenas():
        return sorted(path.name for path in run.directory.glob("treadle.*"))

    run = make_run(2)
    trainer = run.trainer()
    task = asyncio.ensure_future(trainer.run())
    await run.until(lambda: trainer.status().phase == Phase.COMPLETE, task)
    assert arenas() == ["treadle.memory.3"]
    run.experience.complete.set()
    await task
    trainer._worker.shutdown(wait=True)
    assert arenas() == []


async def test_demand_is_answered_while_a_claim_waits_with_the_present_step(make_run):
    run = make_run(2)
    run.experience.batches = [run.experience.batches[0], ()]
    task = asyncio.ensure_future(run.trainer().run())
    await run.until(lambda: run.published_steps() == [0, 1], task)
    weights = run.weights()
    for count in (3, 4):
        run.refit.wanted.set()
        await run.until(lambda count=count: len(run.refit.committed) == count, task)
        assert run.published_steps() == [0, *[1] * (count - 1)]
        assert run.weights() == weights
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_demand_is_answered_after_the_last_step_until_the_run_is_complete(make_run):
    run = make_run(1)
    trainer = run.trainer()
    task = asyncio.ensure_future(trainer.run())
    await run.until(lambda: trainer.status().phase == Phase.COMPLETE, task)
    run.refit.wanted.set()
    await run.until(lambda: run.published_steps() == [0, 1, 1], task)
    assert run.refit.aliases == [], "what an engine asks for is sent with its bytes"
    assert not task.done()
    run.experience.complete.set()
    await task


async def test_a_version_that_ended_is_followed_by_the_same_parameters_under_a_new_number(make_run):
    class Ending(MemoryRefit):
        async def send_version(self, *, trainer_epoch, version, digests):
            if version in (2, 3):
                raise VersionEndedError("ended")
            return await super().send_version(
                trainer_epoch=trainer_epoch, version=version, digests=digests
            )

    run = make_run(1)
    run.refit = Ending(run.experience, run.transport)
    await run.finish(run.trainer())
    assert [(version, step) for version, step, _ in run.refit.committed] == [(1, 0), (4, 1)]


async def test_versions_that_always_end_stop_the_trainer(make_run, monkeypatch):
    class Ending(MemoryRefit):
        async def send_version(self, *, trainer_epoch, version, digests):
            raise VersionEndedError("ended")

    monkeypatch.setattr("treadle_trainer.publisher._FIRST_DELAY_S", 0.0)
    run = make_run(1)
    run.refit = Ending(run.experience, run.transport)
    with pytest.raises(VersionEndedError):
        await run.trainer().run()


@pytest.mark.parametrize("call", ["claim", "report", "commit"])
async def test_a_fenced_trainer_ends_and_writes_nothing_more(make_run, call):
    run = make_run(2)

    class Overtaken(MemoryExperience):
        pass

    async def overtaken(self, method, **kwargs):
        if self.trained_step or call != "report":
            self.trainer_epoch += bool(self.lineage)
        return await method(self, **kwargs)

    method = getattr(MemoryExperience, call)
    setattr(Overtaken, call, lambda self, **kwargs: overtaken(self, method, **kwargs))
    run.experience.__class__ = Overtaken
    with pytest.raises(FencedError):
        await run.trainer().run()
    lineage, published = list(run.experience.lineage), run.published_steps()
    await asyncio.sleep(0)
    assert [checkpoint.step for checkpoint in lineage] == [0]
    assert run.published_steps() == published
    assert max(published) <= run.experience.trained_step


async def test_draining_while_a_claim_waits_ends_at_once_with_a_checkpoint(make_run):
    run = make_run(2)
    run.experience.batches = [run.experience.batches[0], ()]
    trainer = run.trainer()
    task = asyncio.ensure_future(trainer.run())
    await run.until(lambda: run.published_steps() == [0, 1], task)
    await asyncio.wait_for(trainer.drain(), 5)
    await task
    assert [checkpoint.step for checkpoint in run.experience.lineage] == [0, 1]


async def test_draining_in_a_step_finishes_reports_and_commits_it(make_run):
    run = make_run(3)
    trainer = run.trainer()
    task = asyncio.ensure_future(trainer.run())
    await run.until(lambda: trainer.status().phase == Phase.TRAINING, task)
    await asyncio.wait_for(trainer.drain(), 5)
    await task
    assert [step for step, _, _ in run.experience.reports] == [1]
    assert [checkpoint.step for checkpoint in run.experience.lineage] == [0, 1]
    await run.finish(run.trainer())
    assert [step for step, _, _ in run.experience.reports] == [1, 2, 3]


async def test_draining_does_not_wait_for_a_peer_that_is_away(make_run):
    class Away(MemoryRefit):
        async def send_version(self, *, trainer_epoch, version, digests):
            await asyncio.Event().wait()

    run = make_run(2)
    run.refit = Away(run.experience, run.transport)
    trainer = run.trainer()
    task = asyncio.ensure_future(trainer.run())
    await run.until(lambda: trainer.status().phase == Phase.PUBLISHING, task)
    await asyncio.wait_for(trainer.drain(), 5)
    await task


@pytest.fixture
def spans(monkeypatch):
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(telemetry, "tracer", lambda: provider.get_tracer("treadle"))
    return exporter


class FullAt(LocalCheckpoints):
    """Has no room for the first `refusals` checkpoints of a step."""

    def __init__(self, directory, step: int, refusals: float) -> None:
        super().__init__(directory)
        self.step, self.left = step, refusals

    def write(self, step, fill):
        if step == self.step and self.left > 0:
            self.left -= 1
            raise CheckpointStoreFullError("no space")
        return super().write(step, fill)

    def mark_latest(self, checkpoint):
        raise CheckpointStoreFullError("no space")


async def test_a_full_disk_puts_the_checkpoint_off_and_loses_none(make_run):
    run = make_run(4)
    run.store = FullAt(run.directory / "checkpoints", 2, refusals=1)
    await run.finish(run.trainer())
    assert [checkpoint.step for checkpoint in run.experience.lineage] == [0, 3, 4]


@pytest.mark.parametrize("step", [0, 3], ids=["start", "end"])
async def test_the_first_and_the_last_checkpoint_wait_for_room(make_run, monkeypatch, step):
    monkeypatch.setattr(loop, "_ROOM_S", 0.01)
    run = make_run(3)
    run.store = FullAt(run.directory / "checkpoints", step, refusals=3)

    await run.finish(run.trainer())

    assert [checkpoint.step for checkpoint in run.experience.lineage] == [0, 2, 3]


async def test_a_trainer_that_drains_on_a_full_disk_ends_with_the_checkpoints_it_has(make_run):
    run = make_run(3)
    run.store = FullAt(run.directory / "checkpoints", 3, refusals=float("inf"))
    trainer = run.trainer()
    task = asyncio.ensure_future(trainer.run())
    await run.until(lambda: run.store.left and len(run.experience.reports) == 3, task)

    await trainer.drain()
    await task

    assert [checkpoint.step for checkpoint in run.experience.lineage] == [0, 2]


async def test_the_trace_of_an_episode_leads_to_its_step_and_version(make_run, spans):
    run = make_run(1)
    await run.finish(run.trainer())
    finished = spans.get_finished_spans()
    (step,) = (span for span in finished if span.name == "step")
    trained = [span for span in finished if span.name == "episode.train"]
    assert dict(step.attributes) == {"treadle.run": "run", "treadle.step": 1, "treadle.version": 2}
    assert len(step.links) == len(trained) == 4
    for index, span in enumerate(trained):
        assert f"{span.context.trace_id:032x}" == TRACEPARENT.split("-")[1]
        assert f"{span.parent.span_id:016x}" == TRACEPARENT.split("-")[2]
        assert span.attributes["treadle.episode"] == f"1-0-{index}"
        assert span.attributes["treadle.version"] == 2
        assert span.links[0].context.span_id == step.context.span_id
    _, _, trace_id = run.experience.reports[0]
    assert trace_id == f"{step.context.trace_id:032x}"
