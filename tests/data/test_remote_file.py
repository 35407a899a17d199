"""remote_file.py against a local hub: byte ranges of files, every fault and every error."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hub_server import HubServer, point_clients_at
from refusals import refused
from streaming_dataset import disable_retry_waits

from finetune.data.streaming import remote_file as remote_file_module
from finetune.data.streaming.remote_file import HubDatasetFile, LocalFile
from finetune.hub import client as hub_client

NAME, TOKEN = "someone/things", "hf_aliceAlice1234"
CONTENT = os.urandom(5000)
LFS_PATH, SMALL_PATH = "data/train.parquet", "small.txt"


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    disable_retry_waits(monkeypatch)
    with HubServer() as hub:
        hub.add_repo(NAME, {LFS_PATH: CONTENT, SMALL_PATH: CONTENT}, kind="dataset")
        hub.add_user("someone", token=TOKEN)
        point_clients_at(hub, monkeypatch, tmp_path / "home")
        yield hub
        assert hub.server_errors == []


def hub_file(hub: HubServer, path: str = LFS_PATH, name: str = NAME) -> HubDatasetFile:
    commit = hub.store.any_of(name).find("main")
    assert commit is not None
    repo_file = commit.files[path]
    return HubDatasetFile(
        f"hub:{name}", name, commit.sha, path, len(repo_file.content), repo_file.etag
    )


def assert_refused(file: HubDatasetFile | LocalFile, code: str, *expected_texts: object) -> None:
    with refused(code, *expected_texts) as caught:
        file.read(100, 50)
    message = str(caught.value)
    assert "\n" not in message
    assert TOKEN not in message
    assert "hf_wrong" not in message


class TestHubDatasetFile:
    @pytest.mark.parametrize("path", [LFS_PATH, SMALL_PATH])
    def test_reads_byte_ranges(self, hub: HubServer, path: str) -> None:
        file = hub_file(hub, path)
        for first, length in ((0, 1), (100, 50), (4990, 10), (0, 5000)):
            assert file.read(first, length) == CONTENT[first : first + length]
        range_headers = [headers["range"] for headers in hub.headers if "range" in headers]
        assert "bytes=4990-4999" in range_headers

    def test_resolves_the_download_url_once(self, hub: HubServer) -> None:
        for first in range(10):
            hub_file(hub).read(first, 20)
        assert hub.count("/resolve/") == 1
        assert hub.count("/cdn/") == 10

    def test_sends_the_token_only_to_the_hub(
        self, hub: HubServer, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        for kind in ("private", "gated"):
            hub.add_repo(f"someone/{kind}", {LFS_PATH: CONTENT}, kind="dataset", **{kind: True})
            assert hub_file(hub, name=f"someone/{kind}").read(7, 9) == CONTENT[7:16]
        requests = list(zip(hub.requests, hub.headers, strict=True))
        assert len(requests) == 4
        for (_, path), headers in requests:
            assert ("authorization" in headers) == ("/resolve/" in path)

    @pytest.mark.parametrize("endpoint", ["GET .*/resolve/", "GET /cdn/"])
    @pytest.mark.parametrize("kind", ["status", "reset", "truncate"])
    def test_retries_after_a_fault(
        self, hub: HubServer, endpoint: str, kind: str, capfd: pytest.CaptureFixture[str]
    ) -> None:
        hub.fail(endpoint, kind=kind, times=2)
        assert hub_file(hub).read(100, 50) == CONTENT[100:150]
        if (endpoint, kind) != ("GET .*/resolve/", "truncate"):  # this response has no body
            assert hub.faults[0].times == 0
            assert capfd.readouterr().err.count("trying again") >= 1

    def test_resolves_an_expired_url_again(self, hub: HubServer) -> None:
        file = hub_file(hub)
        file.read(0, 5)
        hub.fail("GET /cdn/", status=403)
        assert file.read(5, 5) == CONTENT[5:10]
        assert hub.count("/resolve/") == 2

    def test_fails_if_the_fault_is_permanent(
        self, hub: HubServer, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        hub.fail(".", times=None, echo=True)
        assert_refused(
            hub_file(hub), "hub.unreachable", f"hub:{NAME} {LFS_PATH}", "503", "--resume"
        )
        assert hub.count("/resolve/") == hub_client.MAX_TRIES

    def test_retries_longer_than_one_call(
        self, hub: HubServer, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(remote_file_module, "MAX_OUTAGE_SECONDS", 60.0)
        hub.fail("GET /cdn/", times=2 * hub_client.MAX_TRIES + 1)
        assert hub_file(hub).read(0, 10) == CONTENT[:10]

    def test_error_messages(self, hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
        file = hub_file(hub)
        absent_file = dataclasses.replace(file, path="data/other.parquet")
        assert_refused(absent_file, "data.not_found", "data/other.parquet", file.commit)
        assert_refused(dataclasses.replace(file, commit="a" * 40), "data.not_found", "a" * 40)
        for kind in ("private", "gated"):
            hub.add_repo(f"someone/{kind}", {LFS_PATH: CONTENT}, kind="dataset", **{kind: True})
        assert_refused(hub_file(hub, name="someone/private"), "data.not_found", "someone/private")
        assert_refused(hub_file(hub, name="someone/gated"), "hub.forbidden", "someone/gated")
        monkeypatch.setenv("HF_TOKEN", "hf_wrongWrong1234")
        assert_refused(file, "hub.forbidden", "HF_TOKEN (401)")

    @pytest.mark.parametrize("path", [LFS_PATH, SMALL_PATH])
    @pytest.mark.parametrize("size", [5000, 6000])
    def test_detects_another_file_at_the_same_commit(
        self, hub: HubServer, path: str, size: int
    ) -> None:
        file = hub_file(hub, path)
        commit = hub.store.any_of(NAME).find("main")
        assert commit is not None  # as if the history had been rewritten
        commit.files[path] = dataclasses.replace(commit.files[path], content=os.urandom(size))
        assert_refused(file, "data.changed", path, file.commit)

    def test_a_later_commit_does_not_matter(self, hub: HubServer) -> None:
        file = hub_file(hub)
        hub.commit(NAME, {LFS_PATH: os.urandom(6000)})
        assert file.read(100, 50) == CONTENT[100:150]

    def test_a_forked_child_reads_with_its_own_connection(self, hub: HubServer) -> None:
        file = hub_file(hub)
        file.read(0, 10)
        child = os.fork()
        if child == 0:
            os._exit(0 if file.read(10, 10) == CONTENT[10:20] else 1)
        assert os.waitpid(child, 0)[1] == 0


class TestLocalFile:
    def test_reads_byte_ranges_and_detects_changes(self, tmp_path: Path) -> None:
        path = tmp_path / "file"
        path.write_bytes(CONTENT)
        file = LocalFile.from_path(path)
        assert file.read(100, 50) == CONTENT[100:150]
        stat_before = path.stat()
        for other_content in (CONTENT + b"1", CONTENT[::-1]):
            path.write_bytes(other_content)
            os.utime(path, ns=(stat_before.st_atime_ns, stat_before.st_mtime_ns + 1))
            assert_refused(file, "data.changed", path)
        path.unlink()
        assert_refused(file, "data.unreadable", path)
