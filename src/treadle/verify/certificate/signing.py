"""Signatures of certificates: ed25519, by the package `cryptography` if it is there."""

from __future__ import annotations

from pathlib import Path

from treadle.base.errors import ArgumentError

EXTRA = "Install treadle[sign], which brings the package cryptography."


def signed(data: bytes, key: object) -> dict[str, str]:
    """The signature of some bytes with a private key: 32 bytes, or the path of a PEM file."""
    try:
        from cryptography.hazmat.primitives import serialization
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    except ImportError as error:
        raise ArgumentError("certificate.save", "it cannot be signed here", EXTRA) from error
    private: object
    try:
        if isinstance(key, bytes):
            private = Ed25519PrivateKey.from_private_bytes(key)
        else:
            text = Path(str(key)).read_bytes()
            private = serialization.load_pem_private_key(text, password=None)
    except (OSError, ValueError, TypeError) as error:
        cause = f"the key cannot be read: {error}"
        raise ArgumentError("certificate.save", cause, "Pass 32 bytes or a PEM file.") from error
    if not isinstance(private, Ed25519PrivateKey):
        raise ArgumentError("certificate.save", "the key is not one of ed25519")
    public = private.public_key().public_bytes_raw()
    return {"algorithm": "ed25519", "key": public.hex(), "value": private.sign(data).hex()}
