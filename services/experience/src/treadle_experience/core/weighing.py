"""How many bytes wait for a checkpoint. Part of the fold."""

from treadle_experience.core.state import Result, RunState


def weigh(state: RunState, result: Result) -> None:
    """Counts the bytes of a training result; a medium that others show too is counted already."""
    state.payload_bytes += result.size
    for medium in result.media:
        others = state.shown.get(medium.sha256, 0)
        state.payload_bytes += 0 if others else medium.size
        state.shown[medium.sha256] = others + 1


def unweigh(state: RunState, result: Result) -> None:
    """The inverse of `weigh`."""
    state.payload_bytes -= result.size
    for medium in result.media:
        state.shown[medium.sha256] -= 1
        if not state.shown[medium.sha256]:
            del state.shown[medium.sha256]
            state.payload_bytes -= medium.size
