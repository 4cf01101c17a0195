"""Who needs which object of a node: attempts for a while, recorded results until released."""

import math
from dataclasses import dataclass, field


@dataclass(slots=True)
class Holds:
    """Pins, which end by themselves, and holds, which do not. Time is an argument, in seconds."""

    _until: dict[str, dict[str, float]] = field(default_factory=dict[str, dict[str, float]])

    def pin(self, sha256: str, holder: str, until: float) -> None:
        """Keeps an object for an attempt at the episode `holder`; never shortens what there is."""
        holders = self._until.setdefault(sha256, {})
        holders[holder] = max(until, holders.get(holder, until))

    def confirm(self, sha256: str, holder: str) -> None:
        """Keeps an object until `release`."""
        self._until.setdefault(sha256, {})[holder] = math.inf

    def release(self, sha256: str, holder: str, now: float) -> bool:
        """Ends what `holder` has; whether nobody else needs the object."""
        holders = self._until.get(sha256, {})
        holders.pop(holder, None)
        return self._forget_ended(sha256, now)

    def is_pinned(self, sha256: str, now: float) -> bool:
        """Whether an attempt that the ledger may hear of still needs the object."""
        self._forget_ended(sha256, now)
        return any(until < math.inf for until in self._until.get(sha256, {}).values())

    def forget(self, sha256: str) -> None:
        """The object is gone."""
        self._until.pop(sha256, None)

    def _forget_ended(self, sha256: str, now: float) -> bool:
        """Whether nothing is left."""
        holders = self._until.get(sha256, {})
        for holder in [holder for holder, until in holders.items() if until <= now]:
            del holders[holder]
        if not holders:
            self._until.pop(sha256, None)
        return not holders
