import asyncio

import grpc
import pytest

from treadle.experience.v1 import experience_service_pb2 as pb
from treadle.experience.v1 import experience_service_pb2_grpc as rpc
from treadle_runtime import interceptors
from treadle_runtime.testing import running


class Silent(rpc.ExperienceServiceServicer):
    async def GetRun(self, request, context):
        await asyncio.Event().wait()


@pytest.mark.parametrize("timeout", [None, 7200.0], ids=["G23-none", "G23-two-hours"])
async def test_a_call_whose_deadline_is_no_bound_gets_one(
    monkeypatch: pytest.MonkeyPatch, timeout: float | None
) -> None:
    monkeypatch.setattr(interceptors, "DEADLINE_CAP_S", 0.05)

    def register(server) -> None:
        rpc.add_ExperienceServiceServicer_to_server(Silent(), server)

    async with running(register, "treadle.test") as channel:
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await rpc.ExperienceServiceStub(channel).GetRun(pb.GetRunRequest(), timeout=timeout)

    assert raised.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    assert "within 0.1 s" in raised.value.details()
