"""RemoteRLinfEnv where RLinf's own worker would hold it: its registry, its video wrapper, its EnvOutput."""

from __future__ import annotations

from typing import Any

import pytest

from tests.worldserve.adapters.conftest import STATES
from worldserve.client import EnvironmentClient
from worldserve.serving import RunningServer

torch = pytest.importorskip("torch")
pytest.importorskip("gymnasium")

from worldserve.adapters.rlinf_env import RemoteRLinfEnv, register  # noqa: E402


class Settings(dict[str, Any]):
    """By attribute and `get`, as OmegaConf."""

    def __getattr__(self, name: str) -> Any:
        if name not in self:
            raise AttributeError(name)
        return self[name]


def settings(server: RunningServer, **changes: Any) -> Settings:
    made = Settings(
        targets=server.address, initial_states=STATES, seed=0, group_size=1, max_episode_steps=4, auto_reset=True
    )
    made.update(changes)
    return made


def chunks(*targets: float) -> Any:
    return torch.tensor(targets)[:, None, None].expand(len(targets), 2, 1)


def test_shapes_and_flags_of_an_episode(server: RunningServer) -> None:
    env = RemoteRLinfEnv(settings(server, auto_reset=False, initial_states=STATES[:1]), 2, 0, 1)
    observation, _ = env.reset()
    assert {name: getattr(value, "shape", value) for name, value in observation.items()} == {
        "main_images": (2, 36, 36, 3),
        "wrist_images": None,
        "states": (2, 1),
        "task_descriptions": ["reach the green line"] * 2,
    }
    env.chunk_step(chunks(0.643, -1.0))
    [observation], rewards, terminations, truncations, [infos] = env.chunk_step(chunks(0.643, -1.0))
    assert rewards.tolist() == [[0.0, 1.0], [0.0, 0.0]]
    assert terminations.tolist() == [[False, True], [False, True]]
    assert not truncations.any()
    # Both ended, one succeeded: success and termination are not one bit.
    assert infos["success"].tolist() == [True, False]
    assert infos["episode"]["success_once"].tolist() == [True, False]
    assert infos["episode"]["episode_len"].tolist() == [4, 4]
    assert observation["states"].flatten().tolist() == pytest.approx([0.643, -1.0])
    env.close()


def test_auto_reset_restarts_what_ended_and_keeps_its_figures(server: RunningServer) -> None:
    env = RemoteRLinfEnv(settings(server, initial_states=STATES[:1]), 2, 0, 1)
    env.reset()
    env.chunk_step(chunks(0.643, 0.643))
    env.reset(env_idx=[1])  # slot 1 is now a chunk behind
    [observation], _, terminations, _, [infos] = env.chunk_step(chunks(0.643, 0.5))
    assert terminations[:, -1].tolist() == [True, False]
    assert observation["states"].flatten().tolist() == pytest.approx([0.0, 0.5])
    assert infos["final_observation"]["states"].flatten().tolist() == pytest.approx([0.643, 0.5])
    assert infos["final_info"]["episode"]["return"].tolist() == [1.0, 0.0]
    assert infos["_final_info"].tolist() == [True, False]
    assert env.elapsed_steps.tolist() == [0, 2]
    env.close()


def test_a_group_starts_from_one_state_with_noise_of_its_own(server: RunningServer) -> None:
    env = RemoteRLinfEnv(settings(server, group_size=3), 6, 0, 1)
    observation, _ = env.reset()
    images = observation["main_images"]
    for group in (images[:3], images[3:]):
        assert all(torch.equal(group[0], image) for image in group)
    env.close()


def test_offload_frees_the_servers_episodes(server: RunningServer) -> None:
    env = RemoteRLinfEnv(settings(server), 2, 0, 1)
    with EnvironmentClient(server.address) as client:
        env.reset()
        assert client.info().live == 2
        env.offload()
        assert client.info().live == 0
        env.reset()
        assert client.info().live == 2
    env.close()


def test_settings_that_the_contract_contradicts_are_refused(server: RunningServer) -> None:
    with pytest.raises(ValueError, match=r"max_episode_steps: expected 4, the contract's termination\.limit_actions"):
        RemoteRLinfEnv(settings(server, max_episode_steps=200), 1, 0, 1)
    with pytest.raises(ValueError, match="num_envs: expected a multiple of group_size 2; got 3"):
        RemoteRLinfEnv(settings(server, group_size=2), 3, 0, 1)


def test_rlinfs_registry_gives_it_and_rlinfs_own_classes_take_what_it_returns(server: RunningServer) -> None:
    envs = pytest.importorskip("rlinf.envs", reason="pip install --no-deps rlinf==0.3.0")
    structures = pytest.importorskip("rlinf.data.embodied_io_struct")
    module = pytest.importorskip("rlinf.envs.robotwin.robotwin_env", exc_type=ImportError)
    wrappers = pytest.importorskip("rlinf.envs.wrappers.record_video", exc_type=ImportError)
    before = module.RoboTwinEnv
    try:
        register()
        made = envs.get_env_cls("robotwin", None)
        assert made is RemoteRLinfEnv
        video = Settings(save_video=True, info_on_video=False, video_base_dir="unused", fps=10)
        env = wrappers.RecordVideo(
            made(cfg=settings(server), num_envs=2, seed_offset=0, total_num_processes=1, worker_info=None), video
        )
        env.is_start = True
        first, _ = env.reset()
        outputs = []
        for _ in range(2):
            observations, rewards, terminations, truncations, infos = env.chunk_step(chunks(0.643, -1.0))
            outputs.append(
                structures.EnvOutput(
                    obs=observations[-1],
                    final_obs=infos[-1].get("final_observation"),
                    rewards=rewards,
                    dones=terminations | truncations,
                    terminations=terminations,
                    truncations=truncations,
                    env_infos=infos[-1],
                )
            )
        env.close()
    finally:
        module.RoboTwinEnv = before
    prepared = outputs[0].prepare_observations(first)
    assert prepared["main_images"].shape == (2, 36, 36, 3)
    assert outputs[-1].dones[:, -1].tolist() == [True, True]
    merged = structures.EnvOutput.merge_env_outputs([output.to_dict() for output in outputs])
    assert merged["rewards"].shape == (4, 2)
