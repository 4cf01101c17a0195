"""One probe: an attempt made in a fresh box, judged by what it says and what the host sees."""

import json
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from treadle_agents.processes import Cut, Ended
from treadle_agents.sandbox import attempts
from treadle_agents.sandbox.ports import Box, Limits, Sandbox
from treadle_agents.sandbox.probes.host import Host, host
from treadle_core.errors import InvalidFieldError

PROBES: Sequence[str] = tuple(attempts.ATTEMPTS)
"""Their names."""
LIMITS = Limits(
    processes=24, memory_mb=192, scratch_mb=16, files=512, output_bytes=65536, seconds=120.0
)
_PROGRAM = {
    str(Path(*attempts.__name__.split("."), file.name)): file.read_bytes()
    for file in Path(attempts.__path__[0]).glob("*.py")
}
"""The attempts and nothing else of this distribution, which a box does not have."""
_CUT = {
    "endless_output": Cut.OUTPUT,
    "memory_bomb": Cut.MEMORY,
    "memory_of_many": Cut.MEMORY,
}
"""Attempts that go on until they are killed, and why they are to be."""


@dataclass(frozen=True, slots=True)
class Finding:
    """What came of one probe."""

    probe: str
    escaped: str
    """How it got out, or that it proved nothing; empty where the box held."""


async def findings(sandbox: Sandbox, probes: Sequence[str] = PROBES) -> AsyncIterator[Finding]:
    """Makes one attempt after another, each in a box of its own, while another box is open."""
    async with host() as found, sandbox.open(LIMITS) as other:
        await other.write({found.evidence["other"]: b"of another box"})
        for name in probes:
            yield await _probe(sandbox, name, found)


async def _probe(sandbox: Sandbox, name: str, found: Host) -> Finding:
    async with sandbox.open(LIMITS) as box:
        await box.write(_PROGRAM)
        ended = await box.run(
            ["python3", "-m", attempts.__name__, name],
            given=json.dumps(found.evidence | asdict(LIMITS)).encode(),
        )
        escaped = _said(name, ended) or found.harm() or await _after(name, box, found)
    return Finding(name, escaped)


def _said(name: str, ended: Ended) -> str:
    """What is wrong with how the attempt ended."""
    text = (ended.output + ended.errors).decode(errors="replace")
    if name in _CUT:
        kept = len(ended.output) + len(ended.errors)
        if ended.cut is _CUT[name] and kept <= LIMITS.output_bytes:
            return ""
        return f"was not killed for its {_CUT[name]}, but ended with {ended.status}: {text[-200:]}"
    if ended.cut is not None:
        return f"killed: {ended.cut}"
    return "" if text == "held\n" else text.strip()[-200:] or f"ended with {ended.status}"


async def _after(name: str, box: Box, found: Host) -> str:
    """What an attempt left for those who come later."""
    if name == "links":
        return await _links(box, found)
    if name == "survivor":
        await box.read("started")
    looks = f"cat /proc/[0-9]*/cmdline | tr '\\0' ' ' | grep -c {found.marker}-surviv[o]r"
    later = await box.run(["sh", "-c", looks])
    if later.output.strip() != b"0":
        return f"reached the next command: {later.output[:80]!r} {later.errors[:200]!r}"
    return ""


async def _links(box: Box, found: Host) -> str:
    """Fetches through the links, and puts something there."""
    for place in ("result", "folder/secret", "up/etc/passwd", "pipe"):
        with suppress(InvalidFieldError):
            await box.read(place)
            return f"had {place} fetched"
    for place in ("folder/planted", "up/tmp/planted", "pipe/planted"):
        with suppress(InvalidFieldError):
            await box.write({place: b""})
            return f"had {place} written"
    await box.write({"result": b"replaced"})
    return found.harm()
