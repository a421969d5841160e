"""Headers of a call that become parameters of its inference requests, as Triton's --grpc-header-forward-pattern makes them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from halfserve.protos.inference_pb2 import ModelInferRequest
from halfserve.protos.request_parameters import REQUEST_PARAMETERS, RESERVED_PREFIX

CASE_SENSITIVE = "(?-i)"  # Triton's spelling at a pattern's start; Python's syntax allows it only with a group
# The transport's own headers, which Triton does not show as metadata either, and parameters that this server would obey.
NEVER = re.compile("|".join((":.*", "grpc-.*", "te", "content-type", f"{RESERVED_PREFIX}.*", *REQUEST_PARAMETERS)))


class HeaderPattern:
    """Selects headers by their names, with a regular expression that any part of a name may match."""

    def __init__(self, text: str) -> None:
        """Compile a pattern, which ignores case unless it begins with "(?-i)".

        Raises:
            ValueError: the text is not a regular expression; the message gives the reason.
        """
        pattern = text.removeprefix(CASE_SENSITIVE)
        try:
            self._pattern = re.compile(pattern, 0 if pattern != text else re.IGNORECASE)
        except re.error as error:
            raise ValueError(f"{text!r} is no regular expression ({error}); expected one such as 'x-tenant.*'") from None

    def parameters(self, headers: Mapping[bytes, bytes]) -> bytes:
        """Return a serialized ModelInferRequest with the selected headers as parameters; empty if no header is selected.

        The headers' names are in lower case.
        """
        request = ModelInferRequest()
        for key, value in headers.items():
            name = key.decode("latin-1")
            if self._pattern.search(name) and not NEVER.fullmatch(name):
                request.parameters[name].string_param = value.decode("latin-1")
        return request.SerializeToString(deterministic=True)


@dataclass(frozen=True, kw_only=True)
class ForwardedHeaders:
    """Patterns that select the headers that become parameters; None selects none.

    Attributes:
        grpc: applies to gRPC calls.
        http: applies to HTTP requests.
    """

    grpc: HeaderPattern | None = None
    http: HeaderPattern | None = None
