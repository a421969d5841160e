from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class MemberState(_message.Message):
    __slots__ = ("is_ready", "directory_version", "compute_slots", "models")
    class ModelsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: ModelState
        def __init__(self, key: _Optional[str] = ..., value: _Optional[_Union[ModelState, _Mapping]] = ...) -> None: ...
    IS_READY_FIELD_NUMBER: _ClassVar[int]
    DIRECTORY_VERSION_FIELD_NUMBER: _ClassVar[int]
    COMPUTE_SLOTS_FIELD_NUMBER: _ClassVar[int]
    MODELS_FIELD_NUMBER: _ClassVar[int]
    is_ready: bool
    directory_version: int
    compute_slots: int
    models: _containers.MessageMap[str, ModelState]
    def __init__(self, is_ready: bool = ..., directory_version: _Optional[int] = ..., compute_slots: _Optional[int] = ..., models: _Optional[_Mapping[str, ModelState]] = ...) -> None: ...

class ModelState(_message.Message):
    __slots__ = ("is_served", "requests", "refusals", "queue_ns", "compute_ns", "versions")
    IS_SERVED_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    REFUSALS_FIELD_NUMBER: _ClassVar[int]
    QUEUE_NS_FIELD_NUMBER: _ClassVar[int]
    COMPUTE_NS_FIELD_NUMBER: _ClassVar[int]
    VERSIONS_FIELD_NUMBER: _ClassVar[int]
    is_served: bool
    requests: int
    refusals: int
    queue_ns: int
    compute_ns: int
    versions: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, is_served: bool = ..., requests: _Optional[int] = ..., refusals: _Optional[int] = ..., queue_ns: _Optional[int] = ..., compute_ns: _Optional[int] = ..., versions: _Optional[_Iterable[str]] = ...) -> None: ...
