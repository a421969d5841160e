"""What can be said of one request beside its inputs: the keyword arguments of `infer`, written down once for both clients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypedDict

from serve.client.connection.channel import Compression
from serve.client.connection.headers import HeaderValue
from serve.client.values.parameters import Parameter
from serve.client.values.tensors import Array


class SendOptions(TypedDict, total=False):
    """How a call is sent.

    Attributes:
        timeout_s: seconds for the whole of it, repetitions included; None (the default) for the client's own.
        compression: of the request, "gzip" or "deflate"; None (the default) for the client's own.
        metadata: gRPC metadata for this call, beside the client's own.
    """

    timeout_s: float | None
    compression: Compression | None
    metadata: Mapping[str, HeaderValue] | None


SEND_OPTIONS = frozenset(SendOptions.__annotations__)


class RequestOptions(TypedDict, total=False):
    """What a request asks for.

    Attributes:
        outputs: the names wanted; None (the default) for all.
        request_id: comes back in the response and stands in the server's log.
        parameters: request parameters of the model's own, such as {"temperature": 0.5}.
        priority: 1 is the most urgent; 0 (the default) is the model's default level.
        queue_timeout_s: seconds that the request may wait in the server's queue, where the model allows to choose.
        top_k: ask for the names of the best classes instead of the numbers: how many, for all outputs or by output name. Such
            an output comes as BYTES "value:index[:label]"; `serve.client.values.classes` reads it.
        cast: convert arrays of another dtype to the model's, such as float32 to FP16; a value that would overflow is an error.
    """

    outputs: Sequence[str] | None
    request_id: str
    parameters: Mapping[str, Parameter] | None
    priority: int
    queue_timeout_s: float | None
    top_k: int | Mapping[str, int] | None
    cast: bool


class InferOptions(RequestOptions, SendOptions, total=False):
    """What `infer` takes beside the model and its inputs.

    Attributes:
        version: the model's; empty (the default) for the one that the model's policy chooses.
        into: output name -> an array from `shared_region` of the output's dtype; the server writes the output there, and no
            byte of it is sent.
        idempotent: whether computing the request twice does no harm (the default: a model is a function of its inputs). Say
            False for models that keep state between requests; requests with a "sequence_id" never count as idempotent.
    """

    version: str
    into: Mapping[str, Array] | None
    idempotent: bool


class BoundInferOptions(RequestOptions, SendOptions, total=False):
    """`InferOptions` of a handle, whose version is fixed.

    Attributes:
        into: see `InferOptions`.
        idempotent: see `InferOptions`.
    """

    into: Mapping[str, Array] | None
    idempotent: bool
