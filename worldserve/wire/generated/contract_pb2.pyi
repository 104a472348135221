from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Contract(_message.Message):
    __slots__ = ("interface", "provenance", "interface_fingerprint", "provenance_fingerprint")
    INTERFACE_FIELD_NUMBER: _ClassVar[int]
    PROVENANCE_FIELD_NUMBER: _ClassVar[int]
    INTERFACE_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    PROVENANCE_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    interface: Interface
    provenance: Provenance
    interface_fingerprint: str
    provenance_fingerprint: str
    def __init__(self, interface: _Optional[_Union[Interface, _Mapping]] = ..., provenance: _Optional[_Union[Provenance, _Mapping]] = ..., interface_fingerprint: _Optional[str] = ..., provenance_fingerprint: _Optional[str] = ...) -> None: ...

class Interface(_message.Message):
    __slots__ = ("task", "action", "timing", "observation", "frames", "reset", "termination", "reward")
    TASK_FIELD_NUMBER: _ClassVar[int]
    ACTION_FIELD_NUMBER: _ClassVar[int]
    TIMING_FIELD_NUMBER: _ClassVar[int]
    OBSERVATION_FIELD_NUMBER: _ClassVar[int]
    FRAMES_FIELD_NUMBER: _ClassVar[int]
    RESET_FIELD_NUMBER: _ClassVar[int]
    TERMINATION_FIELD_NUMBER: _ClassVar[int]
    REWARD_FIELD_NUMBER: _ClassVar[int]
    task: str
    action: ActionLayout
    timing: Timing
    observation: Observation
    frames: FrameConvention
    reset: ResetRule
    termination: TerminationRule
    reward: RewardRule
    def __init__(self, task: _Optional[str] = ..., action: _Optional[_Union[ActionLayout, _Mapping]] = ..., timing: _Optional[_Union[Timing, _Mapping]] = ..., observation: _Optional[_Union[Observation, _Mapping]] = ..., frames: _Optional[_Union[FrameConvention, _Mapping]] = ..., reset: _Optional[_Union[ResetRule, _Mapping]] = ..., termination: _Optional[_Union[TerminationRule, _Mapping]] = ..., reward: _Optional[_Union[RewardRule, _Mapping]] = ...) -> None: ...

class ActionLayout(_message.Message):
    __slots__ = ("dimensions", "space", "gripper_sense", "out_of_range")
    DIMENSIONS_FIELD_NUMBER: _ClassVar[int]
    SPACE_FIELD_NUMBER: _ClassVar[int]
    GRIPPER_SENSE_FIELD_NUMBER: _ClassVar[int]
    OUT_OF_RANGE_FIELD_NUMBER: _ClassVar[int]
    dimensions: _containers.RepeatedCompositeFieldContainer[ActionDimension]
    space: str
    gripper_sense: str
    out_of_range: str
    def __init__(self, dimensions: _Optional[_Iterable[_Union[ActionDimension, _Mapping]]] = ..., space: _Optional[str] = ..., gripper_sense: _Optional[str] = ..., out_of_range: _Optional[str] = ...) -> None: ...

class ActionDimension(_message.Message):
    __slots__ = ("name", "unit", "low", "high", "max_change", "arm")
    NAME_FIELD_NUMBER: _ClassVar[int]
    UNIT_FIELD_NUMBER: _ClassVar[int]
    LOW_FIELD_NUMBER: _ClassVar[int]
    HIGH_FIELD_NUMBER: _ClassVar[int]
    MAX_CHANGE_FIELD_NUMBER: _ClassVar[int]
    ARM_FIELD_NUMBER: _ClassVar[int]
    name: str
    unit: str
    low: float
    high: float
    max_change: float
    arm: str
    def __init__(self, name: _Optional[str] = ..., unit: _Optional[str] = ..., low: _Optional[float] = ..., high: _Optional[float] = ..., max_change: _Optional[float] = ..., arm: _Optional[str] = ...) -> None: ...

class Timing(_message.Message):
    __slots__ = ("chunk_actions", "substeps_per_action", "substep_ms", "retiming")
    CHUNK_ACTIONS_FIELD_NUMBER: _ClassVar[int]
    SUBSTEPS_PER_ACTION_FIELD_NUMBER: _ClassVar[int]
    SUBSTEP_MS_FIELD_NUMBER: _ClassVar[int]
    RETIMING_FIELD_NUMBER: _ClassVar[int]
    chunk_actions: int
    substeps_per_action: int
    substep_ms: float
    retiming: str
    def __init__(self, chunk_actions: _Optional[int] = ..., substeps_per_action: _Optional[int] = ..., substep_ms: _Optional[float] = ..., retiming: _Optional[str] = ...) -> None: ...

