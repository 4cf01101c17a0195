import pytest

from treadle.experience.v1 import experience_service_pb2 as pb
from treadle.experience.v1 import experience_service_pb2_grpc as rpc
from treadle_core.errors import Kind, TreadleError
from treadle_runtime.channel import call
from treadle_runtime.errors import RemoteError
from treadle_runtime.testing import running


class NoRoomError(TreadleError):
    kind = Kind.EXHAUSTED
    reason = "NO_ROOM"


class Full(rpc.ExperienceServiceServicer):
    """Has room at the fourth call."""

    def __init__(self, retry_after_s: float | None) -> None:
        self.calls = 0
        self.retry_after_s = retry_after_s

    def register(self, server) -> None:
        rpc.add_ExperienceServiceServicer_to_server(self, server)

    async def GetRun(self, request, context):
        self.calls += 1
        if self.calls < 4:
            raise NoRoomError("no room", retry_after_s=self.retry_after_s)
        return pb.GetRunResponse(position=self.calls)


async def test_a_patient_caller_waits_for_room_as_it_is_told() -> None:
    full = Full(0.001)
    async with running(full.register, "treadle.test") as channel:
        stub = rpc.ExperienceServiceStub(channel)
        answer = await call(stub.GetRun, pb.GetRunRequest(), timeout_s=5, patient=True)

    assert answer.position == 4


@pytest.mark.parametrize(
    ("retry_after_s", "patient"),
    [pytest.param(0.001, False, id="impatient"), pytest.param(None, True, id="not-told-when")],
)
async def test_others_are_refused_at_once(retry_after_s: float | None, patient: bool) -> None:
    full = Full(retry_after_s)
    async with running(full.register, "treadle.test") as channel:
        stub = rpc.ExperienceServiceStub(channel)
        with pytest.raises(RemoteError, match="no room") as refused:
            await call(stub.GetRun, pb.GetRunRequest(), timeout_s=5, budget_s=5, patient=patient)

    assert (refused.value.reason, full.calls) == ("NO_ROOM", 1)
