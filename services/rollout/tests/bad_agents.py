"""Agents that behave, and agents that do not; loaded by path into real workers."""

import asyncio
import contextlib
import os
import subprocess
import sys
import time

from treadle_agents import Env, PolicyError, Result, Turn


class Counting(Env):
    """Shows `ab` until turn `turns`, then gives the number of turns as reward."""

    def __init__(self, turns: int = 3) -> None:
        self.turns = turns

    def step(self, turn: Turn) -> Result:
        over = turn.number >= self.turns
        return Result("ab", reward=float(turn.number) if over else None, terminated=over)


class Chosen(Env):
    """Does what the task's `do` says at the first turn; the second turn ends well."""

    def step(self, turn: Turn) -> Result:
        if turn.number == 1:
            return getattr(self, str(turn.task["do"]))(turn) or Result("ab")
        return Result(reward=1.0, terminated=True)

    def well(self, turn: Turn) -> None:
        pass

    def raises(self, turn: Turn) -> None:
        raise ValueError("no such tool; token=hunter2")

    def refuses(self, turn: Turn) -> None:
        raise PolicyError("not a call")

    def exits(self, turn: Turn) -> None:
        sys.exit(3)

    def dies(self, turn: Turn) -> None:
        os._exit(7)

    def mistypes(self, turn: Turn) -> dict[str, float]:
        return {"reward": 1.0}

    def nan(self, turn: Turn) -> Result:
        return Result(reward=float("nan"), terminated=True)

    def spins(self, turn: Turn) -> None:
        while True:
            pass

    def sleeps(self, turn: Turn) -> None:
        time.sleep(3600)

    def floods(self, turn: Turn) -> None:
        while True:
            print("x" * 1000)  # noqa: T201

    def leaves_a_child(self, turn: Turn) -> None:
        child = subprocess.Popen(["sleep", "3600"])  # noqa: S607
        print(f"child {child.pid}")  # noqa: T201
        self.sleeps(turn)


class ChosenLater(Env):
    """The same, in the event loop."""

    async def step(self, turn: Turn) -> Result:
        if turn.number == 1:
            await getattr(self, str(turn.task["do"]))()
            return Result("ab")
        return Result(reward=1.0, terminated=True)

    async def well(self) -> None:
        await asyncio.sleep(0)

    async def sleeps(self) -> None:
        await asyncio.sleep(3600)

    async def blocks(self) -> None:
        time.sleep(3600)  # noqa: ASYNC251, the mistake

    async def clings(self) -> None:
        while True:
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(3600)

    async def shrugs(self) -> None:
        """Catches what is to end it and plays on."""
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(3600)

    async def raises(self) -> None:
        raise StopIteration


class HangsWhenClosed(Env):
    played = False

    def step(self, turn: Turn) -> Result:
        self.played = True
        return Result(reward=1.0, terminated=True)

    def close(self) -> None:
        if self.played:
            time.sleep(3600)


class NoEnv:
    pass


class BadConstructor(Env):
    def __init__(self) -> None:
        raise OSError("no display")
