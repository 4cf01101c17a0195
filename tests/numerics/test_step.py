"""The trainer's step beside an independent one, and what it must not depend on."""

from dataclasses import replace

import numpy as np
import pytest
import reference
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numerics_harness import stepped

from treadle_trainer.core.advantages.batch_mean import BatchMean
from treadle_trainer.core.advantages.dr_grpo import DrGrpo
from treadle_trainer.core.advantages.grpo import Grpo
from treadle_trainer.core.advantages.reinforce import Reinforce as Returns
from treadle_trainer.core.advantages.reinforce_baseline import ReinforceBaseline
from treadle_trainer.core.advantages.rloo import Rloo
from treadle_trainer.core.aggregations.constant_length import ConstantLength
from treadle_trainer.core.aggregations.prompt_mean import PromptMean
from treadle_trainer.core.aggregations.sequence_mean import SequenceMean
from treadle_trainer.core.aggregations.token_mean import TokenMean
from treadle_trainer.core.corrections.gated import Gated
from treadle_trainer.core.corrections.icepop import IcePop
from treadle_trainer.core.corrections.mis import Mis
from treadle_trainer.core.corrections.tis import Tis
from treadle_trainer.core.kl import Kl
from treadle_trainer.core.losses.cispo import Cispo
from treadle_trainer.core.losses.gspo import Gspo
from treadle_trainer.core.losses.ppo_clip import PpoClip
from treadle_trainer.core.losses.reinforce import Reinforce
from treadle_trainer.core.objective import Objective

ESTIMATORS = {
    "grpo": Grpo(),
    "dr_grpo": DrGrpo(),
    "rloo": Rloo(),
    "reinforce": Returns(),
    "reinforce_baseline": ReinforceBaseline(),
    "batch_mean": BatchMean(),
}
LOSSES = {
    "ppo_clip": PpoClip(0.2, 0.28),
    "gspo": Gspo(0.05, 0.08),
    "cispo": Cispo(2.0),
    "reinforce": Reinforce(),
}
AGGREGATIONS = {
    "token_mean": TokenMean(),
    "sequence_mean": SequenceMean(),
    "prompt_mean": PromptMean(),
    "constant_length": ConstantLength(8),
}
CORRECTIONS = {
    "tis": Tis(2.0),
    "icepop": IcePop(0.5, 2.0),
    "mis": Mis(0.9, 1.1),
    "binary_kl": Gated("seq", "mask", "binary_kl", None, 0.02),
}
LOCAL = ("tis", "icepop")
"""Corrections that look at one token at a time."""

quick = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
# Away from the bounds of clips and gates, where a rounding would decide.
DIFFERENCES = st.sampled_from([-1.5, -0.35, -0.1, -0.02, 0.0, 0.02, 0.11, 0.3, 1.4, 3.5])
REWARDS = st.sampled_from([None, 0.0, 0.35, 1.0, 1.0, -0.5])


@st.composite
def batches(draw, most_segments=3):
    """Episodes with tokens of their own."""
    episodes, name = [], 0
    sizes = draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    for group, size in enumerate(sizes):
        for _ in range(size):
            made = []
            for _ in range(draw(st.integers(1, most_segments))):
                tokens = []
                for difference in draw(st.lists(DIFFERENCES, min_size=0, max_size=5)):
                    name += 1
                    recorded = -0.25 - 3.0 * (name * 0.37 % 1)
                    recorded = float(np.float32(recorded))
                    logp = min(recorded + difference, -0.001)
                    tokens.append((name, logp, recorded, 0.1 * (name % 7)))
                made.append(tokens)
            episodes.append({"reward": draw(REWARDS), "group": group, "segments": made})
    return episodes


@st.composite
def choices(draw, losses=tuple(LOSSES), corrections=(None, *CORRECTIONS)):
    """Names of a recipe, and what they build."""
    names = {
        "estimator": draw(st.sampled_from(list(ESTIMATORS))),
        "loss": draw(st.sampled_from(losses)),
        "aggregation": draw(st.sampled_from(list(AGGREGATIONS))),
        "correction": draw(st.sampled_from(corrections)),
        "kl": draw(st.sampled_from([0.0, 0.1])),
        "bonus": draw(st.sampled_from([0.0, 0.02])),
    }
    correction = CORRECTIONS.get(names["correction"])
    objective = Objective(
        aggregation=AGGREGATIONS[names["aggregation"]],
        form="decoupled" if correction else "direct",
        correction=correction,
        kl=Kl(names["kl"]) if names["kl"] else None,
        entropy_bonus=names["bonus"],
    )
    return names, {
        "advantage": ESTIMATORS[names["estimator"]],
        "loss": LOSSES[names["loss"]],
        "objective": objective,
    }


