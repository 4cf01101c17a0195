"""The actions of a schedule as the rules of a state machine, which Hypothesis chooses and shrinks.

What happens and what must hold is `Schedule`'s; a seed chooses by weight and plays long, this one
looks for short counter-examples and prints them as calls, with the trace of what they did.
"""

import contextlib
from collections.abc import Callable
from random import Random
from typing import Any

from hypothesis import note
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from ledger_model.schedule import ACTIONS, PAUSES, Schedule
from ledger_model.seeds import LENGTHS, open_ledger, open_store

ROUNDS = st.integers(0, 12)


class LedgerMachine(RuleBasedStateMachine):
    """Lives of one run. Has a rule for each action, by its name; see the end of this file."""

    ledger: str

    def __init__(self) -> None:
        super().__init__()
        self._left = contextlib.ExitStack()
        self._is_whole = False

    @initialize(
        random=st.randoms(use_true_random=False), size=st.sampled_from(LENGTHS), rounds=ROUNDS
    )
    def begin(self, random: Random, size: int, rounds: int) -> None:
        ledger = self._left.enter_context(open_ledger(self.ledger))
        self.schedule = Schedule(random, ledger, size, open_store())
        self._left.callback(self.schedule.close)
        self.behave(rounds)

    @rule(rounds=ROUNDS)
    def behave(self, rounds: int) -> None:
        """Everybody does what is next, again and again: brings a run far in few rules."""
        for _ in range(rounds):
            self._guarded(self.schedule.behave)

    @invariant()
    def promises_hold(self) -> None:
        self._guarded(self.schedule.check)

    def teardown(self) -> None:
        """From wherever the run is, it can be completed."""
        with self._left:
            if self._is_whole:
                self._guarded(self.schedule.complete)

    def _guarded(self, work: Callable[..., None], *arguments: Any) -> None:
        self._is_whole = False
        try:
            work(*arguments)
        except Exception:
            note("\n".join(self.schedule.lines()))
            raise
        self._is_whole = True


def machine_of(ledger: str) -> type[LedgerMachine]:
    """The machine on a ledger of this kind."""
    rules = {action.__name__: _rule_of(action) for action in (*ACTIONS, Schedule.hit)}
    return type("LedgerMachine", (LedgerMachine,), {"ledger": ledger, **rules})


def _rule_of(action: Callable[[Schedule], None]) -> Any:
    def act(self: LedgerMachine, pause_s: float) -> None:
        self._guarded(self.schedule.play, action, pause_s)

    act.__name__ = action.__name__
    return rule(pause_s=st.sampled_from(list(PAUSES)))(act)
