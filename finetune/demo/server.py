"""`finetune demo`: serve the page on this machine until it is interrupted."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import signal
import socket
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from finetune import processes
from finetune.commands.predict import Classifier
from finetune.console import say
from finetune.demo.app import About, accepted, build_app, gradio, look
from finetune.demo.middleware import Gate
from finetune.demo.model_facts import example_files, facts, title_of
from finetune.errors import RecipeError, SetupError

__all__ = ["LIMIT_MB", "launch", "serve", "show", "workplace"]

LIMIT_MB = 10
_PORTS = 65535
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
    """Start the server, say where it is, and end it with Ctrl-C or SIGTERM.

    Args:
        app, place, host, port, share, hosted: as for `launch`.
    Returns: its address.
    Raises: SetupError if a link was to be shared and could not be made.
    """
    stop = threading.Event()
    with _signals(stop):
        launch(app, place, host=host, port=port, share=share, hosted=hosted)
        url = str(app.local_url).rstrip("/")
        try:
            if share and not app.share_url:
                raise SetupError(
                    "--share: no link could be made; it needs a network and Gradio's server. Try "
                    "again, or leave it out"
                )
            processes.as_usual()
            say(f"the demo is on {url}; Ctrl-C ends it")
            if share:
                say(f"anyone with this link can use it: {app.share_url}")
            stop.wait()
        finally:
            _close(app)
    say("the demo has ended")
    return url


@contextlib.contextmanager
def workplace() -> Iterator[Path]:
    """A private folder with `uploads` and `examples`, removed at the end."""
    before = os.environ.get("GRADIO_TEMP_DIR")
    with tempfile.TemporaryDirectory(prefix="finetune-demo-", ignore_cleanup_errors=True) as name:
        place = Path(name).resolve()
        for part in ("uploads", "examples"):
            (place / part).mkdir()
        os.environ["GRADIO_TEMP_DIR"] = str(place / "uploads")  # Gradio reads no other switch
        try:
            yield place
        finally:
            if before is None:
                del os.environ["GRADIO_TEMP_DIR"]
            else:
                os.environ["GRADIO_TEMP_DIR"] = before


def launch(
    app: Any,
    place: Path,
    *,
    host: str | None = None,
    port: int | None = None,
    share: bool = False,
    hosted: bool = False,
) -> None:
    """Start the server and go on.

    Args:
        app: of `build_app`.
        place: of `workplace`.
        host, port: where to listen; None leaves it to Gradio's environment variables.
        share: make a public link.
        hosted: this is a Space: its address is the hub's, and its page is framed by the hub's.
    """
    gr = gradio()
    from starlette.middleware import Middleware

    gate = Middleware(
        Gate,
        uploads=place / "uploads",
        limit_bytes=LIMIT_MB * 2**20,
        loopback=not hosted and not share and host is not None and _is_loopback(host),
        policy=not hosted,
    )
    options = accepted(
        gr.Blocks.launch,
        **look(gr),
        footer_links=[],
        run_history=False,
        show_api=False,
        ssr_mode=False,
        mcp_server=False,
        enable_monitoring=False,
        pwa=False,
    )
    if not hosted:
        for name in ("GRADIO_ALLOWED_PATHS", "GRADIO_ROOT_PATH"):
            os.environ.pop(name, None)
    app.launch(
        server_name=f"[{host}]" if host is not None and host.count(":") > 1 else host,
        server_port=port,
        share=share,
        quiet=True,
        prevent_thread_lock=True,
        show_error=False,
        inbrowser=False,
        allowed_paths=[],
        max_file_size=LIMIT_MB * 2**20,
        app_kwargs={"middleware": [gate], "docs_url": None, "redoc_url": None},
        **options,
    )


def _close(app: Any) -> None:
    """Stop the server without waiting for pages that are still open."""
    app.server.config.timeout_graceful_shutdown = 1
    logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)  # it would list the open pages
    app.close(verbose=False)


@contextlib.contextmanager
def _signals(stop: threading.Event) -> Iterator[None]:
    """Turn Ctrl-C and SIGTERM into the end of the demo."""
    if threading.current_thread() is not threading.main_thread():
        yield  # Python gives signals to the main thread only
        return
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = {number: signal.signal(number, lambda *_: stop.set()) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _is_loopback(host: str) -> bool:
    return host in ("localhost", "::1", "[::1]") or host.startswith("127.")


def _free_port(host: str, port: int) -> int:
    """Find out before the weights are loaded whether the server will be able to listen.

    Returns: the port, or a free one for 0.
    """
    if not 0 <= port <= _PORTS:
        raise RecipeError(f"--port: got {port}; expected 0 to {_PORTS}")
    try:
        return _try(host, port)
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise SetupError(
                f"--host {host} --port {port}: cannot be listened on ({error.strerror or error}); "
                "choose another, such as --host 127.0.0.1 --port 7860"
            ) from error
    for other in range(port + 1, min(port + 100, _PORTS) + 1):
        with contextlib.suppress(OSError):
            _try(host, other)
            raise SetupError(f"--port {port}: is taken by another program; try --port {other}")
    raise SetupError(f"--port {port}: is taken by another program; choose another with --port")


def _try(host: str, port: int) -> int:
    bare = host.strip("[]")
    family = socket.AF_INET6 if ":" in bare else socket.AF_INET
    with socket.create_server((bare, port), family=family) as server:
        return int(server.getsockname()[1])
