"""Which PPO settings learn quickly? A stand-in for the tabletop task that costs no physics, outside CI.

A bottle (a blob) lies somewhere; the hand must be over it, within a tolerance, while the gripper closes in the second
chunk. As in the real task the observation is a 96x128 image, an action is 14 joint targets, an episode four chunks, and
a few demonstrations leave the policy good but imprecise. STANDIN_SCALE=2.3 widens the tolerances.

    python -m benchmarks.ppo_standin sft --out /tmp/standin
    python -m benchmarks.ppo_standin ppo --out /tmp/standin --name a --set learning_rate=3e-5 --set noise_steps=4
"""

from __future__ import annotations

import argparse
import json
import math
import time
from pathlib import Path

import numpy as np
import torch

from services.trainer.policies import FlowPolicy, flow_mini, load_policy, save_policy
from services.trainer.policies.observation import PolicyObservation
from services.trainer.ppo import train
from services.trainer.ppo_config import PPOConfig
from services.trainer.rollout import collect_rollout
from services.trainer.run_record import RunRecord
from worldserve.messages import ResetReply, StepReply

LINKS = (0.30, 0.30)
TOLERANCE = {"x": 0.016, "y": 0.016, "yaw": 0.30, "z": 0.014}
SCALE = float(__import__("os").environ.get("STANDIN_SCALE", "1"))
GRID_Y, GRID_X = np.mgrid[0:96, 0:128].astype(np.float32)


def scene(state_id: str) -> dict[str, float]:
    generator = np.random.default_rng([int(state_id.rsplit("/", 1)[1]), 17 if "/train/" in state_id else 99])
    side = 1  # one arm: choosing it takes the longest to learn, and is not what the stand-in is for
    x = generator.uniform(0.05, 0.17) * (1 if side else -1)
    return {"side": side, "x": x, "y": generator.uniform(-0.13, -0.03), "yaw": generator.uniform(-0.5, 0.5)}


def joints(side: int, x: float, y: float, z: float, yaw: float) -> np.ndarray:
    """Six joints that bring the hand there: a planar two-link arm on a turning base, and a wrist."""
    base = (0.3 if side else -0.3, -0.42)
    dx, dy = x - base[0], y - base[1]
    reach = math.hypot(math.hypot(dx, dy), z)
    cosine = np.clip((reach**2 - LINKS[0] ** 2 - LINKS[1] ** 2) / (2 * LINKS[0] * LINKS[1]), -1, 1)
    elbow = math.acos(cosine)
    shoulder = math.atan2(z, math.hypot(dx, dy)) + math.atan2(
        LINKS[1] * math.sin(elbow), LINKS[0] + LINKS[1] * math.cos(elbow)
    )
    turn = math.atan2(dx, dy)
    return np.array([turn, shoulder, elbow, -shoulder + elbow, 0.0, yaw - turn], np.float32)


def hand(side: int, q: np.ndarray) -> np.ndarray:
    """Inverse of `joints`: x, y, z, yaw for (n, 6) joints."""
    base = (0.3 if side else -0.3, -0.42)
    forward = LINKS[0] * np.cos(q[:, 1]) + LINKS[1] * np.cos(q[:, 1] - q[:, 2])
    z = LINKS[0] * np.sin(q[:, 1]) + LINKS[1] * np.sin(q[:, 1] - q[:, 2])
    x, y = base[0] + forward * np.sin(q[:, 0]), base[1] + forward * np.cos(q[:, 0])
    return np.stack([x, y, z, q[:, 5] + q[:, 0] + 0.5 * q[:, 4]], 1)


def draw(s: dict[str, float], state: np.ndarray, held: np.ndarray | None) -> np.ndarray:
    image = np.full((96, 128, 3), 120, np.float32)

    def blob(x: float, y: float, yaw: float, long: float, wide: float, colour: tuple[int, int, int]) -> None:
        u, v = 64 + x * 190, 40 - (y + 0.08) * 190
        du, dv = GRID_X - u, GRID_Y - v
        a, b = du * math.cos(yaw) - dv * math.sin(yaw), du * math.sin(yaw) + dv * math.cos(yaw)
        weight = 1 / (1 + np.exp(np.clip(3 * ((a / long) ** 2 + (b / wide) ** 2 - 1), -30, 30)))
        image[:] = image * (1 - weight[..., None]) + weight[..., None] * np.array(colour)

    pose = (s["x"], s["y"], s["yaw"]) if held is None else (held[0], held[1], held[3])
    blob(*pose, 9.0, 4.0, (200, 40, 40))
    for side in (0, 1):
        x, y, z, yaw = hand(side, state[None, 7 * side : 7 * side + 6])[0]
        blob(x, y, yaw, 3.0 + 20 * max(z, 0), 2.0 + 2 * state[7 * side + 6], (30, 30, 60 + 100 * side))
    return np.clip(image, 0, 255).astype(np.uint8)


