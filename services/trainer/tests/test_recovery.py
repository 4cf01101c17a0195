import asyncio
from functools import partial

import pytest

from treadle_trainer.adapters.folders import ASIDE
from treadle_trainer.adapters.in_memory import MemoryRefit
from treadle_trainer.adapters.single import SingleBackend
from treadle_trainer.checkpoints import NoValidCheckpointError

pytestmark = pytest.mark.component


class Killed(BaseException):
    """Stands for SIGKILL: nothing of ours may catch it."""


class Failpoint:
    """Counts the calls of a trainer to ledger, refit and store, and kills it before one of them.

    Whether the call before had been answered is all the same: a killed trainer knows nothing.
    """

    def __init__(self, kill_at=None):
        self.calls = 0
        self._kill_at = kill_at

    def guard(self, port):
        return Guarded(port, self)

    def enter(self):
        self.calls += 1
        if self.calls == self._kill_at:
            raise Killed


class Guarded:
    def __init__(self, port, failpoint):
        self._port = port
        self._failpoint = failpoint

    def __getattr__(self, name):
        method = getattr(self._port, name)
        return partial(self._await if asyncio.iscoroutinefunction(method) else self._call, method)

    def _call(self, method, *args, **kwargs):
        self._failpoint.enter()
        return method(*args, **kwargs)

    async def _await(self, method, *args, **kwargs):
        if method.__name__ != "await_demand":  # whether it runs at all is a matter of timing
            self._failpoint.enter()
        return await method(*args, **kwargs)


async def test_killed_between_any_two_calls_a_run_ends_in_the_same_weights(make_run):
    whole = make_run(1, "whole")
    counter = Failpoint()
    await whole.finish(whole.trainer(counter.guard))
    assert counter.calls > 12
    for kill_at in range(1, counter.calls + 1):
        run = make_run(1, f"killed-{kill_at}")
        with pytest.raises(Killed):
            await run.finish(run.trainer(Failpoint(kill_at).guard))
        run.refit = MemoryRefit(run.experience, run.transport)  # it keeps nothing
        await run.finish(run.trainer())
        assert run.weights() == whole.weights(), kill_at
        assert run.experience.trained_step == 1, kill_at
        assert {row["step"] for row in run.rows() if row["name"] == "step"} == {1}, kill_at
        steps = [checkpoint.step for checkpoint in run.experience.lineage]
        assert steps == sorted(set(steps)), kill_at
        assert steps[-1] == 1, kill_at
        for checkpoint in run.experience.lineage[-2:]:
            run.store.open(checkpoint)
        names = [path.name for path in (run.directory / "checkpoints").iterdir()]
        assert not [name for name in names if name.startswith(ASIDE)], kill_at


async def test_a_restart_publishes_the_restored_parameters_under_a_new_number(make_run):
    run = make_run(3)
    await run.finish(run.trainer(publish_every=2))
    before = run.weights()
    await run.finish(run.trainer(publish_every=2))
    assert run.published_steps() == [0, 2, 3, 3]
    assert run.weights() == before
    assert [version for version, _, _ in run.refit.committed] == [1, 2, 3, 4]


async def test_a_damaged_checkpoint_costs_steps_but_not_the_result(make_run, small):
    run = make_run(3)
    real = {"start": small, "build_backend": SingleBackend}
    await run.finish(run.trainer(**real))
    before = run.weights()
    newest = run.directory / run.experience.lineage[-1].path / "model.safetensors"
    newest.write_bytes(newest.read_bytes()[:-1])
    await run.finish(run.trainer(**real))
    assert [step for step, _, _ in run.experience.reports] == [1, 2, 3, 3]
    assert run.weights() == before


async def test_without_a_valid_checkpoint_nothing_is_acquired(make_run):
    run = make_run(2)
    await run.finish(run.trainer())
    for path in run.directory.glob("checkpoints/*/state.json"):
        path.write_text("{}")
    with pytest.raises(NoValidCheckpointError, match=r"state\.json"):
        await run.trainer().run()
    assert run.experience.trainer_epoch == 1


async def test_a_restored_trainer_claims_no_step_that_its_checkpoint_covers(make_run):
    run = make_run(4)
    claims = []

    class Noting:
        def __init__(self, port):
            self._port = port

        def __getattr__(self, name):
            if name == "claim":
                return self._claim
            return getattr(self._port, name)

        async def _claim(self, *, step, **rest):
            claims.append(step)
            if step == 4 and claims.count(4) == 1:
                raise Killed
            return await self._port.claim(step=step, **rest)

    with pytest.raises(Killed):
        await run.trainer(lambda port: Noting(port) if port is run.experience else port).run()
    covered, before = run.experience.lineage[-1].step, len(claims)
    await run.finish(run.trainer(lambda p: Noting(p) if p is run.experience else p))
    assert covered == 2
    assert claims[before:] == [3, 4, 5]
