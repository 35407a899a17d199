"""The served review page: decisions made there are the ones that are saved and applied."""

from __future__ import annotations

import signal
import socket
import sys
from pathlib import Path
from typing import Any

import pytest
from demo_server import run_server
from doctor_findings import class_problem, image_of, write_findings
from refusals import refused
from small_datasets import write_image_folder

from finetune.cli.main import main
from finetune.data.decisions import Decision, apply_decisions, read_decisions, write_decisions
from finetune.data.open_source import open_source
from finetune.data.source import Source
from finetune.doctor.findings import class_key, open_findings
from finetune.doctor.review_server import DecisionFile, build_app, serve_review

COUNTS = {
    **{"train/cat": 6, "train/dog": 6, "train/kitten": 6, "train/cow": 3},
    **{"test/cat": 2, "test/dog": 2, "test/kitten": 2, "test/cow": 1},
}
CROSS_ORIGIN = {"Origin": "http://evil.example", "Sec-Fetch-Site": "cross-site"}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Source:
    return open_source(write_image_folder(tmp_path_factory.mktemp("photos"), COUNTS))


def pick(source: Source, *names: str) -> list[dict[str, Any]]:
    """Describe images by name."""
    places = {
        split.name_of(index): (split.name, index)
        for split in source.splits.values()
        for index in range(len(split))
    }
    return [image_of(source, *places[name]) for name in names]


def write_review(folder: Path, source: Source) -> DecisionFile:
    """Write findings that overlap neither with each other nor with the test's decisions."""
    errors = [
        {**image, "given": given, "suggested": suggested, "score": 0.9}
        for image, given, suggested in zip(
            pick(source, "train/cat/0.png", "train/cat/1.png", "train/dog/0.png"),
            ("cat", "cat", "dog"),
            ("dog", "cow", "cat"),
            strict=True,
        )
    ]
    write_findings(
        folder,
        source,
        label_errors=errors,
        leaks=[pick(source, "train/dog/1.png", "test/dog/1.png")],
        duplicates=[pick(source, "train/cow/0.png", "train/cow/1.png", "train/cow/2.png")],
        outliers=[
            {**image, "given": "dog", "reason": "tiny", "score": 1.0}
            for image in pick(source, "train/dog/2.png")
        ],
        class_problems=[
            class_problem("same", ["cat", "kitten"], score=0.9),
            class_problem("overlap", ["cow", "dog"], score=0.2),
        ],
    )
    return open_file(folder, source)


def open_file(folder: Path, source: Source) -> DecisionFile:
    return DecisionFile(folder / "decisions.csv", open_findings(source.name, folder))


def decided(folder: Path) -> dict[str, str]:
    """Return what decisions.csv says: by path or class, the action or the label."""
    return {
        one.path or f"{one.given}": one.label or one.action
        for one in read_decisions(folder / "decisions.csv")
    }


@pytest.fixture
def client(tmp_path: Path, source: Source) -> Any:
    pytest.importorskip("starlette")
    from starlette.testclient import TestClient

    decisions = write_review(tmp_path, source)
    return TestClient(build_app(decisions), base_url="http://127.0.0.1")


class TestRequests:
    def test_findings_and_pictures_are_sent_when_asked_for(self, client: Any) -> None:
        found = client.get("/api/findings/label_errors?start=1&count=9").json()
        assert [one["suggested"] for one in found] == ["cow", "cat"]
        picture = client.get(f"/picture/small/{found[0]['images'][0]['key']}")
        assert picture.headers["content-type"] == "image/png"
        for path in ("api/findings/all", "picture/small/train/99", "picture/huge/train/0", "x"):
            assert client.get(f"/{path}").status_code == 404
        assert client.get("/picture/small/..%2f..%2fetc%2fpasswd").status_code == 404

    def test_page_may_load_only_from_this_server(self, client: Any) -> None:
        page = client.get("/")
        assert "default-src 'none'; img-src 'self' data:; connect-src 'self';" in page.text
        assert page.headers["content-security-policy"] == "frame-ancestors 'none'"

    def test_other_origins_and_host_names_are_refused(self, client: Any, tmp_path: Path) -> None:
        body = {"train/0": {"action": "drop"}}
        assert client.post("/api/decisions", json=body, headers=CROSS_ORIGIN).status_code == 403
        assert client.get("/picture/small/train/0", headers=CROSS_ORIGIN).status_code == 403
        assert client.get("/", headers={"Host": "evil.example"}).status_code == 400
        large = {"train/0": {"action": "drop", "label": "x" * 2**20}}
        assert client.post("/api/decisions", json=large).status_code == 413
        assert not (tmp_path / "decisions.csv").exists()

    @pytest.mark.parametrize(
        "changes",
        [
            ["train/0"],
            {"train/20": {"action": "drop"}},
            {"train/0": "drop"},
            {"train/0": {"action": "merge"}},
            {"train/0": {"action": "relabel", "label": "mouse"}},
            {'["cat", "kitten"]': {"action": "merge", "given": "dog", "label": "cat"}},
            {'["cat", "kitten"]': {"action": "merge", "given": "cat", "label": "cat"}},
        ],
    )
    def test_impossible_decisions_change_nothing(
        self, client: Any, tmp_path: Path, changes: Any
    ) -> None:
        assert client.post("/api/decisions", json=changes).status_code == 422
        assert not (tmp_path / "decisions.csv").exists()


