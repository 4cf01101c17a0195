import dataclasses

import numpy as np
import pytest

from treadle_core.episodes import Episode, Segment, Termination
from treadle_core.errors import InvalidFieldError
from treadle_core.ids import checked_id, episode_id


def segment() -> Segment:
    sampled = np.array([False, True, True])
    return Segment(
        token_ids=np.array([5, 6, 7], np.int32),
        sampled=sampled,
        trained=sampled.copy(),
        logprobs=np.array([0, -0.5, -1], np.float32),
        policy_version=np.array([-1, 3, 4], np.int32),
        context_version=np.array([-1, 3, 3], np.int32),
    )


def test_a_segment_counts_its_tokens() -> None:
    assert (segment().num_tokens, segment().num_trained) == (3, 2)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        pytest.param("token_ids", np.zeros(0, np.int32), id="empty"),
        pytest.param("token_ids", np.array([5, -1, 7], np.int32), id="negative-id"),
        pytest.param("token_ids", np.zeros((3, 1), np.int32), id="two-axes"),
        pytest.param("sampled", np.ones(4, np.bool_), id="other-length"),
        pytest.param("trained", np.ones(3, np.bool_), id="trained-beyond-sampled"),
        pytest.param("logprobs", np.zeros(3, np.float64), id="other-dtype"),
        pytest.param("logprobs", np.array([0, np.nan, -1], np.float32), id="nan"),
        pytest.param("logprobs", np.array([0, -np.inf, -1], np.float32), id="infinite"),
        pytest.param("logprobs", np.array([0, 0.1, -1], np.float32), id="positive"),
        pytest.param("logprobs", np.array([-1, -1, -1], np.float32), id="off-the-sampled"),
        pytest.param("policy_version", np.array([-1, -1, 4], np.int32), id="no-version"),
        pytest.param("context_version", np.array([0, 3, 3], np.int32), id="version-off-sampled"),
        pytest.param("temperature", float("nan"), id="temperature"),
    ],
)
def test_a_bad_array_is_refused_by_name(field: str, value: object) -> None:
    with pytest.raises(InvalidFieldError) as refused:
        dataclasses.replace(segment(), **{field: value})

    assert refused.value.field == field


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 1e7])
def test_a_reward_or_metric_is_a_bounded_number(bad: float) -> None:
    with pytest.raises(InvalidFieldError, match="reward"):
        Episode((segment(),), reward=bad, termination=Termination.FINISHED)
    with pytest.raises(InvalidFieldError, match=r"metrics\.calls"):
        Episode((segment(),), None, Termination.FINISHED, metrics={"calls": bad})


@pytest.mark.parametrize("bad", ["", "a/b", "..", "a\n", "a*", "x" * 129, "ü"])
def test_an_id_is_safe_in_paths_and_subjects(bad: str) -> None:
    with pytest.raises(InvalidFieldError, match="task_id"):
        checked_id("task_id", bad)


def test_an_episode_keeps_its_id_and_shares_it_with_no_other() -> None:
    ids = {episode_id("run", "t1", 0), episode_id("run", "t1", 1), episode_id("run", "t2", 0)}
    assert len(ids) == 3
    assert episode_id("run", "t1", 0) in ids
