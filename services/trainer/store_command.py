"""`worldserve store`: what a replay store holds, and its episodes as a data set with every frame.

worldserve store show runs/store
worldserve store export runs/store --target 127.0.0.1:50051 --out runs/from-store
"""

from __future__ import annotations

import argparse
import sys
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from services.trainer.calls import resumable

if TYPE_CHECKING:
    from services.trainer.action_runs import ActionOutcome
    from services.trainer.replay_store import ReplayStore, StoredEpisode, StoredInfo
    from worldserve.contract import Contract
    from worldserve.episodes import Episode

SUMMARY = "Show a replay store, or export its episodes as a data set with every frame."
DESCRIPTION = """A replay store keeps the episodes of training runs (`worldserve ppo --store`, `grpo --store`): executed
chunks, log-probabilities, verdicts, versions of policy and model. STORE is a directory or redis://HOST:PORT/DATABASE."""
EXAMPLES = """examples:
  worldserve store show runs/store
  worldserve store export runs/store --target 127.0.0.1:50051 --out runs/from-store --last-iteration 3
  worldserve store drop runs/store --run ppo-0123456789ab

`export` runs the executed actions again in a simulator or a world model, and writes what `worldserve finetune-wm`,
`fit-reward`, `fidelity` and `dpo` read. In the target that the run trained in, frames and outcomes are those of then;
in a simulator, they are what the actions of a run in a world model really come to.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """`worldserve store`."""
    arguments = _parser().parse_args(sys.argv[1:] if argv is None else argv)
    work = {"show": show, "export": export, "drop": drop}[arguments.action]
    return resumable("store", lambda: work(arguments))


def _parser() -> argparse.ArgumentParser:
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        "worldserve store", description=DESCRIPTION, epilog=EXAMPLES, formatter_class=formatter
    )
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    for name, text in (
        ("show", "a line a run and iteration"),
        ("export", "episodes with every frame, by running their actions again"),
        ("drop", "forget episodes"),
    ):
        action = actions.add_parser(name, help=text, description=text, epilog=EXAMPLES, formatter_class=formatter)
        action.add_argument("store", help="a directory or redis://HOST:PORT/DATABASE")
        action.add_argument("--run", default="", help="only the run of that name (default: all)")
        action.add_argument("--first-iteration", type=int, default=0, help="only from this iteration on (default 0)")
        action.add_argument("--last-iteration", type=int, help="only up to this iteration (default: all)")
        if name == "export":
            action.add_argument("--target", default="127.0.0.1:50051", help="HOST:PORT (default 127.0.0.1:50051)")
            action.add_argument("--out", type=Path, required=True, help="directory of the data set; goes on there")
            action.add_argument("--batch", type=int, default=32, help="episodes open at once (default 32)")
    return parser


def chosen(store: ReplayStore, arguments: argparse.Namespace) -> list[StoredInfo]:
    """The episodes that the options name."""
    last = arguments.last_iteration
    return [
        info
        for info in store.infos()
        if arguments.run in ("", info.run)
        and info.iteration >= arguments.first_iteration
        and (last is None or info.iteration <= last)
    ]


def _open(where: str) -> ReplayStore:
    from services.trainer.replay_store import open_store

    if "://" not in where and not (Path(where) / "replay_store.json").exists():
        raise ValueError(
            f"store: expected a replay store; {where} is none. `worldserve ppo --store {where}` writes one."
        )
    return open_store(where)


def show(arguments: argparse.Namespace) -> int:
    """Prints a table."""
    with _open(arguments.store) as store:
        found = chosen(store, arguments)
    groups: dict[tuple[str, int, str, str], list[StoredInfo]] = defaultdict(list)
    for info in found:
        groups[info.run, info.iteration, info.policy_version[:12], info.model_version[:12]].append(info)
    print(f"{'run':<18} {'iteration':>9} {'episodes':>8} {'success':>8} {'verdict':>8}  {'policy':<12}  model")
    for (run, iteration, policy, model), infos in groups.items():
        rates = [_rate([getattr(info, name) for info in infos]) for name in ("success", "verdict")]
        print(f"{run:<18} {iteration:>9} {len(infos):>8} {rates[0]:>8} {rates[1]:>8}  {policy:<12}  {model}")
    print(f"{len(found)} episodes")
    return 0


def _rate(outcomes: Iterable[int]) -> str:
    known = [outcome for outcome in outcomes if outcome >= 0]
    return f"{sum(known) / len(known):.3f}" if known else "-"


def drop(arguments: argparse.Namespace) -> int:
    """Forgets what the options name; without any, everything."""
    with _open(arguments.store) as store:
        names = [info.episode_id for info in chosen(store, arguments)]
        store.drop(names)
    print(f"{arguments.store}: {len(names)} episodes dropped")
    return 0


def export(arguments: argparse.Namespace) -> int:
    """Runs what the data set does not hold yet."""
    from rich.progress import Progress

    from services.trainer.action_runs import ActionRun, every_frame, run_actions
    from services.trainer.run_facts import contract_fingerprints
    from worldserve.client import EnvironmentClient
    from worldserve.episodes import EpisodeWriter, refuse_for_training

    if arguments.batch < 1:
        raise ValueError(f"batch: expected at least 1; got {arguments.batch}")
    differing = 0
    with _open(arguments.store) as store, EnvironmentClient(arguments.target) as client:
        infos = chosen(store, arguments)
        refuse_for_training(info.initial_state_id for info in infos)
        contract = client.get_contract()
        check_interface(infos, contract_fingerprints(contract)["interface"], arguments.target)
        chunk = contract.interface.timing.chunk_actions
        with EpisodeWriter(arguments.out) as writer, Progress() as bar:
            left = [info for info in infos if info.episode_id not in writer]
            task = bar.add_task("episodes", total=len(left))
            for first in range(0, len(left), arguments.batch):
                part = [store.read(info.episode_id) for info in left[first : first + arguments.batch]]
                runs = [
                    ActionRun(e.info.initial_state_id, e.info.environment_seed, _flat(e.arrays["executed_actions"]))
                    for e in part
                ]
                for episode, outcome in zip(part, run_actions(client, runs, chunk, every_frame(contract.interface))):
                    writer.append(to_episode(episode, outcome, contract))
                    differing += outcome_differs(episode.info, outcome)
                    bar.advance(task)
    print(f"{arguments.out}: {len(left)} episodes added, {len(infos)} in all; {differing} ended otherwise than stored")
    return 0


def check_interface(infos: Sequence[StoredInfo], interface: str, target: str) -> None:
    """Raises ValueError where an episode was made under another interface than the target's."""
    for info in infos:
        if info.interface and info.interface != interface:
            raise ValueError(
                f"target: expected interface {info.interface}, under which {info.episode_id} was made; {target} has "
                f"{interface}. Name another --target."
            )


