"""Makes real attempts to get out of a sandbox, and counts those that succeed.

    python tools/sandbox_probes.py

Says so and asks nothing where this machine cannot have the sandbox at all. Every attempt that
proves nothing counts as an escape.
"""

import asyncio
import sys

from treadle_agents.sandbox import SandboxMissingError
from treadle_agents.sandbox.bubblewrap import Bubblewrap
from treadle_agents.sandbox.probes import PROBES, Finding, findings
from treadle_runtime.measures import Measure, report


def main() -> int:
    """Makes all attempts."""
    try:
        found = asyncio.run(_findings())
    except SandboxMissingError as error:
        sys.stderr.write(f"SKIPPED: {error.message}\n")
        return report(
            [Measure("probes_skipped", len(PROBES), "probes", details={"why": str(error)})]
        )
    escapes = {each.probe: each.escaped for each in found if each.escaped}
    return report(
        [
            Measure("probes", len(found), "probes", ">= 20"),
            Measure("escapes", len(escapes), "probes", "== 0", {"how": escapes}),
        ]
    )


async def _findings() -> list[Finding]:
    found: list[Finding] = []
    async for each in findings(Bubblewrap()):
        sys.stderr.write(f"{each.probe}: {each.escaped or 'held'}\n")
        found.append(each)
    return found


if __name__ == "__main__":
    raise SystemExit(main())