def minimum_jerk(a: np.ndarray, b: np.ndarray, n: int) -> np.ndarray:
    t = np.arange(1, n + 1)[:, None] / n
    return a + (b - a) * (10 * t**3 - 15 * t**4 + 6 * t**5)


def expert(s: dict[str, float], noise: float, generator: np.random.Generator) -> np.ndarray:
    side = int(s["side"])
    e = generator.normal(size=4) * noise * np.array([0.012, 0.012, 0.008, 0.15])
    x, y, yaw = s["x"] + e[0], s["y"] + e[1], s["yaw"] + e[3]
    home = np.zeros(6, np.float32)
    above, grasp = joints(side, x, y, 0.12, yaw), joints(side, x, y, 0.02 + e[2], yaw)
    goal = joints(side, math.copysign(0.2, s["x"]), -0.02, 0.2, 0.0)
    parts = [minimum_jerk(home, above, 40), minimum_jerk(above, grasp, 22), np.tile(grasp, (14, 1)),
             minimum_jerk(grasp, above, 20), minimum_jerk(above, goal, 45), np.tile(goal, (59, 1))]  # fmt: skip
    arm = np.concatenate(parts)
    actions = np.zeros((200, 14), np.float32)
    actions[:, [6, 13]] = 1.0
    actions[:, 7 * side : 7 * side + 6] = arm
    actions[:, 7 * side + 6] = np.concatenate([np.ones(62), np.linspace(1, 0, 10), np.zeros(128)])
    return actions


class StandIn:
    """An EnvironmentClient without a server."""

    def __init__(self) -> None:
        self.episodes: dict[str, dict] = {}

    def reset(self, items):
        replies = []
        for item in items:
            s, state = scene(item.initial_state_id), np.zeros(14, np.float32)
            state[[6, 13]] = 1.0
            self.episodes[item.episode_id] = {"scene": s, "state": state, "actions": [], "held": False}
            image = draw(s, state, None)
            replies.append(
                ResetReply(item.episode_id, item.initial_state_id, item.seed, image, state, "adjust the bottle")
            )
        return replies

    def step(self, items):
        return [self._one(item) for item in items]

    def _one(self, item):
        e = self.episodes[item.episode_id]
        e["actions"].append(np.asarray(item.actions))
        e["state"] = np.asarray(item.actions[-1], np.float32)
        s, n = e["scene"], len(e["actions"])
        side, done = int(s["side"]), n == 4
        success = False
        if n >= 2:
            arm = np.concatenate(e["actions"])[:, 7 * side : 7 * side + 7]
            gripper = arm[:, 6]
            closed = np.nonzero(gripper < 0.5)[0]
            if len(closed):
                pose = hand(side, arm[max(closed[0] - 3, 0) : closed[0] + 3, :6]).mean(0)
                error = np.abs(pose - [s["x"], s["y"], 0.02, s["yaw"]])
                e["held"] = bool((error < [SCALE * TOLERANCE[k] for k in ("x", "y", "z", "yaw")]).all())
            last = hand(side, arm[-10:, :6])
            success = e["held"] and gripper[-10:].max() < 0.3 and last[:, 2].min() > 0.12
            success = bool(success and (np.abs(last[:, 0]) > 0.15).all())
        held = hand(side, e["state"][None, 7 * side : 7 * side + 6])[0] if e["held"] else None
        frame = draw(s, e["state"], held)
        index = np.array([50 * n], np.int32)
        return StepReply(
            item.episode_id,
            item.chunk_index,
            frame[None],
            index,
            item.actions,
            0,
            50 * n,
            np.zeros(50, np.float32),
            done,
            False,
            "limit" if done else "",
            success,
            None,
            e["state"],
        )

    def close_episodes(self, ids):
        for i in ids:
            self.episodes.pop(i, None)


