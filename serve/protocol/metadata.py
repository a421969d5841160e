"""What a model is and what it has done, as messages."""

from __future__ import annotations

from collections.abc import Iterable

from protos import inference_pb2 as pb
from serve.engine.model import Model
from serve.engine.model_statistics import Duration
from serve.engine.tensors import TensorSpec

TensorMetadata = pb.ModelMetadataResponse.TensorMetadata
NONE = pb.StatisticDuration()  # answers are not cached here; in JSON, what is not set would not be there


def model_metadata(model: Model, versions: Iterable[Model]) -> pb.ModelMetadataResponse:
    """Inputs and outputs with the batch dimension, and every served version."""
    return pb.ModelMetadataResponse(
        name=model.name,
        versions=[str(m.version) for m in versions],
        platform=model.interface.kind.platform,
        inputs=[_tensor(spec) for spec in model.interface.inputs],
        outputs=[_tensor(spec) for spec in model.interface.outputs],
    )


def model_statistics(model: Model) -> pb.ModelStatistics:
    """The counters, in the fields where Triton's clients look for them."""
    s = model.statistics.totals
    return pb.ModelStatistics(
        name=model.name,
        version=str(model.version),
        last_inference=s.last_inference_ms,
        inference_count=s.rows,
        execution_count=s.batches,
        inference_stats=pb.InferStatistics(
            success=_duration(s.success),
            fail=_duration(s.fail),
            queue=_duration(s.queue),
            compute_input=_duration(s.compute_input),
            compute_infer=_duration(s.compute_infer),
            compute_output=_duration(s.compute_output),
            cache_hit=NONE,
            cache_miss=NONE,
        ),
        batch_stats=[
            pb.InferBatchStatistics(
                batch_size=size,
                compute_input=_duration(per_size.compute_input),
                compute_infer=_duration(per_size.compute_infer),
                compute_output=_duration(per_size.compute_output),
            )
            for size, per_size in sorted(s.by_batch_size.items())
        ],
    )


def _tensor(spec: TensorSpec) -> TensorMetadata:
    return TensorMetadata(name=spec.name, datatype=spec.datatype.wire, shape=spec.shape)


def _duration(duration: Duration) -> pb.StatisticDuration:
    return pb.StatisticDuration(count=duration.count, ns=duration.ns)
