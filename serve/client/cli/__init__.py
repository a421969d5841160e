"""`halfserve infer` and `halfserve models`: the commands and the exit codes of their errors."""

from __future__ import annotations

from serve.client.cli.infer import infer
from serve.client.cli.inputs import InputArgumentError
from serve.client.cli.models import models
from serve.client.errors import ClientError

__all__ = ["EXIT_CODES", "infer", "models"]
EXIT_CODES: dict[type[Exception], int] = {InputArgumentError: 2, ClientError: 1, OSError: 1}
