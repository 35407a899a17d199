"""`finetune data doctor SOURCE --review`: serve the review page, and save each decision at once.

The page asks for findings and pictures as they are looked at. Every change is written to
decisions.csv before it is confirmed, so a killed review continues with the next start.
"""

from __future__ import annotations

import functools
import json
import threading
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from finetune import process_lifecycle
from finetune.data.decisions import Decision, label_names, read_decisions, write_decisions
from finetune.doctor.findings import KINDS, Findings, class_key, image_key, open_findings
from finetune.doctor.review_page import DECISIONS_FILE, render_review, training_command
from finetune.errors import FinetuneError, SetupError, install_hint
from finetune.files import stat_signature
from finetune.log import logger
from finetune.report.thumbnails import encode_thumbnail
from finetune.web.access import is_cross_origin, is_loopback, listen, refuse_post, trusted_hosts
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
    source: str, *, folder: str | Path, host: str = "127.0.0.1", port: int = 7861
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
        from uvicorn.protocols.http.auto import AutoHTTPProtocol
    except ImportError as error:
        raise SetupError(
            f"--review: the server is not installed ({error}); {install_hint('demo')}, or open "
            f"{Path(folder) / 'doctor.html'}, which needs no server",
            code="setup.missing_package",
        ) from error
    folder = Path(folder)
    with listen(host, port) as listener:
        findings = open_findings(source, folder, decode_size=_PICTURE_PIXELS["large"])
        decisions = DecisionFile(folder / DECISIONS_FILE, findings)
        config = uvicorn.Config(
            build_app(decisions, host=host),
            http=ConnectionLimits(AutoHTTPProtocol),  # type: ignore[arg-type]
            ws="none",
            log_config=None,
            log_level="warning",
            server_header=False,
            timeout_graceful_shutdown=1,
        )
        server = uvicorn.Server(config)
        address = host.strip("[]")
        name = f"[{address}]" if ":" in address else address
        url = f"http://{name}:{listener.getsockname()[1]}"
        if not is_loopback(host):
            logger.warning(
                f"--host {host}: anyone who can reach this address can see the images, and decide "
                "about the findings"
            )
        process_lifecycle.resume_garbage_collection()
        end = functools.partial(setattr, server, "should_exit")
        with process_lifecycle.handle_interrupts(end), limit_log_rate():
            logger.info(f"the review is at {url} (press Ctrl-C to stop it)")
            server.run(sockets=[listener])
    keys = [keys for kind in findings.keys.values() for keys in kind]
    decided = sum(all(key in decisions.by_key for key in each) for each in keys)
    logger.info(f"{decided:,} of {len(keys):,} findings are decided")
    if decisions.by_key:
        command = training_command(findings.source, decisions.file)
        logger.info(f"train with the decisions: {command}")
    return {"url": url, "decisions": str(decisions.file), "findings": len(keys), "decided": decided}


