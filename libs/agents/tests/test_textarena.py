from typing import Any

import pytest

from treadle_agents.adapters.textarena import TextArenaGame
from treadle_core.episodes import Termination
from treadle_core.errors import InvalidFieldError

pytest.importorskip("textarena", reason='pip install "treadle-agents[textarena]"')
pytestmark = pytest.mark.processes


def guesses(prompt: str) -> str:
    """Halves what is left, by the hints."""
    low, high = 1, 20
    while low < high:
        middle = (low + high) // 2
        answer = prompt.partition(f"assistant\n[{middle}]")[2].partition("is ")[2]
        if answer.startswith("higher"):
            low = middle + 1
        elif answer.startswith("lower"):
            high = middle - 1
        else:
            break
    return f"[{(low + high) // 2}]"


async def test_a_game_of_one_player_is_played_to_its_end(talk: Any) -> None:
    talked = await talk(TextArenaGame("GuessTheNumber-v0"), {"seed": 3}, guesses)
    assert talked.outcome.reward == 1
    assert talked.outcome.metrics == {
        "turns": len(talked.asked),
        "seat": 0,
        "invalid_move": 0,
    }
    (segment,) = talked.segments  # what was seen before is not shown again
    assert segment.trained.tolist() == segment.sampled.tolist()
    assert talked.asked[-1].count("You have to guess the number") == 1


def first_free(prompt: str) -> str:
    """Takes the first square that is free."""
    return prompt.rpartition("Available Moves: ")[2].split("'")[1]


@pytest.mark.parametrize("other", ["refuse", "untrained", "recipe"])
@pytest.mark.parametrize("seed", [0, 1])
async def test_the_other_seat_is_played_by_the_policy_and_not_trained(
    talk: Any, seed: int, other: str
) -> None:
    game = TextArenaGame("TicTacToe-v0", players=2, seat=None)
    talked = await talk(game, {"seed": seed}, first_free, other_sampling=other)
    # Both take the first free square: the first player ends with a column.
    assert talked.outcome.reward == (1 if seed == 0 else -1)
    assert talked.outcome.metrics["seat"] == seed
    assert len(talked.segments) == 2
    trained = [bool(segment.trained.any()) for segment in talked.segments]
    assert sorted(trained) == [False, True]
    assert all(segment.sampled.any() for segment in talked.segments)
    mine = talked.segments[trained.index(True)]
    assert mine.trained.tolist() == mine.sampled.tolist()


class LastFree(TextArenaGame):
    def oppose(self, observation: str) -> str:
        return observation.rpartition("Moves: ")[2].split("'")[-2]


async def test_an_opponent_of_the_user_says_nothing_to_the_policy(talk: Any) -> None:
    talked = await talk(LastFree("TicTacToe-v0", players=2, seat=1), {}, first_free)
    assert talked.outcome.reward == -1  # 8, 7 and 6 are a row, before 0, 1 and 2 are
    (segment,) = talked.segments
    assert segment.trained.tolist() == segment.sampled.tolist()


async def test_a_game_without_end_is_truncated_and_worth_nothing(talk: Any) -> None:
    game = TextArenaGame("GuessTheNumber-v0", max_turns=2)
    talked = await talk(game, {"seed": 3}, lambda prompt: "[1]")
    assert (talked.outcome.reward, talked.outcome.termination) == (0, Termination.TRUNCATED)
    short = await talk(
        TextArenaGame("GuessTheNumber-v0"), {}, lambda _: "no " * 300, max_context=2000
    )
    assert short.outcome.termination is Termination.TRUNCATED


@pytest.mark.parametrize(
    ("told", "says"),
    [
        ({"game": "Nothing-v0"}, "agent.game: expected one of textarena"),
        ({"game": "TicTacToe-v0", "players": 2, "seat": 2}, "agent.seat: expected 0 to 1, got 2"),
    ],
)
def test_what_is_no_game_is_refused(told: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidFieldError, match=says):
        TextArenaGame(**told)
