"""The certificates of models, for the page."""

from __future__ import annotations

import asyncio
import json
import weakref
from pathlib import Path
from typing import Any

from halfserve.protos.certificates import SCHEMA
from halfserve.serve.engine.disk_files import read_certificate
from halfserve.serve.engine.errors import NotFoundError
from halfserve.serve.engine.model import Model

MAX_BYTES = 16 * 2**20
Certificate = dict[str, Any]


class Certificates:
    """Reads each model's certificate once, on a thread."""

    def __init__(self) -> None:
        self._read: dict[int, Certificate | None] = {}  # by the id() of a model's first copy, while that lives

    async def of(self, model: Model) -> Certificate | None:
        """Return a model version's certificate; None without one that belongs to it, as the load found out."""
        # An ensemble has none: its steps do.
        if not model.backends or not model.verdict:
            return None
        copy = model.backends[0]  # not the model: a compiled class has no weak references
        if id(copy) not in self._read:
            path = model.path
            certificate = None if path is None else await asyncio.to_thread(certificate_of, path)
            self._read[id(copy)] = certificate
            weakref.finalize(copy, self._read.pop, id(copy), None).atexit = False
        return self._read[id(copy)]

    async def full(self, model: Model) -> Certificate:
        """Return a model version's certificate. Raises NotFoundError: it has none."""
        certificate = await self.of(model)
        if certificate is None:
            raise NotFoundError(
                f"version {model.version} of {model.name!r} has no certificate; `halfserve export` writes one beside the model"
            )
        return certificate


def certificate_of(model: Path) -> Certificate | None:
    """Return the certificate of a model file; None without a valid one. Loading has checked that it is the model's."""
    try:
        found = read_certificate(model)
        if found is None or len(found.content) > MAX_BYTES:
            return None
        content = json.loads(found.content)
        json.dumps(content, allow_nan=False)  # as it will be sent
    except (OSError, ValueError, RecursionError):
        return None
    return content if isinstance(content, dict) and content.get("schema") == SCHEMA else None


def summary(certificate: Certificate) -> dict[str, Any]:
    """Return the fields of a certificate that the state shows."""
    conversion = certificate.get("conversion")
    known = conversion if isinstance(conversion, dict) else {}
    return {
        "passed": certificate.get("passed") is True,
        "created": certificate.get("created_utc"),
        "samples": certificate.get("samples"),
        "fp16_nodes": known.get("fp16_nodes"),
        "float_nodes": known.get("float_nodes"),
    }
