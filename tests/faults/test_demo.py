"""Attacks on a demo that runs: each is made on ours, and on one without that protection."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from demo_server import (
    DemoServer,
    browser,
    call_predict,
    http_request,
    run_demo,
    save_small_model,
    upload,
)

pytestmark = pytest.mark.slow

EVIL = {"Origin": "http://evil.example", "Sec_Fetch_Site": "cross-site"}
MEGABYTE = 2**20
# Each takes one protection away, in the process of the server.
WITHOUT = {
    "origin": "from finetune.demo import middleware as m; m.is_cross_origin = lambda _: False",
    "host": "from finetune.demo import server as s; s._is_loopback = lambda host: False",
    "limits": "from finetune.demo import server as s; s._TOTAL_MB = s._UPLOADS_PER_MINUTE = 10**6",
    "types": "from finetune.demo import middleware as m; m.Gate._checked = lambda *a: a[2]",
    "frames": "from finetune.demo import middleware as m; m._PAGE_POLICY = b'base-uri *'",
    "cleaning": "from finetune.demo import uploads as w; w._remove_dead = lambda parent: None",
}
PROTECTED = [
    pytest.param(True, id="ours"),
    pytest.param(False, id="unprotected", marks=pytest.mark.faults),
]
Fault = Callable[..., None]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_small_model(tmp_path_factory.mktemp("models") / "vit")


@pytest.fixture(scope="module")
def ours(model: str) -> Iterator[DemoServer]:
    """A demo with all its protections; nothing that it is sent may leave a traceback."""
    with run_demo(model) as server:
        yield server
    assert "Traceback" not in "".join(server.lines)


@contextlib.contextmanager
def attacked(
    request: pytest.FixtureRequest, protection: str, protected: bool
) -> Iterator[DemoServer]:
    """The demo of all tests, or one of its own without a protection."""
    if protected:
        yield request.getfixturevalue("ours")
        return
    with run_demo(request.getfixturevalue("model"), before=WITHOUT[protection]) as server:
        yield server


@contextlib.contextmanager
def alone(model: str, folder: Path, protection: str, protected: bool) -> Iterator[DemoServer]:
    """A demo of its own whose temporary folder is in `folder`, with or without a protection."""
    before = "" if protected else WITHOUT[protection]
    with run_demo(model, before=before, TMPDIR=str(folder)) as server:
        yield server


def kept_bytes(folder: Path) -> int:
    """Bytes of all uploads on the disk, also those that are still arriving."""
    total = 0
    for place in folder.glob("finetune-demo-*/uploads"):
        for top, _, names in os.walk(place):  # which minds nothing that goes meanwhile
            for name in names:
                with contextlib.suppress(FileNotFoundError):
                    total += os.stat(os.path.join(top, name)).st_size
    return total


@pytest.mark.parametrize("protected", PROTECTED)
def test_pages_of_other_origins(
    request: pytest.FixtureRequest, protected: bool, fault: Fault
) -> None:
    with attacked(request, "origin", protected) as server:
        number = 40
        answers = [upload(server, f"{n}.png", b"x" * 1000, **EVIL) for n in range(number)]
        refused = [text for status, text in answers if status == 403]
        call = call_predict(server, None, **EVIL)[0]
        own = {"Origin": server.url, "Sec_Fetch_Site": "same-origin"}
        assert upload(server, "a.png", b"x", **own)[0] == 200
        assert upload(server, "a.png", b"x")[0] == 200  # a program
    if not protected:
        assert (len(refused), call) == (0, 200)
        return
    assert (len(refused), call) == (number, 403)
    assert {len(text.splitlines()) for text in refused} == {1}
    fault("demo: uploads and calls from a page of another origin", "403, nothing kept", f"{number}")


@pytest.mark.parametrize("protected", PROTECTED)
def test_a_name_pointed_at_this_machine(
    request: pytest.FixtureRequest, protected: bool, fault: Fault
) -> None:
    with attacked(request, "host", protected) as server:
        port = server.url.rpartition(":")[2]
        name = f"evil.example:{port}"
        # to the browser, the page and its target are then one origin
        headers = {"Host": name, "Origin": f"http://{name}", "Sec_Fetch_Site": "same-origin"}
        statuses = {
            http_request(server.url, Host=name)[0],
            upload(server, "a.png", b"x", **headers)[0],
        }
    assert statuses == ({421} if protected else {200})
    if protected:
        fault("demo: DNS rebinding, reading and sending", "421")


@pytest.mark.faults
@pytest.mark.parametrize("protected", [True, False])
def test_a_flood_of_uploads(model: str, tmp_path: Path, protected: bool, fault: Fault) -> None:
    """Four connections at once, each upload of the largest size."""
    number, content = 72, os.urandom(10 * MEGABYTE)
    most, statuses = 0, []
    with alone(model, tmp_path, "limits", protected) as server, ThreadPoolExecutor(4) as pool:

        def send(n: int) -> int:
            return upload(server, "a.png", n.to_bytes(8, "big") + content[8:])[0]

        sent = [pool.submit(send, n) for n in range(number)]
        while not all(one.done() for one in sent):
            most = max(most, kept_bytes(tmp_path))
            time.sleep(0.05)
        statuses = [one.result() for one in sent]
        most = max(most, kept_bytes(tmp_path))
    if not protected:
        assert statuses == [200] * number
        assert most == number * len(content)
        return
    assert (statuses.count(200), statuses.count(429)) == (60, number - 60)
    assert most <= 200 * MEGABYTE
    assert kept_bytes(tmp_path) == 0  # it has ended
    fault(
        f"demo: {number} uploads of 10 MB at once",
        "60 in a minute, then 429; never more than 200 MB on the disk; none after the end",
        f"{most / MEGABYTE:.0f} MB at most",
    )


@pytest.mark.faults
@pytest.mark.parametrize("protected", [True, False])
def test_after_a_kill(model: str, tmp_path: Path, protected: bool, fault: Fault) -> None:
    with alone(model, tmp_path, "cleaning", protected) as server:
        assert upload(server, "a.png", b"x" * MEGABYTE)[0] == 200
        server.interrupt(signal.SIGKILL)
    left = kept_bytes(tmp_path)
    assert left == MEGABYTE
    with alone(model, tmp_path, "cleaning", protected):
        assert kept_bytes(tmp_path) == (0 if protected else left)
        assert len(list(tmp_path.glob("finetune-demo-*"))) == (1 if protected else 2)
    if protected:
        assert not list(tmp_path.glob("finetune-demo-*"))
        fault("demo: SIGKILL with uploads on the disk", "the next start removes them")


BAD_DATA = [
    {"data": ["/etc/passwd"]},
    {"data": [5]},
    {"data": 5},
    {"data": []},
    {"data": [True]},
    {"data": [{"path": "\ud800"}]},
    {"data": [{"url": "http://127.0.0.1:1/"}]},
    {"data": [None, None]},
    {"data": [float("nan")]},
    5,
]


@pytest.mark.parametrize("protected", PROTECTED)
def test_data_of_wrong_types(request: pytest.FixtureRequest, protected: bool, fault: Fault) -> None:
    statuses = set()
    with attacked(request, "types", protected) as server:
        for content in BAD_DATA:
            call = {} if isinstance(content, int) else content
            statuses.add(http_request(f"{server.url}/gradio_api/call/predict", content)[0])
            for function in range(5):
                joined = {**call, "fn_index": function, "session_hash": "a"}
                if (function, call.get("data")) != (1, []):  # it takes no input
                    statuses.add(http_request(f"{server.url}/gradio_api/queue/join", joined)[0])
        (path,) = json.loads(upload(server, "a.png", b"x")[1])
        assert "not an image" in call_predict(server, {"path": path})[1]
    written = "".join(server.lines)
    assert ("Traceback" in written) is not protected
    if not protected:
        return
    assert statuses == {403, 422}
    fault(
        "demo: data of wrong types to every function",
        "422, or 403 for a file that is no upload; no traceback in the log",
        f"{6 * len(BAD_DATA) - 1} requests",
    )


@pytest.mark.faults
@pytest.mark.parametrize("protected", [True, False])
def test_a_frame_on_another_page(
    request: pytest.FixtureRequest, protected: bool, fault: Fault
) -> None:
    """The other page has this machine's other name, which is another origin."""
    with attacked(request, "frames", protected) as server, browser() as chromium:
        tab = chromium.new_page()
        other = server.url.replace("127.0.0.1", "localhost")
        tab.goto(f"{other}/robots.txt")
        tab.evaluate(
            "address => { document.body.innerHTML = `<iframe src='${address}'></iframe>`; }",
            server.url,
        )
        tab.wait_for_timeout(3000)
        shown = [frame for frame in tab.frames[1:] if frame.query_selector("#ft-picture")]
        tab.close()
    assert bool(shown) is not protected
    if protected:
        fault("demo: a frame on another page", "the browser shows nothing of it")
