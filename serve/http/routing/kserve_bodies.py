"""Types of the bodies of KServe v2 and Triton's extensions, and what the document says of messages beyond `protos/`.

A class whose name ends in Body is a request's; in the document, its name ends in Request.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, NotRequired, TypedDict

from halfserve.serve.http.routing.operations import OTHER_FIELDS, Component, Count, Datatype, Keyword, Parameter, Positive

Parameters = dict[str, Parameter]
Value = str | int | float | bool | list[Any]
Computation = Annotated[
    dict[str, str],
    "What computes the model: halfserve.provider, halfserve.precision and, where precisions were tried on the CPU, "
    "halfserve.measured. Empty for a version that is not served.",
    Component("Computation"),
]

# Names in the document of messages whose own names say less there.
COMPONENTS = {
    "ModelMetadataResponse.TensorMetadata": "TensorMetadata",
    "ModelStatisticsResponse": "Statistics",
    "StatisticDuration": "Duration",
    "RepositoryIndexResponse.ModelIndex": "IndexEntry",
    "SystemSharedMemoryStatusResponse.RegionStatus": "SystemRegionStatus",
    "CudaSharedMemoryStatusResponse.RegionStatus": "CudaRegionStatus",
}
# Types of fields of which a message's descriptor says less.
FIELDS: dict[str, Any] = {
    "ModelMetadataResponse.TensorMetadata.datatype": Datatype,
    "ModelMetadataResponse.TensorMetadata.shape": list[Annotated[int, Keyword("minimum", -1)]],
    "ModelMetadataResponse.properties": Computation,
    "ModelConfig.max_batch_size": Count,
    "ModelStatistics.last_inference": Annotated[Count, "Milliseconds since the epoch; 0 is never."],
    "ModelStatistics.inference_count": Annotated[Count, "Rows."],
    "ModelStatistics.execution_count": Annotated[Count, "Batches."],
    "RepositoryIndexResponse.ModelIndex.state": Literal["LOADING", "READY", "UNLOADING", "UNAVAILABLE"],
    "RepositoryIndexResponse.ModelIndex.properties": Computation,
}
# Fields that may be absent in the message, and never are.
ALWAYS_SET = {"ModelStatistics.inference_stats", *(f"InferStatistics.{name}" for name in ("success", "fail", "queue"))}


class InferInputJson(TypedDict):
    name: str
    datatype: Datatype
    shape: list[Count]
    parameters: NotRequired[
        Annotated[
            Parameters,
            "binary_data_size: bytes behind the JSON. shared_memory_region, shared_memory_byte_size, shared_memory_offset: "
            "where the tensor lies instead.",
        ]
    ]
    data: NotRequired[Annotated[list[Any], "Elements, flat or nested as the shape is."]]


class InferOutputJson(TypedDict):
    name: str
    parameters: NotRequired[
        Annotated[
            Parameters,
            "binary_data: as bytes behind the JSON. classification: so many best classes, as text. shared_memory_*: where to "
            "leave the tensor.",
        ]
    ]


class InferBody(TypedDict):
    id: NotRequired[str]
    parameters: NotRequired[
        Annotated[Parameters, "priority, timeout (microseconds), binary_data_output (all outputs as bytes)."]
    ]
    inputs: list[InferInputJson]
    outputs: NotRequired[Annotated[list[InferOutputJson], "Left out: all of them."]]


class ResponseOutputJson(TypedDict):
    name: str
    datatype: Datatype
    shape: list[Count]
    parameters: NotRequired[Parameters]
    data: NotRequired[list[Any]]


class InferResponseJson(TypedDict):
    model_name: str
    model_version: str
    id: NotRequired[str]
    parameters: NotRequired[Parameters]
    outputs: list[ResponseOutputJson]


class GenerateBody(TypedDict):
    id: NotRequired[str]
    parameters: NotRequired[dict[str, Value]]
    others: Annotated[Value, OTHER_FIELDS]


class GenerateResponseJson(TypedDict):
    model_name: NotRequired[str]
    model_version: NotRequired[str]
    id: NotRequired[str]
    error: NotRequired[Annotated[str, "In place of all other fields, in an event."]]
    others: Annotated[Value, OTHER_FIELDS]


class IndexBody(TypedDict):
    ready: NotRequired[Annotated[bool, "Only versions that are ready."]]


class LoadBody(TypedDict):
    parameters: NotRequired[
        Annotated[
            dict[str, str],
            "config: a ModelConfig as JSON, in place of config.pbtxt. file:<path in the model's folder>: that file's content, "
            "as base64.",
        ]
    ]


class UnloadParametersJson(TypedDict):
    unload_dependents: NotRequired[bool]


class UnloadBody(TypedDict):
    parameters: NotRequired[UnloadParametersJson]


class SystemRegionJson(TypedDict):
    key: Annotated[str, "Name of the shared memory object."]
    offset: NotRequired[Annotated[Count, Keyword("default", 0)]]
    byte_size: Positive


class CudaHandleJson(TypedDict):
    b64: str


class CudaRegionJson(TypedDict):
    raw_handle: CudaHandleJson
    device_id: NotRequired[Count]
    byte_size: Positive


TraceSettingsJson = Annotated[dict[str, str | int | list[str] | None], Component("TraceSettings")]
LogSettingsJson = Annotated[dict[str, str | int | bool], Component("LogSettings")]
