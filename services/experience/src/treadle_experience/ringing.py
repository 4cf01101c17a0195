"""Which doorbells a durable transition rings: those of whoever might now get another answer."""

from collections.abc import Mapping
from types import MappingProxyType

from treadle_experience.core import transitions as recorded
from treadle_experience.core.transitions import Transition
from treadle_runtime.doorbell import Topic

_SILENT: Mapping[Topic, tuple[type[Transition], ...]] = MappingProxyType(
    {
        Topic.TICKETS: (
            recorded.RunBegan,
            recorded.TaskOpened,
            recorded.TicketIssued,
            recorded.EpisodeDone,
            recorded.VersionAnnounced,
            recorded.VersionAborted,
        ),
        Topic.BATCHES: (
            recorded.RunBegan,
            recorded.TaskOpened,
            recorded.TicketIssued,
            recorded.EpisodeDone,
            recorded.AttemptEnded,
            recorded.StepClaimed,
            recorded.PayloadsReleased,
            recorded.VersionAnnounced,
            recorded.VersionAborted,
        ),
    }
)
"""What gives nobody who waits a ticket or a batch: it takes one, or another transition tells more.
Versions are rung by refit, which gives engines their orders."""


def topics(transition: Transition) -> list[Topic]:
    """What to ring. A kind that is not known to be silent rings."""
    return [topic for topic, silent in _SILENT.items() if not isinstance(transition, silent)]
