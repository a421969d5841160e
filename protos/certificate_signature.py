"""Signatures of certificates: Ed25519 (RFC 8032), with keys in PEM files as OpenSSL writes them.

The exporting side has the private key (`openssl genpkey -algorithm ed25519 -out private.pem`), and servers have the public key
(`openssl pkey -in private.pem -pubout -out public.pem`). The package cryptography is needed only if a key is given.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from halfserve.installation import install_hint
from halfserve.protos.certificates import signed_bytes

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

LARGEST_KEY_BYTES = 1 << 16
_WRITE_PRIVATE = "write one with: openssl genpkey -algorithm ed25519 -out private.pem"
_WRITE_PUBLIC = "write one with: openssl pkey -in private.pem -pubout -out public.pem"


class CertificateKeyError(Exception):
    """A key file cannot be used; the text names it and says what to do."""


class SigningKey:
    """A private key, which signs certificates."""

    def __init__(self, path: Path) -> None:
        """Read the key.

        Raises:
            CertificateKeyError: the file holds no Ed25519 private key without a pass phrase, or cannot be read.
        """
        load, ed25519 = _cryptography()
        content = _read(path)
        try:
            key = load.load_pem_private_key(content, password=None)
        except (ValueError, TypeError) as error:  # TypeError: it has a pass phrase
            raise CertificateKeyError(f"{path}: holds no private key without a pass phrase; {_WRITE_PRIVATE}") from error
        if not isinstance(key, ed25519.Ed25519PrivateKey):
            raise CertificateKeyError(f"{path}: holds a key of another kind than Ed25519; {_WRITE_PRIVATE}")
        self._key: Ed25519PrivateKey = key

    def signature(self, certificate: Mapping[str, Any]) -> str:
        """Sign a certificate, given as JSON types; returns the signature in base64."""
        return base64.b64encode(self._key.sign(signed_bytes(certificate))).decode()


class VerifyingKey:
    """A public key, which checks signatures of certificates."""

    def __init__(self, path: Path) -> None:
        """Read the key.

        Raises:
            CertificateKeyError: the file holds no Ed25519 public key, or cannot be read.
        """
        load, ed25519 = _cryptography()
        content = _read(path)
        try:
            key = load.load_pem_public_key(content)
        except ValueError as error:
            raise CertificateKeyError(f"{path}: holds no public key; {_WRITE_PUBLIC}") from error
        if not isinstance(key, ed25519.Ed25519PublicKey):
            raise CertificateKeyError(f"{path}: holds a key of another kind than Ed25519; {_WRITE_PUBLIC}")
        self._key: Ed25519PublicKey = key

    def signed(self, certificate: Mapping[str, Any]) -> bool:
        """Return whether the certificate, given as JSON types, was signed with this key's private key."""
        from cryptography.exceptions import InvalidSignature  # noqa: PLC0415  (see the module's text)

        given = certificate.get("signature")
        try:
            signature = base64.b64decode(given, validate=True) if isinstance(given, str) else b""
            self._key.verify(signature, signed_bytes(certificate))
        except (InvalidSignature, ValueError):  # ValueError: it is no base64
            return False
        return True


def _cryptography() -> tuple[Any, Any]:
    try:
        from cryptography.hazmat.primitives import serialization  # noqa: PLC0415  (see the module's text)
        from cryptography.hazmat.primitives.asymmetric import ed25519  # noqa: PLC0415  (see the module's text)
    except ImportError as error:
        lacking = f"signatures need the package cryptography; {install_hint('sign')}"
        raise CertificateKeyError(lacking) from error
    return serialization, ed25519


def _read(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(LARGEST_KEY_BYTES)
    except OSError as error:
        raise CertificateKeyError(f"cannot read the certificate key {path}: {error.strerror or error}") from error
