"""Steps whose every trained token has a log-probability of its own, to be differentiated by.

The tokens of a step have ids of their own, so that the parameters of the backend are the
log-probabilities, and its gradient is the derivative by each. All else is the trainer's: weighing,
packing, objective, accumulation, ranks.
"""

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np
import torch

from treadle_core.episodes import Episode, Group, Segment, Termination
from treadle_trainer.core.step import StepSettings, train_step

CONTEXT = 0
"""Id of every token that is not trained."""


@dataclass
class Own:
    """Backend of log-probabilities; its update keeps the gradient and changes nothing."""

    logps: torch.Tensor
    entropies: torch.Tensor
    gradient: list = field(default_factory=list)

    @property
    def vocab_size(self):
        return self.logps.numel()

    def logprobs(self, microbatch, *, entropy_gradient=False):
        targets = torch.from_numpy(microbatch.targets)
        entropies = self.entropies if entropy_gradient else self.entropies.detach()
        return self.logps[targets], entropies[targets]

    def add_up_gradient(self, ranks):
        for each in (self.logps, self.entropies):
            each.grad = torch.zeros_like(each) if each.grad is None else each.grad
            ranks.add_up(each.grad)

    def clip_gradient(self, max_norm):
        return 1.0

    def update(self, learning_rate):
        both = (self.logps, self.entropies)
        self.gradient = [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in both]
        self.discard_gradient()

    def discard_gradient(self):
        self.logps.grad = self.entropies.grad = None


class Together:
    """Ranks that are threads of one process."""

    def __init__(self, size):
        self.size = size
        self._barrier = threading.Barrier(size)
        self._said = [b""] * size
        self._tensors = [None] * size

    def of(self, rank):
        return _Rank(self, rank)


@dataclass
class _Rank:
    _all: Together
    rank: int

    @property
    def size(self):
        return self._all.size

    def gather(self, said):
        self._all._said[self.rank] = said
        self._all._barrier.wait()
        found = list(self._all._said)
        self._all._barrier.wait()
        return found

    def add_up(self, tensor):
        self._all._tensors[self.rank] = tensor
        self._all._barrier.wait()
        total = sum(each.clone() for each in self._all._tensors)
        self._all._barrier.wait()
        tensor.copy_(total)
        self._all._barrier.wait()


def tensors(episodes):
    """Log-probabilities and entropies by token id, float64."""
    tokens = [u for e in episodes for s in e["segments"] for u in s]
    size = max((u[0] for u in tokens), default=0) + 1
    logps, entropies = (
        torch.zeros(size, dtype=torch.float64),
        torch.zeros(size, dtype=torch.float64),
    )
    for name, logp, _, entropy in tokens:
        logps[name], entropies[name] = logp, entropy
    return logps.requires_grad_(), entropies.requires_grad_()


def segment_of(tokens, context, gap):
    """Context, and the tokens with some context between them."""
    ids, recorded = [CONTEXT] * context, [0.0] * context
    for place, (name, _, logprob, _) in enumerate(tokens):
        if gap and place and place % gap == 0:
            ids.append(CONTEXT)
            recorded.append(0.0)
        ids.append(name)
        recorded.append(logprob)
    trained = np.array(ids) != CONTEXT
    versions = np.where(trained, 1, -1).astype(np.int32)
    return Segment(
        token_ids=np.array(ids, np.int32),
        sampled=trained,
        trained=trained.copy(),
        logprobs=np.array(recorded, np.float32),
        policy_version=versions,
        context_version=versions.copy(),
    )


def groups_of(episodes, *, rank=0, size=1, context=2, gap=0):
    """The groups of a step; a rank has the segments of every `size`-th episode."""
    groups = {}
    for number, e in enumerate(episodes):
        segments = [segment_of(s, context, gap) for s in e["segments"]]
        mine = tuple(segments) if number % size == rank else ()
        members = groups.setdefault(e["group"], [])
        members.append(Episode(mine, e["reward"], Termination.FINISHED))
    return [Group(str(name), tuple(members)) for name, members in groups.items()]


def stepped(episodes, *, advantage, loss, objective, microbatch=1000, size=1, **laid):
    """Loss, derivative by log-probabilities and by entropies, and the result."""
    # Recorded order is that of groups, which ranks count by.
    episodes = sorted(episodes, key=lambda e: [x["group"] for x in episodes].index(e["group"]))
    together = Together(size)

    def one(rank):
        backend = Own(*tensors(episodes))
        result = train_step(
            backend,
            groups_of(episodes, rank=rank, size=size, **laid),
            advantage=advantage,
            loss=loss,
            settings=StepSettings(microbatch, 1.0, objective),
            learning_rate=1.0,
            ranks=together.of(rank),
        )
        if not backend.gradient:
            backend.gradient = [torch.zeros_like(p) for p in tensors(episodes)]
        return result, backend.gradient

    with ThreadPoolExecutor(size) as pool:
        found = list(pool.map(one, range(size)))
    result, (by_logp, by_entropy) = found[0]
    return result.loss, by_logp.numpy(), by_entropy.numpy(), result
