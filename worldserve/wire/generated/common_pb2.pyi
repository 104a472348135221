from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Array(_message.Message):
    __slots__ = ("dtype", "shape", "data")
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    dtype: str
    shape: _containers.RepeatedScalarFieldContainer[int]
    data: bytes
    def __init__(self, dtype: _Optional[str] = ..., shape: _Optional[_Iterable[int]] = ..., data: _Optional[bytes] = ...) -> None: ...

class Frames(_message.Message):
    __slots__ = ("frame_indices", "pixels")
    FRAME_INDICES_FIELD_NUMBER: _ClassVar[int]
    PIXELS_FIELD_NUMBER: _ClassVar[int]
    frame_indices: _containers.RepeatedScalarFieldContainer[int]
    pixels: Array
    def __init__(self, frame_indices: _Optional[_Iterable[int]] = ..., pixels: _Optional[_Union[Array, _Mapping]] = ...) -> None: ...

class ItemError(_message.Message):
    __slots__ = ("code", "reason", "name", "expected", "got", "advice", "retry_after_s", "differences")
    CODE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_FIELD_NUMBER: _ClassVar[int]
    GOT_FIELD_NUMBER: _ClassVar[int]
    ADVICE_FIELD_NUMBER: _ClassVar[int]
    RETRY_AFTER_S_FIELD_NUMBER: _ClassVar[int]
    DIFFERENCES_FIELD_NUMBER: _ClassVar[int]
    code: str
    reason: str
    name: str
    expected: str
    got: str
    advice: str
    retry_after_s: float
    differences: _containers.RepeatedCompositeFieldContainer[FieldDifference]
    def __init__(self, code: _Optional[str] = ..., reason: _Optional[str] = ..., name: _Optional[str] = ..., expected: _Optional[str] = ..., got: _Optional[str] = ..., advice: _Optional[str] = ..., retry_after_s: _Optional[float] = ..., differences: _Optional[_Iterable[_Union[FieldDifference, _Mapping]]] = ...) -> None: ...

class FieldDifference(_message.Message):
    __slots__ = ("name", "expected", "got")
    NAME_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_FIELD_NUMBER: _ClassVar[int]
    GOT_FIELD_NUMBER: _ClassVar[int]
    name: str
    expected: str
    got: str
    def __init__(self, name: _Optional[str] = ..., expected: _Optional[str] = ..., got: _Optional[str] = ...) -> None: ...

class Verdict(_message.Message):
    __slots__ = ("success", "peak", "peak_frame_index", "threshold")
    SUCCESS_FIELD_NUMBER: _ClassVar[int]
    PEAK_FIELD_NUMBER: _ClassVar[int]
    PEAK_FRAME_INDEX_FIELD_NUMBER: _ClassVar[int]
    THRESHOLD_FIELD_NUMBER: _ClassVar[int]
    success: bool
    peak: float
    peak_frame_index: int
    threshold: float
    def __init__(self, success: _Optional[bool] = ..., peak: _Optional[float] = ..., peak_frame_index: _Optional[int] = ..., threshold: _Optional[float] = ...) -> None: ...