def demonstrations(count: int, noise: float):
    client, generator = StandIn(), np.random.default_rng(5)
    images, states, actions, successes = [], [], [], []
    for n in range(count):
        sid = f"s/train/{100000 + n}"
        from worldserve.messages import ResetItem, StepItem

        r = client.reset([ResetItem(sid, sid)])[0]
        plan = expert(scene(sid), noise, generator)
        frame, state = r.frame, r.proprioception
        for c in range(4):
            images.append(frame)
            states.append(state)
            actions.append(plan[50 * c : 50 * c + 50])
            reply = client.step([StepItem(sid, c, plan[50 * c : 50 * c + 50])])[0]
            frame, state = reply.frames[-1], reply.proprioception
        successes.append(reply.success)
        client.close_episodes([sid])
    print("expert success", np.mean(successes))
    return np.stack(images), np.stack(states), np.stack(actions)


def sft(args) -> None:
    images, states, actions = demonstrations(args.demos, args.noise)
    policy = load_policy(args.start) if args.start else FlowPolicy(flow_mini(), seed=0)
    obs_state, act = torch.from_numpy(states), torch.from_numpy(actions)
    rel = policy.relative(act, obs_state)
    std = rel.flatten(0, 1).std(0).clamp(min=0.05)
    if not args.start:
        policy.set_statistics(obs_state.mean(0), obs_state.std(0).clamp(min=0.05), rel.flatten(0, 1).mean(0), std)
    parameters = policy.prefix_parameters() + policy.expert_parameters()
    optimizer = torch.optim.AdamW(parameters, lr=2e-3, betas=(0.9, 0.95), weight_decay=0.01)
    generator = torch.Generator().manual_seed(0)
    started = time.process_time()
    for step in range(args.steps):
        for group in optimizer.param_groups:
            group["lr"] = 2e-3 * min(1, step / 50) * (0.5 + 0.5 * math.cos(math.pi * step / args.steps)) + 1e-6
        rows = torch.randint(len(states), (16,), generator=generator)
        obs = PolicyObservation(torch.from_numpy(images)[rows], obs_state[rows], ["adjust the bottle"] * 16)
        loss = policy.flow_matching_loss(obs, act[rows], generator, draws=4)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        if step % 200 == 199 or step == 0:
            print(step + 1, f"loss {loss.item():.4f} cpu {time.process_time() - started:.0f}", flush=True)
    save_policy(policy, args.out / "sft", {"demos": args.demos, "steps": args.steps})
    for mode in ("mean", "sample"):
        print(mode, evaluate(policy, mode))


def evaluate(policy: FlowPolicy, mode: str, count: int = 300) -> float:
    ids = [f"s/validation/{n}" for n in range(count)]
    return float(collect_rollout(StandIn(), policy, ids, 123, "success", mode, 300, overlap=False).success.mean())


def ppo(args) -> None:
    policy = load_policy(args.out / "sft")
    values: dict = {"iterations": 12, "critic_warmup_iterations": 0, "episodes_per_iteration": 256, "batch": 256}
    values |= {"reward_source": "success", "overlap": False, "out": args.out / args.name}
    for item in args.set:
        key, _, value = item.partition("=")
        values[key] = json.loads(value)
        if isinstance(values[key], list):
            values[key] = tuple(values[key])
    config = PPOConfig(**values)
    import shutil

    shutil.rmtree(config.out, ignore_errors=True)
    ids = [f"s/train/{n}" for n in range(2000)]
    started = time.process_time()

    def progress(phase, done, total):
        if phase not in ("rollout", "update"):
            m = json.loads((config.out / "metrics.jsonl").read_text().splitlines()[-1])
            extra = {
                k.split("/")[1]: round(m.get(k) or 0, 4)
                for k in (
                    "actor/ratio_max",
                    "critic/value_loss",
                    "actor/optimizer_steps",
                    "time/rollout_cpu_s",
                    "time/update_cpu_s",
                )
            }
            print(f"[{time.process_time() - started:5.0f} cpu]", phase, extra, flush=True)

    train(StandIn(), policy, ids, config, RunRecord(config.out, {}, False), progress)
    for mode in ("mean", "sample"):
        print("validation", mode, evaluate(policy, mode), flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("command", choices=["sft", "ppo"])
    parser.add_argument("--out", type=Path, default=Path("/tmp/standin"))
    parser.add_argument("--demos", type=int, default=60)
    parser.add_argument("--noise", type=float, default=0.0)
    parser.add_argument("--steps", type=int, default=1200)
    parser.add_argument("--start", type=Path)
    parser.add_argument("--name", default="ppo")
    parser.add_argument("--set", action="append", default=[])
    torch.set_num_threads(1)
    arguments = parser.parse_args()
    {"sft": sft, "ppo": ppo}[arguments.command](arguments)
