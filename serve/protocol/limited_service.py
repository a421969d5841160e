"""The service as one sees it who may use some models only."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from google.protobuf.message import Message

from protos import inference_pb2 as pb
from serve.engine.errors import PermissionDeniedError
from serve.engine.inference_core import RestrictedCore
from serve.protocol.service import SERVICE, Service, UnaryMethod

FOR_ALL = "the token is for some models only, and this setting holds for all of them; ask who runs the server to change it"


class LimitedService(Service):
    """Answers as a server without the other models would; regions of shared memory, logs and traces are the whole server's.

    It keeps its own forms of requests (see `Inference`), some megabytes at most: one that has been met asks for a visible
    model, and is not checked for that again.
    """

    def __init__(self, whole: Service, may_use: Callable[[str], bool]) -> None:
        """A view of a service.

        Args:
            whole: knows all models.
            may_use: whether a model is visible, by its name.
        """
        self._view = RestrictedCore(whole.core, may_use)
        super().__init__(self._view, server_version=whole.server_version, beside=whole)
        for name in ("TraceSetting", "LogSettings"):
            path = f"/{SERVICE}/{name}"
            method = self.unary[path]
            self.unary[path] = UnaryMethod(method.request, partial(_of_one_model, method.answer))

    def close(self) -> None:
        """Show no models any more. Requests that were taken are answered."""
        self._view.close()


def _of_one_model(answer: Callable[[Any], Message], request: pb.TraceSettingRequest | pb.LogSettingsRequest) -> Message:
    """Answer a request about settings, unless it changes what holds for all models."""
    if request.settings and not (isinstance(request, pb.TraceSettingRequest) and request.model_name):
        raise PermissionDeniedError(FOR_ALL)
    return answer(request)
