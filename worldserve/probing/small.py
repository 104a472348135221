"""Servers of the small world, and its reference: what the probes are proven on where nothing else runs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

from worldserve.contract import fingerprint
from worldserve.faults import open_client
from worldserve.probing.probe import probe, record
from worldserve.probing.reference import Reference
from worldserve.probing.run import Frame, Question
from worldserve.probing.world import ProbeJudge, ProbeWorld, probe_world_interface, success_actions
from worldserve.serving import ServerSettings, start_environment_server

STATES = tuple(f"probe/state/{number:04d}" for number in range(21))


@dataclass(frozen=True)
class SmallServers:
    """Addresses of the small world as simulator and as world model (with a reward), a reference and frames 0."""

    simulator: str
    world_model: str
    reference: Reference
    known_frames: dict[str, Frame]


@contextlib.contextmanager
def small_servers() -> Iterator[SmallServers]:
    """Starts both in this process, records the reference on the simulator, and ends them afterwards."""
    simulator = start_environment_server(ProbeWorld(), None, ServerSettings())
    model = start_environment_server(ProbeWorld("world_model", judged=True), ProbeJudge(), ServerSettings())
    try:
        reference, frames = _recorded(simulator.address)
        yield SmallServers(simulator.address, model.address, reference, frames)
    finally:
        for server in (simulator, model):
            server.stop(0)


def _recorded(address: str) -> tuple[Reference, dict[str, Frame]]:
    from worldserve.messages import ResetItem, raise_for_errors

    interface, actions = probe_world_interface(), success_actions()
    with open_client(address, interface=interface) as client:
        replies = raise_for_errors(client.reset([ResetItem(f"known/{n}", state) for n, state in enumerate(STATES)]))
        client.close_episodes([reply.episode_id for reply in replies])
        frames = {reply.initial_state_id: reply.frame for reply in replies}
        path = actions[61]  # at the bottle
        plan = Reference(fingerprint(interface), STATES[0], frames[STATES[0]], path, STATES[0], actions, None)
        report = probe(client, Question(STATES[0], STATES[1], known_frames=frames), plan)
    return record(report, plan), frames
