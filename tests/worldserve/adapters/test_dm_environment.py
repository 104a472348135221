"""RemoteEnvironment under dm_env's own test mixin."""

from __future__ import annotations

import numpy as np
import pytest

from examples.own_environment import Reach
from tests.worldserve.adapters.conftest import STATES
from worldserve.serving import RunningServer, ServerSettings, start_environment_server

pytest.importorskip("gymnasium")
pytest.importorskip("dm_env", reason="pip install '.[dm-env]'")
from absl.testing import absltest
from dm_env import test_utils

from worldserve.adapters.dm_environment import RemoteEnvironment


class TestDmEnvsOwnSuite(test_utils.EnvironmentTestMixin, absltest.TestCase):
    """Every test of `dm_env.test_utils.EnvironmentTestMixin`."""

    server: RunningServer

    @classmethod
    def setUpClass(cls) -> None:
        cls.server = start_environment_server(Reach(), None, ServerSettings())

    @classmethod
    def tearDownClass(cls) -> None:
        cls.server.stop(0)

    def make_object_under_test(self) -> RemoteEnvironment:
        environment = RemoteEnvironment(self.server.address, STATES)
        self.addCleanup(environment.close)
        return environment

    def make_action_sequence(self):  # type: ignore[no-untyped-def]
        generator = np.random.default_rng(0)
        for _ in range(7):
            yield generator.uniform(-1, 1, (2, 1)).astype(np.float32)


def test_the_discount_of_an_end_is_zero_and_the_next_step_starts_anew(server: RunningServer) -> None:
    environment = RemoteEnvironment(server.address, STATES[:1])
    steps = [environment.step(np.full((2, 1), 0.643, np.float32)) for _ in range(4)]
    assert [step.step_type.name for step in steps] == ["FIRST", "MID", "LAST", "FIRST"]
    assert [step.reward for step in steps] == [None, 0.0, 1.0, None]
    assert [step.discount for step in steps] == [None, 1.0, 0.0, None]
    assert environment.info["instruction"] == "reach the green line"
    environment.close()
