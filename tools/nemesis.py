"""What a seed does to whom, and when: faults one at a time, then in pairs."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

STREAK = 4
"""Most deaths of a victim in a row, each after a short life; its supervisor gives up at six."""
STEADY_S = 32.0
"""A life that is not short, as the supervisor counts, and a little more."""
_LAST_S = (1.0, 4.0)
"""Shortest and longest fault that is healed: beyond the lease of an episode, now and then."""
_STILL_S = 3.5
"""Longest stop. A service that stands still longer has a successor, were there a standby."""

DEADLY = ("kill", "lose", "drain")
"""After which the victim is started again."""

LINK_FAULTS: dict[str, dict[str, tuple[float, float]]] = {
    "hold": {},
    "mute": {},
    "hole": {},
    "half": {},
    "flip": {},
    "cut": {"after": (1, 20_000)},
    "delay": {"seconds": (0.02, 0.3), "jitter": (0.0, 0.2)},
}
"""What a link may suffer, with the range of each setting."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One thing that is done."""

    kind: str
    """One of DEADLY: `kill`, `lose` (and what it kept), `drain` (told to end); or `stop`, `part`
    (from all networks), `disk`, or one of LINK_FAULTS."""
    target: str = ""
    """A member by its name, or a link."""
    lasts_s: float = 0.0
    """Until it is healed; a deadly one heals itself."""
    settings: dict[str, float] = field(default_factory=dict[str, float])

    def __str__(self) -> str:
        lasts = f" {self.lasts_s:.1f} s" if self.lasts_s else ""
        return f"{self.kind} {self.target}{lasts}".replace("  ", " ")


@dataclass(frozen=True, slots=True)
class Means:
    """What can be done to a run."""

    links: Sequence[str]
    unframed: Sequence[str] = ()
    """Of the links, those of whose bytes every one may be a value: a wrong bit is never planned."""
    forgetful: Sequence[str] = ()
    """Members that may lose what they keep, with their death."""
    drains: bool = False
    """Members can be told to end, and are started again."""
    parts: bool = False
    """Members can be parted from all networks."""
    disk: bool = False
    """The run's disk can be filled."""


@dataclass(frozen=True, slots=True)
class Scene:
    """What happens at once, and the seconds after the beginning before which it does not."""

    at_s: float
    faults: tuple[Fault, ...]


def plan(
    seed: int, victims: Sequence[str], means: Means, *, kills: int, seconds: float
) -> list[Scene]:
    """Spreads `kills` deaths over `seconds`.

    In the first half each is alone, and so is what comes between two; in the second half something
    else happens at the moment of the death.
    """
    chance = random.Random(seed)  # noqa: S311, a schedule, no secret
    gap_s = seconds / kills
    lives = _Lives(victims, chance)
    scenes: list[Scene] = []
    for number in range(kills):
        at_s = gap_s * (number + chance.uniform(0.0, 0.3))
        victim = lives.next(at_s)
        death = Fault(_deadly(chance, victim, means), victim)
        if number < kills // 2:
            scenes.append(Scene(at_s, (death,)))
            scenes.append(Scene(at_s + gap_s / 2, (_other(chance, victims, means),)))
            continue
        others = [name for name in victims if name != victim]
        scenes.append(Scene(at_s, (death, _other(chance, others, means))))
    return scenes


class _Lives:
    """Who died when, on the schedule."""

    def __init__(self, victims: Sequence[str], chance: random.Random) -> None:
        self._chance = chance
        self._died_s = dict.fromkeys(victims, -STEADY_S)
        self._in_a_row = dict.fromkeys(victims, 0)
        self._deaths = dict.fromkeys(victims, 0)

    def next(self, at_s: float) -> str:
        """Someone of those who died least often and can bear it, who dies at `at_s`."""
        rested = {name: at_s - died_s > STEADY_S for name, died_s in self._died_s.items()}
        streaks = {name: 0 if rested[name] else count for name, count in self._in_a_row.items()}
        bearable = [name for name, streak in streaks.items() if streak < STREAK]
        bearable = bearable or [min(streaks, key=lambda name: streaks[name])]
        fewest = min(self._deaths[name] for name in bearable)
        name = self._chance.choice([each for each in bearable if self._deaths[each] == fewest])
        self._in_a_row[name] = streaks[name] + 1
        self._died_s[name] = at_s
        self._deaths[name] += 1
        return name


def _deadly(chance: random.Random, victim: str, means: Means) -> str:
    if victim in means.forgetful and chance.random() < 0.5:
        return "lose"
    return "drain" if means.drains and chance.random() < 0.2 else "kill"


def _other(chance: random.Random, victims: Sequence[str], means: Means) -> Fault:
    kinds = [*LINK_FAULTS, "stop", "stop"] + ["part", "part"] * means.parts + ["disk"] * means.disk
    kind = chance.choice(kinds)
    lasts_s = round(chance.uniform(*_LAST_S), 2)
    if kind == "stop":
        return Fault(kind, chance.choice(victims), min(lasts_s, _STILL_S))
    if kind == "part":
        return Fault(kind, chance.choice(victims), lasts_s)
    if kind == "disk":
        return Fault(kind, "", lasts_s)
    settings = {name: round(chance.uniform(*span), 3) for name, span in LINK_FAULTS[kind].items()}
    links = [name for name in means.links if kind != "flip" or name not in means.unframed]
    return Fault(kind, chance.choice(links), lasts_s, settings)
