"""Layouts, digests and load orders to `treadle.refit.v1` and back."""

from collections.abc import Mapping
from dataclasses import fields
from functools import lru_cache
from typing import Any

from treadle.refit.v1 import refit_service_pb2 as pb
from treadle_weights.digests import digest_of, hex_digest
from treadle_weights.layouts import Layout, Rectangle
from treadle_weights.plan import Copy
from treadle_weights.transport import Arena, LoadOrder


def layout_to_wire(layout: Layout) -> pb.Layout:
    return pb.Layout(rectangles=[pb.Rectangle(**_fields(r)) for r in layout.rectangles])


def layout_from_wire(message: pb.Layout) -> Layout:
    """The layout; equal messages give the same object for a while, since engines repeat theirs.

    Raises InvalidFieldError.
    """
    return _parsed(message.SerializeToString(deterministic=True))


def digests_to_wire(digests: Mapping[str, int]) -> dict[str, str]:
    return {name: hex_digest(digest) for name, digest in digests.items()}


def digests_from_wire(digests: Mapping[str, str]) -> dict[str, int]:
    """Raises InvalidFieldError where a digest is not 16 hex digits."""
    return {name: digest_of(f"digests[{name}]", digest) for name, digest in digests.items()}


def arena_to_wire(arena: Arena) -> pb.Arena:
    return pb.Arena(path=arena.path, size=arena.size)


def arena_from_wire(message: pb.Arena) -> Arena:
    return Arena(message.path, message.size)


def load_order_to_wire(order: LoadOrder) -> pb.LoadOrder:
    return pb.LoadOrder(
        version=order.version,
        arena=arena_to_wire(order.arena),
        source=layout_to_wire(order.source),
        copies=[pb.Copy(**_fields(copy)) for copy in order.copies],
        digests=digests_to_wire(order.digests),
    )


def load_order_from_wire(message: pb.LoadOrder) -> LoadOrder:
    """Raises InvalidFieldError."""
    return LoadOrder(
        version=message.version,
        arena=arena_from_wire(message.arena),
        source=layout_from_wire(message.source),
        copies=tuple(
            Copy(
                c.tensor,
                c.dtype,
                tuple(c.start),
                tuple(c.stop),
                c.source_rank,
                c.source,
                c.target_rank,
                c.target,
            )
            for c in message.copies
        ),
        digests=digests_from_wire(message.digests),
    )


def _fields(value: Rectangle | Copy) -> dict[str, Any]:
    """Its fields by name: both have those of their messages."""
    return {each.name: getattr(value, each.name) for each in fields(value)}


@lru_cache(maxsize=64)
def _parsed(data: bytes) -> Layout:
    return Layout(
        tuple(
            Rectangle(
                r.tensor, r.dtype, tuple(r.shape), tuple(r.start), tuple(r.stop), r.offset, r.rank
            )
            for r in pb.Layout.FromString(data).rectangles
        )
    )
