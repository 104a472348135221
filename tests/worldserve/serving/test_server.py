"""A server as an operator meets it: health, reflection, metrics, draining, lost replies, a port that is taken."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import urllib.request
from pathlib import Path

import grpc
import numpy as np
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from tests.worldserve.serving.conftest import KNOWN_STATE, StubBackend, chunk
from worldserve.client import EnvironmentClient
from worldserve.client.calling import ServerAwayError
from worldserve.messages import ItemError, ResetItem, StepItem
from worldserve.serving import RunningServer, ServerSettings, start_environment_server


def scrape(server: RunningServer) -> dict[str, float]:
    with urllib.request.urlopen(f"http://{server.metrics_address}/metrics", timeout=10) as reply:
        lines = reply.read().decode().splitlines()
    return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines if line and line[0] != "#"}


def test_health_and_reflection_answer(server: RunningServer) -> None:
    with grpc.insecure_channel(server.address) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        for service in ("", "worldserve.v1.EnvironmentService"):
            status = health.Check(health_pb2.HealthCheckRequest(service=service), timeout=10).status
            assert status == health_pb2.HealthCheckResponse.SERVING
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        request = reflection_pb2.ServerReflectionRequest(list_services="")
        [reply] = stub.ServerReflectionInfo(iter([request]), timeout=10)
    names = {service.name for service in reply.list_services_response.service}
    assert {"worldserve.v1.EnvironmentService", "grpc.health.v1.Health"} <= names


def test_metrics_count_calls_steps_frames_and_bad_numbers(server: RunningServer, client: EnvironmentClient) -> None:
    client.reset([ResetItem("a", KNOWN_STATE)])
    wild = chunk()
    wild[0, 0] = 9.0
    client.step([StepItem("a", 0, wild)])
    client.step([StepItem("a", 1, np.full((50, 14), np.inf, np.float32)), StepItem("x", 0, chunk())])
    values = scrape(server)
    expected = {
        'worldserve_rpc_total{code="OK",method="Step"}': 2,
        'worldserve_rpc_seconds_count{method="Reset"}': 1,
        "worldserve_episodes_live": 1,
        "worldserve_episodes_capacity": 4,
        "worldserve_steps_total": 50,
        "worldserve_frames_total": 2,
        "worldserve_clipped_values_total": 1,
        "worldserve_non_finite_values_total": 700,
        'worldserve_item_errors_total{reason="EPISODE_UNKNOWN"}': 1,
    }
    assert {name: values.get(name) for name in expected} == expected


def test_a_second_server_cannot_take_the_port(server: RunningServer) -> None:
    with pytest.raises(OSError, match="expected a free address"):
        start_environment_server(StubBackend(), None, ServerSettings(bind=server.address))


def test_a_metrics_address_that_is_taken_is_named(server: RunningServer) -> None:
    settings = ServerSettings(metrics_bind=server.metrics_address)
    with pytest.raises(OSError, match=f"metrics_bind: expected a free address; got {server.metrics_address}"):
        start_environment_server(StubBackend(), None, settings)


def test_a_server_that_is_not_there_is_named(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        target = f"127.0.0.1:{taken.getsockname()[1]}"
        with EnvironmentClient(target, timeout_s=0.3) as client, pytest.raises(ServerAwayError, match=target):
            client.get_contract()


def test_stop_lets_running_calls_end(backend: StubBackend) -> None:
    backend.gate = threading.Event()
    server = start_environment_server(backend, None, ServerSettings())
    replies: list[object] = []
    with EnvironmentClient(server.address) as client:
        client.reset([ResetItem("a", KNOWN_STATE)])
        call = threading.Thread(target=lambda: replies.extend(client.step([StepItem("a", 0, chunk())])))
        call.start()
        while not scrape(server).get('worldserve_rpc_total{code="OK",method="Reset"}'):
            pass
        stopping = threading.Thread(target=server.stop, args=(20,))
        while not call.is_alive():
            pass
        # The step is inside the backend once the gate has a waiter; opening it after stop began proves the wait.
        while not backend.gate._cond._waiters:  # type: ignore[attr-defined]
            pass
        stopping.start()
        backend.gate.set()
        call.join(20)
        stopping.join(20)
    assert [type(reply).__name__ for reply in replies] == ["StepReply"]


class DroppingProxy:
    """Forwards one connection at a time and cuts it when the server's next reply arrives: the reply is lost."""

    def __init__(self, target: str) -> None:
        host, _, port = target.rpartition(":")
        self._target = (host, int(port))
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self.armed = threading.Event()
        self.dropped = 0
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            server = socket.create_connection(self._target)
            threading.Thread(target=self._pump, args=(client, server, False), daemon=True).start()
            threading.Thread(target=self._pump, args=(server, client, True), daemon=True).start()

    def _pump(self, source: socket.socket, sink: socket.socket, from_server: bool) -> None:
        try:
            while data := source.recv(65536):
                # A reply with an answer's bytes (frames, arrays) is long; acknowledgements and pings are short.
                if from_server and self.armed.is_set() and len(data) > 2000:
                    self.armed.clear()
                    self.dropped += 1
                    break
                sink.sendall(data)
        except OSError:
            pass
        for end in (source, sink):
            # close() alone sends nothing while the other thread still waits in recv on the same socket.
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()

    def close(self) -> None:
        self._listener.close()


def test_a_reset_and_a_step_whose_reply_was_lost_happen_once(server: RunningServer, backend: StubBackend) -> None:
    proxy = DroppingProxy(server.address)
    with EnvironmentClient(proxy.address, timeout_s=20) as client:
        client.get_contract()
        proxy.armed.set()
        [opened] = client.reset([ResetItem("a", KNOWN_STATE, 3)])
        assert proxy.dropped == 1
        proxy.armed.set()
        [reply] = client.step([StepItem("a", 0, chunk())])
        assert proxy.dropped == 2
    proxy.close()
    assert not isinstance(opened, ItemError) and not isinstance(reply, ItemError)
    assert reply.elapsed_steps == 50
    assert backend.resets == ["a"]
    assert backend.runs == [("a", 0)]


SCRIPT = """
import sys
from tests.worldserve.serving.conftest import StubBackend
from worldserve.serving import ServerSettings, serve, start_environment_server
sys.exit(serve(start_environment_server(StubBackend(), None, ServerSettings())))
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_drains_the_process(number: signal.Signals) -> None:
    root = Path(__file__).parents[3]
    environment = {**os.environ, "PYTHONPATH": str(root)}
    with subprocess.Popen(
        [sys.executable, "-c", SCRIPT], stdout=subprocess.PIPE, env=environment, text=True
    ) as process:
        assert process.stdout is not None
        ready = json.loads(process.stdout.readline())
        assert ready["kind"] == "simulator"
        with EnvironmentClient(ready["ready"], timeout_s=60) as client:
            assert client.info().capacity == 4
        process.send_signal(number)
        assert process.wait(120) == 0
