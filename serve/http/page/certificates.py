"""The certificates that `halfserve export` leaves beside models, for people to read."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from serve.engine.errors import NotFoundError
from serve.engine.model import Model

FILE = "certificate.json"
SCHEMA = "halfserve.certificate"
MAX_BYTES = 16 * 2**20
Certificate = dict[str, Any]


class Certificates:
    """Reads each model's certificate once, on a thread."""

    def __init__(self) -> None:
        self._read: WeakKeyDictionary[Model, Certificate | None] = WeakKeyDictionary()

    async def of(self, model: Model) -> Certificate | None:
        """A model version's certificate; None where it has none that can be read."""
        if model not in self._read:
            self._read[model] = None if model.path is None else await asyncio.to_thread(read, model.path.parent / FILE)
        return self._read[model]

    async def full(self, model: Model) -> Certificate:
        """A model version's certificate.

        Raises:
            NotFoundError: it has none.
        """
        certificate = await self.of(model)
        if certificate is None:
            raise NotFoundError(
                f"version {model.version} of {model.name!r} has no certificate; `halfserve export` writes one beside the model"
            )
        return certificate


def read(path: Path) -> Certificate | None:
    """The certificate in a file; None where there is none. Whether it belongs to the model was checked when that was loaded."""
    try:
        if path.stat().st_size > MAX_BYTES:
            return None
        content = json.loads(path.read_bytes())
        json.dumps(content, allow_nan=False)  # as it will be sent
    except (OSError, ValueError, RecursionError):
        return None
    return content if isinstance(content, dict) and content.get("schema") == SCHEMA else None


def summary(certificate: Certificate) -> dict[str, Any]:
    """What a line about a certificate says."""
    conversion = certificate.get("conversion")
    known = conversion if isinstance(conversion, dict) else {}
    return {
        "passed": certificate.get("passed") is True,
        "created": certificate.get("created_utc"),
        "samples": certificate.get("samples"),
        "fp16_nodes": known.get("fp16_nodes"),
        "float_nodes": known.get("float_nodes"),
    }
