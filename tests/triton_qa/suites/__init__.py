"""The suites: what the scripts of Triton's QA do, as data."""

from tests.triton_qa.suite import Suite
from tests.triton_qa.suites.examples import EXAMPLES
from tests.triton_qa.suites.inference import INFERENCE
from tests.triton_qa.suites.lifecycle import LIFECYCLE
from tests.triton_qa.suites.newer import NEWER
from tests.triton_qa.suites.operations import OPERATIONS
from tests.triton_qa.suites.python_backend import PYTHON_BACKEND
from tests.triton_qa.suites.requests import REQUESTS
from tests.triton_qa.suites.sequences import SEQUENCES

SUITES: tuple[Suite, ...] = (
    *PYTHON_BACKEND,
    *INFERENCE,
    *REQUESTS,
    *SEQUENCES,
    *LIFECYCLE,
    *OPERATIONS,
    *EXAMPLES,
    *NEWER,
)
