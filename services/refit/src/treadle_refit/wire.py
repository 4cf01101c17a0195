"""`treadle.refit.v1` to the core's values and back. Whatever is wrong names its field."""

import math
import re

from google.protobuf.duration_pb2 import Duration

from treadle.refit.v1 import refit_service_pb2 as pb
from treadle_core.errors import InvalidFieldError
from treadle_core.ids import checked_id
from treadle_refit.core.errors import WrongRunError
from treadle_refit.core.fleet import Report
from treadle_refit.core.orders import Alias, Discard, Install
from treadle_weights.transport import LoadOrder
from treadle_weights.wire import layout_from_wire, load_order_to_wire

_TRACE_ID = re.compile(r"([0-9a-f]{32})?")


def check_run(served: str, run_id: str) -> None:
    """Raises WrongRunError unless the request is for the run served here."""
    if checked_id("run_id", run_id) != served:
        raise WrongRunError(
            f"run_id: this is run {served}, not {run_id}",
            field="run_id",
            limit=served,
            value=run_id,
        )


def at_least(field: str, value: int, limit: int) -> int:
    """Returns `value`; raises InvalidFieldError where it is less than `limit`."""
    if value < limit:
        raise InvalidFieldError(field, limit=f">= {limit}", value=value)
    return value


def wait_s(duration: Duration) -> float:
    """Seconds that a call may wait."""
    seconds = duration.seconds + duration.nanos / 1e9
    if seconds < 0 or not math.isfinite(seconds):
        raise InvalidFieldError("wait", limit=">= 0 s", value=seconds)
    return seconds


def trace_id(value: str) -> str:
    """A trace id: 32 hex digits, or nothing."""
    if not _TRACE_ID.fullmatch(value):
        raise InvalidFieldError("trace_id", limit=_TRACE_ID.pattern, value=repr(value[:40]))
    return value


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
