from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, LlamaConfig

from treadle_agents.record import Generated
from treadle_core.tickets import Sampling
from treadle_rollout.adapters.transformers_engine.acceptance import accept
from treadle_rollout.adapters.transformers_engine.batch import KEY_STEP, plan
from treadle_rollout.adapters.transformers_engine.decoder import Decoder
from treadle_rollout.adapters.transformers_engine.policy import Policy
from treadle_rollout.adapters.transformers_engine.sampling import sample
from treadle_rollout.adapters.transformers_engine.slots import Slots
from treadle_rollout.ports import GenerationRequest

CONTEXT = 64


def request(session: str, *ids: int, max_tokens: int = 4) -> GenerationRequest:
    return GenerationRequest(session, np.array(ids, np.int32), Sampling(1.0, max_tokens))


@given(
    st.lists(st.one_of(st.none(), st.tuples(st.integers(0, 40), st.integers(1, 20))), min_size=1),
    st.integers(4, 200),
    st.sampled_from([1, 10]),
)
def test_a_batch_feeds_what_is_lacking_once_and_pads_it_back_and_forth(
    rows: list[tuple[int, int] | None], max_tokens: int, singly: int
) -> None:
    slots = Slots(len(rows), CONTEXT)
    for call, row in enumerate(rows):
        slots.seat(call, request(str(call), *range(1, 2 + (sum(row) - 1 if row else 0))))
    for slot, row in enumerate(rows):
        if row is None:
            slots.end(slot)
        else:
            slots.cached[slot] = row[0]
    lacking = {slot: row[1] for slot, row in enumerate(rows) if row is not None}

    batch = plan(slots, max_tokens, singly=singly)

    if not lacking:
        assert batch is None
        return
    assert batch is not None
    fed = dict(zip(batch.fed.tolist(), batch.counts.tolist(), strict=True))
    assert all(0 < count <= lacking[slot] for slot, count in fed.items())
    minority = 2 * sum(count > 1 for count in lacking.values()) <= len(lacking)
    wanted = {s: 1 if minority and count <= singly else count for s, count in lacking.items()}
    assert sum(fed.values()) == min(sum(wanted.values()), max(max_tokens, len(lacking)))
    assert set(batch.sampling.tolist()) == {s for s, count in fed.items() if count == lacking[s]}
    assert np.array_equal(batch.positions[batch.last], slots.known[batch.sampling] - 1)
    assert np.array_equal(batch.slots[batch.last], batch.sampling)
    for slot, count in fed.items():
        first = int(slots.cached[slot])
        own = batch.positions[batch.slots == slot]
        assert own.tolist() == list(range(first, first + count))
    assert np.array_equal(batch.token_ids, slots.token_ids[batch.slots, batch.positions])
    assert [group.start for group in batch.groups] == [0, *(g.stop for g in batch.groups[:-1])]
    assert batch.groups[-1].stop == batch.token_ids.size
    for group in batch.groups:
        size = group.stop - group.start
        held = np.arange(*group.span) if group.span else group.slots
        assert group.positions.shape == (held.size, group.queries)
        places = np.arange(size) if group.unpad is None else group.unpad
        pad = np.arange(group.positions.size) if group.pad is None else group.pad
        assert np.array_equal(pad[places], np.arange(size))
        tokens = slice(group.start, group.stop)
        assert np.array_equal(held[places // group.queries], batch.slots[tokens])
        assert np.array_equal(group.positions.ravel()[places], batch.positions[tokens])
        assert group.keys % KEY_STEP == 0
        assert group.positions.max() < group.keys <= CONTEXT


def test_a_session_finds_its_slot_and_what_it_shares_with_it() -> None:
    slots = Slots(2, CONTEXT)
    slots.seat(0, request("a", 1, 2, 3, 4))
    slots.cached[0] = 4
    slots.end(0)
    slots.seat(1, request("b", 9))
    slots.seat(2, request("a", 1, 2, 7, 4, 5))
    assert slots.slot_of(2) == 0
    assert slots.cached.tolist() == [2, 0]


def test_a_prompt_that_is_wholly_cached_feeds_its_last_token_again() -> None:
    slots = Slots(1, CONTEXT)
    slots.seat(0, request("a", 1, 2, 3))
    slots.cached[0] = 3
    slots.end(0)
    slots.seat(1, request("a", 1, 2, 3))
    assert slots.cached[0] == 2


def test_the_slot_that_was_idle_longest_is_reclaimed_and_its_session_starts_anew() -> None:
    slots = Slots(2, CONTEXT)
    for call, session in enumerate("ab"):
        slots.seat(call, request(session, 1, 2, 3))
        slots.cached[call] = 3
    assert not slots.seat(2, request("c", 1))
    slots.end(1)
    slots.end(0)
    assert slots.seat(3, request("c", 1, 2))
    assert slots.slot_of(3) == 1
    assert slots.cached[1] == 0
    assert slots.seat(4, request("b", 1, 2, 3))
    assert slots.slot_of(4) == 0
    assert slots.cached[0] == 0


def test_a_session_released_while_idle_leaves_a_free_slot_that_is_taken_first() -> None:
    slots = Slots(2, CONTEXT)
    for call, session in enumerate("ab"):
        slots.seat(call, request(session, 1, 2, 3))
        slots.cached[call] = 3
    slots.end(0)
    slots.end(1)
    slots.release("b")
    slots.seat(2, request("c", 1, 2, 3))
    assert slots.slot_of(2) == 1
    assert slots.cached.tolist() == [3, 0]


def test_a_session_released_while_it_runs_leaves_a_free_slot() -> None:
    slots = Slots(2, CONTEXT)
    slots.seat(0, request("a", 1, 2))
    slots.cached[0] = 2
    slots.release("a")
    assert slots.running == 1
    slots.end(0)
    slots.seat(1, request("a", 1, 2, 3))
    assert slots.slot_of(1) == 0
    assert slots.cached[0] == 0
    slots.release("never seen")


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.5])
def test_samples_follow_softmax_of_the_scaled_logits(temperature: float) -> None:
    logits = torch.tensor([0.0, 1.0, -2.0, 2.0, float("-inf")])
    draws = 20_000
    generator = torch.Generator().manual_seed(0)
    token_ids, logprobs = sample(
        logits.repeat(draws, 1), np.full(draws, temperature, np.float32), generator
    )
    expected = torch.softmax(logits.double() / temperature, -1).numpy()
    share = np.bincount(token_ids, minlength=5) / draws
    assert np.all(np.abs(share - expected) <= 4 * np.sqrt(expected / draws))
    assert np.allclose(logprobs, np.log(expected[token_ids]), atol=1e-6)


