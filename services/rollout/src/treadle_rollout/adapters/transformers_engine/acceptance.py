"""Whether a model computes the same on the packed cache as by its own attention."""

import numpy as np
import torch
from numpy.typing import NDArray

from treadle_core.tickets import Sampling
from treadle_rollout.adapters.transformers_engine.attention import UnservedAttentionError
from treadle_rollout.adapters.transformers_engine.batch import plan
from treadle_rollout.adapters.transformers_engine.policy import Policy
from treadle_rollout.adapters.transformers_engine.slots import Slots
from treadle_rollout.core.errors import UnsupportedModelError
from treadle_rollout.ports import GenerationRequest

_FEEDS = ((3, 1, 3), (2, 2, 1), (1, 4, 2))
"""Tokens that each probed sequence feeds in each batch: single ones beside several."""

_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.02}
"""Largest difference, as a share of the largest logit."""

_REFUSALS = (
    AttributeError,
    IndexError,
    KeyError,
    RuntimeError,
    TypeError,
    ValueError,
)


def accept(policy: Policy, *, slots: int, max_context: int, graphs: bool = False) -> None:
    """Turns the policy to its packed attention, and to CUDA graphs, shown to be right.

    Raises:
        UnsupportedModelError: its forward does not work so, or gives other logits.
    """
    feeds = _FEEDS[:slots] if max_context >= max(map(sum, _FEEDS)) else ((1, 1),)
    rng = np.random.default_rng(0)
    sequences = [rng.integers(policy.vocabulary, size=sum(feed)) for feed in feeds]
    expected = torch.stack([policy.plain_logits(sequence) for sequence in sequences])
    policy.serve_packed()
    try:
        logits = _fed(policy, sequences, feeds, Slots(len(feeds), max_context))
    except _REFUSALS as error:
        raise UnsupportedModelError(policy.name, str(error)) from error
    _compare(policy, logits, expected)
    if graphs:
        policy.capture()
        try:
            single = tuple((1,) * sequence.size for sequence in sequences)
            logits = _fed(policy, sequences, single, Slots(len(feeds), max_context))
        except _REFUSALS as error:
            why = f"cannot be captured as a CUDA graph, set cuda_graphs to false: {error}"
            raise UnsupportedModelError(policy.name, why) from error
        _compare(policy, logits, expected)
    policy.cache.clear()


def _compare(policy: Policy, logits: torch.Tensor, expected: torch.Tensor) -> None:
    difference = (logits - expected).abs().max().item()
    limit = _TOLERANCE[expected.dtype] * expected.abs().max().item()
    if not difference <= limit:
        raise UnsupportedModelError(
            policy.name, f"logits on the packed cache differ by {difference:.2g} (> {limit:.2g})"
        )


def _fed(
    policy: Policy,
    sequences: list[NDArray[np.int64]],
    feeds: tuple[tuple[int, ...], ...],
    slots: Slots,
) -> torch.Tensor:
    """Logits after each sequence, fed batch by batch, [M, V]."""
    logits: dict[int, torch.Tensor] = {}
    for call, sequence in enumerate(sequences):
        first = sequence[: feeds[call][0]].astype(np.int32)
        slots.seat(call, GenerationRequest(str(call), first, Sampling()))
    turns = [0] * len(feeds)
    while (batch := plan(slots, 10**6)) is not None:
        out = policy.logits(batch)
        if out.shape[0] != batch.sampling.size:
            raise UnservedAttentionError("its forward ignores logits_to_keep")
        slots.cached[batch.fed] += batch.counts
        for slot, row in zip(map(int, batch.sampling), out, strict=True):
            logits[slot] = row.clone()
            turns[slot] += 1
            known = int(slots.known[slot])
            if known == sequences[slot].size:
                slots.end(slot)
                continue
            more = sequences[slot][known : known + feeds[slot][turns[slot]]]
            slots.token_ids[slot, known : known + more.size] = more
            slots.known[slot] += more.size
    return torch.stack([logits[slot] for slot in range(len(sequences))])
