"""Experience over gRPC: the real ledger."""

from collections.abc import Sequence

import grpc.aio

from treadle.experience.v1 import experience_service_pb2 as pb
from treadle.experience.v1.experience_service_pb2_grpc import ExperienceServiceStub
from treadle_rollout import wire
from treadle_rollout.ports import Attempt, Failure, Lease, Result
from treadle_runtime.channel import call
from treadle_runtime.fields import duration

TIMEOUT_S = 10.0
"""Of a call that does not wait on purpose."""


class GrpcExperience:
    """Experience at the other end of a channel. Each call is tried once: callers repeat."""

    def __init__(self, channel: grpc.aio.Channel, run_id: str, replica_id: str) -> None:
        self._stub = ExperienceServiceStub(channel)
        self._run_id = run_id
        self._replica_id = replica_id

    async def lease(
        self, *, served_version: int, max_tickets: int, slots: int, wait_s: float
    ) -> Lease:
        request = pb.LeaseTicketsRequest(
            run_id=self._run_id,
            replica_id=self._replica_id,
            served_version=served_version,
            max_tickets=max_tickets,
            slots=slots,
            wait=duration(wait_s),
        )
        timeout_s = TIMEOUT_S + wait_s
        return wire.lease_from_wire(
            await call(self._stub.LeaseTickets, request, timeout_s=timeout_s)
        )

    async def renew(
        self, attempts: Sequence[Attempt], *, served_version: int, timeout_s: float
    ) -> Sequence[Attempt]:
        request = pb.RenewLeasesRequest(
            run_id=self._run_id,
            replica_id=self._replica_id,
            served_version=served_version,
            attempts=wire.attempts_to_wire(attempts),
        )
        response = await call(self._stub.RenewLeases, request, timeout_s=timeout_s)
        return wire.attempts_from_wire(response.revoked)

    async def complete(self, attempt: Attempt, result: Result) -> None:
        request = pb.CompleteEpisodeRequest(
            run_id=self._run_id,
            replica_id=self._replica_id,
            attempt=wire.attempt_to_wire(attempt),
            result=wire.result_to_wire(result),
        )
        await call(self._stub.CompleteEpisode, request, timeout_s=TIMEOUT_S)

    async def fail(self, attempt: Attempt, failure: Failure) -> None:
        request = wire.failure_to_wire(self._run_id, self._replica_id, attempt, failure)
        await call(self._stub.FailEpisode, request, timeout_s=TIMEOUT_S)

    async def hand_back(self, attempts: Sequence[Attempt]) -> None:
        request = pb.ReturnTicketsRequest(
            run_id=self._run_id,
            replica_id=self._replica_id,
            attempts=wire.attempts_to_wire(attempts),
        )
        await call(self._stub.ReturnTickets, request, timeout_s=TIMEOUT_S)
