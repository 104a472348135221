"""RemoteTorchRLEnv against TorchRL's own check of specs, and its partial resets."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.worldserve.adapters.conftest import STATES
from worldserve.serving import RunningServer

torch = pytest.importorskip("torch")
pytest.importorskip("gymnasium")
pytest.importorskip("torchrl")
from torchrl.envs.utils import check_env_specs  # noqa: E402

from worldserve.adapters.torchrl_env import RemoteTorchRLEnv  # noqa: E402


@pytest.fixture
def env(server: RunningServer) -> Iterator[RemoteTorchRLEnv]:
    made = RemoteTorchRLEnv(server.address, 3, STATES, timeout_s=20)
    yield made
    made.close()


def test_torchrls_check_has_no_complaint(env: RemoteTorchRLEnv) -> None:
    check_env_specs(env, seed=0)


def test_a_rollout_ends_where_the_contract_says_and_rewards_the_last_chunk(env: RemoteTorchRLEnv) -> None:
    def policy(tensordict):  # type: ignore[no-untyped-def]
        tensordict["action"] = torch.tensor([0.643, -0.643, 0.0])[:, None, None].expand(3, 2, 1).clone()
        return tensordict

    env.set_seed(0)
    rollout = env.rollout(4, policy, break_when_any_done=False)
    assert rollout["next", "done"][:, :, 0].tolist() == [[False, True, False, True]] * 3
    assert rollout["next", "terminated"].tolist() == rollout["next", "done"].tolist()
    assert not rollout["next", "truncated"].any()
    # 0.643 and -0.643 are the goals of the two states; 0 reaches neither.
    assert set(rollout["next", "reward"][:2, 1::2].flatten().tolist()) <= {0.0, 1.0}
    assert rollout["next", "reward"][2].sum() == 0
    assert rollout["next", "reward"][:, ::2].sum() == 0
    ends = rollout["next", "success"][:, 1::2, 0]
    assert torch.equal(ends.float(), rollout["next", "reward"][:, 1::2, 0])
    assert ends.any()


def test_a_partial_reset_leaves_the_others_where_they_are(env: RemoteTorchRLEnv) -> None:
    tensordict = env.reset()
    tensordict["action"] = torch.full((3, 2, 1), 0.5)
    tensordict = env.step(tensordict)["next"]
    tensordict["_reset"] = torch.tensor([[False], [True], [False]])
    assert env.reset(tensordict)["proprioception"].flatten().tolist() == [0.5, 0.0, 0.5]


def test_equal_seeds_give_equal_rollouts(env: RemoteTorchRLEnv) -> None:
    def pixels() -> object:
        env.set_seed(4)
        return env.reset()["pixels"]

    assert torch.equal(pixels(), pixels())
