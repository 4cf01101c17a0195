"""An engine without a model, as a process: attends, loads, installs, and says what it serves.

Usage: lone_engine.py ADDRESS DIRECTORY ENGINE_ID TRANSPORT
"""

import asyncio
import sys
from typing import Any

import numpy as np
from google.protobuf.duration_pb2 import Duration

from treadle.refit.v1 import refit_service_pb2 as pb
from treadle.refit.v1 import refit_service_pb2_grpc as rpc
from treadle_core.errors import TreadleError
from treadle_runtime.channel import call, connect
from treadle_runtime.plugins import PluginConfig, build
from treadle_weights.layouts import whole
from treadle_weights.plan import box_of
from treadle_weights.wire import layout_to_wire, load_order_from_wire

SHAPES = {f"layers.{i}.weight": ("float32", (160, 160)) for i in range(16)}


async def main(address: str, directory: str, engine_id: str, transport: str) -> None:
    layout = whole(SHAPES)
    config = PluginConfig.model_validate({"name": transport, "directory": directory})
    receiver = build("treadle.weight_transports", config).receiver()
    buffer = np.zeros(layout.size(), np.uint8)
    state: dict[str, Any] = {"serving": 0, "verified": 0, "failed": 0}
    async with connect(address) as channel:
        attend = rpc.RefitServiceStub(channel).Attend
        while True:
            request = pb.AttendRequest(
                run_id="run",
                engine_id=engine_id,
                layout=layout_to_wire(layout),
                wait=Duration(seconds=20),
                **state,
            )
            response = await call(attend, request, timeout_s=30, budget_s=30)
            match response.WhichOneof("order"):
                case "load":
                    order = load_order_from_wire(response.load)
                    try:
                        await asyncio.to_thread(receiver.receive, order, layout, buffer)
                    except TreadleError as error:
                        state |= {"failed": order.version, "failure": error.message}
                    else:
                        state |= {"verified": order.version}
                case "install":
                    state |= {"serving": response.install.version, "verified": 0}
                    value = box_of(buffer, layout.rectangles[-1]).view(np.float32)[0, 0]
                    print(f"{state['serving']} {value}", flush=True)  # noqa: T201
                case "discard":
                    state |= {"verified": 0}
                case _:
                    pass


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
