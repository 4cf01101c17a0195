"""`python -m treadle_runtime.probe ADDRESS`: whether a service serves; for health checks of images.

Exit status 0 where it says SERVING, and 1 with a line on stderr where it says otherwise or nothing.
"""

import sys
from typing import Any, cast

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

PATIENCE_S = 3.0
"""Less than the timeout of the images' health checks."""


def main(argv: list[str]) -> int:
    """Asks once."""
    (address,) = argv
    options = [("grpc.default_authority", "localhost"), ("grpc.enable_http_proxy", 0)]
    with grpc.insecure_channel(address, options=options) as channel:
        stub = cast("Any", health_pb2_grpc).HealthStub(channel)
        try:
            answer = stub.Check(health_pb2.HealthCheckRequest(), timeout=PATIENCE_S)
        except grpc.RpcError as error:
            sys.stderr.write(f"{address}: {cast('Any', error).code().name}\n")
            return 1
    if answer.status != health_pb2.HealthCheckResponse.SERVING:
        sys.stderr.write(
            f"{address}: {health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)}\n"
        )
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
