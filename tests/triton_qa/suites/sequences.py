"""Suites of sequence batching and of cancelled requests, with ONNX models, ensembles and stand-ins."""

from __future__ import annotations

from tests.triton_qa.repository import copied, stand_in
from tests.triton_qa.sequence_models import plain_sequence, sequence_ensembles, summing_sequence
from tests.triton_qa.suite import Builder, Suite

FILE = "L0_sequence_batcher/sequence_batcher_test.py"
CUSTOM = "custom_models/custom_sequence_int32"
DIRECT = "direct {{ max_queue_delay_microseconds: 3000000 minimum_slot_utilization: {} }}"
METHODS = (
    "test_simple_sequence",
    "test_length1_sequence",
    "test_batch_size",
    "test_no_sequence_start",
    "test_no_sequence_start2",
    "test_no_sequence_end",
    "test_no_correlation_id",
)
# Methods whose requests wait for each other in Triton's own scheduler, which reads TRITONSERVER_BACKLOG_DELAY_SCHEDULER and
# TRITONSERVER_DELAY_SCHEDULER. Another server runs them as they come, which is the same where each runs alone, without batches.
DELAYED = {
    (3, 10): ("test_backlog_fill_no_end",),
    (2, 10): ("test_backlog_fill",),
    (2, 12): ("test_backlog_same_correlation_id",),
    (0, 16): ("test_backlog_same_correlation_id_no_end",),
    (0, 8): ("test_half_batch",),
    (0, 4): ("test_backlog_sequence_timeout",),
    (0, 12): ("test_skip_batch", "test_full_batch", "test_ragged_batch", "test_backlog"),
}
STATE = 'initial_state {{ name: "state init" data_type: {} dims: [ 1 ] zero_data: true }}'


def _environment(*, batch: int, instances: int, has_state: bool, backends: str) -> dict[str, str]:
    return {
        "BACKENDS": backends,
        "ENSEMBLES": "0" if has_state else "1",
        "NO_BATCHING": "0" if batch else "1",
        "MODEL_INSTANCES": str(instances),
        "IMPLICIT_STATE": str(int(has_state)),
        "INITIAL_STATE_FILE": "0",
        "INITIAL_STATE_ZERO": "0",
        "BATCHER_TYPE": "FIXED",
        "CUDA_VISIBLE_DEVICES": "",
    }


def _python(batch: int, count: int) -> Builder:
    name = "python_sequence_int32" if batch else "python_nobatch_sequence_int32"
    return copied(
        "python_models/sequence_int32",
        name,
        replacing=(
            ("^max_batch_size:.*", f"max_batch_size: {batch}"),
            ("KIND_GPU", "KIND_CPU"),
            ("^count: .*", f"count: {count}"),
        ),
    )


def _models(batch: int, count: int, *, has_state: bool) -> tuple[Builder, ...]:
    if has_state:
        return tuple(summing_sequence(dtype, batch=batch, count=count) for dtype in ("int32", "bool", "object"))
    made = [plain_sequence(dtype, batch=batch, count=count) for dtype in ("int32", "bool")]
    made += [sequence_ensembles("int32", batch=batch)]
    if batch > 1:  # a model that keeps its state itself has one instance here
        sizes = (("^max_batch_size:.*", f"max_batch_size: {batch}"), ("kind: KIND_CPU", f"kind: KIND_CPU count: {count}"))
        made.append(copied(CUSTOM, replacing=sizes))
    return tuple(made)


