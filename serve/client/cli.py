"""`halfserve infer` and `halfserve models`: each in a file of its own, and the errors of both."""

from __future__ import annotations

from serve.client.commands.infer import infer
from serve.client.commands.input_files import InputArgumentError
from serve.client.commands.models import models
from serve.client.errors import InferenceClientError

__all__ = ["EXIT_CODES", "infer", "models"]

EXIT_CODES: dict[type[Exception], int] = {InputArgumentError: 2, InferenceClientError: 1, OSError: 1}
