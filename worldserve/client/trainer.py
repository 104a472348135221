"""Client of `TrainerService`."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence

from worldserve.client.calling import Caller, ServerAwayError
from worldserve.jobs import Job, JobState, LogChunk, MetricsRow, TrainerInfo
from worldserve.wire.generated import trainer_pb2, trainer_pb2_grpc
from worldserve.wire.jobs import job_from_proto, news_from_proto, state_to_proto

# A watch is opened anew this often, so that no stream lives for the days that a job may take.
_WATCH_S = 600.0
_AGAIN_S = 0.5


class TrainerClient:
    """A trainer.

    Args:
        target: HOST:PORT.
        timeout_s: deadline of a call, retries included; a watch gives up after so long without the server.
    """

    def __init__(self, target: str, timeout_s: float = 60.0) -> None:
        self._caller = Caller(target, timeout_s, "TrainerService", "a simulator, a world model or a reward server")
        self._stub = trainer_pb2_grpc.TrainerServiceStub(self._caller.channel)

    def get_trainer(self) -> TrainerInfo:
        """Which commands may be submitted, and how full the server is."""
        reply = self._caller.call(self._stub.GetTrainer, trainer_pb2.GetTrainerRequest())
        return TrainerInfo(tuple(reply.commands), reply.slots, reply.running, reply.queued)

    def submit(self, job_id: str, command: str, settings: Mapping[str, str]) -> Job:
        """Queues a job; the same submission again returns it as it is by now.

        Raises:
            CallFailedError: for settings that the command refuses, or a name that is taken.
        """
        spec = trainer_pb2.JobSpec(command=command, settings=dict(settings))
        request = trainer_pb2.SubmitJobRequest(job_id=job_id, spec=spec)
        return job_from_proto(self._caller.call(self._stub.SubmitJob, request).job)

    def get(self, job_id: str) -> Job:
        """A job as it is now. Raises CallFailedError for one that is not there."""
        return job_from_proto(self._caller.call(self._stub.GetJob, trainer_pb2.GetJobRequest(job_id=job_id)).job)

    def list(self, states: Sequence[JobState] = ()) -> list[Job]:
        """Jobs in these states (none: all), oldest first, without metrics and results."""
        request = trainer_pb2.ListJobsRequest(states=[state_to_proto(state) for state in states])
        return [job_from_proto(job) for job in self._caller.call(self._stub.ListJobs, request).jobs]

    def cancel(self, job_id: str) -> Job:
        """Asks a job to end; it is CANCELLING until it has."""
        request = trainer_pb2.CancelJobRequest(job_id=job_id)
        return job_from_proto(self._caller.call(self._stub.CancelJob, request).job)

    def watch(self, job_id: str, log_offset: int = 0, metrics_offset: int = 0) -> Iterator[Job | LogChunk | MetricsRow]:
        """A job's news until it has ended; the last is the job in its end state.

        A stream that breaks is taken up where it was, also across a restart of the server.

        Args:
            log_offset, metrics_offset: first byte and first row that are wanted; negative for none.

        Raises:
            ServerAwayError: when the server was away for the client's `timeout_s`.
        """
        heard, ended = time.monotonic(), False
        while not ended:
            request = trainer_pb2.WatchJobRequest(job_id=job_id, log_offset=log_offset, metrics_offset=metrics_offset)
            try:
                for message in self._caller.stream(self._stub.WatchJob, request, _WATCH_S):
                    heard, news = time.monotonic(), news_from_proto(message)
                    if isinstance(news, LogChunk):
                        log_offset = news.next_offset
                    elif isinstance(news, MetricsRow):
                        metrics_offset = news.next_offset
                    ended = isinstance(news, Job) and news.state.ended
                    yield news
            except ServerAwayError:
                ended = False
                if time.monotonic() - heard > self._caller.timeout_s:
                    raise
                time.sleep(_AGAIN_S)

    def close(self) -> None:
        """Closes the channel."""
        self._caller.close()

    def __enter__(self) -> TrainerClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
