"""Payloads that wait for a checkpoint, and when the ledger asks for one."""

from treadle_experience.core import steps


def report(world, step: int) -> bool:
    return steps.report(world.run, trainer_epoch=world.epoch, step=step, metrics={}, trace_id="")


def train(world, step: int) -> bool:
    for ticket in world.lease(world.state.newest_version):
        world.complete(ticket, payload=b"x" * 100, versions=[world.state.newest_version])
    world.claim(step)
    return report(world, step)


def test_a_checkpoint_is_asked_for_at_four_fifths_of_the_budget(make_world) -> None:
    world = make_world(max_lag=0, payload_budget_bytes=1000).start()

    asked = [train(world, 1)]
    world.publish(1)
    asked.append(train(world, 2))

    assert asked == [False, True]
    assert world.state.payload_bytes == 800
    assert report(world, 2)  # told again
    world.checkpoint(2)
    assert not report(world, 2)  # all that was trained is covered


def test_released_payloads_give_their_bytes_back(make_world) -> None:
    world = make_world(max_lag=0).start()
    for step in (1, 2, 3):
        train(world, step)
        world.publish(step)
        world.checkpoint(step)

    assert (
        world.state.payload_bytes == 400
    )  # of step 3: the checkpoint of step 2 can still be restored
    assert world.reload() == world.state


def test_without_a_budget_nothing_is_asked_for(make_world) -> None:
    world = make_world(max_lag=0).start()

    assert not train(world, 1)
