import asyncio
import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from tokenizers import AddedToken, Tokenizer, decoders, models

from treadle_core.tickets import Sampling, Ticket
from treadle_rollout.adapters.worker_pool import AgentPool
from treadle_rollout.adapters.worker_process import WorkerSettings

AGENTS = Path(__file__).parent / "bad_agents.py"


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: Any) -> Path:
    """A BPE tokenizer that says `ab` in one token, though a policy may say it in two."""
    vocabulary = {"a": 0, "<end>": 1, "b": 2, "ab": 3, "c": 4, "ca": 5}
    tokenizer = Tokenizer(models.BPE(vocabulary, [("a", "b"), ("c", "a")]))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([AddedToken("<end>", special=True)])
    tokenizer.enable_truncation(2)  # what a careless export leaves behind
    tokenizer.enable_padding(length=8)
    path = tmp_path_factory.mktemp("model") / "tokenizer.json"
    tokenizer.save(str(path))
    return path


@contextlib.asynccontextmanager
async def running_pool(settings: WorkerSettings, workers: int = 1) -> AsyncGenerator[AgentPool]:
    pool = AgentPool(settings, workers)
    await pool.start()
    supervised = asyncio.create_task(pool.run())
    try:
        yield pool
    finally:
        supervised.cancel()
        await asyncio.wait({supervised})


@pytest.fixture
def pool_of(tokenizer: Path, tmp_path: Path) -> Callable[..., Any]:
    """Runs a pool of real workers for a class of bad_agents.py, within a block."""

    def start(agent: str, *, workers: int = 1, places: int = 8, **parameters: Any) -> Any:
        settings = WorkerSettings(
            tokenizer=tokenizer,
            agent=f"{AGENTS}:{agent}",
            parameters=parameters,
            places=places,
            log=tmp_path / "logs" / "agents.log",
            cancel_s=0.2,
        )
        return running_pool(settings, workers)

    return start


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pools(
    tokenizer: Path, tmp_path_factory: Any
) -> AsyncGenerator[Callable[[str], Awaitable[AgentPool]]]:
    """One running pool a class of bad_agents.py, for all tests of a module."""
    found: dict[str, AgentPool] = {}
    log = tmp_path_factory.mktemp("logs") / "agents.log"
    async with contextlib.AsyncExitStack() as stack:

        async def pool_of(agent: str) -> AgentPool:
            if agent not in found:
                name = f"{AGENTS}:{agent}"
                settings = WorkerSettings(tokenizer, name, {}, places=16, log=log, cancel_s=0.2)
                found[agent] = await stack.enter_async_context(running_pool(settings))
            return found[agent]

        yield pool_of


@pytest.fixture
def ticket() -> Callable[..., Ticket]:
    """Makes tickets."""

    def make(name: str = "e", **fields: Any) -> Ticket:
        task = fields.pop("task", {"prompt": "c"})
        values = {
            "episode_id": name,
            "attempt": 1,
            "task_id": f"task-{name}",
            "index": 0,
            "spec": task,
            "sampling": Sampling(max_tokens=8),
            "deadline_s": 30.0,
        }
        return Ticket(**(values | fields))

    return make
