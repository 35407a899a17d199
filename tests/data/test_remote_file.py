"""remote_file.py against the loopback hub: parts of files, each fault, each refusal."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hub_server import HubServer, point_at
from refusals import refused
from streamed import without_waits

from finetune.data.streaming import remote_file as ranges
from finetune.data.streaming.remote_file import HubFile, LocalFile
from finetune.hub import client as hub_reads

NAME, ALICE = "someone/things", "hf_aliceAlice1234"
CONTENT = os.urandom(5000)
LARGE, SMALL = "data/train.parquet", "small.txt"


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    without_waits(monkeypatch)
    with HubServer() as hub:
        hub.add_repo(NAME, {LARGE: CONTENT, SMALL: CONTENT}, kind="dataset")
        hub.add_user("someone", token=ALICE)
        point_at(hub, monkeypatch, tmp_path / "home")
        yield hub
        assert hub.mistakes == []


def file_of(hub: HubServer, path: str = LARGE, name: str = NAME) -> HubFile:
    commit = hub.store.any_of(name).find("main")
    assert commit is not None
    known = commit.files[path]
    return HubFile(f"hub:{name}", name, commit.sha, path, len(known.content), known.etag)


def refuse(file: HubFile | LocalFile, code: str, *named: object) -> None:
    with refused(code, *named) as caught:
        file.read(100, 50)
    text = str(caught.value)
    assert "\n" not in text
    assert ALICE not in text
    assert "hf_wrong" not in text


class TestHub:
    @pytest.mark.parametrize("path", [LARGE, SMALL])
    def test_parts(self, hub: HubServer, path: str) -> None:
        file = file_of(hub, path)
        for first, length in ((0, 1), (100, 50), (4990, 10), (0, 5000)):
            assert file.read(first, length) == CONTENT[first : first + length]
        sent = [headers["range"] for headers in hub.headers if "range" in headers]
        assert "bytes=4990-4999" in sent

    def test_the_file_store_is_asked_for_once(self, hub: HubServer) -> None:
        for first in range(10):
            file_of(hub).read(first, 20)
        assert hub.count("/resolve/") == 1
        assert hub.count("/cdn/") == 10

    def test_the_token_goes_to_the_hub_alone(
        self, hub: HubServer, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("HF_TOKEN", ALICE)
        for kind in ("private", "gated"):
            hub.add_repo(f"someone/{kind}", {LARGE: CONTENT}, kind="dataset", **{kind: True})
            assert file_of(hub, name=f"someone/{kind}").read(7, 9) == CONTENT[7:16]
        asked = list(zip(hub.requests, hub.headers, strict=True))
        assert len(asked) == 4
        for (_, path), headers in asked:
            assert ("authorization" in headers) == ("/resolve/" in path)

    @pytest.mark.parametrize("call", ["GET .*/resolve/", "GET /cdn/"])
    @pytest.mark.parametrize("kind", ["status", "reset", "truncate"])
    def test_a_fault_passes(
        self, hub: HubServer, call: str, kind: str, capfd: pytest.CaptureFixture[str]
    ) -> None:
        hub.fail(call, kind=kind, times=2)
        assert file_of(hub).read(100, 50) == CONTENT[100:150]
        if (call, kind) != ("GET .*/resolve/", "truncate"):  # it has no body
            assert hub.faults[0].times == 0
            assert capfd.readouterr().err.count("trying again") >= 1

    def test_an_address_that_expired_is_asked_for_anew(self, hub: HubServer) -> None:
        file = file_of(hub)
        file.read(0, 5)
        hub.fail("GET /cdn/", status=403)
        assert file.read(5, 5) == CONTENT[5:10]
        assert hub.count("/resolve/") == 2

    def test_for_ever(self, hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("HF_TOKEN", ALICE)
        hub.fail(".", times=None, echo=True)
        refuse(file_of(hub), "hub.unreachable", f"hub:{NAME} {LARGE}", "503", "--resume")
        assert hub.count("/resolve/") == hub_reads.TRIES

    def test_longer_than_one_call_is_tried(
        self, hub: HubServer, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(ranges, "PATIENCE_SECONDS", 60.0)
        hub.fail("GET /cdn/", times=2 * hub_reads.TRIES + 1)
        assert file_of(hub).read(0, 10) == CONTENT[:10]

    def test_refusals(self, hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
        file = file_of(hub)
        gone = dataclasses.replace(file, path="data/other.parquet")
        refuse(gone, "data.not_found", "data/other.parquet", file.commit)
        refuse(dataclasses.replace(file, commit="a" * 40), "data.not_found", "a" * 40)
        for kind in ("private", "gated"):
            hub.add_repo(f"someone/{kind}", {LARGE: CONTENT}, kind="dataset", **{kind: True})
        refuse(file_of(hub, name="someone/private"), "data.not_found", "someone/private")
        refuse(file_of(hub, name="someone/gated"), "hub.forbidden", "someone/gated")
        monkeypatch.setenv("HF_TOKEN", "hf_wrongWrong1234")
        refuse(file, "hub.forbidden", "HF_TOKEN (401)")

    @pytest.mark.parametrize("path", [LARGE, SMALL])
    @pytest.mark.parametrize("size", [5000, 6000])
    def test_another_file_under_the_same_commit(self, hub: HubServer, path: str, size: int) -> None:
        file = file_of(hub, path)
        commit = hub.store.any_of(NAME).find("main")
        assert commit is not None  # as if the history had been written anew
        commit.files[path] = dataclasses.replace(commit.files[path], content=os.urandom(size))
        refuse(file, "data.changed", path, file.commit)

    def test_a_later_commit_changes_nothing(self, hub: HubServer) -> None:
        file = file_of(hub)
        hub.commit(NAME, {LARGE: os.urandom(6000)})
        assert file.read(100, 50) == CONTENT[100:150]

    def test_after_a_fork_the_child_reads_by_itself(self, hub: HubServer) -> None:
        file = file_of(hub)
        file.read(0, 10)
        child = os.fork()
        if child == 0:
            os._exit(0 if file.read(10, 10) == CONTENT[10:20] else 1)
        assert os.waitpid(child, 0)[1] == 0


class TestLocal:
    def test_parts(self, tmp_path: Path) -> None:
        path = tmp_path / "file"
        path.write_bytes(CONTENT)
        file = LocalFile.at(path)
        assert file.read(100, 50) == CONTENT[100:150]
        before = path.stat()
        for other in (CONTENT + b"1", CONTENT[::-1]):
            path.write_bytes(other)
            os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns + 1))
            refuse(file, "data.changed", path)
        path.unlink()
        refuse(file, "data.unreadable", path)