def to_episode(stored: StoredEpisode, outcome: ActionOutcome, contract: Contract) -> Episode:
    """A stored episode as its actions went this time, every frame included."""
    from worldserve.episodes import Episode

    info, replies, last = stored.info, outcome.replies, outcome.replies[-1]
    executed = np.concatenate([reply.executed_actions for reply in replies])
    metadata: dict[str, Any] = {
        "run": info.run,
        "iteration": info.iteration,
        "model_version": info.model_version,
        "stored_success": info.success,
        "stored_verdict": info.verdict,
        "success_after_chunk": [reply.success for reply in replies],
    }
    return Episode(
        episode_id=info.episode_id,
        initial_state_id=info.initial_state_id,
        seed=info.environment_seed,
        instruction=outcome.reset.instruction,
        requested_actions=_flat(stored.arrays["samples/actions"]),
        executed_actions=executed,
        proprioception=np.concatenate([outcome.reset.proprioception[None], executed]),
        rewards=np.concatenate([reply.rewards for reply in replies]),
        success=last.success,
        verdict=last.verdict,
        end_reason=last.end_reason,
        terminated=last.terminated,
        truncated=last.truncated,
        clipped_count=int(stored.arrays["clipped_actions"]),
        policy_name=info.run,
        policy_sha256=info.policy_version,
        contract=contract,
        metadata=metadata,
        frame_source=outcome.frames,
    )


def outcome_differs(info: StoredInfo, outcome: ActionOutcome) -> bool:
    """Whether success or verdict, where both know it, is not the stored one."""
    verdict = None if outcome.verdict is None else outcome.verdict.success
    pairs = ((info.success, outcome.success), (info.verdict, verdict))
    return any(before >= 0 and now is not None and bool(before) != now for before, now in pairs)


def _flat(chunks: Any) -> Any:
    """(T, actions, dimensions) to float32 (T * actions, dimensions)."""
    return np.ascontiguousarray(chunks.reshape(-1, chunks.shape[-1]), dtype=np.float32)
