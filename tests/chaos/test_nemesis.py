"""The schedule of a nemesis follows from its seed, and leaves nobody's supervisor without hope."""

import dataclasses
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
LINKS = ["rollout-experience", "trainer-refit", "experience-redis"]
MEANS = nemesis.Means(LINKS, unframed=["experience-redis"], forgetful=["nats"], disk=True)
SUPERVISOR_GIVES_UP = 6


def scenes(seed, victims=SERVICES, *, kills=50, means=MEANS):
    return nemesis.plan(seed, victims, means, kills=kills, seconds=300)


def kinds(planned):
    return {(fault.kind, fault.target) for scene in planned for fault in scene.faults}


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


def test_only_what_a_run_can_suffer_is_planned():
    few = [each for seed in range(20) for each in scenes(seed, FLEET)]
    all_means = dataclasses.replace(MEANS, drains=True, parts=True, disk=False)
    many = [each for seed in range(20) for each in scenes(seed, FLEET, means=all_means)]

    assert ("lose", "nats") in kinds(few)
    assert {kind for kind, _ in kinds(few)}.isdisjoint({"drain", "part"})
    assert {"drain", "part"} <= {kind for kind, _ in kinds(many)}
    assert "disk" not in {kind for kind, _ in kinds(many)}
    assert {name for kind, name in kinds(few + many) if kind == "lose"} == {"nats"}


def test_no_bit_is_damaged_where_each_may_be_a_value():
    planned = kinds([each for seed in range(20) for each in scenes(seed)])

    assert ("hole", "experience-redis") in planned
    assert ("flip", "rollout-experience") in planned
    assert ("flip", "experience-redis") not in planned