def assert_same(found, wanted):
    """Loss and both gradients to 1e-5 of their scale."""
    for a, b in zip(found[:3], wanted[:3], strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5 * max(1e-3, np.abs(b).max(initial=0)))


@given(batch=batches(), chosen=choices())
@settings(parent=quick, max_examples=200)
def test_a_step_is_the_one_of_the_formulas(batch, chosen):
    names, built = chosen
    total, by_logp, by_entropy = reference.step(batch, **names)
    found = stepped(batch, **built)
    size = found[1].size
    wanted = [np.array([by.get(name, 0.0) for name in range(size)]) for by in (by_logp, by_entropy)]
    if not any(by_logp):
        total = 0.0  # no token enters, and none is updated
    assert_same(found, (total, *wanted))


@given(
    batch=batches(), chosen=choices(), microbatch=st.sampled_from([12, 25]), size=st.integers(1, 2)
)
@quick
def test_micro_batches_and_ranks_do_not_matter(batch, chosen, microbatch, size):
    _, built = chosen
    wanted = stepped(batch, **built)
    assert_same(stepped(batch, **built, microbatch=microbatch, size=size), wanted)


@pytest.mark.parametrize("pieces", [1, 2, 8])
@pytest.mark.parametrize("size", [1, 2])
def test_eight_segments_in_one_two_or_eight_micro_batches(pieces, size):
    rng = np.random.default_rng(3)
    batch, name = [], 0
    for number in range(8):
        tokens = []
        for _ in range(10):
            name += 1
            tokens.append((name, float(-rng.random()), float(np.float32(-rng.random())), 0.5))
        batch.append({"reward": number % 3 / 2, "group": number // 4, "segments": [tokens]})
    built = {
        "advantage": ReinforceBaseline(),
        "loss": Gspo(0.05, 0.08),
        "objective": Objective(SequenceMean(), "decoupled", Tis(), Kl(0.1), 0.01),
    }
    wanted = stepped(batch, **built, microbatch=1000)
    found = stepped(batch, **built, microbatch=12 * 8 // pieces, size=size)
    assert found[3].num_microbatches == max(pieces, size)
    assert_same(found, wanted)


@given(batch=batches(), chosen=choices(), data=st.data())
@quick
def test_the_order_of_groups_episodes_and_segments_does_not_matter(batch, chosen, data):
    _, built = chosen
    shuffled = data.draw(st.permutations(batch))
    shuffled = [{**e, "segments": data.draw(st.permutations(e["segments"]))} for e in shuffled]
    assert_same(stepped(shuffled, **built), stepped(batch, **built))


@given(batch=batches(), chosen=choices(), context=st.integers(1, 6), gap=st.integers(0, 3))
@quick
def test_what_is_not_trained_does_not_matter(batch, chosen, context, gap):
    _, built = chosen
    assert_same(stepped(batch, **built, context=context, gap=gap), stepped(batch, **built))


@given(
    batch=batches(most_segments=1),
    chosen=choices(("ppo_clip", "cispo", "reinforce"), (None, *LOCAL)),
    data=st.data(),
)
@quick
def test_an_episode_in_several_segments_counts_once(batch, chosen, data):
    _, built = chosen
    split = []
    for e in batch:
        (tokens,) = e["segments"]
        cut = data.draw(st.integers(0, len(tokens)))
        pieces = [tokens[:cut], *([token] for token in tokens[cut:])]
        split.append({**e, "segments": pieces})
    assert_same(stepped(split, **built), stepped(batch, **built))


@pytest.mark.parametrize(
    ("aggregation", "weights"),
    [
        pytest.param(SequenceMean(), [1 / 8, 1 / 8, 1 / 2], id="sequences"),
        pytest.param(SequenceMean("segment"), [1 / 3, 1 / 9, 1 / 3], id="segments"),
        pytest.param(ConstantLength(10), [1 / 20] * 3, id="constant"),
        pytest.param(ConstantLength(10, "segment"), [1 / 30] * 3, id="constant-over-segments"),
    ],
)
def test_what_a_sequence_is_can_be_chosen(aggregation, weights):
    """An episode of segments of one and three tokens, and one of a single token."""
    tokens = [(n, -0.5, -0.5, 0.0) for n in range(1, 6)]
    batch = [
        {"reward": 1.0, "group": 0, "segments": [tokens[:1], tokens[1:4]]},
        {"reward": 0.5, "group": 0, "segments": [tokens[4:]]},
    ]
    built = {"advantage": Returns(whiten=False), "loss": Reinforce()}
    objective = Objective(aggregation, "decoupled", Gated("off"))
    _, by_logp, _, _ = stepped(batch, **built, objective=objective)
    first, second, last = weights
    np.testing.assert_allclose(-by_logp[1:], [first, second, second, second, last / 2], rtol=1e-6)


@given(batch=batches(), chosen=choices())
@quick
def test_where_all_rewards_are_equal_the_reward_moves_nothing(batch, chosen):
    names, built = chosen
    equal = [{**e, "reward": 0.35} for e in batch]
    objective = replace(built["objective"], kl=None, entropy_bonus=0.0)
    if names["estimator"] == "rloo":  # alone in its group a reward has no baseline
        groups = [e["group"] for e in equal]
        equal = [e for e in equal if groups.count(e["group"]) > 1]
    if not equal or names["estimator"] == "reinforce":
        return
    loss, by_logp, _, _ = stepped(equal, **{**built, "objective": objective})
    assert loss == 0
    assert not by_logp.any()


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "reinforce_baseline"])
def test_groups_of_one_episode_say_nothing_where_the_baseline_is_their_own(name):
    tokens = [(1, -0.5, -0.75, 0.0)]
    batch = [{"reward": 1.0, "group": 0, "segments": [tokens]}]
    built = {"advantage": ESTIMATORS[name], "loss": PpoClip(), "objective": Objective()}
    loss, by_logp, _, _ = stepped(batch, **built)
    assert loss == 0
    assert not by_logp.any()


@pytest.mark.parametrize(("name", "entering"), [("grpo", 0), ("rloo", 0)])
def test_a_missing_reward_is_no_zero(name, entering):
    tokens = [[(n, -0.5, -0.75, 0.0)] for n in (1, 2, 3)]
    rewards = [1.0, 0.0, None]
    batch = [
        {"reward": r, "group": 0, "segments": [s]} for r, s in zip(rewards, tokens, strict=True)
    ]
    built = {"advantage": ESTIMATORS[name], "loss": PpoClip(), "objective": Objective()}
    found = stepped(batch, **built)
    assert found[1][3] == entering
    assert_same((found[0], found[1][:3], found[2][:3]), stepped(batch[:2], **built))


@pytest.mark.parametrize("place", range(1, 7))
def test_a_perturbed_token_moves_exactly_one_position(place):
    batch = [
        {"reward": float(n), "group": 0,
         "segments": [[(3 * n + i, -0.4 - 0.1 * i, -0.5, 0.2) for i in (1, 2, 3)]]}
        for n in (0, 1)
    ]  # fmt: skip
    built = {"advantage": Grpo(), "loss": PpoClip(0.9, 5.0), "objective": Objective()}
    before = stepped(batch, **built, gap=2)[1]
    touched = [
        {**e, "segments": [[(n, logp, r - 0.125 * (n == place), h) for n, logp, r, h in s]
                           for s in e["segments"]]}
        for e in batch
    ]  # fmt: skip
    after = stepped(touched, **built, gap=2)[1]
    assert np.flatnonzero(before != after).tolist() == [place]
    assert after[place] / before[place] == pytest.approx(np.exp(0.125), rel=1e-6)


def test_metrics_say_what_was_trained():
    tokens = [(1, -0.5, -0.75, 0.3), (2, -1.0, -0.75, 0.5), (3, -2.0, -2.0, 0.1)]
    batch = [
        {"reward": 1.0, "group": 0, "segments": [tokens[:2]]},
        {"reward": 0.0, "group": 0, "segments": [tokens[2:]]},
    ]
    built = {"advantage": DrGrpo(), "loss": PpoClip(0.2, 0.2), "objective": Objective()}
    result = stepped(batch, **built)[3]
    means = {name: value / result.num_trained for name, value in result.sums.items()}
    assert means["entropy"] == pytest.approx(0.3)
    assert means["mismatch_kl"] == pytest.approx(0.0)
    assert means["mismatch_abs"] == pytest.approx(0.5 / 3)
    assert means["mismatch_tokens"] == pytest.approx(2 / 3)
    assert means["clip_fraction"] == pytest.approx(1 / 3)
    assert result.spreads["ratio_p50"] == pytest.approx(1.0)
    assert result.spreads["ratio_max"] == pytest.approx(np.exp(0.25))
    assert result.spreads["advantage_std"] == pytest.approx(0.5)
    assert result.spreads["advantage_max"] == pytest.approx(0.5)
