"""`finetune data doctor SOURCE --review`: serve the review page, and save each decision at once.

The page asks for findings and pictures as they are looked at. Every change is written to
decisions.csv before it is confirmed, so a killed review continues with the next start.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from finetune import process_lifecycle
from finetune.data.decisions import Decision, read_decisions, write_decisions
from finetune.data.stat_signatures import stat_signature
from finetune.doctor.findings import KINDS, Findings, class_key, open_findings
from finetune.doctor.review_page import DECISIONS_FILE, render_review, training_command
from finetune.errors import FinetuneError, SetupError, install_hint
from finetune.log import logger
from finetune.report.thumbnails import encode_thumbnail
from finetune.web.access import is_cross_origin, is_loopback, resolve_port, trusted_hosts
from finetune.web.connections import ConnectionLimits, limit_log_rate

if TYPE_CHECKING:
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response

__all__ = ["DecisionFile", "build_app", "serve_review"]

_PICTURE_PIXELS = {"small": 160, "medium": 640, "large": 1280}  # longer side
_MAX_FINDINGS = 500  # in an answer
_MAX_BODY_BYTES = 2**20
_HEADERS = {
    "Content-Security-Policy": "frame-ancestors 'none'",
    "Cross-Origin-Resource-Policy": "same-origin",
    "X-Content-Type-Options": "nosniff",
}


def serve_review(
    source: str,
    *,
    folder: str | Path,
    host: str = "127.0.0.1",
    port: int = 7861,
) -> dict[str, Any]:
    """Serve the review page until it is interrupted.

    Args:
        source: the diagnosed source string.
        folder: the folder of doctor.json; decisions.csv is written there.
        host: address to listen on; the default accepts connections only from this machine.
        port: port to listen on; 0 uses any free port.
    Returns: a dict with keys "url", "decisions" (the file), "findings" and "decided" (their
        numbers), after the review has ended.
    Raises: SetupError if the server's packages are missing, or if listening fails; DataError if
        doctor.json or decisions.csv cannot be used.
    """
    try:
        import starlette  # noqa: F401
        import uvicorn
    except ImportError as error:
        raise SetupError(
            f"--review: the server is not installed ({error}); {install_hint('demo')}, or open "
            f"{Path(folder) / 'doctor.html'}, which needs no server",
            code="setup.missing_package",
        ) from error
    port = resolve_port(host, port)
    folder = Path(folder)
    findings = open_findings(source, folder, decode_size=_PICTURE_PIXELS["large"])
    decisions = DecisionFile(folder / DECISIONS_FILE, findings)
    config = uvicorn.Config(
        build_app(findings, decisions, folder, host=host),
        host=host.strip("[]"),
        port=port,
        log_config=None,
        access_log=False,
        lifespan="off",
        ws="none",
        server_header=False,
        timeout_graceful_shutdown=1,
    )
    config.load()
    config.http_protocol_class = ConnectionLimits(config.http_protocol_class)  # type: ignore[assignment]
    logging.getLogger("uvicorn.error").setLevel(logging.WARNING)
    url = f"http://[{config.host}]:{port}" if ":" in config.host else f"http://{host}:{port}"
    server, stop = uvicorn.Server(config), threading.Event()
    thread = threading.Thread(target=server.run, daemon=True)
    with process_lifecycle.handle_interrupts(lambda _: stop.set()), limit_log_rate():
        thread.start()
        while not server.started:
            if not thread.is_alive():
                raise SetupError(
                    f"--host {host} --port {port}: cannot listen; choose another with --port",
                    code="setup.wrong_address",
                )
            time.sleep(0.02)
        process_lifecycle.resume_garbage_collection()
        logger.info(f"the review is at {url} (press Ctrl-C to stop it)")
        if not is_loopback(host):
            logger.warning(
                f"--host {host}: anyone who can reach this address can see the images, and decide "
                "about the findings"
            )
        stop.wait()
        server.should_exit = True
        thread.join(timeout=5)
    keys = [keys for kind in findings.keys.values() for keys in kind]
    decided = sum(all(key in decisions.by_key for key in each) for each in keys)
    logger.info(f"{decided:,} of {len(keys):,} findings are decided")
    if decisions.by_key:
        logger.info(
            f"train with the decisions: {training_command(findings.source, decisions.file)}"
        )
    return {
        "url": url,
        "decisions": str(decisions.file),
        "findings": len(keys),
        "decided": decided,
    }


class DecisionFile:
    """The decisions about findings, and the file that has them.

    Decisions about other images and classes stay in the file.

    Args:
        file: path of decisions.csv, which need not exist.
        findings: the findings to decide.
    Attributes:
        by_key: the decisions about findings by key.
    Raises: DataError if the file exists and is damaged.
    """

    def __init__(self, file: Path, findings: Findings) -> None:
        self.file = file
        self.by_key: dict[str, Decision] = {}
        self._others: list[Decision] = []
        self._findings = findings
        self._class_keys = {key for keys in findings.keys["class_problems"] for key in keys}
        self._lock = threading.Lock()
        self._stat: tuple[int, ...] | None = None
        self._read_if_changed()

    def update(self, changes: Mapping[str, Any]) -> None:
        """Change decisions and save them all.

        Args:
            changes: by key, a dict with keys "action", "label" and "given"; None takes the
                decision back.
        Raises: ValueError for a change that is not possible, which changes nothing; SetupError if
            the file cannot be written.
        """
        decisions = {
            key: None if change is None else self._parse(key, change)
            for key, change in changes.items()
        }
        with self._lock:
            self._read_if_changed()  # a person may edit the file meanwhile
            for key, decision in decisions.items():
                if decision is None:
                    self.by_key.pop(key, None)
                else:
                    self.by_key[key] = decision
            write_decisions(self.file, [*self._others, *self.by_key.values()])
            self._stat = stat_signature(self.file)

    def to_json(self) -> dict[str, dict[str, Any]]:
        """Return the decisions by key, as `update` takes them."""
        with self._lock:
            self._read_if_changed()
            return {
                key: {
                    "action": one.action,
                    "label": one.label,
                    "given": self._findings.given_label(key)
                    if key in self._findings.images
                    else one.given,
                }
                for key, one in self.by_key.items()
            }

    def _parse(self, key: str, change: Any) -> Decision:
        """Parse a decision about a finding. Raises: ValueError if there is no such decision."""
        if not isinstance(change, dict):
            raise ValueError("a decision is an object with an action")
        action, label, given = (change.get(name) for name in ("action", "label", "given"))
        names = set(self._findings.source.class_names)
        if image := self._findings.images.get(key):
            labels: list[Any] = [label]
            if isinstance(label, str) and self._findings.is_multilabel:
                labels = [] if label == "[]" else label.split("|")
            if action not in ("keep", "drop", "relabel"):
                raise ValueError(f"unknown action {action!r} for an image")
            if action == "relabel" and not names.issuperset(labels):
                raise ValueError(f"unknown label {label!r}")
            return Decision(
                action,
                image["split"],
                image["index"],
                image["path"],
                self._findings.given_label(key),
                label if action == "relabel" else None,
                image.get("digest"),
            )
        if key not in self._class_keys:
            raise ValueError(f"unknown image {key!r}")
        classes = json.loads(key)
        if action == "keep":
            return Decision("keep", given=classes[0], label=classes[1] if classes[1:] else None)
        if action != "merge" or given not in classes or label not in names - {given}:
            raise ValueError(f"{key} cannot be merged in this way")
        return Decision("merge", given=given, label=label)

    def _read_if_changed(self) -> None:
        signature = stat_signature(self.file) if self.file.exists() else None
        if signature == self._stat:
            return
        by_path: dict[str, str | None] = {}
        for key, image in self._findings.images.items():
            by_path[image["path"]] = key if image["path"] not in by_path else None
        decisions = read_decisions(self.file) if signature else []
        self.by_key, self._others, self._stat = {}, [], signature
        for decision in decisions:
            decided = self._key_of(decision, by_path)
            if decided is None or decided in self.by_key:
                self._others.append(decision)
            else:
                self.by_key[decided] = decision

    def _key_of(self, decision: Decision, by_path: Mapping[str, str | None]) -> str | None:
        """Return the key of a decision; None if it is not about a finding."""
        if decision.path is None and decision.index is None:
            classes = [name for name in (decision.given, decision.label) if name is not None]
            keys = (classes, classes[::-1], classes[:1])
            return next((key for key in map(class_key, keys) if key in self._class_keys), None)
        key = by_path.get(decision.path or "")
        if decision.split is not None and decision.index is not None:
            key = f"{decision.split}/{decision.index}"
        image = self._findings.images.get(key or "")
        if image is None or decision.path not in (None, image["path"]):
            return None
        return key


def build_app(
    findings: Findings, decisions: DecisionFile, folder: Path, *, host: str = "127.0.0.1"
) -> Starlette:
    """Build the application that serves the page, findings and pictures, and takes decisions.

    Args:
        findings: the findings to review.
        decisions: where decisions are saved.
        folder: the folder of doctor.json.
        host: the address that the server listens on.
    """
    from starlette.applications import Starlette
    from starlette.concurrency import run_in_threadpool
    from starlette.exceptions import HTTPException
    from starlette.middleware import Middleware
    from starlette.middleware.base import BaseHTTPMiddleware
    from starlette.middleware.trustedhost import TrustedHostMiddleware
    from starlette.responses import HTMLResponse, PlainTextResponse, Response
    from starlette.routing import Route

    def send_page(request: Request) -> Response:
        html = render_review(
            findings,
            folder,
            decisions=decisions.to_json(),
            sources="img-src 'self' data:; connect-src 'self'",
        )
        return HTMLResponse(html, headers={"Cache-Control": "no-store"})

    def send_findings(request: Request) -> Response:
        kind = request.path_params["kind"]
        start, count = (request.query_params.get(name, "0") for name in ("start", "count"))
        if kind not in KINDS or not (start.isdecimal() and count.isdecimal()):
            raise HTTPException(404, "no such findings")
        stop = int(start) + min(int(count), _MAX_FINDINGS)
        body = json.dumps(findings.describe(kind, int(start), stop))
        return Response(body, media_type="application/json")

    def send_picture(request: Request) -> Response:
        size, key = (request.path_params[name] for name in ("size", "key"))
        try:
            split, index = findings.locate(key)
            pixels_HWC = findings.source.splits[split].decode(index)
            body, media_type = encode_thumbnail(pixels_HWC, max_side=_PICTURE_PIXELS[size])
        except (KeyError, FinetuneError) as error:
            raise HTTPException(404, "no such picture, or it cannot be read") from error
        headers = {"Cache-Control": "private, max-age=600"}
        return Response(body, media_type=media_type, headers=headers)

    async def take_decisions(request: Request) -> Response:
        try:
            changes = json.loads(await request.body())
            if not isinstance(changes, dict):
                raise ValueError("expected a JSON object that maps keys to decisions")
            await run_in_threadpool(decisions.update, changes)
        except (ValueError, RecursionError) as error:
            raise HTTPException(422, str(error)) from error
        except FinetuneError as error:
            raise HTTPException(500, str(error)) from error
        return Response(status_code=204)

    async def check_request(request: Request, forward: Any) -> Response:
        refusal = _refuse(request)
        response = await forward(request) if refusal is None else PlainTextResponse(*refusal)
        response.headers.update(_HEADERS)
        return response

    return Starlette(
        routes=[
            Route("/", send_page),
            Route("/api/findings/{kind}", send_findings),
            Route("/api/decisions", take_decisions, methods=["POST"]),
            Route("/picture/{size}/{key:path}", send_picture),
        ],
        middleware=[
            Middleware(TrustedHostMiddleware, allowed_hosts=trusted_hosts(host)),
            Middleware(BaseHTTPMiddleware, dispatch=check_request),
        ],
    )


def _refuse(request: Request) -> tuple[str, int] | None:
    """Return why a request is refused, and the HTTP status; None if it is accepted."""
    if request.url.path != "/" and is_cross_origin(request.headers):
        return "cross-origin requests are not allowed", 403
    if request.method == "POST":
        if request.headers.get("content-type", "").partition(";")[0] != "application/json":
            return "expected JSON", 415
        length = request.headers.get("content-length", "")
        if not length.isdecimal():
            return "a request needs a Content-Length", 411
        if int(length) > _MAX_BODY_BYTES:
            return "too many decisions at once", 413
    return None
