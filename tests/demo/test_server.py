"""Serving the demo: its address, its end, and what a stranger gets from it."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

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


@pytest.fixture
def busy() -> Iterator[int]:
    """A port on which something else listens."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        yield int(other.getsockname()[1])


def test_a_busy_port_is_named_with_a_free_one(busy: int) -> None:
    pytest.importorskip("gradio")
    with refused("setup.in_use", f"--port {busy}") as caught:
        serve("embedded:vit_nano", port=busy)
    free = int(str(caught.value).rsplit(" ", 1)[1])
    assert busy < free <= busy + 100
    socket.create_server(("127.0.0.1", free)).close()


@pytest.mark.parametrize("host", ["192.0.2.1", "not a host"])
def test_an_address_that_cannot_be(host: str) -> None:
    pytest.importorskip("gradio")
    with refused("setup.wrong_address", host):
        serve("embedded:vit_nano", host=host, port=0)


def test_without_gradio_nothing_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gradio", None)
    monkeypatch.setattr(serve_module, "Classifier", None)
    with refused("setup.missing_package", "finetune-vision[demo]"):
        serve("embedded:vit_nano", port=0)


def test_a_model_that_is_not_there(tmp_path: Path) -> None:
    pytest.importorskip("gradio")
    with refused("weights.not_found", tmp_path / "nothing"):
        serve(str(tmp_path / "nothing"), port=0)


@pytest.mark.parametrize(
    "host, local", [("127.0.0.1", True), ("localhost", True), ("::1", True), ("0.0.0.0", False)]
)
def test_which_addresses_are_this_machine_s(host: str, local: bool) -> None:
    assert serve_module._is_loopback(host) is local


class TestLink:
    """`--share`, without a network."""

    class App:
        local_url = "http://127.0.0.1:1/"
        share_url: str | None = None

        def launch(self, **_: Any) -> None:
            """Begin nothing."""

    def test_a_link_that_could_not_be_made(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        closed: list[Any] = []
        monkeypatch.setattr(serve_module, "_build_middleware", lambda *_, **__: None)
        monkeypatch.setattr(serve_module, "_close_server", closed.append)
        app = self.App()
        with refused("setup.unreachable", "--share"):
            serve_module.run_server(app, tmp_path, host="127.0.0.1", port=0, share=True)
        assert closed == [app]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DemoServer]:
    with run_demo(save_small_model(tmp_path_factory.mktemp("models") / "vit")) as server:
        yield server


@pytest.mark.slow
class TestStrangers:
    """Requests that no page of ours makes, to the real server."""

    @pytest.mark.parametrize(
        "path",
        [
            "/gradio_api/file=/etc/passwd",
            "/file=/etc/passwd",
            "/file=../../etc/passwd",
            "/gradio_api/file=../../../../etc/passwd",
            "/gradio_api/file=%2Fetc%2Fpasswd",
            "/gradio_api/file=..%2f..%2f..%2fetc/passwd",
            "/gradio_api/file=%252Fetc%252Fpasswd",
            "/static/../../../../../../etc/passwd",
            "/static/%2e%2e/%2e%2e/%2e%2e/%2e%2e/%2e%2e/%2e%2e/etc/passwd",
            "/assets/..%2f..%2f..%2f..%2f..%2f..%2f..%2fetc/passwd",
            "/gradio_api/proxy=http://127.0.0.1:1/",
            "/gradio_api/file=http://127.0.0.1:1/",
            "/monitoring",
            "/openapi.json",
        ],
    )
    def test_paths_lead_nowhere(self, server: DemoServer, path: str) -> None:
        status, text = http_request(server.url + path)
        assert status in (403, 404)
        assert "root:" not in text
        assert len(text) < 200

    def test_own_files_of_the_server_are_not_sent(self, server: DemoServer) -> None:
        status, text = upload(server, "a.png", b"x")
        assert status == 200
        (path,) = json.loads(text)
        assert http_request(f"{server.url}/gradio_api/file={path}") == (200, "x")
        place = Path(path).parents[2]
        for outside in (place / "examples" / "x", Path(__file__), place / "uploads" / ".."):
            assert http_request(f"{server.url}/gradio_api/file={outside}")[0] == 403

    @pytest.mark.parametrize(
        "path", ["/etc/passwd", "../../etc/passwd", "http://127.0.0.1:1/x.png", __file__]
    )
    def test_a_program_cannot_name_a_file_of_its_choice(
        self, server: DemoServer, path: str
    ) -> None:
        picture = {"path": path, "meta": {"_type": "gradio.FileData"}}
        status, text = call_predict(server, picture)
        assert status == 403
        assert "root:" not in text
        joined = {"data": [picture], "fn_index": 0, "session_hash": "a"}
        assert http_request(f"{server.url}/gradio_api/queue/join", joined)[0] == 403

    def test_a_program_gets_an_answer_or_a_refusal(
        self, server: DemoServer, tmp_path: Path
    ) -> None:
        Image.new("RGB", (30, 20), (200, 0, 0)).save(tmp_path / "a.png")
        for content, words in (
            ((tmp_path / "a.png").read_bytes(), '"confidence"'),
            (b"no picture", "not an image"),
        ):
            (path,) = json.loads(upload(server, "a.png", content)[1])
            status, text = call_predict(
                server, {"path": path, "meta": {"_type": "gradio.FileData"}}
            )
            assert status == 200
            assert words in text
            assert "Traceback" not in text
            if "confidence" in words:
                labels = [one["label"] for one in json.loads(text.split("data: ", 1)[1])[0]]
                assert sorted(labels) == sorted(ODD_NAMES)

    def test_a_large_upload_is_refused(self, server: DemoServer) -> None:
        status, text = upload(server, "a.png", os.urandom(10 * 2**20 + 2**17))
        assert status == 413
        assert "more than 10 MB" in text

    def test_it_asked_nobody_else_and_ends_with_a_line(self, server: DemoServer) -> None:
        """The last one: it ends the server."""
        assert http_request(server.url)[0] == 200
        assert server.interrupt(signal.SIGINT) == 0
        written = "".join(server.lines)
        assert written.endswith("finetune: the demo has ended\n")
        assert "OUTSIDE" not in written
        assert "Traceback" not in written
