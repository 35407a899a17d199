"""`finetune demo`: serve the demo page until it is interrupted."""

from __future__ import annotations

import logging
import os
import threading
from pathlib import Path
from typing import Any, NoReturn

from finetune import process_lifecycle
from finetune.demo.app import PageContent, build_app, import_gradio, theme_options
from finetune.demo.middleware import DemoMiddleware
from finetune.demo.model_summary import (
    copy_example_images,
    model_title,
    pin_hub_commit,
    summarize_model,
)
from finetune.demo.uploads import temporary_workspace
from finetune.errors import Interrupted, SetupError
from finetune.inference import Classifier
from finetune.log import logger
from finetune.web.access import is_loopback, resolve_port, trusted_hosts
from finetune.web.connections import ConnectionLimits, limit_log_rate

__all__ = ["MAX_UPLOAD_MB", "run_server", "serve"]

MAX_UPLOAD_MB = 10
_MAX_TOTAL_UPLOAD_MB = 200
# set explicitly, because Gradio's environment variables could enable these features
_DISABLED_FEATURES = dict.fromkeys(
    ("run_history", "ssr_mode", "mcp_server", "enable_monitoring", "pwa"), False
)
_PRIVACY_NOTE = (
    "Images stay on this machine: they are classified here and deleted when the demo ends."
)


def serve(
    model: str, *, host: str = "127.0.0.1", port: int = 7860, share: bool = False
) -> NoReturn:
    """Serve the demo page of a model until it is interrupted.

    Args:
        model: the model to load, see `Classifier.load`.
        host: address to listen on; the default accepts connections only from this machine.
        port: port to listen on; 0 uses any free port.
        share: True to also create a public link through Gradio's server.
    Raises: Interrupted when a signal ends the demo; SetupError if Gradio is not installed, or if
        listening or sharing fails.
    """
    import_gradio()
    port = resolve_port(host, port)
    model = pin_hub_commit(model)
    classifier = Classifier.load(model, mark_unknown=None)
    with temporary_workspace() as workspace:
        content = PageContent(
            title=model_title(model),
            facts=summarize_model(model, classifier),
            notes=[_PRIVACY_NOTE] if is_loopback(host) and not share else [],
            examples=copy_example_images(model, workspace / "examples"),
        )
        app = build_app(classifier, content)
        run_server(app, workspace, host=host, port=port, share=share)


def run_server(
    app: Any,
    workspace: Path,
    *,
    host: str | None,
    port: int | None,
    share: bool = False,
    is_space: bool = False,
) -> NoReturn:
    """Run the server, log its address, and stop it on Ctrl-C, SIGTERM or SIGHUP.

    Args:
        app: the app returned by `build_app`.
        workspace: the folder created by `temporary_workspace`.
        host, port: address and port to listen on; None for Gradio's environment variables.
        share: True to also create a public link.
        is_space: True if the server runs in a Space: the Hub then serves it under another address
            and inside a frame.
    Raises: Interrupted after a signal; SetupError if the public link cannot be created.
    """
    received: list[int] = []
    stop = threading.Event()

    def end(signal_number: int) -> None:
        received.append(signal_number)
        stop.set()

    if not is_space:
        for name in ("GRADIO_ALLOWED_PATHS", "GRADIO_ROOT_PATH"):
            os.environ.pop(name, None)
    with process_lifecycle.handle_interrupts(end), limit_log_rate():
        app.launch(
            server_name=f"[{host}]" if host is not None and host.count(":") > 1 else host,
            server_port=port,
            share=share,
            quiet=True,
            prevent_thread_lock=True,
            allowed_paths=[],
            max_file_size=MAX_UPLOAD_MB * 2**20,
            app_kwargs={
                # a public link or a Space has another host name
                "middleware": _build_middleware(
                    app, workspace, host=None if share or is_space else host, is_space=is_space
                ),
                "openapi_url": None,
            },
            footer_links=[],
            **_DISABLED_FEATURES,
            **theme_options(import_gradio()),
        )
        url = str(app.local_url).rstrip("/")
        try:
            if share and not app.share_url:
                raise SetupError(
                    "--share: Gradio's server did not create a public link; check the network and "
                    "try again, or leave out --share",
                    code="setup.unreachable",
                )
            config = app.server.config
            config.http_protocol_class = ConnectionLimits(config.http_protocol_class)
            process_lifecycle.resume_garbage_collection()
            logger.info(f"the demo is at {url} (press Ctrl-C to stop it)")
            if share:
                logger.info(f"anyone with this link can use it: {app.share_url}")
            stop.wait()
        finally:
            _close_server(app)
    raise Interrupted("the demo has ended", received[0])


def _build_middleware(app: Any, workspace: Path, *, host: str | None, is_space: bool) -> list[Any]:
    from starlette.middleware import Middleware
    from starlette.middleware.trustedhost import TrustedHostMiddleware

    space_host = os.environ.get("SPACE_HOST") if is_space else None
    return [
        Middleware(TrustedHostMiddleware, allowed_hosts=trusted_hosts(host)),
        Middleware(
            DemoMiddleware,
            upload_folder=workspace / "uploads",
            max_upload_bytes=MAX_UPLOAD_MB * 2**20,
            max_total_bytes=_MAX_TOTAL_UPLOAD_MB * 2**20,
            allow_framing=is_space,
            index_events=[
                number
                for number, event in app.fns.items()
                if any(isinstance(block, import_gradio().Dataset) for block in event.inputs)
            ],
            # the Hub's proxy may send another Host than the browser did
            trusted_origins=[f"https://{space_host}"] if space_host else [],
        ),
    ]


def _close_server(app: Any) -> None:
    """Stop the server without waiting for pages that are still open."""
    app.server.config.timeout_graceful_shutdown = 1
    # otherwise uvicorn logs every open page
    logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)
    app.close(verbose=False)
