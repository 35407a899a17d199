"""Who may use a server on this machine: address, host names, and origins of requests."""

from __future__ import annotations

import contextlib
import errno
import socket
from collections.abc import Collection, Mapping

from finetune.errors import SetupError

__all__ = [
    "is_cross_origin",
    "is_loopback",
    "listen",
    "refuse_post",
    "resolve_port",
    "trusted_hosts",
]

_MAX_PORT = 65535


def is_loopback(host: str) -> bool:
    """Return True if only this machine can connect to the address."""
    return host in ("localhost", "::1", "[::1]") or host.startswith("127.")


def trusted_hosts(host: str | None) -> list[str]:
    """Return the host names under which a server accepts requests, for TrustedHostMiddleware.

    Other names are rejected: an attacker's domain may resolve to this machine (DNS rebinding).

    Args:
        host: the address that the server listens on. If it is not a loopback address, or None, any
            name is accepted.
    """
    return ["localhost", "127.0.0.1", "[::1]", host] if host and is_loopback(host) else ["*"]


def is_cross_origin(headers: Mapping[str, str]) -> bool:
    """Return True if a browser sends this request from a page of another origin.

    The header Sec-Fetch-Site decides: current browsers send it to https and loopback servers, also
    from within a frame. Without it, the host in Origin must equal Host. Clients other than browsers
    send neither header.

    Args:
        headers: the request headers, with lower-case names.
    Source: Go, net/http, CrossOriginProtection.
    """
    if site := headers.get("sec-fetch-site"):
        return site not in ("same-origin", "none")
    origin = headers.get("origin")
    return origin is not None and origin.partition("://")[2] != headers.get("host")


def refuse_post(
    headers: Mapping[str, str], *, max_bytes: int, trusted_origins: Collection[str] = ()
) -> tuple[int, str] | None:
    """Return the HTTP status and the reason if a POST request is refused; None if it is accepted.

    Args:
        headers: the request headers, with lower-case names.
        max_bytes: maximum size of the body.
        trusted_origins: further origins whose pages may send requests.
    """
    if is_cross_origin(headers) and headers.get("origin") not in trusted_origins:
        return 403, "cross-origin requests are not allowed"
    length = headers.get("content-length", "")
    if not length.isdecimal() or "transfer-encoding" in headers:
        return 411, "a request needs a Content-Length"
    if int(length) > max_bytes:
        return 413, f"more than {max_bytes / 2**20:.2g} MB; send less at once"
    return None


def resolve_port(host: str, port: int) -> int:
    """Check that the port is free, before slow preparations.

    Returns: the port; for port 0, a free port.
    Raises: SetupError if the server cannot listen there.
    """
    with listen(host, port) as server:
        return int(server.getsockname()[1])


def listen(host: str, port: int) -> socket.socket:
    """Open the socket of a server; port 0 takes any free port.

    Raises: SetupError if the server cannot listen there.
    """
    try:
        return _bind(host, port)
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise SetupError(
                f"--host {host} --port {port}: cannot listen ({error.strerror or error}); "
                "choose another, such as --host 127.0.0.1",
                code="setup.wrong_address",
            ) from error
    for free_port in range(port + 1, min(port + 100, _MAX_PORT) + 1):
        with contextlib.suppress(OSError):
            _bind(host, free_port).close()
            raise SetupError(
                f"--port {port}: this port is in use by another program; try --port {free_port}",
                code="setup.in_use",
            )
    raise SetupError(
        f"--port {port}: this port is in use by another program; choose another with --port",
        code="setup.in_use",
    )


def _bind(host: str, port: int) -> socket.socket:
    address = host.strip("[]")
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    return socket.create_server((address, port), family=family)
