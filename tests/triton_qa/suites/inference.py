"""Suites of inference by data type and shape, and of ensembles."""

from __future__ import annotations

from collections.abc import Iterator

from tests.triton_qa.onnx_models import Shapes, add_sub, add_sub_ensembles, nop, reshape_ensembles, reshaping, scalar
from tests.triton_qa.repository import NOT_DECOUPLED_REPEAT, REPEAT, SQUARE, copied, folder
from tests.triton_qa.suite import Builder, Suite

POLICIES = {
    "int8": "latest { num_versions: 1 }",
    "int16": "latest { num_versions: 2 }",
    "int32": "all { }",
    "float16": "specific { versions: [1] }",
    "float32": "specific { versions: [1, 3] }",
}
MIXED = (
    ("int64", "int64", "int64"),
    ("float16", "float32", "float32"),
    ("int32", "int8", "int8"),
    ("int8", "int32", "int32"),
    ("int32", "int8", "int16"),
    ("int32", "float32", "float32"),
    ("float32", "int32", "int32"),
    ("int32", "float16", "int16"),
    ("object", "int32", "int32"),
    ("object", "object", "object"),
    ("object", "int32", "object"),
    ("object", "object", "int32"),
    ("int32", "object", "object"),
    ("int32", "int32", "object"),
    ("int32", "object", "int32"),
)
VERSIONED = tuple((dtype, dtype, dtype) for dtype in POLICIES)


def _family(dims: tuple[int, ...], *, has_versions: bool) -> tuple[Builder, ...]:
    models = []
    for types in (*VERSIONED, *MIXED):
        policy = POLICIES[types[0]] if has_versions and types in VERSIONED else ""
        versions = (1, 2, 3) if policy else (1,)
        for batch in (8, 0):
            models.append(add_sub(*types, batch=batch, dims=dims, versions=versions, policy=policy))
            models.append(add_sub_ensembles(*types, batch=batch, dims=dims, versions=versions, policy=policy))
    return (
        *models,
        *(nop(dtype, batch=batch, dims=dims) for dtype in {name for types in MIXED for name in types} for batch in (8, 0)),
    )


# Types and rank of the tensors of any size.
VARIABLE = (
    (("float32", "float32", "float32"), 1),
    (("float32", "int32", "int32"), 2),
    (("float32", "int64", "int64"), 2),
    (("float32", "int32", "int64"), 3),
    (("float32", "float32", "int32"), 1),
    (("int32", "int32", "int32"), 2),
    (("int32", "int32", "float32"), 3),
    (("object", "object", "object"), 1),
    (("object", "int32", "int32"), 2),
    (("object", "object", "int32"), 2),
    (("object", "int32", "object"), 3),
)
FRAMEWORKS = ("graphdef", "savedmodel", "onnx", "libtorch", "plan")


def _variable() -> Iterator[Builder]:
    for types, rank in VARIABLE:
        dims = (-1,) * rank
        for prefix in FRAMEWORKS:
            yield add_sub(*types, prefix=prefix, batch=0, dims=dims)
            if prefix not in {"onnx", "libtorch"}:
                yield add_sub_ensembles(*types, prefix=prefix, batch=0, dims=dims)
        yield add_sub(*types, prefix="libtorch", dims=dims)
    yield from (nop(dtype, batch=0, dims=(-1,) * rank) for dtype in ("float32", "int32", "int64") for rank in (1, 2, 3))


# Type, shapes that clients send, shapes within, shapes that clients get, and whether there are models without batches.
RESHAPED: tuple[tuple[str, Shapes, Shapes, Shapes | None, bool], ...] = (
    ("object", ([1],), ([],), None, False),
    ("float32", ([1],), ([],), None, False),
    ("float32", ([1], [8]), ([], [4, 1, 2]), None, False),
    ("float32", ([4, 4], [2], [2, 2, 3]), ([16], [1, 2], [3, 2, 2]), None, True),
    ("float32", ([4, 4], [2], [2, 2, 3], [1]), ([16], [1, 2], [3, 2, 2], [1]), ([16], [1, 2], [3, 2, 2], [1]), True),
    ("int32", ([2, 4, -1, 6],), ([8, -1, 1, 6],), None, True),
    ("int32", ([1, -1, 1], [-1], [2, 2, 3]), ([-1], [1, -1, 1], [3, 2, 2]), None, True),
    ("int32", ([-1, 1], [2]), ([1, -1], [1, 2]), ([1, -1], [1, 2]), True),
)