class Observation(_message.Message):
    __slots__ = ("camera", "height", "width", "color", "proprioception", "instruction")
    CAMERA_FIELD_NUMBER: _ClassVar[int]
    HEIGHT_FIELD_NUMBER: _ClassVar[int]
    WIDTH_FIELD_NUMBER: _ClassVar[int]
    COLOR_FIELD_NUMBER: _ClassVar[int]
    PROPRIOCEPTION_FIELD_NUMBER: _ClassVar[int]
    INSTRUCTION_FIELD_NUMBER: _ClassVar[int]
    camera: str
    height: int
    width: int
    color: str
    proprioception: str
    instruction: str
    def __init__(self, camera: _Optional[str] = ..., height: _Optional[int] = ..., width: _Optional[int] = ..., color: _Optional[str] = ..., proprioception: _Optional[str] = ..., instruction: _Optional[str] = ...) -> None: ...

class FrameConvention(_message.Message):
    __slots__ = ("frame_zero", "frame_k", "frames_per_episode")
    FRAME_ZERO_FIELD_NUMBER: _ClassVar[int]
    FRAME_K_FIELD_NUMBER: _ClassVar[int]
    FRAMES_PER_EPISODE_FIELD_NUMBER: _ClassVar[int]
    frame_zero: str
    frame_k: str
    frames_per_episode: int
    def __init__(self, frame_zero: _Optional[str] = ..., frame_k: _Optional[str] = ..., frames_per_episode: _Optional[int] = ...) -> None: ...

class ResetRule(_message.Message):
    __slots__ = ("initial_state", "seed", "reported_state", "keyframe_starts")
    INITIAL_STATE_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    REPORTED_STATE_FIELD_NUMBER: _ClassVar[int]
    KEYFRAME_STARTS_FIELD_NUMBER: _ClassVar[int]
    initial_state: str
    seed: str
    reported_state: str
    keyframe_starts: bool
    def __init__(self, initial_state: _Optional[str] = ..., seed: _Optional[str] = ..., reported_state: _Optional[str] = ..., keyframe_starts: _Optional[bool] = ...) -> None: ...

class TerminationRule(_message.Message):
    __slots__ = ("limit_actions", "limit_is", "success_ends_episode")
    LIMIT_ACTIONS_FIELD_NUMBER: _ClassVar[int]
    LIMIT_IS_FIELD_NUMBER: _ClassVar[int]
    SUCCESS_ENDS_EPISODE_FIELD_NUMBER: _ClassVar[int]
    limit_actions: int
    limit_is: str
    success_ends_episode: bool
    def __init__(self, limit_actions: _Optional[int] = ..., limit_is: _Optional[str] = ..., success_ends_episode: _Optional[bool] = ...) -> None: ...

class RewardRule(_message.Message):
    __slots__ = ("source", "first_frame", "last_frame", "reduction", "placement")
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    FIRST_FRAME_FIELD_NUMBER: _ClassVar[int]
    LAST_FRAME_FIELD_NUMBER: _ClassVar[int]
    REDUCTION_FIELD_NUMBER: _ClassVar[int]
    PLACEMENT_FIELD_NUMBER: _ClassVar[int]
    source: str
    first_frame: int
    last_frame: int
    reduction: str
    placement: str
    def __init__(self, source: _Optional[str] = ..., first_frame: _Optional[int] = ..., last_frame: _Optional[int] = ..., reduction: _Optional[str] = ..., placement: _Optional[str] = ...) -> None: ...

class Provenance(_message.Message):
    __slots__ = ("kind", "backend", "worldserve_version", "facts")
    class FactsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    KIND_FIELD_NUMBER: _ClassVar[int]
    BACKEND_FIELD_NUMBER: _ClassVar[int]
    WORLDSERVE_VERSION_FIELD_NUMBER: _ClassVar[int]
    FACTS_FIELD_NUMBER: _ClassVar[int]
    kind: str
    backend: str
    worldserve_version: str
    facts: _containers.ScalarMap[str, str]
    def __init__(self, kind: _Optional[str] = ..., backend: _Optional[str] = ..., worldserve_version: _Optional[str] = ..., facts: _Optional[_Mapping[str, str]] = ...) -> None: ...
