"""One trace id leads from an agent's turn to the step that trained on it and the version after."""

import collections
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc

pytestmark = pytest.mark.e2e


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """An OTLP collector that keeps every span in memory, under its trace id."""

    def __init__(self) -> None:
        self.spans: list[dict[str, Any]] = []

    def Export(self, request: Any, context: Any) -> Any:
        for resource in request.resource_spans:
            service = _attributes(resource.resource.attributes)["service.name"]
            for scope in resource.scope_spans:
                self.spans += [_span(service, span) for span in scope.spans]
        return trace_service_pb2.ExportTraceServiceResponse()

    def traces(self) -> dict[str, list[dict[str, Any]]]:
        found: dict[str, list[dict[str, Any]]] = collections.defaultdict(list)
        for span in self.spans:
            found[span["trace"]].append(span)
        return found


def _attributes(pairs: Any) -> dict[str, Any]:
    return {pair.key: getattr(pair.value, pair.value.WhichOneof("value")) for pair in pairs}


def _span(service: str, span: Any) -> dict[str, Any]:
    return {
        "service": service,
        "trace": span.trace_id.hex(),
        "id": span.span_id.hex(),
        "parent": span.parent_span_id.hex(),
        "name": span.name,
        "attributes": _attributes(span.attributes),
        "links": {link.trace_id.hex() for link in span.links},
    }


@pytest.fixture
def collector() -> Iterator[tuple[Collector, str]]:
    server = grpc.server(ThreadPoolExecutor(2))
    kept = Collector()
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(kept, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield kept, f"http://127.0.0.1:{port}"
    server.stop(None)


def test_one_trace_id_leads_from_a_turn_to_its_step_and_the_version_after(
    make_run, collector
) -> None:
    kept, endpoint = collector
    run = make_run(f"run.otlp_endpoint={endpoint}")
    run.start()
    run.finish()

    traces = kept.traces()
    trained = [span for span in kept.spans if span["name"] == "episode.train"]
    assert len(trained) == 6 * 4 * 4
    installed = {
        other["attributes"]["treadle.version"] for other in kept.spans if other["name"] == "install"
    }
    for span in trained:
        trace = traces[span["trace"]]
        names = collections.Counter(other["name"] for other in trace)
        assert names["episode"] == 1
        assert names["turn"] >= 1
        assert names["episode.train"] == 1
        # Both ends of the call that recorded it, and of all others, are spans too.
        rpcs = {other["service"] for other in trace if other["name"].endswith("/CompleteEpisode")}
        assert rpcs == {"treadle-rollout", "treadle-experience"}
        step, version = (span["attributes"][f"treadle.{key}"] for key in ("step", "version"))
        (of_step,) = (
            other
            for other in kept.spans
            if other["name"] == "step" and other["attributes"]["treadle.step"] == step
        )
        assert span["trace"] in of_step["links"]
        # The install of that version belongs to the step's trace. An engine that is behind may
        # pass a version over for a newer one; the last is always served.
        served = min(other for other in installed if other >= version)
        if served == version:
            installs = [other for other in traces[of_step["trace"]] if other["name"] == "install"]
            assert [other["attributes"]["treadle.version"] for other in installs] == [version]
        else:
            assert step < 6
    services = {span["service"] for span in kept.spans}
    assert services == {
        "treadle-experience",
        "treadle-refit",
        "treadle-rollout",
        "treadle-trainer",
    }