class DecisionFile:
    """The decisions about findings, by key, and decisions.csv, which need not exist yet.

    Decisions about other images and classes stay in the file.

    Raises: DataError if the file exists and is damaged.
    """

    def __init__(self, file: Path, findings: Findings) -> None:
        self.file = file
        self.findings = findings
        self.by_key: dict[str, Decision] = {}
        self._others: list[Decision] = []
        self._class_keys = {key for keys in findings.keys["class_problems"] for key in keys}
        counts = Counter(image["path"] for image in findings.images.values())
        keys = ((image["path"], key) for key, image in findings.images.items())
        self._key_of_path = {path: key for path, key in keys if counts[path] == 1}
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
        parsed = {key: self._parse(key, change) for key, change in changes.items()}
        with self._lock:
            self._read_if_changed()  # a person may edit the file meanwhile
            changed = {**self.by_key, **parsed}
            self.by_key = {key: one for key, one in changed.items() if one is not None}
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
                    "given": one.given or self.findings.given_label(key),
                }
                for key, one in self.by_key.items()
            }

    def _parse(self, key: str, change: Any) -> Decision | None:
        if change is None:
            return None
        if not isinstance(change, dict):
            raise ValueError("a decision is an object with an action")
        action, label, given = (change.get(name) for name in ("action", "label", "given"))
        source = self.findings.source
        if image := self.findings.images.get(key):
            place, digest = (image["split"], image["index"], image["path"]), image.get("digest")
            labels = label_names(str(label), source.splits[image["split"]])
            if action in ("keep", "drop"):
                return Decision(action, *place, self.findings.given_label(key), digest=digest)
            if action == "relabel" and set(labels) <= set(source.class_names):
                return Decision(action, *place, self.findings.given_label(key), label, digest)
        elif key in self._class_keys:
            first, *others = json.loads(key)
            if action == "keep":
                return Decision("keep", given=first, label=next(iter(others), None))
            names = {*source.class_names} - {given}
            if action == "merge" and given in (first, *others) and label in names:
                return Decision("merge", given=given, label=label)
        raise ValueError(f"{key}: no finding, or it cannot be decided in this way: {change}")

    def _read_if_changed(self) -> None:
        signature = stat_signature(self.file) if self.file.exists() else None
        if signature == self._stat:
            return
        decisions = read_decisions(self.file) if signature else []
        self.by_key, self._others, self._stat = {}, [], signature
        for decision in decisions:
            key = self._key_of(decision)
            if key is None or key in self.by_key:
                self._others.append(decision)
            else:
                self.by_key[key] = decision

    def _key_of(self, decision: Decision) -> str | None:
        """Return the key of a decision; None if it is not about a finding."""
        if decision.path is None and decision.index is None:
            classes = [name for name in (decision.given, decision.label) if name is not None]
            keys = map(class_key, (classes, classes[::-1], classes[:1]))
            return next((key for key in keys if key in self._class_keys), None)
        key = self._key_of_path.get(decision.path or "")
        if decision.split is not None and decision.index is not None:
            key = image_key(decision.split, decision.index)
        image = self.findings.images.get(key or "")
        return key if image and decision.path in (None, image["path"]) else None


def build_app(decisions: DecisionFile, *, host: str = "127.0.0.1") -> Starlette:
    """Build the application that serves the page, findings and pictures, and takes decisions."""
    from starlette.applications import Starlette
    from starlette.concurrency import run_in_threadpool
    from starlette.exceptions import HTTPException
    from starlette.middleware import Middleware
    from starlette.middleware.base import BaseHTTPMiddleware
    from starlette.middleware.trustedhost import TrustedHostMiddleware
    from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response
    from starlette.routing import Route

    findings = decisions.findings

    def send_page(request: Request) -> Response:
        html = render_review(findings, decisions.file.parent, decisions=decisions.to_json())
        return HTMLResponse(html, headers={"Cache-Control": "no-store"})

    def send_findings(request: Request) -> Response:
        kind = request.path_params["kind"]
        start, count = (request.query_params.get(name, "0") for name in ("start", "count"))
        if kind not in KINDS or not (start.isdecimal() and count.isdecimal()):
            raise HTTPException(404, "no such findings")
        stop = int(start) + min(int(count), _MAX_FINDINGS)
        return JSONResponse(findings.describe(kind, int(start), stop))

    def send_picture(request: Request) -> Response:
        size, key = (request.path_params[name] for name in ("size", "key"))
        try:
            split, index = findings.locate(key)
            side = _PICTURE_PIXELS[size]
            body, media_type = encode_thumbnail(split.decode(index), max_side=side)
        except (KeyError, FinetuneError) as error:
            raise HTTPException(404, "no such picture, or it cannot be read") from error
        headers = {"Cache-Control": "private, max-age=600"}
        return Response(body, media_type=media_type, headers=headers)

    async def take_decisions(request: Request) -> Response:
        try:
            changes = await request.json()
            if not isinstance(changes, dict):
                raise ValueError("expected a JSON object that maps keys to decisions")
            await run_in_threadpool(decisions.update, changes)
        except (ValueError, RecursionError) as error:
            raise HTTPException(422, str(error)) from error
        except FinetuneError as error:
            raise HTTPException(500, str(error)) from error
        return Response(status_code=204)

    async def check_request(request: Request, forward: Any) -> Response:
        refusal = None
        if request.method == "POST":
            refusal = refuse_post(request.headers, max_bytes=_MAX_BODY_BYTES)
        elif request.url.path != "/" and is_cross_origin(request.headers):
            refusal = 403, "cross-origin requests are not allowed"
        response = PlainTextResponse(refusal[1], refusal[0]) if refusal else await forward(request)
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
