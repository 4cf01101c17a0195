"""Runs all checks: `python -m treadle_rollout.conformance {scripted,transformers,vllm}`.

Prints a line of JSON a measure, and exits with 1 where a check fails.
"""

import argparse
import asyncio
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from treadle_rollout.conformance.checks import CHECKS
from treadle_rollout.conformance.subject import (
    DEADLINE_S,
    Check,
    NotApplicableError,
    Subject,
    run,
)
from treadle_runtime.measures import Measure, report


def scripted(folder: Path) -> Subject:
    """The engine without a model."""
    from treadle_rollout.conformance.tables import Tables  # noqa: PLC0415

    return Tables()


def transformers(folder: Path) -> Subject:
    """The embedded engine on a tiny model."""
    # Imported here: torch costs seconds, and the other engines need none.
    from transformers.utils import logging  # noqa: PLC0415

    from treadle_rollout.conformance.tiny_model import TinyModel, tiny_config  # noqa: PLC0415

    logging.disable_progress_bar()
    return TinyModel(tiny_config(), folder)


def vllm(folder: Path) -> Subject:
    """The same tiny model on vLLM."""
    from treadle_rollout.conformance.vllm_model import VllmModel, tiny_config  # noqa: PLC0415

    return VllmModel(tiny_config(), folder)


SUBJECTS: Mapping[str, Callable[[Path], Subject]] = {
    "scripted": scripted,
    "transformers": transformers,
    "vllm": vllm,
}
"""By name of the engine."""

_DEADLINES_S = {"vllm": 300.0}
"""Of a check, where engines take long to start: vLLM half a minute, and a check starts up to
three."""


@dataclass(slots=True)
class Findings:
    """What came of each check, by its name."""

    passed: list[str] = field(default_factory=list[str])
    not_applicable: dict[str, str] = field(default_factory=dict[str, str])
    """Why not."""
    failed: dict[str, str] = field(default_factory=dict[str, str])
    """How."""


async def examine(
    subject: Subject, checks: Sequence[Check] = CHECKS, *, deadline_s: float = DEADLINE_S
) -> Findings:
    """Runs checks, one after another, whatever the ones before did."""
    findings = Findings()
    for check in checks:
        name = check.__name__
        try:
            await run(check, subject, deadline_s=deadline_s)
        except NotApplicableError as error:
            findings.not_applicable[name] = str(error)
        except Exception as error:  # noqa: BLE001, a check that breaks in any way has failed
            findings.failed[name] = f"{type(error).__name__}: {error}"
        else:
            findings.passed.append(name)
    return findings


def measures(findings: Findings) -> list[Measure]:
    """What was found, with the names behind each count."""
    ran = [*findings.passed, *findings.failed]
    apart, failed = findings.not_applicable, findings.failed
    return [
        Measure("conformance_cases", len(ran), "checks", ">= 1", {"names": ran}),
        Measure("conformance_not_applicable", len(apart), "checks", details={"names": apart}),
        Measure("conformance_failures", len(failed), "checks", "== 0", {"names": failed}),
    ]


def main(argv: list[str]) -> int:
    """Returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m treadle_rollout.conformance")
    parser.add_argument("engine", choices=sorted(SUBJECTS))
    parser.add_argument("checks", nargs="*", help="names of checks; all, where none is named")
    options = parser.parse_args(argv)
    known = {check.__name__: check for check in CHECKS}
    if unknown := [name for name in options.checks if name not in known]:
        parser.error(f"no check is named {', '.join(unknown)}")
    checks = [known[name] for name in options.checks] or CHECKS
    with tempfile.TemporaryDirectory(prefix="treadle-conformance-") as folder:
        subject = SUBJECTS[options.engine](Path(folder))
        deadline_s = _DEADLINES_S.get(options.engine, DEADLINE_S)
        return report(measures(asyncio.run(examine(subject, checks, deadline_s=deadline_s))))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
