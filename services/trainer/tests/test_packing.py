import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from treadle_core.errors import InvalidFieldError
from treadle_trainer.core.packing import Example, pack


@st.composite
def batches(draw):
    lengths = draw(st.lists(st.integers(1, 30), min_size=1, max_size=20))
    rng = np.random.default_rng(draw(st.integers(0, 999)))
    built = []
    for number, length in enumerate(lengths):
        trained = rng.random(length) < draw(st.sampled_from([0.0, 0.5, 1.0]))
        trained[0] = False
        built.append(
            Example(
                (np.arange(length) + 1000 * number).astype(np.int32),
                trained,
                -rng.random(length).astype(np.float32),
                float(number),
                1.0 + number,
            )
        )
    return built


@given(built=batches(), room=st.integers(30, 90))
@settings(max_examples=50)
def test_every_trained_token_is_predicted_once_from_the_token_before_it(built, room):
    seen = []
    for microbatch in pack(built, max_tokens=room):
        assert microbatch.num_tokens <= room
        for place, row in enumerate(microbatch.rows):
            example = built[microbatch.token_ids[row] // 1000]
            token = int(microbatch.targets[place])
            index = token % 1000
            assert microbatch.token_ids[row] == example.token_ids[index - 1]
            assert microbatch.position_ids[row] == index - 1
            assert microbatch.logprobs[place] == example.logprobs[index]
            assert microbatch.advantages[place] == example.advantage
            assert microbatch.temperatures[place] == example.temperature
            seen.append(token)
    wanted = [int(token) for e in built for token in e.token_ids[e.trained]]
    assert sorted(seen) == sorted(wanted)


@given(built=batches(), room=st.integers(30, 90))
@settings(max_examples=50)
def test_segments_lie_whole_and_end_to_end(built, room):
    for microbatch in pack(built, max_tokens=room):
        numbers = microbatch.segment_ids
        assert numbers[0] == 0
        assert set(np.diff(numbers)) <= {0, 1}
        for number in range(numbers[-1] + 1):
            inside = numbers == number
            example = built[microbatch.token_ids[inside][0] // 1000]
            np.testing.assert_array_equal(microbatch.token_ids[inside], example.token_ids)
            np.testing.assert_array_equal(
                microbatch.position_ids[inside], np.arange(example.num_tokens)
            )


@given(built=batches(), room=st.integers(30, 90))
@settings(max_examples=50)
def test_fewer_than_twice_the_micro_batches_that_are_needed(built, room):
    tokens = sum(example.num_tokens for example in built if example.num_trained)
    assert len(pack(built, max_tokens=room)) <= 2 * -(-tokens // room)


def test_a_segment_longer_than_a_micro_batch_is_refused(make_examples):
    (example,) = make_examples(np.random.default_rng(0), 1)
    with pytest.raises(InvalidFieldError) as raised:
        pack([example], max_tokens=example.num_tokens - 1)
    assert raised.value.field == "microbatch_tokens"
    assert raised.value.value == str(example.num_tokens - 1)


@pytest.mark.parametrize(
    ("trained", "temperature", "field"),
    [
        pytest.param([True, True], 1.0, "trained[0]", id="nothing-predicts-the-first-token"),
        pytest.param([False, True], 0.0, "temperature", id="greedy-tokens"),
    ],
)
def test_what_cannot_be_trained_is_refused(trained, temperature, field):
    with pytest.raises(InvalidFieldError) as raised:
        Example(
            np.array([3, 4], np.int32),
            np.array(trained),
            np.zeros(2, np.float32),
            temperature=temperature,
        )
    assert raised.value.field == field