class TestDecisionFile:
    def test_rows_about_other_images_stay(self, tmp_path: Path, source: Source) -> None:
        file = tmp_path / "decisions.csv"
        by_hand = [
            Decision("drop", path="train/cat/5.png"),
            Decision("relabel", path="train/cat/0.png", label="cow"),
            Decision("merge", given="kitten", label="cat"),
        ]
        write_decisions(file, by_hand)
        decisions = write_review(tmp_path, source)
        assert decisions.to_json() == {
            "train/0": {"action": "relabel", "label": "cow", "given": "cat"},
            class_key(["cat", "kitten"]): {"action": "merge", "label": "cat", "given": "kitten"},
        }
        decisions.update({"train/0": {"action": "keep"}, class_key(["cat", "kitten"]): None})
        assert decided(tmp_path) == {"train/cat/5.png": "drop", "train/cat/0.png": "keep"}

    def test_edits_of_the_file_meanwhile_are_kept(self, tmp_path: Path, source: Source) -> None:
        decisions = write_review(tmp_path, source)
        decisions.update({"train/0": {"action": "drop"}})
        open_file(tmp_path, source).update({"train/1": {"action": "drop"}})
        decisions.update({"train/9": {"action": "drop"}})
        assert set(decided(tmp_path)) == {"train/cat/0.png", "train/cat/1.png", "train/dog/0.png"}

    def test_damaged_file(self, tmp_path: Path, source: Source) -> None:
        write_review(tmp_path, source)
        (tmp_path / "decisions.csv").write_text("action,path\ndelete,train/cat/0.png\n")
        with refused("data.wrong_format", tmp_path / "decisions.csv", "line 2"):
            open_file(tmp_path, source)
        assert "delete" in (tmp_path / "decisions.csv").read_text()


def review(folder: Path, source: Source) -> Any:
    """Serve the review in another process."""
    pytest.importorskip("uvicorn")
    return run_server(lambda: serve_review(source.name, folder=folder, port=0))


def press(tab: Any, *keys: str) -> None:
    for key in keys:
        tab.wait_for_selector(".actions")
        tab.keyboard.press(key)
    tab.wait_for_selector("body:not([data-unsaved])")


class TestBrowser:
    def test_decisions_of_the_page_are_applied(
        self, chromium: Any, tmp_path: Path, source: Source
    ) -> None:
        write_review(tmp_path, source)
        with review(tmp_path, source) as server:
            tab = chromium.new_page()
            problems: list[str] = []
            tab.on("pageerror", lambda error: problems.append(str(error)))
            tab.on("console", lambda message: problems.append(message.text))
            tab.goto(server.url)
            tab.wait_for_selector(".actions")
            press(tab, "Enter", "1", "r")  # cat/0 is a dog, cat/1 stays, dog/0 is another class
            tab.keyboard.type("kit")
            press(tab, "Enter")
            assert decided(tmp_path) == {
                "train/cat/0.png": "dog",
                "train/cat/1.png": "keep",
                "train/dog/0.png": "kitten",
            }
            press(
                tab, "2", "ArrowRight", "m", "d"
            )  # a leak, the second of three copies, a tiny one
            server.interrupt(signal.SIGKILL)
            tab.keyboard.press("Enter")  # merge the two classes
            tab.wait_for_selector("#problem:not([hidden])")
        problems.clear()  # of the killed server
        with review(tmp_path, source) as server:
            tab.goto(server.url)
            tab.wait_for_selector(".actions")
            assert "6 of 8" in tab.text_content("#progress-text")
            press(tab, "Enter", "u", "Enter", "1")
            assert tab.is_visible("#finish-dialog")
            assert "8 of 8" in tab.text_content("#progress-text")
            command = f"finetune train {source.name} data.decisions={tmp_path / 'decisions.csv'}"
            assert tab.text_content("#command") == command
            assert server.interrupt() == 0
        assert problems == []
        changed, summary = apply_decisions(
            source, read_decisions(tmp_path / "decisions.csv"), on_test=False
        )
        assert summary.splits == {"train": {"dropped": 4, "relabeled": 2}}
        names = [changed.splits["train"].name_of(index) for index in range(17)]
        assert "train/dog/1.png" not in names
        assert [name for name in names if "cow" in name] == ["train/cow/1.png"]
        assert len(changed.class_names) == 3

    def test_ten_thousand_findings(self, chromium: Any, tmp_path: Path, source: Source) -> None:
        write_findings(tmp_path, source, num_errors=10_000)
        with review(tmp_path, source) as server:
            tab = chromium.new_page(viewport={"width": 1280, "height": 800})
            tab.goto(server.url)
            tab.evaluate("document.getElementById('list').scrollTop = 5_000 * 64")
            tab.wait_for_selector(".row[data-loaded]")
            assert tab.locator(".row").count() < 40
            tab.locator(".row").nth(5).click()
            tab.wait_for_selector(".actions")
            assert "5,00" in tab.text_content(".steps")


class TestStart:
    @pytest.fixture(autouse=True)
    def no_server(self) -> None:
        pytest.importorskip("uvicorn")

    def test_missing_packages(
        self, tmp_path: Path, source: Source, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setitem(sys.modules, "uvicorn", None)
        with refused("setup.missing_package", "finetune-vision[demo]", "doctor.html"):
            serve_review(source.name, folder=tmp_path)

    def test_port_in_use(
        self, tmp_path: Path, source: Source, capsys: pytest.CaptureFixture[str]
    ) -> None:
        write_review(tmp_path, source)
        with socket.create_server(("127.0.0.1", 0)) as listener:
            port = str(listener.getsockname()[1])
            options = ("--out", str(tmp_path), "--review", "--port", port)
            assert main(["data", "doctor", source.name, *options]) == 5
        assert f"--port {port}" in capsys.readouterr().err
