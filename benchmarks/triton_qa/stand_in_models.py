"""Models of the QA's test backends that several suites use."""

from __future__ import annotations

from benchmarks.triton_qa.repository import stand_in
from benchmarks.triton_qa.suite import Builder

DECOUPLED = "model_transaction_policy { decoupled: True }"
SQUARE = stand_in(
    "square",
    "square_int32",
    f"""max_batch_size: 0
input [ {{ name: "IN" data_type: TYPE_INT32 dims: [ 1 ] }} ]
output [ {{ name: "OUT" data_type: TYPE_INT32 dims: [ 1 ] }} ]
{DECOUPLED}""",
)


def repeat(name: str, policy: str = "") -> Builder:
    """Builder of a model that answers with each element of IN."""
    return stand_in(
        "repeat",
        name,
        f"""max_batch_size: 0
input [
  {{ name: "IN" data_type: TYPE_INT32 dims: [ -1 ] }},
  {{ name: "DELAY" data_type: TYPE_UINT32 dims: [ -1 ] }},
  {{ name: "WAIT" data_type: TYPE_UINT32 dims: [ 1 ] }}
]
output [ {{ name: "OUT" data_type: TYPE_INT32 dims: [ 1 ] }}, {{ name: "IDX" data_type: TYPE_UINT32 dims: [ 1 ] }} ]
instance_group [ {{ kind: KIND_CPU }} ]
{policy}""",
    )


REPEAT, NOT_DECOUPLED_REPEAT = repeat("repeat_int32", DECOUPLED), repeat("repeat_int32")
