"""`treadle.refit.v1` to the core's values and back. Whatever is wrong names its field."""

from treadle.refit.v1 import refit_service_pb2 as pb
from treadle_core.ids import checked_id
from treadle_refit.core.fleet import Report
from treadle_refit.core.orders import Alias, Discard, Install
from treadle_runtime.fields import at_least
from treadle_weights.transport import LoadOrder
from treadle_weights.wire import layout_from_wire, load_order_to_wire


def report(request: pb.AttendRequest) -> Report:
    """What an engine says of itself."""
    return Report(
        engine_id=checked_id("engine_id", request.engine_id),
        layout=layout_from_wire(request.layout),
        serving=at_least("serving", request.serving, 0),
        verified=at_least("verified", request.verified, 0),
        failed=at_least("failed", request.failed, 0),
        failure=request.failure[:1000],
        draining=request.draining,
    )


def order(order: LoadOrder | Install | Discard | Alias | None) -> pb.AttendResponse:
    """What the engine is to do."""
    match order:
        case LoadOrder():
            return pb.AttendResponse(load=load_order_to_wire(order))
        case Install(version, trace_id):
            return pb.AttendResponse(install=pb.InstallOrder(version=version, trace_id=trace_id))
        case Discard(version):
            return pb.AttendResponse(discard=pb.DiscardOrder(version=version))
        case Alias(version, base, trace_id):
            return pb.AttendResponse(
                alias=pb.AliasOrder(version=version, base=base, trace_id=trace_id)
            )
        case None:
            return pb.AttendResponse()
