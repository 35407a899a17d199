"""`finetune demo`: serve the page on this machine until it is interrupted."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import socket
import threading
from pathlib import Path
from typing import Any

import torch

from finetune import processes
from finetune.commands.predict import Classifier
from finetune.console import say
from finetune.demo.app import About, build_app, gradio, input_kinds, look
from finetune.demo.middleware import Gate
from finetune.demo.model_facts import example_files, facts, title_of
from finetune.demo.uploads import Uploads, workplace
from finetune.errors import SetupError

__all__ = ["LIMIT_MB", "serve", "show"]

LIMIT_MB = 10
_TOTAL_MB = 200
_UPLOADS_PER_MINUTE = 60
_PORTS = 65535
# else Gradio's environment variables decide
_OFF = dict.fromkeys(("run_history", "ssr_mode", "mcp_server", "enable_monitoring", "pwa"), False)
_LOCAL_NOTE = (
    "Pictures stay on this machine: they are classified here and deleted when the demo ends."
)


def serve(
    model: str,
    *,
    host: str = "127.0.0.1",
    port: int = 7860,
    share: bool = False,
    device: torch.device | str | None = None,
) -> dict[str, Any]:
    """Show a model in the browser until it is interrupted.

    Args:
        model: see `Classifier.load`.
        host: the address to listen on; only this machine reaches the default.
        port: to listen on; 0 takes a free one.
        share: also make a public link, through a server of Gradio's.
        device: None takes a GPU if there is one.
    Returns: {"model", "url", "share_url"}, after the demo has ended.
    Raises: SetupError without Gradio, or if the address cannot be listened on or shared.
    """
    gradio()
    port = _free_port(host, port)
    classifier = Classifier.load(model, device=device)
    with workplace() as place:
        about = About(
            title=title_of(model),
            facts=facts(model, classifier),
            notes=[_LOCAL_NOTE] if _is_loopback(host) and not share else [],
            examples=example_files(model, place / "examples"),
        )
        app = build_app(classifier, about)
        url = show(app, place, host=host, port=port, share=share)
        return {"model": model, "url": url, "share_url": app.share_url if share else None}


def show(
    app: Any,
    place: Path,
    *,
    host: str | None,
    port: int | None,
    share: bool = False,
    hosted: bool = False,
) -> str:
    """Start the server, print its address, and end it with Ctrl-C or SIGTERM.

    Args:
        app: of `build_app`.
        place: of `workplace`.
        host, port: where to listen; None leaves it to Gradio's environment variables.
        share: make a public link.
        hosted: this is a Space: its address is the hub's, and its page is framed by the hub's.
    Returns: its address.
    Raises: SetupError if a link was to be shared and could not be made.
    """
    stop = threading.Event()
    loopback = not hosted and not share and host is not None and _is_loopback(host)
    if not hosted:
        for name in ("GRADIO_ALLOWED_PATHS", "GRADIO_ROOT_PATH"):
            os.environ.pop(name, None)
    with processes.signals_to(lambda _: stop.set()):
        app.launch(
            server_name=f"[{host}]" if host is not None and host.count(":") > 1 else host,
            server_port=port,
            share=share,
            quiet=True,
            prevent_thread_lock=True,
            allowed_paths=[],
            max_file_size=LIMIT_MB * 2**20,
            app_kwargs={
                "middleware": [_gate(app, place, loopback=loopback, hosted=hosted)],
                "docs_url": None,
                "redoc_url": None,
            },
            footer_links=[],
            **_OFF,
            **look(gradio()),
        )
        url = str(app.local_url).rstrip("/")
        try:
            if share and not app.share_url:
                raise SetupError(
                    "--share: no link could be made; it needs a network and Gradio's server. Try "
                    "again, or leave it out",
                    code="setup.unreachable",
                )
            processes.resume_garbage_collection()
            say(f"the demo is on {url}; Ctrl-C ends it")
            if share:
                say(f"anyone with this link can use it: {app.share_url}")
            stop.wait()
        finally:
            _close(app)
    say("the demo has ended")
    return url


def _gate(app: Any, place: Path, *, loopback: bool, hosted: bool) -> Any:
    """The middleware of a page, with the limits of its uploads."""
    from starlette.middleware import Middleware

    space = os.environ.get("SPACE_HOST") if hosted else None
    return Middleware(
        Gate,
        uploads=Uploads(
            place / "uploads", total_bytes=_TOTAL_MB * 2**20, per_minute=_UPLOADS_PER_MINUTE
        ),
        limit_bytes=LIMIT_MB * 2**20,
        inputs=input_kinds(app),
        loopback=loopback,
        policy=not hosted,
        # the hub's proxy may send another Host than the one that the browser sees
        trusted=[f"https://{space}"] if space else [],
    )


def _close(app: Any) -> None:
    """Stop the server without waiting for pages that are still open."""
    app.server.config.timeout_graceful_shutdown = 1
    logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)  # it would list the open pages
    app.close(verbose=False)


def _is_loopback(host: str) -> bool:
    return host in ("localhost", "::1", "[::1]") or host.startswith("127.")


def _free_port(host: str, port: int) -> int:
    """Check the address before the weights are loaded.

    Returns: the port, or a free one for 0.
    """
    try:
        return _try(host, port)
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise SetupError(
                f"--host {host} --port {port}: cannot be listened on ({error.strerror or error}); "
                "choose another, such as --host 127.0.0.1 --port 7860",
                code="setup.wrong_address",
            ) from error
    for other in range(port + 1, min(port + 100, _PORTS) + 1):
        with contextlib.suppress(OSError):
            _try(host, other)
            raise SetupError(
                f"--port {port}: is taken by another program; try --port {other}",
                code="setup.in_use",
            )
    raise SetupError(
        f"--port {port}: is taken by another program; choose another with --port",
        code="setup.in_use",
    )


def _try(host: str, port: int) -> int:
    bare = host.strip("[]")
    family = socket.AF_INET6 if ":" in bare else socket.AF_INET
    with socket.create_server((bare, port), family=family) as server:
        return int(server.getsockname()[1])
