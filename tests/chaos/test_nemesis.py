"""The schedule of a nemesis follows from its seed, and leaves nobody's supervisor without hope."""

import importlib.util
import sys
from collections import Counter

import pytest
from e2e_harness import ROOT

NAME = "nemesis"
spec = importlib.util.spec_from_file_location(NAME, ROOT / "tools" / f"{NAME}.py")
nemesis = importlib.util.module_from_spec(spec)
sys.modules[NAME] = nemesis
spec.loader.exec_module(nemesis)

SERVICES = ["experience", "refit", "rollout", "trainer"]
FLEET = [*SERVICES, "nats", "payloads", "redis"]
LINKS = ["rollout-experience", "trainer-refit"]
SUPERVISOR_GIVES_UP = 6


def scenes(seed, victims=SERVICES, *, kills=50):
    return nemesis.plan(seed, victims, kills=kills, seconds=300, links=LINKS, disk=True)


def deaths(planned):
    return [
        (scene.at_s, fault.target)
        for scene in planned
        for fault in scene.faults
        if fault.kind in nemesis.DEADLY
    ]


def test_a_seed_gives_one_schedule_and_another_seed_another():
    assert scenes(1) == scenes(1)
    assert scenes(1) != scenes(2)


@pytest.mark.parametrize("victims", [SERVICES, FLEET])
@pytest.mark.parametrize("seed", range(20))
def test_everyone_dies_and_nobody_too_often_in_a_row(seed, victims):
    planned = deaths(scenes(seed, victims))

    assert len(planned) == 50
    assert set(Counter(name for _, name in planned)) == set(victims)
    for victim in victims:
        streak, before_s = 0, -100.0
        for at_s, name in planned:
            if name == victim:
                streak = streak + 1 if at_s - before_s < nemesis.STEADY_S else 1
                before_s = at_s
                assert streak < SUPERVISOR_GIVES_UP


def test_faults_come_one_at_a_time_and_then_in_pairs():
    planned = scenes(3)

    sizes = [len(scene.faults) for scene in planned]
    assert sizes == sorted(sizes)
    assert set(sizes) == {1, 2}


def test_who_is_killed_is_not_stopped_at_the_same_moment():
    for scene in scenes(4):
        targets = [fault.target for fault in scene.faults if fault.kind in ("kill", "stop")]
        assert len(targets) == len(set(targets))