SEQUENCES = (
    *(
        Suite(
            name=f"sequences{'_state' if has_state else ''}_{batch or 'nobatch'}",
            tests=FILE,
            methods=METHODS,
            models=_models(batch, count, has_state=has_state),
            environment=_environment(
                batch=batch, instances=count, has_state=has_state, backends="onnx" if has_state or batch < 2 else "onnx custom"
            ),
            has_fresh_servers=True,
        )
        for has_state in (False, True)
        for batch, count in ((0, 4), (4, 1), (1, 4))
    ),
    *(
        Suite(
            name=f"sequences_delayed{'_state' if has_state else ''}_{batch or 'nobatch'}_{backlog}_{delay}",
            tests=FILE,
            methods=methods,
            models=_models(batch, 4, has_state=has_state),
            environment={
                **_environment(batch=batch, instances=4, has_state=has_state, backends="onnx"),
                "ENSEMBLES": "0",  # the suites above have them
                "TRITONSERVER_BACKLOG_DELAY_SCHEDULER": str(backlog),
                "TRITONSERVER_DELAY_SCHEDULER": str(delay),
            },
            has_fresh_servers=True,
            method_seconds=180,
        )
        for has_state, batch in ((False, 0), (False, 1), (True, 0))
        for (backlog, delay), methods in DELAYED.items()
    ),
    Suite(
        name="sequences_request_timeout",
        tests=FILE,
        methods=(
            "SequenceBatcherRequestTimeoutTest.test_request_timeout",
            "SequenceBatcherRequestTimeoutTest.test_send_request_after_timeout",
        ),
        models=(copied("L0_sequence_batcher/request_timeout_models/custom_sequence_int32_timeout"),),
        environment=_environment(batch=4, instances=1, has_state=False, backends="custom"),
    ),
    Suite(
        name="sequences_ordering",
        tests=FILE,
        methods=(
            "SequenceBatcherPreserveOrderingTest.test_sequence_with_preserve_ordering",
            "SequenceBatcherPreserveOrderingTest.test_sequence_without_preserve_ordering",
        ),
        models=tuple(
            copied(
                "python_models/sequence_py",
                f"seqpy_{ordering}_ordering_{mode}",
                replacing=(("^preserve_ordering: False", "preserve_ordering: True"),) if ordering == "preserve" else (),
                adding="model_transaction_policy { decoupled: true }" if mode == "decoupled" else "",
            )
            for ordering in ("preserve", "no_preserve")
            for mode in ("decoupled", "nondecoupled")
        ),
        environment=_environment(batch=4, instances=1, has_state=False, backends="python"),
    ),
    Suite(
        name="request_cancellation",
        tests="L0_request_cancellation/grpc_cancellation_test.py",
        methods=("test_grpc_async_infer", "test_grpc_stream_infer", "test_aio_grpc_async_infer", "test_aio_grpc_stream_infer"),
        models=(
            stand_in(
                "identity",
                "custom_identity_int32",
                """max_batch_size: 1024
input [ { name: "INPUT0" data_type: TYPE_INT32 dims: [ -1 ] } ]
output [ { name: "OUTPUT0" data_type: TYPE_INT32 dims: [ -1 ] } ]
instance_group [ { kind: KIND_CPU } ]
parameters [ { key: "execute_delay_ms" value: { string_value: "10000" } } ]""",
            ),
        ),
        has_fresh_servers=True,
    ),
    Suite(
        name="request_cancellation_schedulers",
        tests="L0_request_cancellation/scheduler_test.py",
        models=(
            *(
                stand_in(
                    "identity",
                    name,
                    f"""max_batch_size: {batch}
input [ {{ name: "INPUT0" data_type: TYPE_FP32 dims: [ -1 ] }} ]
output [ {{ name: "OUTPUT0" data_type: TYPE_FP32 dims: [ -1 ] }} ]
instance_group [ {{ count: 1 kind: KIND_CPU }} ]
{scheduling}
parameters [ {{ key: "execute_delay_ms" value: {{ string_value: "6000" }} }} ]""",
                )
                for name, batch, scheduling in (
                    ("dynamic_batch", 2, "dynamic_batching { max_queue_delay_microseconds: 600000 }"),
                    ("sequence_direct", 1, "sequence_batching { direct { } max_sequence_idle_microseconds: 6000000 }"),
                    (
                        "sequence_oldest",
                        1,
                        "sequence_batching { oldest { max_candidate_sequences: 1 } max_sequence_idle_microseconds: 6000000 }",
                    ),
                )
            ),
            stand_in(
                "",
                "ensemble_model",
                """platform: "ensemble"
max_batch_size: 1
input [ { name: "INPUT0" data_type: TYPE_FP32 dims: [ -1 ] } ]
output [ { name: "OUTPUT0" data_type: TYPE_FP32 dims: [ -1 ] } ]
ensemble_scheduling { step [
  { model_name: "dynamic_batch" model_version: -1
    input_map { key: "INPUT0" value: "INPUT0" } output_map { key: "OUTPUT0" value: "between" } },
  { model_name: "dynamic_batch" model_version: -1
    input_map { key: "INPUT0" value: "between" } output_map { key: "OUTPUT0" value: "OUTPUT0" } }
] }""",
            ),
        ),
    ),
    Suite(
        name="iterative_sequence",
        tests="L0_iterative_sequence/iterative_sequence_e2e.py",
        methods=("test_generate_stream", "test_grpc_stream"),
        models=(copied("L0_iterative_sequence/models/iterative_sequence"),),
        flags=("--model-control-mode=explicit",),
    ),
)
