"""Prometheus metrics of a server, and the interceptor that counts its calls."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import grpc
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, start_http_server

from worldserve.messages import StepReply
from worldserve.version import __version__

LATENCY_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)


class ServerMetrics:
    """All metrics of one server, in a registry of its own (two servers in one process do not mix)."""

    def __init__(self, kind: str, backend: str) -> None:
        self.registry = CollectorRegistry()
        about = Gauge(
            "worldserve_build_info", "What runs; always 1.", ["version", "kind", "backend"], registry=self.registry
        )
        about.labels(__version__, kind, backend).set(1)
        self.calls = Counter(
            "worldserve_rpc", "Calls by method and status code.", ["method", "code"], registry=self.registry
        )
        self.latency = Histogram(
            "worldserve_rpc_seconds", "Seconds from a call's arrival to its last reply.", ["method"],
            buckets=LATENCY_BUCKETS_S, registry=self.registry,
        )  # fmt: skip
        self.live = Gauge("worldserve_episodes_live", "Open episodes.", registry=self.registry)
        self.capacity = Gauge(
            "worldserve_episodes_capacity", "Episodes that can be open at once.", registry=self.registry
        )
        self.steps = Counter("worldserve_steps", "Actions executed.", registry=self.registry)
        self.frames = Counter(
            "worldserve_frames", "Frames drawn, or scored by a reward server.", registry=self.registry
        )
        self.clipped = Counter(
            "worldserve_clipped_values", "Numbers of actions that clipping changed.", registry=self.registry
        )
        self.non_finite = Counter(
            "worldserve_non_finite_values", "NaN or infinity met in actions and model outputs.", registry=self.registry
        )
        self.ended = Counter(
            "worldserve_episodes_ended",
            "Episodes that ended, by what the reward went by.",
            ["outcome"],
            registry=self.registry,
        )
        self.item_errors = Counter(
            "worldserve_item_errors", "Items of batches that failed, by reason.", ["reason"], registry=self.registry
        )

    def watch_episodes(self, live: Callable[[], int], capacity: int) -> None:
        """Reads the live count at every scrape."""
        self.live.set_function(live)
        self.capacity.set(capacity)

    def committed(self, actions: int, frames: int, clipped: int, reply: StepReply) -> None:
        """Counts a committed chunk."""
        self.steps.inc(actions)
        self.frames.inc(frames)
        self.clipped.inc(clipped)
        if reply.end_reason:
            self.ended.labels("success" if reply.rewards[-1] > 0 else "failure").inc()

    def serve(self, host: str, port: int) -> tuple[Any, int]:
        """Starts `/metrics` and returns (server, port). Port 0 takes a free one."""
        server, _ = start_http_server(port, host, self.registry)
        return server, int(server.server_port)


class MetricsInterceptor(grpc.ServerInterceptor):
    """Counts and times every call by method and final status code."""

    def __init__(self, metrics: ServerMetrics) -> None:
        self._metrics = metrics

    def intercept_service(self, continuation: Any, details: grpc.HandlerCallDetails) -> Any:
        """Wraps the handler of a call; the health and reflection services are left alone."""
        handler = continuation(details)
        if handler is None or not details.method.startswith("/worldserve."):
            return handler
        method = details.method.rpartition("/")[2]
        if handler.response_streaming:
            return handler._replace(unary_stream=self._stream(method, handler.unary_stream))
        return handler._replace(unary_unary=self._unary(method, handler.unary_unary))

    def _unary(self, method: str, call: Any) -> Any:
        def counted(request: Any, context: grpc.ServicerContext) -> Any:
            with _Timed(self._metrics, method, context):
                return call(request, context)

        return counted

    def _stream(self, method: str, call: Any) -> Any:
        def counted(request: Any, context: grpc.ServicerContext) -> Iterator[Any]:
            with _Timed(self._metrics, method, context):
                yield from call(request, context)

        return counted


class _Timed:
    def __init__(self, metrics: ServerMetrics, method: str, context: grpc.ServicerContext) -> None:
        self._metrics, self._method, self._context = metrics, method, context

    def __enter__(self) -> None:
        self._started = time.perf_counter()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        code = self._context.code()  # type: ignore[attr-defined]
        name = code.name if code is not None else ("OK" if error is None else "UNKNOWN")
        self._metrics.calls.labels(self._method, name).inc()
        self._metrics.latency.labels(self._method).observe(time.perf_counter() - self._started)
