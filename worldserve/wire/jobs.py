"""Values of `worldserve.jobs` to and from protobuf."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from worldserve.jobs import Job, JobProgress, JobState, LogChunk, MetricsRow
from worldserve.wire.generated import trainer_pb2

_NUMBERS: dict[JobState, Any] = {state: trainer_pb2.JobState.Value(f"JOB_STATE_{state.name}") for state in JobState}
_STATES = {number: state for state, number in _NUMBERS.items()}


def state_to_proto(state: JobState) -> Any:
    """A state's number, of the generated enum."""
    return _NUMBERS[state]


def state_from_proto(number: int) -> JobState:
    """A state by its number. Raises ValueError for one that is none."""
    if number not in _STATES:
        raise ValueError(f"state: expected one of {sorted(_STATES)}; got {number}")
    return _STATES[number]


def job_to_proto(job: Job) -> trainer_pb2.Job:
    """A job."""
    return trainer_pb2.Job(
        job_id=job.job_id,
        spec=trainer_pb2.JobSpec(command=job.command, settings=dict(job.settings)),
        state=_NUMBERS[job.state],
        message=job.message,
        submitted_at_s=job.submitted_at_s,
        started_at_s=job.started_at_s,
        ended_at_s=job.ended_at_s,
        attempts=job.attempts,
        exit_status=job.exit_status,
        out=job.out,
        progress=trainer_pb2.JobProgress(done=job.progress.done, total=job.progress.total, unit=job.progress.unit),
        metrics=dict(job.metrics),
        result_json=job.result_json,
        revision=job.revision,
    )


def job_from_proto(message: trainer_pb2.Job) -> Job:
    """A job."""
    return Job(
        job_id=message.job_id,
        command=message.spec.command,
        settings=dict(message.spec.settings),
        state=state_from_proto(message.state),
        message=message.message,
        submitted_at_s=message.submitted_at_s,
        started_at_s=message.started_at_s,
        ended_at_s=message.ended_at_s,
        attempts=message.attempts,
        exit_status=message.exit_status if message.HasField("exit_status") else None,
        out=message.out,
        progress=JobProgress(message.progress.done, message.progress.total, message.progress.unit),
        metrics=dict(message.metrics),
        result_json=message.result_json,
        revision=message.revision,
    )


def brief(job: Job) -> Job:
    """Without what a list leaves out."""
    return replace(job, metrics={}, result_json="")


def news_to_proto(news: Job | LogChunk | MetricsRow) -> trainer_pb2.WatchJobResponse:
    """One piece of news."""
    if isinstance(news, Job):
        return trainer_pb2.WatchJobResponse(job=job_to_proto(news))
    if isinstance(news, LogChunk):
        return trainer_pb2.WatchJobResponse(log=trainer_pb2.LogChunk(next_offset=news.next_offset, text=news.text))
    row = trainer_pb2.MetricsRow(next_offset=news.next_offset, values=dict(news.values))
    return trainer_pb2.WatchJobResponse(metrics=row)


def news_from_proto(message: trainer_pb2.WatchJobResponse) -> Job | LogChunk | MetricsRow:
    """One piece of news."""
    kind = message.WhichOneof("news")
    if kind == "log":
        return LogChunk(message.log.next_offset, message.log.text)
    if kind == "metrics":
        return MetricsRow(message.metrics.next_offset, dict(message.metrics.values))
    return job_from_proto(message.job)
