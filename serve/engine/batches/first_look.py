"""A look at the first requests that meet, where nobody could look at two rows before the model served."""

from __future__ import annotations

import numpy as np

from serve.engine.backend import Backend
from serve.engine.batches.assembly import assemble
from serve.engine.batches.likeness import mixed_output
from serve.engine.device_faults import InstanceLostError, is_device_lost
from serve.engine.queueing.joining import Joining
from serve.engine.requests import InferRequest
from serve.engine.tensors import Tensors


class _NoRowsError(Exception):
    """Not as many rows come out as go in."""


def may_share(backend: Backend, requests: list[InferRequest], joining: Joining) -> bool:
    """Whether these requests may be computed together, by what two of them get alone and together.

    Rows that are all the same may show nothing: once they have shown nothing they may share, and the look goes on with the
    first ones that differ.

    Args:
        backend: computes.
        requests: at least two, of one bucket.
        joining: of their model, and doubtful.

    Raises:
        InstanceLostError: this copy of the model will not compute any more.
    """

    def run(inputs: Tensors) -> Tensors:
        rows = len(next(iter(inputs.values())))
        outputs = {name: array.copy() for name, array in backend.run(inputs).items()}  # the next run may write where this has
        if any(array.shape[:1] != (rows,) for array in outputs.values()):
            raise _NoRowsError
        return outputs

    try:
        first = _inputs(backend, requests[0])
        for request in requests[1:]:
            beside = _inputs(backend, request)
            if differed := not _are_same(first, beside):
                break
        if not differed and joining.same_may_share:
            return True
        together = {name: np.concatenate([array, beside[name]]) for name, array in first.items()}
        mixed = mixed_output(run, first, beside, together)
    except Exception as error:
        if is_device_lost(error):
            raise InstanceLostError(str(error)) from error
        return False  # whose fault it was comes out where each is computed
    joining.looked(mixed, differed=differed)
    return mixed is None


def _inputs(backend: Backend, request: InferRequest) -> Tensors:
    # Copies: the next request's are put together in the same place.
    return {name: assemble([request], name, backend.compute_dtype(name)).copy() for name in request.inputs}


def _are_same(ones: Tensors, others: Tensors) -> bool:
    return all(np.array_equal(array, others[name]) for name, array in ones.items())
