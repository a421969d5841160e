"""`halfserve infer` and `halfserve models`: the commands and the exit codes of their errors."""

from __future__ import annotations

from halfserve.serve.client.cli.infer import infer
from halfserve.serve.client.cli.inputs import InputArgumentError
from halfserve.serve.client.cli.models import models
from halfserve.serve.client.errors import ClientError

__all__ = ["EXIT_CODES", "infer", "models"]
EXIT_CODES: dict[type[Exception], int] = {InputArgumentError: 2, ClientError: 1, OSError: 1}
