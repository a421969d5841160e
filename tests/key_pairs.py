"""Keys that sign certificates, as OpenSSL writes them."""

from __future__ import annotations

from pathlib import Path

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey


def key_pair(folder: Path) -> tuple[Path, Path]:
    """A new private key and its public key, in PEM files of the folder."""
    key, pem = Ed25519PrivateKey.generate(), serialization.Encoding.PEM
    private, public = folder / "private.pem", folder / "public.pem"
    folder.mkdir(exist_ok=True)
    private.write_bytes(key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()))
    public.write_bytes(key.public_key().public_bytes(pem, serialization.PublicFormat.SubjectPublicKeyInfo))
    return private, public
