"""An exchange driven by hand: no server, no event loop, no waiting."""

from __future__ import annotations

from typing import Any

from halfserve.protos import inference_pb2 as pb
from halfserve.serve.client.exchange import Exchange, Pause


def metadata(datatype: str) -> pb.ModelMetadataResponse:
    """A model "m" with an input "x" and an output "y", both [-1]."""
    tensor = pb.ModelMetadataResponse.TensorMetadata(name="x", datatype=datatype, shape=[-1])
    output = pb.ModelMetadataResponse.TensorMetadata(name="y", datatype=datatype, shape=[-1])
    return pb.ModelMetadataResponse(name="m", inputs=[tensor], outputs=[output])


def drive(exchange: Exchange[Any], answers: list[Any], pauses: list[float] | None = None) -> tuple[list[str], Any]:
    """Answer each call in turn; an exception among the answers is thrown. Returns the methods called and the result.

    Args:
        pauses: the seconds of each pause are appended to it.
    """
    called = []
    try:
        step = next(exchange)
        while True:
            if isinstance(step, Pause):
                if pauses is not None:
                    pauses.append(step.seconds)
                step = exchange.send(None)
                continue
            called.append(step.method)
            answer = answers.pop(0)
            step = exchange.throw(answer) if isinstance(answer, Exception) else exchange.send(answer)
    except StopIteration as finished:
        assert not answers
        return called, finished.value
