"""Who may ask: anyone on this machine, or whoever has the token."""

from __future__ import annotations

import hmac
import ipaddress
import os
from collections.abc import Mapping
from pathlib import Path

from treadle.base.errors import ArgumentError, LoadError
from treadle.serve.request_error import RequestError, shown

VARIABLE = "TREADLE_TOKEN"
SHORTEST, LARGEST = 16, 4096  # characters of a token, bytes of its file


def is_loopback(host: str) -> bool:
    """Whether only programs of this machine reach an address. Names but localhost are not known."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def read_token(file: str | None, environment: Mapping[str, str] = os.environ) -> str | None:
    """The token of a file, or of the environment; None where there is neither."""
    if file is None:
        given, source = environment.get(VARIABLE), VARIABLE
    else:
        given, source = _content(Path(file)), file
    if given is None:
        return None
    token = given.strip()
    if len(token) < SHORTEST or not token.isascii() or not token.isprintable() or " " in token:
        cause = f"the token of {source} has {len(token)} characters, or some that no header has"
        remedy = f"Use {SHORTEST} letters and digits at least: openssl rand -hex 32."
        raise ArgumentError("serve", cause, remedy)
    return token


def _content(path: Path) -> str:
    try:
        with path.open("rb") as file:
            content = file.read(LARGEST + 1)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        cause = f"the token of {path} cannot be read: {reason}"
        raise LoadError("serve", cause, "Name a file with the token and nothing else.") from error
    if len(content) > LARGEST:
        cause = f"{path} has more than {LARGEST} bytes"
        raise LoadError("serve", cause, "Name a file with the token and nothing else.")
    return content.decode("latin-1")


def check_address(host: str, token: str | None) -> None:
    """Beyond this machine a token is needed."""
    if token is None and not is_loopback(host):
        raise ArgumentError(
            "serve",
            f"{host} can be reached from other machines, and there is no token",
            f"Put one into a file and name it with --token-file, or set {VARIABLE}.",
        )


def admit(headers: Mapping[str, str], token: str | None) -> None:
    """Refuse a request without the token; without any token, one that names another host.

    A page in a browser can make its own name lead to 127.0.0.1, but not change what it calls it.
    """
    if token is not None:
        scheme, _, given = headers.get("authorization", "").partition(" ")
        is_bearer = scheme.lower() == "bearer"
        is_same = hmac.compare_digest(given.strip().encode("utf-8", "replace"), token.encode())
        if not (is_bearer and is_same):
            cause = "the request has no token, or another one"
            remedy = "Send the header Authorization: Bearer TOKEN."
            raise RequestError(401, "admit", cause, remedy, headers={"www-authenticate": "Bearer"})
        return
    host = headers.get("host", "")
    if not is_loopback(_without_port(host)):
        cause = f"the request is for the host {shown(host)}"
        remedy = "Without a token only localhost, 127.0.0.1 and [::1] are answered."
        raise RequestError(421, "admit", cause, remedy, {"host": host[:100]})


def _without_port(host: str) -> str:
    """The name or address of a `Host`: an address of IPv6 is in brackets, a port behind a colon."""
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0].lower()
