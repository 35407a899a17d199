"""Attacks on a running demo: each must fail, and must succeed without the protection."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from browsers import browser
from demo_server import DemoServer, call_predict, http_request, run_demo, save_small_model, upload
from PIL import Image

pytestmark = pytest.mark.slow

CROSS_ORIGIN = {"Origin": "http://evil.example", "Sec_Fetch_Site": "cross-site"}
MEGABYTE = 2**20
# Code that removes one protection in the process of the server.
DISABLE_PROTECTION = {
    "origin": "from finetune.web import access; access.is_cross_origin = lambda _: False",
    "host": "from finetune.demo import server as s; s.trusted_hosts = lambda host: ['*']",
    "limit": "from finetune.demo import server as s; s._MAX_TOTAL_UPLOAD_MB = 10**6",
    "files": (
        "from finetune.demo.middleware import DemoMiddleware; "
        "DemoMiddleware._check_file = lambda *_: None"
    ),
    "frames": "from finetune.demo import middleware as m; m._NO_FRAMES = b'base-uri *'",
    "cleaning": (
        "from finetune.demo import uploads as u; u._remove_abandoned_folders = lambda: None"
    ),
}
PROTECTED = [
    pytest.param(True, id="protected"),
    pytest.param(False, id="unprotected"),
]
Fault = Callable[..., None]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_small_model(tmp_path_factory.mktemp("models") / "vit")


@pytest.fixture(scope="module")
def protected_demo(model: str) -> Iterator[DemoServer]:
    """A demo with all protections; no attack may cause a traceback."""
    with run_demo(model) as server:
        yield server
    assert "Traceback" not in "".join(server.lines)


@contextlib.contextmanager
def demo_under_attack(
    request: pytest.FixtureRequest, protection: str, protected: bool
) -> Iterator[DemoServer]:
    """Yield the shared demo, or a separate demo without one protection."""
    if protected:
        yield request.getfixturevalue("protected_demo")
        return
    with run_demo(
        request.getfixturevalue("model"), setup_code=DISABLE_PROTECTION[protection]
    ) as server:
        yield server


@contextlib.contextmanager
def own_demo(model: str, folder: Path, protection: str, protected: bool) -> Iterator[DemoServer]:
    """Start a demo with its temporary folder in `folder`, with or without a protection."""
    setup_code = "" if protected else DISABLE_PROTECTION[protection]
    with run_demo(model, setup_code=setup_code, TMPDIR=str(folder)) as server:
        yield server


def upload_bytes(folder: Path) -> int:
    """Return the size of all uploads on the disk, including incomplete ones."""
    total = 0
    for folder_of_demo in folder.glob("finetune-demo-*/uploads"):
        for top, _, names in os.walk(folder_of_demo):  # os.walk ignores folders that disappear
            for name in names:
                with contextlib.suppress(FileNotFoundError):
                    total += os.stat(os.path.join(top, name)).st_size
    return total


@pytest.mark.parametrize("protected", PROTECTED)
def test_cross_origin_requests_are_refused(
    request: pytest.FixtureRequest, protected: bool, fault: Fault
) -> None:
    with demo_under_attack(request, "origin", protected) as server:
        num_uploads = 40
        responses = [
            upload(server, f"{n}.png", b"x" * 1000, **CROSS_ORIGIN) for n in range(num_uploads)
        ]
        refused_texts = [text for status, text in responses if status == 403]
        call_status = call_predict(server, None, **CROSS_ORIGIN)[0]
        same_origin = {"Origin": server.url, "Sec_Fetch_Site": "same-origin"}
        assert upload(server, "a.png", b"x", **same_origin)[0] == 200
        assert upload(server, "a.png", b"x")[0] == 200  # a client that is no browser
    if not protected:
        assert (len(refused_texts), call_status) == (0, 200)
        return
    assert (len(refused_texts), call_status) == (num_uploads, 403)
    assert {len(text.splitlines()) for text in refused_texts} == {1}
    fault(
        "demo: uploads and calls from a page of another origin",
        "403, nothing stored",
        f"{num_uploads}",
    )


@pytest.mark.parametrize("protected", PROTECTED)
def test_dns_rebinding_is_refused(
    request: pytest.FixtureRequest, protected: bool, fault: Fault
) -> None:
    with demo_under_attack(request, "host", protected) as server:
        port = server.url.rpartition(":")[2]
        host = f"evil.example:{port}"
        # for the browser, the page and its target then have the same origin
        headers = {"Host": host, "Origin": f"http://{host}", "Sec_Fetch_Site": "same-origin"}
        statuses = {
            http_request(server.url, Host=host)[0],
            upload(server, "a.png", b"x", **headers)[0],
        }
    assert statuses == ({400} if protected else {200})
    if protected:
        fault("demo: DNS rebinding, reading and sending", "400")


@pytest.mark.parametrize("protected", [True, False])
def test_uploads_are_limited_in_total(
    model: str, tmp_path: Path, protected: bool, fault: Fault
) -> None:
    """Four parallel connections; each upload has the largest size."""
    num_uploads, content = 40, os.urandom(10 * MEGABYTE)
    max_bytes = 0
    with own_demo(model, tmp_path, "limit", protected) as server, ThreadPoolExecutor(4) as pool:

        def send(n: int) -> int:
            return upload(server, "a.png", n.to_bytes(8, "big") + content[8:])[0]

        futures = [pool.submit(send, n) for n in range(num_uploads)]
        while not all(future.done() for future in futures):
            max_bytes = max(max_bytes, upload_bytes(tmp_path))
            time.sleep(0.05)
        assert [future.result() for future in futures] == [200] * num_uploads
        max_bytes = max(max_bytes, upload_bytes(tmp_path))
    assert upload_bytes(tmp_path) == 0  # the demo has ended
    if not protected:
        assert max_bytes == num_uploads * len(content)
        return
    assert max_bytes <= (200 + 3 * 10) * MEGABYTE  # three more may be on their way
    fault(
        f"demo: {num_uploads} uploads of 10 MB in parallel",
        "new ones replace the oldest: 200 MB on the disk, and those on their way",
        f"{max_bytes / MEGABYTE:.0f} MB at most",
    )


@pytest.mark.parametrize("protected", [True, False])
def test_the_next_start_removes_uploads_of_a_killed_demo(
    model: str, tmp_path: Path, protected: bool, fault: Fault
) -> None:
    with own_demo(model, tmp_path, "cleaning", protected) as server:
        assert upload(server, "a.png", b"x" * MEGABYTE)[0] == 200
        server.interrupt(signal.SIGKILL)
    bytes_after_kill = upload_bytes(tmp_path)
    assert bytes_after_kill == MEGABYTE
    with own_demo(model, tmp_path, "cleaning", protected):
        assert upload_bytes(tmp_path) == (0 if protected else bytes_after_kill)
        assert len(list(tmp_path.glob("finetune-demo-*"))) == (1 if protected else 2)
    if protected:
        assert not list(tmp_path.glob("finetune-demo-*"))
        fault("demo: SIGKILL with uploads on the disk", "the next start removes them")


@pytest.mark.parametrize("protected", PROTECTED)
def test_other_files_and_addresses_are_not_read(
    request: pytest.FixtureRequest, tmp_path: Path, protected: bool, fault: Fault
) -> None:
    """Gradio would classify a local file, and download an address to classify it."""
    Image.new("RGB", (8, 8)).save(tmp_path / "private.png")
    address = "http://images.example/a.png"
    with demo_under_attack(request, "files", protected) as server:
        results = [call_predict(server, {"path": str(tmp_path / "private.png")})]
        results.append(http_request(f"{server.url}/gradio_api/file={address}"))
        deadline = time.monotonic() + (1 if protected else 30)
        is_fetched = False
        while not is_fetched and time.monotonic() < deadline:  # another thread reads the lines
            is_fetched = f"OUTSIDE {address.split('/')[2]}\n" in server.lines
            time.sleep(0.05)
    if not protected:
        assert is_fetched
        return
    assert [status for status, _ in results] == [403, 403]
    assert not is_fetched
    fault("demo: another file of this machine, a URL to fetch", "403")


@pytest.mark.parametrize("protected", [True, False])
def test_the_page_cannot_be_framed(
    request: pytest.FixtureRequest, protected: bool, fault: Fault
) -> None:
    """The other page uses another name of this machine, which is another origin."""
    with demo_under_attack(request, "frames", protected) as server, browser() as chromium:
        tab = chromium.new_page()
        other_origin = server.url.replace("127.0.0.1", "localhost")
        tab.goto(f"{other_origin}/robots.txt")
        tab.evaluate(
            "address => { document.body.innerHTML = `<iframe src='${address}'></iframe>`; }",
            server.url,
        )
        tab.wait_for_timeout(3000)
        frames_with_content = [
            frame for frame in tab.frames[1:] if frame.query_selector("#ft-image")
        ]
        tab.close()
    assert bool(frames_with_content) is not protected
    if protected:
        fault("demo: a frame on another page", "the browser shows nothing of it")
