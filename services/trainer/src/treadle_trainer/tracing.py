"""Spans of a step: one for the step, and one for each episode in the episode's own trace."""

import contextlib
from collections.abc import Generator, Sequence
from dataclasses import dataclass

from opentelemetry.trace import Link, Span, get_current_span

from treadle_runtime import telemetry
from treadle_trainer.core.claims import ClaimedEpisode


@dataclass(frozen=True, slots=True)
class StepTrace:
    """The spans of one step while it runs."""

    span: Span
    episodes: tuple[Span, ...]

    @property
    def trace_id(self) -> str:
        """32 hex digits; empty when nothing is traced."""
        return telemetry.trace_id(self.span)

    def published(self, version: int) -> None:
        """Says which version the step became."""
        for span in (self.span, *self.episodes):
            span.set_attribute("treadle.version", version)


@contextlib.contextmanager
def step_trace(run_id: str, step: int, episodes: Sequence[ClaimedEpisode]) -> Generator[StepTrace]:
    """Spans for the body: `step`, current, linked to the episodes; and an `episode.train` each."""
    tracer = telemetry.tracer()
    traced = [episode for episode in episodes if episode.traceparent]
    contexts = [telemetry.parent(episode.traceparent) for episode in traced]
    links = [Link(get_current_span(context).get_span_context()) for context in contexts]
    attributes = {"treadle.run": run_id, "treadle.step": step}
    with tracer.start_as_current_span("step", links=links, attributes=attributes) as span:
        back = [Link(span.get_span_context())]
        spans = tuple(
            tracer.start_span(
                "episode.train",
                context=context,
                links=back,
                attributes={
                    **attributes,
                    "treadle.episode": episode.episode_id,
                    "treadle.attempt": episode.attempt,
                },
            )
            for episode, context in zip(traced, contexts, strict=True)
        )
        try:
            yield StepTrace(span, spans)
        finally:
            for episode_span in spans:
                episode_span.end()
