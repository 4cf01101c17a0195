import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
import pytest_asyncio

from treadle_gateway.settings import GatewaySettings
from treadle_gateway.testing import MODEL, Scripted, World, serving, write_model

WorldOf = Callable[..., contextlib.AbstractAsyncContextManager[World]]


@pytest.fixture(scope="session")
def world_of(tmp_path_factory: pytest.TempPathFactory) -> WorldOf:
    """Makes gateways whose workers have nothing to complain of."""
    folder = tmp_path_factory.mktemp("model")
    tokenizer = write_model(folder)

    @contextlib.asynccontextmanager
    async def make(workers: int = 1, **told: Any) -> AsyncIterator[World]:
        log = tmp_path_factory.mktemp("gateway") / "gateway.log"
        base = {"model_folder": folder, "model_name": MODEL, "max_context": 65536, "log": log}
        settings = GatewaySettings(**base | told)
        async with serving(settings, Scripted(tokenizer), workers) as world:
            yield world
        assert "Traceback" not in log.read_text()

    return make


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def gateway(world_of: WorldOf) -> AsyncIterator[World]:
    async with world_of() as world:
        yield world


@pytest.fixture
def world(gateway: World) -> World:
    """The gateway of the module, with a policy that greets."""
    gateway.policy.reset()
    return gateway
