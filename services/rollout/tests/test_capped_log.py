import asyncio
import os
from pathlib import Path
from typing import Any

from treadle_rollout.adapters.capped_log import CappedLog


async def test_a_flood_leaves_the_last_of_it_and_bounded_files(
    tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.setattr("treadle_rollout.adapters.capped_log.FILE_LIMIT", 100_000)
    monkeypatch.setattr("treadle_rollout.adapters.capped_log.RATE", 1e9)
    log = CappedLog(tmp_path / "logs" / "agents.log")
    writing = await log.open()
    for chunk in [b"x" * 50_000] * 10 + [b"the last words"]:
        await asyncio.to_thread(os.write, writing, chunk)
    os.close(writing)
    await log.close()
    files = {path.name: path.stat().st_size for path in (tmp_path / "logs").iterdir()}
    assert set(files) == {"agents.log", "agents.log.1"}
    assert max(files.values()) < 200_000
    kept = [(tmp_path / "logs" / name).read_bytes() for name in ("agents.log.1", "agents.log")]
    assert b"".join(kept).endswith(b"the last words")
