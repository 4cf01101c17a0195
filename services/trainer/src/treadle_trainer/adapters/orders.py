"""What rank 0 tells the ranks that follow it, through the store where they found each other.

Orders are numbered keys of the store. Between two of them rank 0 beats, by an order that means
nothing, so that a follower may wait for the next one without end, and yet notices when nobody is
left to give one. So no rank is in a collective while rank 0 waits for anybody but ranks.
"""

import json
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

from treadle.experience.v1 import experience_service_pb2 as experience_pb
from treadle_trainer import wire
from treadle_trainer.adapters.process_group import ProcessGroup, Store, lost
from treadle_trainer.core.advantages import Advantage
from treadle_trainer.core.claims import Claim
from treadle_trainer.core.ranks import ALONE, Ranks
from treadle_trainer.core.shares import share_out
from treadle_trainer.ports import LoadOrder, RanksLostError, StepOrder

LOAD_S = 900.0
"""How long followers may take to start, or to load."""

_BEATS = 4
"""Signs of life in the time after which silence is death."""
_LOOK_S = 0.05
_HERE = "here"
"""Key under which a follower says that it has started."""


class OrderedFollowers:
    """Followers that take orders through a store."""

    def __init__(
        self,
        open_store: Callable[[], Store],
        *,
        size: int,
        timeout_s: float,
        advantage: Advantage,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        """Opens the store at the first order. `check` raises RanksLostError where one has ended.

        A rank that is silent for `timeout_s` while others wait for it is lost.
        """
        self._open_store = open_store
        self._size = size
        self._timeout_s = timeout_s
        self._advantage = advantage
        self._check = check
        self._store: Store | None = None
        self._group: ProcessGroup | None = None
        self._posted = 0
        self._posting = threading.Lock()
        self._ended = threading.Event()

    @property
    def ranks(self) -> Ranks:
        return self._group or ALONE

    def load(self, folder: Path, *, optimizer: bool, digest: Callable[[], str]) -> None:
        self._join()
        number = self._post("load", folder=str(folder.resolve()), optimizer=optimizer)
        wanted, found = digest(), self._answers(f"loaded/{number}")
        if other := [rank for rank, each in found.items() if each != wanted]:
            raise RanksLostError(
                f"ranks {other} loaded other parameters from {folder} than rank 0",
                field="digest",
                limit=wanted,
                value=found[other[0]],
            )

    def train(self, step: int, claim: Claim) -> None:
        if self._group is None:
            raise RuntimeError("a step before anything was loaded")
        turns = share_out(claim, self._advantage, self._size)
        shares = [_for_rank(claim, turns, rank) for rank in range(1, self._size)]
        self._post("step", step=step, sizes=[len(share) for share in shares])
        for rank, share in enumerate(shares, 1):
            self._group.send(share, rank)

    def end(self) -> None:
        self._ended.set()
        if self._group is not None:
            self._post("end")

    def _join(self) -> None:
        """Forms the group, once all are there."""
        if self._group is not None:
            return
        self._store = store = self._open_store()
        threading.Thread(target=self._beat, name="beat", daemon=True).start()
        self._answers(_HERE)
        self._post("join")
        self._group = ProcessGroup(store, rank=0, size=self._size, timeout_s=self._timeout_s)

    def _answers(self, to: str) -> dict[int, str]:
        """What each follower says, by its rank; waits until all have."""
        found: dict[int, str] = {}
        give_up = time.monotonic() + LOAD_S
        while self._store is not None and len(found) < self._size - 1:
            self._check()
            if time.monotonic() > give_up:
                silent = sorted(set(range(1, self._size)) - found.keys())
                raise lost(0, f"waiting for {to}", LOAD_S, f"nothing from {silent}")
            for rank in range(1, self._size):
                if rank not in found and self._store.check([f"{to}/{rank}"]):
                    found[rank] = self._store.get(f"{to}/{rank}").decode()
            time.sleep(_LOOK_S)
        return found

    def _beat(self) -> None:
        while not self._ended.wait(self._timeout_s / _BEATS):
            self._post("go on waiting")

    def _post(self, what: str, **order: Any) -> int:
        with self._posting:
            if self._store is None:
                raise RuntimeError("no store")
            self._posted += 1
            self._store.set(_order(self._posted), json.dumps({"do": what, **order}))
            return self._posted


class Orders:
    """The orders as a follower reads them."""

    def __init__(self, store: Store, *, rank: int, size: int, timeout_s: float) -> None:
        self._store = store
        self._rank = rank
        self._size = size
        self._timeout_s = timeout_s
        self._group: ProcessGroup | None = None
        self._read = 0
        store.set(f"{_HERE}/{rank}", "")

    @property
    def ranks(self) -> Ranks:
        return self._group or ALONE

    def next(self) -> LoadOrder | StepOrder | None:
        while True:
            order = self._next()
            what = order.pop("do")
            if what == "join":
                self._group = ProcessGroup(
                    self._store, rank=self._rank, size=self._size, timeout_s=self._timeout_s
                )
            elif what == "load":
                return LoadOrder(self._read, Path(order["folder"]), order["optimizer"])
            elif what == "step" and self._group is not None:
                share = self._group.receive(order["sizes"][self._rank - 1])
                message = experience_pb.ClaimStepResponse.FromString(share)
                return StepOrder(order["step"], wire.claim_from_wire(message))
            elif what == "end":
                return None

    def loaded(self, load: LoadOrder, digest: str) -> None:
        self._store.set(f"loaded/{load.number}/{self._rank}", digest)

    def _next(self) -> dict[str, Any]:
        key = _order(self._read + 1)
        try:
            self._store.wait([key], timedelta(seconds=self._timeout_s))
            order: dict[str, Any] = json.loads(self._store.get(key))
            self._read += 1
            if self._store.add(f"{key}/read", 1) == self._size - 1:
                for old in (key, f"{key}/read"):
                    self._store.delete_key(old)
        except RuntimeError as error:
            raise lost(self._rank, "waiting for orders", self._timeout_s, error) from error
        return order


def _for_rank(claim: Claim, turns: list[int], rank: int) -> bytes:
    """The claim, with inline payloads only where a rank's turn is."""
    turn = iter(turns)
    tasks = tuple(
        replace(
            task,
            episodes=tuple(
                each if next(turn) == rank else replace(each, inline=None) for each in task.episodes
            ),
        )
        for task in claim.tasks
    )
    return wire.claim_to_wire(replace(claim, tasks=tasks)).SerializeToString()


def _order(number: int) -> str:
    return f"order/{number}"
