"""Games of textarena, of one player or of many.

A game draws from the one generator of its process: a seed makes it the same again only where no
other game is played beside it.
"""

import asyncio
from typing import Any, cast

from treadle_agents.adapters.libraries import library
from treadle_agents.adapters.policy import NoRoomError, Policy
from treadle_agents.chat_agent import ChatAgent, ChatContext
from treadle_agents.env import Result
from treadle_core.errors import InvalidFieldError

_EXTRA = "textarena"


class TextArenaGame(ChatAgent):
    """Plays one seat of a game with the policy; the reward is what the game gives that seat.

    The policy plays the other seats too, each in a conversation of its own, whose turns are not
    trained, since the reward is not theirs; inherit and override `oppose` for another opponent. A
    game that is not over when its turns or the context end is truncated, and worth 0.
    """

    def __init__(
        self,
        game: str,
        players: int = 1,
        parameters: dict[str, Any] | None = None,
        seat: int | None = 0,
        system: str = "",
        max_turns: int = 200,
    ) -> None:
        """Says what is played.

        Args:
            game: textarena's id.
            players: seats at the table.
            parameters: more for the game.
            seat: which one is trained, from 0; none: they take turns, by the task's seed.
            system: what the system says first to every seat that the policy plays.
            max_turns: of all seats together.

        A task may hold `seed`. Raises InvalidFieldError for a game or a seat that is none.
        """
        arena = library("textarena", extra=_EXTRA)
        try:
            self._game: Any = arena.make(game, **(parameters or {}))
        except (ValueError, TypeError, ImportError) as error:
            raise InvalidFieldError("agent.game", limit="one of textarena", value=error) from error
        if seat is not None and not 0 <= seat < players:
            raise InvalidFieldError("agent.seat", limit=f"0 to {players - 1}", value=seat)
        self._players, self._seat = players, seat
        self._system = [{"role": "system", "content": system}] if system else []
        self._max_turns = max_turns

    async def run(self, context: ChatContext) -> Result:
        seed = cast("int | None", context.task.get("seed"))
        mine = (seed or 0) % self._players if self._seat is None else self._seat
        await asyncio.to_thread(self._game.reset, num_players=self._players, seed=seed)
        async with Policy(context, extra=_EXTRA) as policy:
            seats = [_Seat(list(self._system)) for _ in range(self._players)]
            try:
                over = await self._play(policy, seats, mine)
            except NoRoomError:
                over = False
        return self._worth(mine, seats[mine].turns, over=over)

    def oppose(self, observation: str) -> str | None:
        """The action of another seat that is shown this; None: the policy plays it. May block."""
        return None

    async def _play(self, policy: Policy, seats: "list[_Seat]", mine: int) -> bool:
        """Plays until the game is over; False where the turns run out before."""
        number: int
        for _ in range(self._max_turns):
            number, raw = self._game.get_observation()
            observation, seat = _text(raw), seats[number]
            if number == mine:
                action = await seat.act(policy, observation)
            else:
                action = await asyncio.to_thread(self.oppose, observation)
                if action is None:
                    action = await seat.act(policy, observation, trained=False)
            over, _ = await asyncio.to_thread(self._game.step, action)
            if over:
                return True
        return False

    def _worth(self, mine: int, turns: int, *, over: bool) -> Result:
        metrics = {"turns": float(turns), "seat": float(mine)}
        if not over:
            return Result(reward=0.0, truncated=True, metrics=metrics)
        rewards, told = self._game.close()
        metrics["invalid_move"] = float(bool(told[mine].get("invalid_move")))
        return Result(reward=float(rewards[mine]), metrics=metrics)


class _Seat:
    """One player's conversation."""

    def __init__(self, messages: list[dict[str, Any]]) -> None:
        self.turns = 0
        self._messages = messages
        self._seen = ""

    async def act(self, policy: Policy, observation: str, *, trained: bool = True) -> str:
        """What the policy does when it is shown what is new in an observation."""
        # Most games show all that happened so far every time.
        new = observation.removeprefix(self._seen).strip() or observation
        self._seen = observation
        self._messages.append({"role": "user", "content": new})
        reply = await policy.ask(self._messages, trained=trained)
        self._messages.append(reply.message)
        self.turns += 1
        return reply.content


def _text(observation: Any) -> str:
    """An observation as text; those of a game without wrappers are messages with their senders."""
    if isinstance(observation, str):
        return observation
    return "\n".join(f"[{sender}] {text}" for sender, text, _ in observation)
