"""What is trained, and where."""

import numpy as np
import pytest

from treadle_core.episodes import NO_VERSION


def trained(talk, **others) -> list[list[bool]]:
    """For each segment whether each turn's first sampled token is trained."""
    found = []
    for segment in talk.capture.segments(trainable=True):
        begins = np.flatnonzero(np.diff(segment.sampled.astype(int), prepend=0) == 1)
        found.append(segment.trained[begins].tolist())
    return found


def test_a_conversation_is_one_segment_of_the_very_tokens(talk):
    told, ids = [talk.user("1")], []
    for number in ("2", "3"):
        turn = talk.say(told, talk.assistant(number))
        ids += [*turn.new_ids.tolist(), *turn.sampled.token_ids.tolist()]
        told += [talk.assistant(number), talk.user(number)]
    (segment,) = talk.capture.segments(trainable=True)
    assert segment.token_ids.tolist() == ids
    mask = [False] * 3 + [True] * 3
    assert segment.sampled.tolist() == segment.trained.tolist() == mask * 2
    assert segment.logprobs.tolist() == [-1.0 if own else 0.0 for own in mask * 2]
    assert segment.policy_version.tolist() == [1 if own else NO_VERSION for own in mask * 2]
    assert segment.context_version.tolist() == segment.policy_version.tolist()
    assert segment.temperature == 1.0


def test_a_session_without_a_turn_has_no_segment(talk):
    talk.locate(talk.user("hi"))
    talk.start(talk.user("hi"))
    assert talk.capture.segments(trainable=True) == ()


def test_nothing_is_trained_in_a_session_that_is_not_trainable(talk):
    talk.say([talk.user("hi")], talk.assistant("hello"))
    (segment,) = talk.capture.segments(trainable=False)
    assert (segment.sampled.sum(), segment.num_trained) == (3, 0)


def _fork(talk, *ends: str) -> None:
    """Ways on from one reply, in order, each of which ends so."""
    told = [talk.user("hi")]
    talk.say(told, talk.assistant("hello"))
    for number, end in enumerate(ends):
        turn = talk.start(*told, talk.assistant("hello"), talk.user(f"way {number}"))
        if end == "nothing":
            continue
        talk.hear(turn, 2)
        if end == "cut":
            turn.cut("cancelled")
        elif end != "running":
            talk.end(turn, talk.assistant("on"))
            if end == "delivered":
                turn.delivered()


@pytest.mark.parametrize(
    ("ends", "expected"),
    [
        pytest.param(["delivered", "delivered"], [[True, True], [False, True]], id="first"),
        pytest.param(["cut", "delivered"], [[False, False], [True, True]], id="first-trained"),
        pytest.param(["undelivered", "delivered"], [[False, False], [True, True]], id="arrived"),
        pytest.param(["running", "delivered"], [[False, False], [True, True]], id="ended"),
        pytest.param(["cut", "cut"], [[True, False], [False, False]], id="none-trained"),
        pytest.param(["nothing", "delivered"], [[True, True]], id="nothing-heard"),
        pytest.param(["nothing"], [[True]], id="nothing-heard-at-all"),
    ],
)
def test_a_shared_token_is_trained_once_in_the_first_line_that_ends_trained(talk, ends, expected):
    _fork(talk, *ends)
    assert trained(talk) == expected


def test_lines_stand_in_the_order_of_their_last_turns(talk):
    a, b = [talk.user("a")], [talk.user("b")]
    talk.say(a, talk.assistant("1"))
    second = talk.say(b, talk.assistant("2"))
    third = talk.say([*a, talk.assistant("1"), talk.user("more")], talk.assistant("3"))
    segments = talk.capture.segments(trainable=True)
    last = [segment.token_ids[-1] for segment in segments]
    assert last == [second.sampled.token_ids[-1], third.sampled.token_ids[-1]]


def test_a_turn_sampled_in_another_way_is_context(talk):
    told = [talk.user("hi"), talk.assistant("hello"), talk.user("more")]
    talk.say(told[:1], told[1], trained=False)
    talk.say(told, talk.assistant("fine"))
    assert trained(talk) == [[False, True]]
    assert talk.capture.counts["untrained.other_sampling"] == 1


def test_a_turn_that_its_client_marked_is_context_and_joins_no_other(talk):
    told = [talk.user("hi"), talk.assistant("hello"), talk.user("more")]
    running = talk.start(told[0])
    marked = talk.start(told[0], identity={"untrained": "1"})
    assert marked is not running
    for turn in (running, marked):
        talk.hear(turn, 2)
        talk.end(turn, told[1])
        turn.delivered()
    assert sorted(trained(talk)) == [[False], [True]]
    assert talk.capture.counts["untrained.asked"] == 1


def test_greedy_tokens_are_never_trained(talk):
    talk.say([talk.user("hi")], talk.assistant("hello"), temperature=0.0)
    (segment,) = talk.capture.segments(trainable=True)
    assert (segment.temperature, segment.num_trained) == (0.0, 0)
    assert talk.capture.counts["untrained.greedy"] == 1


def test_a_segment_trains_only_what_was_sampled_at_its_temperature(talk):
    told = [talk.user("hi"), talk.assistant("hello"), talk.user("more")]
    talk.say(told[:1], told[1], temperature=0.5)
    talk.say(told, talk.assistant("fine"))
    (segment,) = talk.capture.segments(trainable=True)
    assert segment.temperature == 1.0
    assert trained(talk) == [[False, True]]
    assert talk.capture.counts["untrained.other_temperature"] == 1
    # Another line may have it.
    talk.say([*told[:2], talk.user("else")], talk.assistant("fine"), temperature=0.5)
    assert trained(talk) == [[False, True], [True, True]]
    assert talk.capture.counts["untrained.other_temperature"] == 0


def test_a_last_turn_that_is_not_trained_does_not_decide_the_temperature(talk):
    told = [talk.user("hi"), talk.assistant("hello"), talk.user("more")]
    talk.say(told[:1], told[1])
    talk.say(told, talk.assistant("fine"), temperature=0.0)
    (segment,) = talk.capture.segments(trainable=True)
    assert segment.temperature == 1.0
    assert trained(talk) == [[True, False]]


def test_a_refit_within_a_turn_is_told_by_each_token(talk):
    turn = talk.start(talk.user("hi"))
    talk.hear(turn, 1)
    talk.hear(turn, 1)
    turn._pieces[1].policy_version[:] = 2
    talk.end(turn, talk.assistant("hello"))
    (segment,) = talk.capture.segments(trainable=True)
    assert segment.policy_version.tolist() == [-1, -1, -1, 1, 2]
