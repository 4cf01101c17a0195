"""Traces: ids always, export by OTLP when an endpoint is configured."""

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import Span, Tracer
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

_PROPAGATOR = TraceContextTextMapPropagator()
_EXPORT_TIMEOUT_S = 5


def setup(service: str, run_id: str, otlp_endpoint: str) -> TracerProvider:
    """Installs the process's tracer provider; call its `shutdown` to flush what is left."""
    resource = Resource.create({"service.name": f"treadle-{service}", "treadle.run": run_id})
    provider = TracerProvider(resource=resource)
    if otlp_endpoint:
        exporter = OTLPSpanExporter(otlp_endpoint, insecure=True, timeout=_EXPORT_TIMEOUT_S)
        provider.add_span_processor(BatchSpanProcessor(exporter, schedule_delay_millis=1000))
    trace.set_tracer_provider(provider)
    return provider


def tracer() -> Tracer:
    """The house's tracer."""
    return trace.get_tracer("treadle")


def traceparent(span: Span) -> str:
    """W3C traceparent of a span, to be stored or sent; empty for a span that has no identity."""
    carrier: dict[str, str] = {}
    _PROPAGATOR.inject(carrier, trace.set_span_in_context(span))
    return carrier.get("traceparent", "")


def parent(traceparent: str) -> Context:
    """Context whose children continue the trace of a stored traceparent."""
    return _PROPAGATOR.extract({"traceparent": traceparent} if traceparent else {}, Context())


def trace_id(span: Span) -> str:
    """Trace id of a span, 32 hex digits; empty for a span that has no identity."""
    context = span.get_span_context()
    return trace.format_trace_id(context.trace_id) if context.is_valid else ""
