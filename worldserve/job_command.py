"""Jobs of a trainer: `worldserve job submit|get|list|cancel|watch`.

    worldserve job submit ppo recipe=mini target=127.0.0.1:50052 seed=3 --id ppo-3 --watch
    worldserve job submit evaluate policy=runs/jobs/ppo-3/out/policy reference=weights/policy-sft
    worldserve job list --state running
    worldserve job get ppo-3
    worldserve job watch ppo-3                 # log and progress until it ends; Ctrl-C leaves the job alone
    worldserve job cancel ppo-3

Settings are NAME=VALUE, names as in recipes (learning_rate), values as YAML writes them (5e-5, "[0, 4]", null); what
they mean is in `worldserve COMMAND --help`. `worldserve serve-trainer` starts the trainer.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time
import uuid
from collections.abc import Callable, Sequence

from worldserve.client.calling import CallFailedError
from worldserve.client.trainer import TrainerClient
from worldserve.jobs import Job, JobState, LogChunk, MetricsRow

SUMMARY = "Submit, list, watch and cancel jobs of a trainer."
DEFAULT_TARGET = "127.0.0.1:50054"


def _submit(client: TrainerClient, arguments: argparse.Namespace) -> int:
    settings = {}
    for word in arguments.settings:
        name, equals, value = word.partition("=")
        if not equals or not name.isidentifier():
            raise ValueError(f"settings: expected NAME=VALUE with a name as in recipes; got {word!r}")
        settings[name] = value
    job_id = arguments.id or f"{arguments.job}-{uuid.uuid4().hex[:8]}"
    job = client.submit(job_id, arguments.job, settings)
    if arguments.watch:
        print(_line(job), file=sys.stderr)
        return _follow(client, job_id, log=True)
    print(job_id if not arguments.json else _json(job))
    return 0


def _get(client: TrainerClient, arguments: argparse.Namespace) -> int:
    job = client.get(arguments.id)
    if arguments.json:
        print(_json(job))
        return 0
    print(_line(job))
    for name, value in sorted(job.settings.items()):
        print(f"  {name}={value}")
    print(f"  out: {job.out}")
    for name, number in sorted(job.metrics.items()):
        print(f"  {name}: {number:.6g}")
    if job.result_json:
        print(job.result_json)
    return 0


def _list(client: TrainerClient, arguments: argparse.Namespace) -> int:
    jobs = client.list([JobState(state) for state in arguments.state])
    if arguments.json:
        print(json.dumps([json.loads(_json(job)) for job in jobs], indent=2))
    else:
        for job in jobs:
            print(_line(job))
    return 0


def _cancel(client: TrainerClient, arguments: argparse.Namespace) -> int:
    job = client.cancel(arguments.id)
    while arguments.wait and not job.state.ended:
        time.sleep(0.2)
        job = client.get(arguments.id)
    print(_line(job) if not arguments.json else _json(job))
    return 0


def _watch(client: TrainerClient, arguments: argparse.Namespace) -> int:
    return _follow(client, arguments.id, log=not arguments.no_log)


def _follow(client: TrainerClient, job_id: str, log: bool) -> int:
    """Log to standard output, state and progress to standard error; 0 when it succeeded, 1 otherwise."""
    job: Job | None = None
    said = ""
    for news in client.watch(job_id, log_offset=0 if log else -1):
        if isinstance(news, LogChunk):
            print(news.text, end="", flush=True)
        elif isinstance(news, MetricsRow):
            shown = {name: value for name, value in news.values.items() if name.startswith("env/")}
            if shown and not log:
                print("  ".join(f"{name} {value:.4g}" for name, value in sorted(shown.items())), flush=True)
        else:
            job, line = news, _line(news)
            if line != said:
                print(line, file=sys.stderr, flush=True)
            said = line
    return 0 if job is not None and job.state is JobState.SUCCEEDED else 1


def _line(job: Job) -> str:
    """A job in one line."""
    progress = job.progress
    done = f"{progress.done}/{progress.total}" if progress.total else str(progress.done)
    counted = f"  {done} {progress.unit}" if progress.unit and (progress.done or progress.total) else ""
    again = f"  attempt {job.attempts}" if job.attempts > 1 else ""
    message = f"  ({job.message})" if job.message else ""
    return f"{job.job_id}  {job.command}  {job.state.value}{counted}{again}{message}"


def _json(job: Job) -> str:
    return json.dumps({**dataclasses.asdict(job), "state": job.state.value}, indent=2)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "worldserve job", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(required=True, metavar="submit|get|list|cancel|watch")

    def add(name: str, run: Callable[[TrainerClient, argparse.Namespace], int], text: str) -> argparse.ArgumentParser:
        command = commands.add_parser(name, help=text, description=text)
        command.add_argument("--target", default=DEFAULT_TARGET, metavar="HOST:PORT", help="the trainer (%(default)s)")
        command.add_argument("--timeout", type=float, default=60.0, metavar="S", help="seconds to wait for the trainer")
        command.add_argument("--json", action="store_true", help="print JSON")
        command.set_defaults(run=run)
        return command

    submit = add("submit", _submit, "check a job's settings and queue it; prints its id")
    submit.add_argument("job", metavar="COMMAND", help="for example ppo")
    submit.add_argument("settings", nargs="*", metavar="NAME=VALUE")
    submit.add_argument("--id", help="the job's name (none: made up); the same submission again is the same job")
    submit.add_argument("--watch", action="store_true", help="then watch it")
    for name, run, text in (
        ("get", _get, "show one job: settings, progress, newest metrics, result"),
        ("cancel", _cancel, "ask a job to end"),
        ("watch", _watch, "follow a job until it ends; exit status 0 when it succeeded"),
    ):
        command = add(name, run, text)
        command.add_argument("id", metavar="ID")
        if name == "cancel":
            command.add_argument("--wait", action="store_true", help="until it has ended")
        if name == "watch":
            command.add_argument("--no-log", action="store_true", help="metrics instead of the log")
    listing = add("list", _list, "list jobs, oldest first")
    listing.add_argument(
        "--state", nargs="*", default=[], choices=[state.value for state in JobState], help="only in these states"
    )
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """`worldserve job`: exit status 1 for a refused call or a job that did not succeed, 130 after Ctrl-C."""
    arguments = _parser().parse_args(argv)
    try:
        with TrainerClient(arguments.target, arguments.timeout) as client:
            status: int = arguments.run(client, arguments)
            return status
    except KeyboardInterrupt:
        print("worldserve job: interrupted; the job goes on", file=sys.stderr)
        return 130
    except BrokenPipeError:
        raise
    except CallFailedError as error:
        print(f"worldserve job: {error.details}", file=sys.stderr)
        return 1
    except (OSError, ValueError) as error:
        print(f"worldserve job: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