def _reshaped() -> Iterator[Builder]:
    for dtype, given, inner, outputs, has_both in RESHAPED:
        for batch in (8, 0) if has_both else (8,):
            for prefix in ("graphdef", "savedmodel", "onnx", "libtorch"):
                yield reshaping(dtype, given, inner, outputs=outputs, prefix=prefix, batch=batch)
            if dtype == "float32":  # an ensemble's steps need a shape
                held = [shape or taken for shape, taken in zip(inner, given, strict=True)]
                yield reshape_ensembles(given, held, outputs=outputs, batch=batch)
    flat = ([2, 2, 4], [1, 2, 1], [3, 2, 2], [1, 1, 1])
    for batch in (8, 0):
        yield reshaping("float32", ([1], [8]), ([1, 1, 1], [4, 1, 2]), prefix="plan", batch=batch)
        yield reshaping("float32", ([4, 4], [2], [2, 2, 3], [1]), flat, outputs=flat, prefix="plan", batch=batch)


CPU = {"TRITON_SERVER_CPU_ONLY": "1", "BACKENDS": "onnx", "CUDA_VISIBLE_DEVICES": ""}
INFERENCE: tuple[Suite, ...] = (
    Suite(
        name="infer",
        tests="L0_infer/infer_test.py",
        models=_family((16,), has_versions=True),
        environment={**CPU, "ENSEMBLES": "1"},
        method_seconds=180,
    ),
    Suite(
        name="infer_shared_memory",
        tests="L0_infer/infer_test.py",
        models=_family((16,), has_versions=True),
        environment={**CPU, "ENSEMBLES": "1", "TEST_SYSTEM_SHARED_MEMORY": "1"},
        method_seconds=180,
    ),
    Suite(
        name="infer_variable",
        tests="L0_infer_variable/infer_variable_test.py",
        models=tuple(_variable()),
        environment=CPU,
        method_seconds=180,
    ),
    Suite(
        name="infer_reshape",
        tests="L0_infer_reshape/infer_reshape_test.py",
        models=tuple(_reshaped()),
        environment=CPU,
        method_seconds=180,
    ),
    Suite(
        name="simple_ensemble",
        tests="L0_simple_ensemble/ensemble_test.py",
        models=(
            add_sub("int32", "int32", "int32", name="simple", versions=(1, 2), policy="all { }", swaps=False),
            copied("L0_simple_ensemble/models/ensemble_add_sub_int32_int32_int32"),
        ),
        has_fresh_servers=True,
    ),
    Suite(
        name="decoupled",
        tests="L0_decoupled/decoupled_test.py",
        methods=(
            "test_one_to_none",
            "test_one_to_one",
            "test_one_to_many",
            "test_no_streaming",
            "test_response_order",
            "test_wrong_shape",
        ),
        models=(
            folder("L0_decoupled/models"),
            REPEAT,
            SQUARE,
            # The newest version counts, and has its outputs swapped.
            add_sub("int32", "int32", "int32", batch=0, dims=(1,), prefix="libtorch", output="OUTPUT__", versions=(1, 3)),
        ),
        method_seconds=2400,
    ),
    Suite(
        name="decoupled_not",
        tests="L0_decoupled/decoupled_test.py",
        methods=("NonDecoupledTest.test_grpc", "NonDecoupledTest.test_http"),
        models=(NOT_DECOUPLED_REPEAT,),
    ),
    Suite(name="scalar_io", tests="L0_scalar_io/scalar_test.py", models=(scalar((1,)), scalar((1, 1)))),
)
