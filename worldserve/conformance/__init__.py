"""The conformance suite: what every server of `EnvironmentService` must do, as tests to point at yours.

    pytest --pyargs worldserve.conformance -p worldserve.conformance.plugin \\
        --worldserve-target 127.0.0.1:50051 --worldserve-states task/train/0000 task/train/0001
    worldserve contract conform 127.0.0.1:50051        # the same, with states of the sealed sets

It asks for the protocol's rules: batches whose items fail alone, idempotency, order, clipping, frames, ends, errors by
status and reason. Whether the *meaning* of actions and frames is right is asked by `worldserve contract probe`.
"""
