"""What people are told of versions and engines: log lines, and a row of metrics per version."""

import logging
from collections.abc import Sequence

from treadle_refit.core.fleet import EngineState, Report
from treadle_refit.core.publication import Publication
from treadle_runtime.tracker import Tracker
from treadle_weights.plan import Copy

log = logging.getLogger(__name__)


def tell_engine(report: Report, before: EngineState, state: EngineState) -> None:
    """Who comes, comes back, arrives or fails; not each version."""
    has_failed = report.failed > report.serving
    if has_failed or before in (EngineState.DEAD, EngineState.SUSPECT):
        log.log(
            logging.WARNING if has_failed else logging.INFO,
            "engine %s is %s: serves %d, failed to load %d %s",
            report.engine_id,
            state,
            report.serving,
            report.failed,
            report.failure,
        )


def tell_plan(
    tracker: Tracker, publication: Publication, report: Report, copies: Sequence[Copy]
) -> None:
    """One row (docs/metrics.md) for each new pair of layouts of an engine."""
    tracker.log(
        "plan",
        {
            "version": publication.version,
            "engine": report.engine_id,
            "tensors": len(report.layout.by_tensor),
            "copies": len(copies),
            "bytes": sum(rectangle.size for rectangle in report.layout.rectangles),
            "source_ranks": len({copy.source_rank for copy in copies}),
            "target_ranks": len({copy.target_rank for copy in copies}),
        },
    )


def tell_commit(tracker: Tracker, publication: Publication, *, began_at: float, now: float) -> None:
    """One row (docs/metrics.md). `began_at` is when the ledger was told of the commit."""
    opened_at, total_s = publication.opened_at, now - publication.opened_at + publication.open_s
    log.info(
        "version %d of step %d is committed%s: %d engines verified it, %d left behind, %.1f ms",
        publication.version,
        publication.step,
        " as an alias" if publication.aliased else "",
        publication.members,
        publication.left_behind,
        total_s * 1e3,
    )
    tracker.log(
        "version",
        {
            "version": publication.version,
            "step": publication.step,
            "members": publication.members,
            "left_behind": publication.left_behind,
            "aliased": int(publication.aliased),
            "bytes": 0 if publication.aliased else publication.arena.size,
            "open_s": round(publication.open_s, 6),
            "fill_s": round(publication.sent_at - opened_at, 6),
            "verify_s": round(began_at - publication.sent_at, 6),
            "commit_s": round(now - began_at, 6),
            "total_s": round(total_s, 6),
            "trace_id": publication.trace_id,
        },
    )
