"""Suites of what requests may hold, and of how long they wait: sizes of zero, NaN, missing inputs, queues, timeouts."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

from tests.triton_qa.onnx_models import add_sub, heading, identity, nop, step, tensors
from tests.triton_qa.repository import copied, folder
from tests.triton_qa.suite import Builder, Suite

CUSTOM = "custom_models/custom_zero_1_float32"
MOST = 2**64 - 1
WAITS = "max_queue_delay_microseconds: 10000000"
# The settings of dynamic batching, and of the model besides, for each method of the queue's test.
QUEUES = {
    "max_queue_size": "preferred_batch_size: [ 4, 8 ] default_queue_policy { max_queue_size: 8 }",
    "policy_delay": f"preferred_batch_size: [ 4, 8 ] {WAITS} "
    "default_queue_policy { timeout_action: DELAY default_timeout_microseconds: 100000 }",
    "policy_reject": f"preferred_batch_size: [ 4, 8 ] {WAITS} default_queue_policy {{ default_timeout_microseconds: 100000 }}",
    "timeout_override": f"preferred_batch_size: [ 4, 8 ] {WAITS} "
    "default_queue_policy { allow_timeout_override: true default_timeout_microseconds: 1000000 }",
    "priority_levels": f"preferred_batch_size: [ 4, 8 ] {WAITS} priority_levels: 2 default_priority_level: 2",
    "max_priority_levels": f"preferred_batch_size: [ 4, 8 ] {WAITS} priority_levels: {MOST} default_priority_level: {2**32}",
    "priority_with_policy": f"preferred_batch_size: [ 4, 8, 32 ] {WAITS} priority_levels: 2 default_priority_level: 2 "
    "default_queue_policy { timeout_action: DELAY allow_timeout_override: true default_timeout_microseconds: 11000000 } "
    "priority_queue_policy { key: 2 value: { "
    "timeout_action: REJECT allow_timeout_override: true default_timeout_microseconds: 11000000 } }",
}
SLOW = 'parameters [ { key: "execute_delay_ms" value: { string_value: "5000" } } ]'


def _zero_ensembles(count: int, dtype: str, dims: tuple[int, ...], *, batch: int) -> Builder:
    """Builder of the ensembles that pass each of their inputs on: once, twice, and three times."""

    def build(_qa: Path, repository: Path) -> None:
        shape = "_".join(map(str, dims)).replace("-", "m")
        for kind, length in (("simple", 1), ("sequence", 2), ("fan", 3)):
            made = repository / f"{kind}_zero{'' if batch else '_nobatch'}_zero_{count}_{dtype}"
            (made / "1").mkdir(parents=True)
            steps = []
            for number in range(count):
                names = [f"INPUT{number}", *(f"between{number}_{part}" for part in range(1, length)), f"OUTPUT{number}"]
                for source, target in pairwise(names):
                    pair = {"INPUT0": source, "INPUT1": source}
                    steps.append(step(f"nop_{dtype}_{batch}_{shape}", pair, {"OUTPUT0": target}))
            config = heading(made.name, "ensemble", batch)
            config += tensors("input", [(f"INPUT{number}", dtype, dims) for number in range(count)])
            config += tensors("output", [(f"OUTPUT{number}", dtype, dims) for number in range(count)])
            (made / "config.pbtxt").write_text(f"{config}ensemble_scheduling {{ step [ {', '.join(steps)} ] }}\n")

    return build


SIZED = (
    (1, "float32", 1),
    (3, "float32", 1),
    (1, "float16", 2),
    (3, "float16", 2),
    (1, "object", 1),
    (3, "object", 2),
    (1, "bool", 1),
)
ZEROS = tuple(
    builder
    for count, dtype, rank in SIZED
    for batch in (8, 0)
    for builder in (
        nop(dtype, batch=batch, dims=(-1,) * rank),
        identity(count, dtype, batch=batch, dims=(-1,) * rank),
        _zero_ensembles(count, dtype, (-1,) * rank, batch=batch),
    )
)
REQUESTS = (
    Suite(
        name="infer_zero",
        tests="L0_infer_zero/infer_zero_test.py",
        models=ZEROS,
        environment={"BACKENDS": "onnx", "CUDA_VISIBLE_DEVICES": ""},
    ),
    *(
        Suite(
            name=f"model_queue_{method}",
            tests="L0_model_queue/model_queue_test.py",
            methods=(f"test_{method}",),
            models=(
                copied(
                    CUSTOM,
                    replacing=(("dims:.*", "dims: [ -1 ]"), ("^max_batch_size:.*", "max_batch_size: 32")),
                    adding="instance_group [ { kind: KIND_CPU count: 1 } ] "
                    f"dynamic_batching {{ {policy} }} {SLOW if method == 'max_queue_size' else ''}",
                ),
                copied("L0_model_queue/ensemble_zero_1_float32"),
            ),
            method_seconds=240,
        )
        for method, policy in QUEUES.items()
    ),
    Suite(
        name="input_validation",
        tests="L0_input_validation/input_validation_test.py",
        models=(
            folder("L0_input_validation/models"),
            identity(
                1,
                "float32",
                name="pt_identity",
                dims=(8,),
                extra="dynamic_batching { max_queue_delay_microseconds: 1000000 }",
            ),
            add_sub("object", "int32", "int32", prefix="graphdef"),
        ),
        left_out={"test_wrong_input_shape_tensor_size": "needs TensorRT's shape tensors"},
    ),
    Suite(
        name="client_timeout",
        tests="L0_client_timeout/client_infer_timeout_test.py",
        models=(copied("L0_client_timeout/models/custom_identity_int32"),),
    ),
    Suite(name="nan_inf", tests="L0_nan_inf/nan_inf_test.py", models=(folder("L0_nan_inf/models"),)),
)
