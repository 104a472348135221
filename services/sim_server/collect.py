"""Expert demonstrations in the tabletop simulator, recorded with every frame: `worldserve demonstrate`.

    worldserve demonstrate --episodes 200 --out runs/demonstrations
    worldserve demonstrate --episodes 600 --noise-scale 1.6 --out runs/noisy

The scripted expert plans from the scene's inside (the settled bottle pose), so it runs beside the scenes, not over the
wire. Episode i depends on (seed, i) and its initial state alone, and the data set is in the order of i: how many
processes share the work changes nothing.
"""

from __future__ import annotations

import glob
import logging
import multiprocessing
import os
import shutil
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from worldserve.contract import Contract, execute
from worldserve.episodes import Episode, EpisodeInfo, EpisodeReader, EpisodeWriter, InitialState, InitialStateSet

if TYPE_CHECKING:
    from services.sim_server.tabletop import TabletopScene

_log = logging.getLogger("worldserve.sim")
SUMMARY = "Record expert demonstrations in the simulator, with natural failures on request."


@dataclass(frozen=True)
class DemonstrateConfig:
    """Expert demonstrations in the simulator, recorded with every frame."""

    out: Path
    """Directory of the data set; an interrupted collection goes on there."""
    episodes: int = 200
    """How many episodes the data set shall hold in the end."""
    noise_scale: float = 0.0
    """Errors of the expert's plan: 0 succeeds nearly always, about 1.6 fails in half of the episodes."""
    initial_states: Path = Path("initial_states/train")
    """Sealed set of initial states, taken in order and again from the start."""
    first_state: int = 0
    """Position in the set of the first episode's state."""
    seed: int = 0
    """Of the errors; episode i draws from (seed, i)."""
    workers: int = 2
    """Processes, each with scenes of its own."""

    def __post_init__(self) -> None:
        if self.episodes < 1 or self.workers < 1 or self.first_state < 0:
            raise ValueError(
                "episodes, workers: expected at least 1, first_state at least 0; "
                f"got {self.episodes}, {self.workers}, {self.first_state}"
            )
        if not (np.isfinite(self.noise_scale) and self.noise_scale >= 0):
            raise ValueError(f"noise_scale: expected a finite number >= 0; got {self.noise_scale!r}")


def episode_name(config: DemonstrateConfig, index: int) -> str:
    """Names an episode by what defines it."""
    return f"expert/{config.noise_scale:g}/{config.seed}/{index}"


def demonstrate(state: InitialState, contract: Contract, config: DemonstrateConfig, index: int) -> Episode:
    """Plans, runs and returns one expert episode with all its frames."""
    from services.sim_server.tabletop import SceneParameters, TabletopScene
    from services.sim_server.tabletop.expert import plan_expert

    generator = np.random.Generator(np.random.PCG64(np.random.SeedSequence([config.seed, index])))
    with TabletopScene(SceneParameters.from_dict(state.scene)) as scene:
        requested = plan_expert(scene, config.noise_scale, generator)
        return _run(scene, state, contract, requested, config, index)


def _run(
    scene: TabletopScene,
    state: InitialState,
    contract: Contract,
    requested: np.ndarray,
    config: DemonstrateConfig,
    index: int,
) -> Episode:
    start = scene.proprioception()
    executed = execute(requested, start, contract.interface.action)
    first_frame = scene.observe()
    outcome = scene.run_actions(executed.actions, range(1, len(requested) + 1))
    rewards = np.zeros(len(requested), np.float32)
    rewards[-1] = float(outcome.success_latched)
    return Episode(
        episode_id=episode_name(config, index),
        initial_state_id=state.initial_state_id,
        seed=config.seed,
        instruction=state.instruction,
        requested_actions=requested,
        executed_actions=executed.actions,
        proprioception=np.concatenate([start[None], executed.actions]),
        rewards=rewards,
        success=outcome.success_latched,
        clipped_count=executed.clipped_count,
        policy_name=f"expert, noise scale {config.noise_scale:g}",
        contract=contract,
        metadata={"first_success_action": outcome.first_success_action, "diagnostics": dict(outcome.diagnostics)},
        frame_source=np.concatenate([first_frame[None], outcome.frames]),
    )


