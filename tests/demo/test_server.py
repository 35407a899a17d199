"""Serving the demo: its address, its end, and what a stranger gets from it."""

from __future__ import annotations

import json
import os
import signal
import socket
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from demo_server import ODD_NAMES, Running, demo, small_model
from PIL import Image

from finetune.demo import server as serve_module
from finetune.demo.server import serve, workplace
from finetune.errors import RecipeError, SetupError, WeightsError


@pytest.fixture
def busy() -> Iterator[int]:
    """A port on which something else listens."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        yield int(other.getsockname()[1])


def test_a_busy_port_is_named_with_a_free_one(busy: int) -> None:
    pytest.importorskip("gradio")
    with pytest.raises(SetupError, match=f"--port {busy}: is taken") as caught:
        serve("embedded:vit_nano", port=busy)
    free = int(str(caught.value).rsplit(" ", 1)[1])
    assert busy < free <= busy + 100
    socket.create_server(("127.0.0.1", free)).close()


@pytest.mark.parametrize(
    "host, port, error, words",
    [
        ("127.0.0.1", 70_000, RecipeError, "expected 0 to 65535"),
        ("127.0.0.1", -1, RecipeError, "expected 0 to 65535"),
        ("192.0.2.1", 0, SetupError, "cannot be listened on"),
        ("not a host", 0, SetupError, "cannot be listened on|without a network"),
    ],
)
def test_an_address_that_cannot_be(
    host: str, port: int, error: type[Exception], words: str
) -> None:
    pytest.importorskip("gradio")
    with pytest.raises(error, match=words):
        serve("embedded:vit_nano", host=host, port=port)


def test_without_gradio_nothing_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "gradio", None)
    monkeypatch.setattr(serve_module, "Classifier", None)
    with pytest.raises(SetupError, match=r"pip install 'finetune\[demo\]'"):
        serve("embedded:vit_nano", port=0)


def test_a_model_that_is_not_there(tmp_path: Path) -> None:
    pytest.importorskip("gradio")
    with pytest.raises(WeightsError, match="no such file or folder"):
        serve(str(tmp_path / "nothing"), port=0)


def test_the_workplace_is_private_and_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    for before in (None, "/somewhere"):
        monkeypatch.delenv("GRADIO_TEMP_DIR", raising=False)
        if before:
            monkeypatch.setenv("GRADIO_TEMP_DIR", before)
        with workplace() as place:
            assert os.environ["GRADIO_TEMP_DIR"] == str(place / "uploads")
            assert place.stat().st_mode & 0o077 == 0
            (place / "uploads" / "a").write_text("a")
        assert not place.exists()
        assert os.environ.get("GRADIO_TEMP_DIR") == before


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

    def test_a_link_that_could_not_be_made(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        closed: list[Any] = []
        monkeypatch.setattr(serve_module, "launch", lambda *_, **__: None)
        monkeypatch.setattr(serve_module, "_close", closed.append)
        app = self.App()
        with pytest.raises(SetupError, match="--share: no link could be made"):
            serve_module.show(app, tmp_path, host="127.0.0.1", port=0, share=True)
        assert closed == [app]


def ask(url: str, data: Any = None, **headers: str) -> tuple[int, str]:
    """One request. Returns: status, text."""
    body = None if data is None else data if isinstance(data, bytes) else json.dumps(data).encode()
    kinds = {} if isinstance(data, bytes) else {"Content-Type": "application/json"}
    request = urllib.request.Request(url, data=body, headers={**kinds, **headers})
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            return answer.status, answer.read().decode("utf-8", "replace")
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode("utf-8", "replace")


def send(server: Running, name: str, content: bytes) -> tuple[int, str]:
    """Upload one file as a browser does."""
    head = f'Content-Disposition: form-data; name="files"; filename="{name}"'
    body = b"--x\r\n" + head.encode() + b"\r\n\r\n" + content + b"\r\n--x--\r\n"
    kind = {"Content-Type": "multipart/form-data; boundary=x"}
    return ask(f"{server.url}/gradio_api/upload", body, **kind)


def classify(server: Running, upload: Any) -> tuple[int, str]:
    """The open function, as its clients call it. Returns: the status, and what it answers."""
    status, text = ask(f"{server.url}/gradio_api/call/predict", {"data": [upload]})
    if status != 200:
        return status, text
    return ask(f"{server.url}/gradio_api/call/predict/{json.loads(text)['event_id']}")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with demo(small_model(tmp_path_factory.mktemp("models") / "vit")) as server:
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
    def test_paths_lead_nowhere(self, server: Running, path: str) -> None:
        status, text = ask(server.url + path)
        assert status in (403, 404)
        assert "root:" not in text
        assert len(text) < 200

    def test_own_files_of_the_server_are_not_sent(self, server: Running) -> None:
        status, text = send(server, "a.png", b"x")
        assert status == 200
        (path,) = json.loads(text)
        assert ask(f"{server.url}/gradio_api/file={path}") == (200, "x")
        place = Path(path).parents[2]
        for outside in (place / "examples" / "x", Path(__file__), place / "uploads" / ".."):
            assert ask(f"{server.url}/gradio_api/file={outside}")[0] == 403

    @pytest.mark.parametrize(
        "path", ["/etc/passwd", "../../etc/passwd", "http://127.0.0.1:1/x.png", __file__]
    )
    def test_a_program_cannot_name_a_file_of_its_choice(self, server: Running, path: str) -> None:
        upload = {"path": path, "meta": {"_type": "gradio.FileData"}}
        status, text = classify(server, upload)
        assert status == 403
        assert "root:" not in text
        joined = {"data": [upload], "fn_index": 0, "session_hash": "a"}
        assert ask(f"{server.url}/gradio_api/queue/join", joined)[0] == 403

    def test_a_program_gets_an_answer_or_a_refusal(self, server: Running, tmp_path: Path) -> None:
        Image.new("RGB", (30, 20), (200, 0, 0)).save(tmp_path / "a.png")
        for content, words in (
            ((tmp_path / "a.png").read_bytes(), '"confidence"'),
            (b"no picture", "not an image"),
        ):
            (path,) = json.loads(send(server, "a.png", content)[1])
            status, text = classify(server, {"path": path, "meta": {"_type": "gradio.FileData"}})
            assert status == 200
            assert words in text
            assert "Traceback" not in text
            if "confidence" in words:
                labels = [one["label"] for one in json.loads(text.split("data: ", 1)[1])[0]]
                assert sorted(labels) == sorted(ODD_NAMES)

    def test_a_large_upload_is_refused(self, server: Running) -> None:
        status, text = send(server, "a.png", os.urandom(10 * 2**20 + 2**17))
        assert status == 413
        assert "more than 10 MB" in text

    def test_a_name_that_is_not_ours_is_refused(self, server: Running) -> None:
        assert ask(server.url, Host="evil.example")[0] == 421

    def test_a_stranger_s_page_may_not_read_answers(self, server: Running) -> None:
        request = urllib.request.Request(
            f"{server.url}/config", headers={"Origin": "http://evil.example"}
        )
        with urllib.request.urlopen(request, timeout=30) as answer:
            assert answer.headers.get("Access-Control-Allow-Origin") is None

    def test_it_asked_nobody_else_and_ends_with_a_line(self, server: Running) -> None:
        """The last one: it ends the server."""
        assert ask(server.url)[0] == 200
        assert server.interrupt(signal.SIGINT) == 0
        written = "".join(server.lines)
        assert written.endswith("finetune: the demo has ended\n")
        assert "OUTSIDE" not in written
        assert "Traceback" not in written
