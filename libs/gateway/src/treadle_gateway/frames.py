"""What a replica and its gateway workers say to each other.

Arrays travel as their bytes, little-endian.
"""

from enum import IntEnum

from treadle_runtime.workers.framing import Framing


class Say(IntEnum):
    """What a frame says; the fields follow it. `key` names a request of a worker."""

    START = 0
    """To the worker, first: settings, port."""
    READY = 1
    """From the worker: the port that it listens on."""
    REFUSED = 2
    """From the worker: it cannot serve; message."""
    OPEN = 3
    """To the worker: session, sha256 of its token, spec."""
    END = 4
    """To the worker: session; SEGMENTs and ENDED come back."""
    SEGMENT = 5
    """From the worker: session, one segment."""
    ENDED = 6
    """From the worker: session, counts, outcome or None; nothing of it is left."""
    GENERATE = 7
    """From the worker: key, session, stands, ids, sampling, apart_s, spans; as Asked has them."""
    PIECE = 8
    """To the worker: key, ids, log-probabilities, versions, context versions, length."""
    DONE = 9
    """To the worker: key; no further piece."""
    FAILED = 10
    """To the worker: key, kind, message, field, retry_after_s."""
    STOP = 11
    """From the worker: key; no further piece is wanted."""
    OUTCOME = 12
    """From the worker: session, how its client ended it, or that its time was over."""
    TAKE = 13
    """From the worker: key; a client wants an offered episode."""
    TAKEN = 14
    """To the worker: key, access and spec, or None: none is offered any more."""
    LEAVE = 15
    """From the worker: key; the client of TAKE does not wait any more."""
    DRAIN = 16
    """To the worker: no new sessions."""
    LOST = 17
    """From the worker: session; what came of it cannot be given up."""
    OPENED = 18
    """From the worker: session; its client may come."""
    PICTURE = 19
    """From the worker: session, bytes of an image that its prompts may show from now on."""


FRAMING = Framing(Say, max_bytes=256 * 1024 * 1024, any_keys=True)
"""The longest frame is a segment; biases are keyed by token."""
