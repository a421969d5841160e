"""ModelInfer for a caller that is counted, or that may not do everything; others do not come by here."""

from __future__ import annotations

from collections.abc import Callable

from serve.engine.errors import InferenceError, InvalidArgumentError, PermissionDeniedError
from serve.protocol.inference import Cancel, Reply, Watch, WatchableInference
from serve.protocol.messages import parse_request
from serve.security.client_limits import Share

REGION = "shared_memory_region"
REGION_BYTES = REGION.encode()
Check = Callable[[], None]


class GatedInference:
    """The way in of one caller."""

    __slots__ = ("_check", "_count", "_inference", "_is_charged", "_may_share", "_share")

    def __init__(
        self,
        inference: WatchableInference,
        *,
        share: Share | None,
        check: Check | None,
        may_share: bool,
        count: Callable[[InferenceError], None],
        is_charged: bool = False,
    ) -> None:
        """A way in.

        Args:
            inference: answers requests.
            share: what the caller may take; None sets no bounds.
            check: raises where the caller is not let in any more; a stream lasts longer than a token may.
            may_share: whether requests may name shared memory.
            count: is told of requests that were refused here.
            is_charged: requests that come here have been charged to the share already.
        """
        self._is_charged = is_charged
        self._inference = inference
        self._share = share
        self._check = check
        self._may_share = may_share
        self._count = count

    def infer(self, data: bytes | memoryview, time_left_s: float | None, reply: Reply, watch: Watch | None = None) -> Cancel:
        """As `Inference.infer`.

        Raises:
            UnauthenticatedError: the caller's token has been revoked.
            PermissionDeniedError: the request names shared memory, which the caller may not.
            RateLimitedError: the caller has taken its share.
        """
        share = self._share
        try:
            if self._check is not None:
                self._check()
            if not self._may_share and _names_region(bytes(data)):
                raise PermissionDeniedError("the token may not use shared memory: it takes the role 'shared-memory'")
            if share is not None:
                share.enter(is_charged=self._is_charged)
        except InferenceError as error:
            self._count(error)
            raise
        if share is None:
            return self._inference.infer(data, time_left_s, reply, watch)
        return _Counted(share, reply).begin(self._inference, data, time_left_s, watch)

    def failed(self, data: bytes, error: Exception) -> None:
        """As `Inference.failed`."""
        self._inference.failed(data, error)

    def gone(self, data: bytes) -> None:
        """As `Inference.gone`."""
        self._inference.gone(data)


class _Counted:
    """A request in progress. However it ends, it leaves its place once."""

    __slots__ = ("_cancel", "_left", "_reply", "_share")

    def __init__(self, share: Share, reply: Reply) -> None:
        self._share = share
        self._reply = reply
        self._left = False
        self._cancel: Cancel | None = None

    def begin(
        self, inference: WatchableInference, data: bytes | memoryview, time_left_s: float | None, watch: Watch | None
    ) -> Cancel:
        try:
            self._cancel = inference.infer(data, time_left_s, self._answered, watch)
        except BaseException:
            self._leave()
            raise
        return self._gone

    def _answered(self, result: bytes | InferenceError) -> None:
        self._leave()
        self._reply(result)

    def _gone(self) -> None:
        self._leave()
        if self._cancel is not None:
            self._cancel()

    def _leave(self) -> None:
        if not self._left:
            self._left = True
            self._share.leave()


def _names_region(data: bytes) -> bool:
    """Whether a request has a parameter of that name: the word may also be part of a tensor, or not be there at all."""
    if REGION_BYTES not in data:
        return False
    try:
        request = parse_request(data)
    except InvalidArgumentError:
        return False  # it will be refused for that
    return any(REGION in i.parameters for i in request.inputs) or any(REGION in o.parameters for o in request.outputs)