def test_one_batch_mixes_temperatures_and_rows_that_are_not_finite() -> None:
    logits = torch.tensor([[0.0, 3.0, 1.0], [torch.nan, 0.0, 0.0], [5.0, 0.0, torch.inf]])
    token_ids, logprobs = sample(
        logits, np.array([0.0, 1.0, 0.7], np.float32), torch.Generator().manual_seed(0)
    )
    assert token_ids[0] == 1
    assert logprobs[0] == pytest.approx(torch.log_softmax(logits[0], -1)[1].item())
    assert np.isfinite(logprobs).tolist() == [True, False, False]


@torch.inference_mode()
def test_keys_of_broken_weights_do_not_outlive_their_replacement(tmp_path: Path) -> None:
    config = LlamaConfig(
        vocab_size=16,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=False,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    policy = Policy(tmp_path, dtype="float32", device="cpu", slots=2, max_context=CONTEXT)
    good = np.concatenate(
        [p.detach().numpy().ravel().view(np.uint8) for _, p in policy.model.named_parameters()]
    )
    accept(policy, slots=2, max_context=CONTEXT)
    decoder = Decoder(
        policy, slots=2, max_context=CONTEXT, stop_ids=frozenset(), batch_tokens=8, seed=0
    )
    policy.arrival[:] = 0xFF
    decoder.install(1)
    for call in range(2):
        decoder.submit(call, request(str(call), *range(1, 15), *range(1, 7)))
    # Both feed a part of their prompts: not a number from the first key to the last.
    decoder.step()
    decoder.step()
    policy.arrival[: good.size] = good
    decoder.install(2)
    ended = []
    while not decoder.idle:
        ended += decoder.step().ended
    assert len(ended) == 2
    for _, turn in ended:
        assert isinstance(turn, Generated)
        assert turn.length
        assert np.isfinite(turn.logprobs).all()
