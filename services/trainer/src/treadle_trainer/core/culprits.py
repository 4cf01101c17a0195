"""Who spoils a whole: halving until the parts that are bad by themselves are found."""

from collections.abc import Callable, Sequence
from typing import TypeVar

T = TypeVar("T")


def culprits(
    whole: Sequence[T], *, is_bad: Callable[[Sequence[T]], bool], max_probes: int
) -> list[T]:
    """The members of `whole`, which is bad, that make it so, in order; never none.

    A part whose halves are both good is to blame as it is, and so is one that more than
    `max_probes` calls of `is_bad` would be needed to look into.
    """
    probes = 0

    def search(part: Sequence[T]) -> list[T]:
        nonlocal probes
        if len(part) <= 1 or probes + 2 > max_probes:
            return list(part)
        probes += 2
        middle = len(part) // 2
        bad = [half for half in (part[:middle], part[middle:]) if is_bad(half)]
        return [member for half in bad for member in search(half)] or list(part)

    return search(whole)
