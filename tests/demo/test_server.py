"""Serving the demo: address, shutdown, and requests from outside the page."""

from __future__ import annotations

import contextlib
import json
import select
import signal
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar
from urllib.parse import urlsplit

import pytest
from demo_server import (
    ODD_NAMES,
    DemoServer,
    call_predict,
    http_request,
    run_demo,
    save_small_model,
    upload,
)
from PIL import Image
from refusals import refused

from finetune.demo import server as serve_module
from finetune.demo.server import serve
from finetune.errors import Interrupted
from finetune.web.connections import MAX_CONNECTIONS


@pytest.fixture
def busy_port() -> Iterator[int]:
    """A port that another socket uses."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield int(listener.getsockname()[1])


def test_busy_port_suggests_a_free_one(busy_port: int) -> None:
    pytest.importorskip("gradio")
    with refused("setup.in_use", f"--port {busy_port}") as caught:
        serve("embedded:vit_nano", port=busy_port)
    free = int(str(caught.value).rsplit(" ", 1)[1])
    assert busy_port < free <= busy_port + 100
    socket.create_server(("127.0.0.1", free)).close()


@pytest.mark.parametrize("host", ["192.0.2.1", "not a host"])
def test_invalid_address(host: str) -> None:
    pytest.importorskip("gradio")
    with refused("setup.wrong_address", host):
        serve("embedded:vit_nano", host=host, port=0)


def test_missing_gradio_fails_before_loading_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gradio", None)
    monkeypatch.setattr(serve_module, "Classifier", None)
    with refused("setup.missing_package", "finetune-vision[demo]"):
        serve("embedded:vit_nano", port=0)


def test_missing_model(tmp_path: Path) -> None:
    pytest.importorskip("gradio")
    with refused("weights.not_found", tmp_path / "nothing"):
        serve(str(tmp_path / "nothing"), port=0)


class UnsharedApp:
    """Replaces the page, when Gradio's server creates no public link."""

    local_url = "http://127.0.0.1:1/"
    share_url: str | None = None
    fns: ClassVar[dict[int, Any]] = {}
    server = SimpleNamespace(config=SimpleNamespace())
    is_closed = False

    def launch(self, **_: Any) -> None:
        """Start nothing."""

    def close(self, **_: Any) -> None:
        self.is_closed = True


def test_failed_share_link_closes_the_server(tmp_path: Path) -> None:
    pytest.importorskip("gradio")
    app = UnsharedApp()
    with refused("setup.unreachable", "--share"):
        serve_module.run_server(app, tmp_path, host="127.0.0.1", port=0, share=True)
    assert app.is_closed


class LocalApp(UnsharedApp):
    """A page that sends SIGTERM to this process as soon as it is served."""

    def launch(self, **_: Any) -> None:
        signal.raise_signal(signal.SIGTERM)


def test_demo_that_is_stopped_raises_interrupted(tmp_path: Path) -> None:
    pytest.importorskip("gradio")
    app = LocalApp()
    app.server.config.http_protocol_class = object
    with pytest.raises(Interrupted) as stopped:
        serve_module.run_server(app, tmp_path, host="127.0.0.1", port=0)
    assert stopped.value.exit_code == 143
    assert app.is_closed


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DemoServer]:
    with run_demo(save_small_model(tmp_path_factory.mktemp("models") / "vit")) as server:
        yield server


@pytest.mark.slow
class TestRequests:
    """Requests to the real server; for refusals, see test_middleware.py and tests/faults."""

    @pytest.mark.parametrize(
        "path",
        [
            "/gradio_api/file=%2Fetc%2Fpasswd",
            "/gradio_api/file=..%2f..%2f..%2fetc/passwd",
            "/gradio_api/file=%252Fetc%252Fpasswd",
            "/static/../../../../../../etc/passwd",
            "/static/%2e%2e/%2e%2e/%2e%2e/%2e%2e/%2e%2e/%2e%2e/etc/passwd",
            "/assets/..%2f..%2f..%2f..%2f..%2f..%2f..%2fetc/passwd",
            "/monitoring",
            "/openapi.json",
            "/gradio_api/runs",
            "/gradio_api/vibe-code",
        ],
    )
    def test_other_paths_are_refused(self, server: DemoServer, path: str) -> None:
        status, text = http_request(server.url + path)
        assert status in (403, 404)
        assert "root:" not in text

    def test_only_uploaded_files_are_served(self, server: DemoServer) -> None:
        (path,) = json.loads(upload(server, "a.png", b"x")[1])
        assert http_request(f"{server.url}/gradio_api/file={path}") == (200, "x")
        workspace = Path(path).parents[2]
        for outside in (workspace / "lock", Path(__file__), workspace / "uploads" / ".."):
            assert http_request(f"{server.url}/gradio_api/file={outside}")[0] == 403

    def test_api_returns_a_prediction_or_an_error(self, server: DemoServer, tmp_path: Path) -> None:
        Image.new("RGB", (30, 20), (200, 0, 0)).save(tmp_path / "a.png")
        for content, words in (
            ((tmp_path / "a.png").read_bytes(), '"confidence"'),
            (b"no image", "not an image"),
        ):
            (path,) = json.loads(upload(server, "a.png", content)[1])
            status, text = call_predict(
                server, {"path": path, "meta": {"_type": "gradio.FileData"}}
            )
            assert status == 200
            assert words in text
            assert "Traceback" not in text
            if "confidence" in words:
                labels = [
                    prediction["label"] for prediction in json.loads(text.split("data: ", 1)[1])[0]
                ]
                assert sorted(labels) == sorted(ODD_NAMES)

    @pytest.mark.parametrize("fn_index", [0, 99])
    def test_malformed_calls_are_answered(self, server: DemoServer, fn_index: int) -> None:
        """The last test checks that they have logged no traceback."""
        body = {"fn_index": fn_index, "session_hash": "a"}
        for data in ([], [5], [None]):
            status, _ = http_request(f"{server.url}/gradio_api/queue/join", {**body, "data": data})
            assert status == (422 if data == [5] else 200 if fn_index == 0 else 400)
        status, text = http_request(f"{server.url}/gradio_api/call/predict", {"data": []})
        event = json.loads(text)["event_id"]
        assert "no image" in http_request(f"{server.url}/gradio_api/call/predict/{event}")[1]

    def test_half_requests_do_not_block_the_server(self, server: DemoServer) -> None:
        address = urlsplit(server.url)
        with contextlib.ExitStack() as stack:
            clients = []
            for _ in range(MAX_CONNECTIONS + 100):
                client = socket.create_connection((address.hostname, address.port))
                clients.append(stack.enter_context(client))
                client.send(b"GET / HTTP/1.1\r\nHost: ")
            started = time.monotonic()
            assert http_request(server.url)[0] == 200
            assert time.monotonic() - started < 20
            time.sleep(1.5)
            readable, _, _ = select.select(clients, [], [], 0)
            assert 100 <= len(readable) < len(clients), "closed by the server"

    def test_makes_no_outside_request_and_cleans_up_at_the_end(self, server: DemoServer) -> None:
        """Runs last, because it stops the server."""
        (path,) = json.loads(upload(server, "a.png", b"x")[1])
        assert http_request(server.url)[0] == 200
        assert server.interrupt(signal.SIGHUP) == 129
        assert not Path(path).parents[2].exists()
        log = "".join(server.lines)
        assert log.endswith("\nthe demo has ended\n")
        assert "OUTSIDE" not in log
        assert "Traceback" not in log
