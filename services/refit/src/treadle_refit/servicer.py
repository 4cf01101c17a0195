"""RefitService: wire in, one call of the reconciler, wire out."""

import grpc.aio

from treadle.refit.v1 import refit_service_pb2 as pb
from treadle.refit.v1 import refit_service_pb2_grpc as rpc
from treadle_core.ids import checked_id
from treadle_refit import wire
from treadle_refit.reconciler import Reconciler
from treadle_runtime.fields import at_least, check_run, hexadecimal, wait_s
from treadle_weights.wire import arena_to_wire, digests_from_wire, layout_from_wire

SERVICE_NAME = pb.DESCRIPTOR.services_by_name["RefitService"].full_name


class RefitServicer(rpc.RefitServiceServicer):
    """Serves one run."""

    def __init__(self, run_id: str, reconciler: Reconciler) -> None:
        self._run_id = run_id
        self._reconciler = reconciler

    def register(self, server: grpc.aio.Server) -> None:
        """Adds the service to a server."""
        rpc.add_RefitServiceServicer_to_server(self, server)

    async def OpenVersion(
        self, request: pb.OpenVersionRequest, context: object
    ) -> pb.OpenVersionResponse:
        check_run(self._run_id, request.run_id)
        publication = await self._reconciler.open_version(
            trainer_epoch=at_least("trainer_epoch", request.trainer_epoch, 1),
            step=at_least("step", request.step, 0),
            request_id=checked_id("request_id", request.request_id),
            layout=layout_from_wire(request.layout),
            trace_id=hexadecimal("trace_id", request.trace_id, 32, optional=True),
            alias_of=at_least("alias_of", request.alias_of, 0),
            weights=request.weights_digest,
        )
        return pb.OpenVersionResponse(
            version=publication.version,
            arena=arena_to_wire(publication.arena),
            aliased=publication.aliased,
        )

    async def SendVersion(
        self, request: pb.SendVersionRequest, context: object
    ) -> pb.SendVersionResponse:
        check_run(self._run_id, request.run_id)
        publication = await self._reconciler.send_version(
            trainer_epoch=at_least("trainer_epoch", request.trainer_epoch, 1),
            version=at_least("version", request.version, 1),
            digests=digests_from_wire(request.digests),
        )
        return pb.SendVersionResponse(
            members=publication.members, left_behind=publication.left_behind
        )

    async def AwaitDemand(
        self, request: pb.AwaitDemandRequest, context: object
    ) -> pb.AwaitDemandResponse:
        check_run(self._run_id, request.run_id)
        wanted = await self._reconciler.await_demand(
            published_version=at_least("published_version", request.published_version, 0),
            wait_s=wait_s(request.wait),
        )
        return pb.AwaitDemandResponse(wanted=wanted)

    async def Attend(self, request: pb.AttendRequest, context: object) -> pb.AttendResponse:
        check_run(self._run_id, request.run_id)
        order = await self._reconciler.attend(wire.report(request), wait_s=wait_s(request.wait))
        return wire.order(order)
