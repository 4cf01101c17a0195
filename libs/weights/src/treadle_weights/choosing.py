"""What of a version travels: all of its bytes, or what changed, by what arrives first.

Rates are those of the transfers before; until one was measured, all bytes travel.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from treadle_weights import delta
from treadle_weights.buckets import Bucket, packed
from treadle_weights.channel import Terms, cut
from treadle_weights.layouts import Layout

_FIRST_SCAN = 1e9
"""Bytes of a second that are compared and coded, until it was measured."""
_MEASURABLE = 1 << 20
"""Bytes of which a rate can be told."""


@dataclass(slots=True)
class Held:
    """A version whose bytes lie here."""

    transfer: str
    version: int
    layout: Layout
    data: NDArray[np.uint8]
    digests: Mapping[str, int]
    deltas: dict[str, NDArray[np.uint8]] = field(default_factory=dict[str, NDArray[np.uint8]])
    """By the transfer of their base."""


class Chooser:
    """Chooses for one sender. Calls come from one thread."""

    def __init__(self, terms: Terms) -> None:
        self._terms = terms
        self.link_rate: float | None = None
        """Of the last transfer, in bytes of a second; None before the first."""
        self._scan_rate = _FIRST_SCAN

    def note_link(self, size: int, seconds: float) -> None:
        """So many bytes took so long."""
        if size >= _MEASURABLE:
            self.link_rate = size / seconds

    def payload(
        self, base: Held | None, held: Held
    ) -> tuple[str, NDArray[np.uint8], Sequence[Bucket]]:
        """Encoding, bytes and launches of `held` for receivers that all hold `base`, if one."""
        terms = self._terms
        if base is not None and self._is_delta(base, held):
            data = self._delta(base, held)
            if data.size < held.layout.size():
                return "delta", data, packed(data.size, terms.bucket_bytes)
        buckets = cut(held.layout, terms.bucket_bytes, is_packed=terms.is_packed)
        return "dense", held.data[: held.layout.size()], buckets

    def _is_delta(self, base: Held, held: Held) -> bool:
        if self._terms.encoding != "auto":
            return self._terms.encoding == "delta"
        link, most = self.link_rate, self._terms.most_bytes_per_s
        if most is not None:
            link = min(link or most, most)
        if link is None:
            return False
        size, rates = held.layout.size(), delta.Rates(link, self._scan_rate)
        if not delta.is_delta_faster(size, 0, rates):
            return False  # whatever changed: comparing alone takes longer than sending
        expected = delta.estimate(held.layout, base.data, held.data)
        return delta.is_delta_faster(size, expected, rates)

    def _delta(self, base: Held, held: Held) -> NDArray[np.uint8]:
        if base.transfer not in held.deltas:
            began_at = time.monotonic()
            held.deltas[base.transfer] = delta.encode(
                held.layout, base.data, held.data, base.digests
            )
            if held.layout.size() >= _MEASURABLE:
                self._scan_rate = held.layout.size() / (time.monotonic() - began_at)
        return held.deltas[base.transfer]
