"""What the server does for a model while it runs: inference requests of its own, responses, logs, metrics, loading models."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Protocol

from halfserve.serve.backends.python_child.errors import TritonModelException
from halfserve.serve.backends.python_child.wire import WireTensor

Reply = tuple[Mapping[str, Any], list[WireTensor]]


class ServerAccess(Protocol):
    """The server, as a model reaches it. Every method may be called on any thread."""

    def call(self, kind: str, arguments: Mapping[str, Any], tensors: list[WireTensor]) -> Reply:
        """Have the server do something, and wait for its reply. An error comes as the reply's "error"."""

    def call_for_many(self, kind: str, arguments: Mapping[str, Any], tensors: list[WireTensor]) -> Iterator[Reply]:
        """The same with replies until one that has "final"."""

    def tell(self, kind: str, arguments: Mapping[str, Any], tensors: list[WireTensor]) -> None:
        """Have the server do something, without a reply."""


class _Holder:
    access: ServerAccess | None = None


def connect(access: ServerAccess) -> None:
    """Use this server from now on."""
    _Holder.access = access


def server() -> ServerAccess:
    """The server that runs this model.

    Raises:
        TritonModelException: there is none.
    """
    if _Holder.access is None:
        raise TritonModelException("no server runs this model")
    return _Holder.access


def done(reply: Reply) -> Reply:
    """A reply without an error.

    Raises:
        TritonModelException: the server's error.
    """
    error = reply[0].get("error")
    if error is not None:
        raise TritonModelException(error[1])
    return reply


def load_model(model_name: str, config: str = "", files: Mapping[str, bytes] | None = None) -> None:
    """Load or reload a model of the repository; needs a server with --model-control explicit.

    Raises:
        TritonModelException: the server refuses; or `files` are given, which this server takes from clients only.
    """
    if files:
        raise TritonModelException("load_model with files is not supported; put the files into the model repository")
    done(server().call("load_model", {"model": model_name, "config": config}, []))


def unload_model(model_name: str, unload_dependents: bool = False) -> None:  # noqa: ARG001  (Triton's signature)
    """Unload a model, later: this returns at once.

    Raises:
        TritonModelException: no such model is served.
    """
    done(server().call("unload_model", {"model": model_name}, []))


def is_model_ready(model_name: str, model_version: str = "") -> bool:
    """Whether a model, or one version of it, takes requests."""
    return bool(done(server().call("is_ready", {"model": model_name, "version": model_version}, []))[0]["ready"])