def _work(
    config: DemonstrateConfig,
    worker: int,
    indices: Sequence[int],
    shard: Path,
    done: multiprocessing.Queue[int],
    parent: int,
) -> None:
    """Runs in a spawned process: episodes `indices` into a shard of its own."""
    from services.sim_server.contract import tabletop_contract
    from services.sim_server.worker import die_with_parent

    die_with_parent(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent ends this process
    contract = tabletop_contract()
    states = InitialStateSet.load(config.initial_states)
    with EpisodeWriter(shard) as writer:
        for index in indices:
            if episode_name(config, index) not in writer:
                state = states[_state_position(config, index, len(states))]
                writer.append(demonstrate(state, contract, config, index))
            done.put(worker)


def run(config: DemonstrateConfig) -> int:
    """Collects until `config.out` holds all episodes, in the order of their indices; returns how many were added.

    Workers write shards beside `config.out`. What an interrupted run left there, whatever its number of workers, is
    not collected again; an episode that this run does not ask for stays in its shard for a run that does.

    Raises:
        FileNotFoundError, ValueError: for initial states that are not there or damaged.
        ValueError: where episodes are recorded that this run would have made otherwise.
    """
    ids = InitialStateSet.load(config.initial_states).ids  # here, before every worker fails at it
    refuse_other_plan(config, ids)
    names = [episode_name(config, index) for index in range(config.episodes)]
    there = {name for directory in (config.out, *_shards(config.out)) for name in _ids(directory)}
    missing = [index for index, name in enumerate(names) if name not in there]
    if missing:
        _collect(config, missing)
    added = _merge(_shards(config.out), config.out, names)
    for shard in _shards(config.out):
        if _ids(shard) <= set(names):
            shutil.rmtree(shard, ignore_errors=True)
        else:
            _log.warning("%s keeps episodes that this run did not ask for, for the command that began them", shard)
    return added


def _state_position(config: DemonstrateConfig, index: int, count: int) -> int:
    """Of episode `index`'s initial state in a set of `count`."""
    return (config.first_state + index) % count


def refuse_other_plan(config: DemonstrateConfig, ids: Sequence[str]) -> None:
    """Raises ValueError where `config.out` holds an episode that this command would not record, whatever its number.

    Nor may a shard of an interrupted run hold an episode of this plan from another initial state. Episodes of other
    plans are left in their shards.
    """
    prefix = episode_name(config, 0).removesuffix("0")
    for directory in (config.out, *_shards(config.out)):
        for info in _infos(directory):
            number = info.episode_id.removeprefix(prefix)
            if not info.episode_id.startswith(prefix) or not number.isdigit():
                if directory != config.out:
                    continue
                expected, got = f"episode {info.episode_id}", f"{prefix}0 ..."
            else:
                expected = f"{info.episode_id} from {info.initial_state_id}"
                state = ids[_state_position(config, int(number), len(ids))]
                if state == info.initial_state_id:
                    continue
                got = f"from {state}"
            raise ValueError(
                f"out: {directory} holds demonstrations of another plan (expected {expected}; got {got}). Give the "
                "--noise-scale, --seed, --first-state and --initial-states they were recorded with, or another --out; "
                "readers take several data sets together"
            )


def _shard(out: Path, worker: int) -> Path:
    return out.with_name(f".{out.name}.worker-{worker}")


def _shards(out: Path) -> list[Path]:
    """Those that exist, of any number of workers."""
    pattern = f".{glob.escape(out.name)}.worker-*"
    return sorted(path for path in out.parent.glob(pattern) if (path / "meta").is_dir())


def _infos(directory: Path) -> list[EpisodeInfo]:
    """Of the finished episodes of a data set; none where there is no data set yet."""
    return list(EpisodeReader(directory).infos) if (directory / "meta" / "info.json").exists() else []


def _ids(directory: Path) -> set[str]:
    return {info.episode_id for info in _infos(directory)}


def _merge(shards: Sequence[Path], out: Path, names: Sequence[str]) -> int:
    """Appends the episodes `names` that shards hold and `out` does not, in that order; returns how many."""
    home = {name: shard for shard in reversed(shards) for name in _ids(shard)}
    if not home.keys() & set(names):
        return 0
    readers = {shard: EpisodeReader(shard) for shard in set(home.values())}
    added = 0
    with EpisodeWriter(out) as writer:
        for name in names:
            if name in home and name not in writer:
                writer.append(readers[home[name]].by_id(name))
                added += 1
    return added


def _collect(config: DemonstrateConfig, missing: Sequence[int]) -> None:
    """Records episodes `missing` into one shard a worker."""
    from rich.progress import Progress

    context = multiprocessing.get_context("spawn")
    done: multiprocessing.Queue[int] = context.Queue()
    processes = [
        context.Process(
            target=_work,
            args=(config, worker, missing[worker :: config.workers], _shard(config.out, worker), done, os.getpid()),
            daemon=True,
        )
        for worker in range(min(config.workers, len(missing)))
    ]
    try:
        for process in processes:
            process.start()
        with Progress(transient=True) as progress:
            task = progress.add_task("demonstrations", total=len(missing))
            counted = 0
            while counted < len(missing):
                counted += _wait(done, processes)
                progress.update(task, completed=counted)
        for process in processes:
            process.join()
    finally:
        for process in processes:
            if process.is_alive():
                process.terminate()
                process.join()


def _wait(done: multiprocessing.Queue[int], processes: Sequence[multiprocessing.process.BaseProcess]) -> int:
    """1 when an episode was finished within a second, else 0; raises when a worker died."""
    import queue

    try:
        done.get(timeout=1.0)
        return 1
    except queue.Empty:
        dead = [process.exitcode for process in processes if process.exitcode not in (None, 0)]
        if dead:
            raise RuntimeError(
                f"a collecting worker died (exit codes {dead}); what it finished is kept: run again"
            ) from None
        return 0


def main(argv: Sequence[str] | None = None) -> int:
    """`worldserve demonstrate`."""
    import tyro

    config = tyro.cli(DemonstrateConfig, args=argv, prog="worldserve demonstrate", description=__doc__)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # the same orderly end as Ctrl-C
    try:
        added = run(config)
    except KeyboardInterrupt:
        print(f"interrupted; go on with the same command ({config.out})", file=sys.stderr)
        return 130
    except (ValueError, OSError, RuntimeError) as error:
        print(f"worldserve demonstrate: {error}", file=sys.stderr)
        return 1
    infos = EpisodeReader(config.out).infos
    successes = sum(bool(info.success) for info in infos)
    print(f"{config.out}: {added} episodes added, {len(infos)} in all, {successes} successes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
