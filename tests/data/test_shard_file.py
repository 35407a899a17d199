"""shard_file.py: byte ranges of local files, of a local hub and of a web server; every fault."""

from __future__ import annotations

import dataclasses
import os
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hub_server import HubServer, point_clients_at
from huggingface_hub import constants
from refusals import refused
from streaming_dataset import disable_retry_waits
from tar_shards import RangeServer

from finetune.data.streaming import shard_file
from finetune.data.streaming.shard_file import LocalFile, RemoteFile, ShardFile, open_stream
from finetune.hub import client

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


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RangeServer]:
    disable_retry_waits(monkeypatch)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    (tmp_path / "a.tar").write_bytes(CONTENT)
    with RangeServer(tmp_path) as server:
        yield server


def hub_file(hub: HubServer, path: str = LFS_PATH, name: str = NAME) -> RemoteFile:
    commit = hub.store.any_of(name).find("main")
    assert commit is not None
    return RemoteFile.open_on_hub(f"hub:{name}", name, commit.sha, path)


def assert_refused(file: ShardFile, code: str, *expected_texts: object) -> None:
    with refused(code, *expected_texts) as caught:
        file.read(100, 50)
    message = str(caught.value)
    assert "\n" not in message
    assert TOKEN not in message


class TestHubFile:
    @pytest.mark.parametrize("path", [LFS_PATH, SMALL_PATH])
    def test_reads_byte_ranges(self, hub: HubServer, path: str) -> None:
        file = hub_file(hub, path)
        assert file.size == len(CONTENT)
        assert file.etag == hub.store.any_of(NAME).find("main").files[path].etag  # type: ignore[union-attr]
        for first, length in ((0, 1), (100, 50), (4990, 10), (0, 5000)):
            assert file.read(first, length) == CONTENT[first : first + length]

    def test_sends_the_token_only_to_the_hub(
        self, hub: HubServer, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        for kind in ("private", "gated"):
            hub.add_repo(f"someone/{kind}", {LFS_PATH: CONTENT}, kind="dataset", **{kind: True})
            assert hub_file(hub, name=f"someone/{kind}").read(7, 9) == CONTENT[7:16]
        requests = list(zip(hub.requests, hub.headers, strict=True))
        assert len(requests) == 6  # the hub redirects once for each file
        for (_, path), headers in requests:
            assert ("authorization" in headers) == ("/resolve/" in path)

    @pytest.mark.parametrize("endpoint", ["GET .*/resolve/", "GET /cdn/"])
    @pytest.mark.parametrize("kind", ["status", "reset", "truncate"])
    def test_retries_after_a_fault(
        self, hub: HubServer, endpoint: str, kind: str, capfd: pytest.CaptureFixture[str]
    ) -> None:
        file = hub_file(hub)
        hub.fail(endpoint, kind=kind, times=2)
        assert file.read(100, 50) == CONTENT[100:150]
        shard_file.store_urls.clear()
        assert file.read(100, 50) == CONTENT[100:150]
        if (endpoint, kind) != ("GET .*/resolve/", "truncate"):  # this response has no body
            assert hub.faults[0].times == 0
            assert "trying again" in capfd.readouterr().err

    def test_resolves_an_expired_url_again(self, hub: HubServer) -> None:
        file = hub_file(hub)
        hub.fail("GET /cdn/", status=403)
        assert file.read(5, 5) == CONTENT[5:10]
        assert hub.count("/resolve/") == 2

    def test_fails_if_the_fault_is_permanent(
        self, hub: HubServer, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        file = hub_file(hub)
        hub.requests.clear()
        hub.fail(".", times=None, echo=True)
        assert_refused(file, "hub.unreachable", f"hub:{NAME} {LFS_PATH}", "503", "--resume")
        assert hub.count("/resolve/") == shard_file.MAX_READ_TRIES - 1
        assert hub.count("/cdn/") == 1

    def test_error_messages(self, hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
        file = hub_file(hub)
        with refused("data.not_found", "data/other.parquet"):
            hub_file(hub, "data/other.parquet")
        for kind, code in (("private", "data.not_found"), ("gated", "hub.forbidden")):
            hub.add_repo(f"someone/{kind}", {LFS_PATH: CONTENT}, kind="dataset", **{kind: True})
            with refused(code, f"someone/{kind}"):
                hub_file(hub, name=f"someone/{kind}")
        monkeypatch.setenv("HF_TOKEN", "hf_wrongWrong1234")
        shard_file.store_urls.clear()
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
        shard_file.store_urls.clear()  # these expire
        assert_refused(file, "data.changed", path)

    def test_a_later_commit_does_not_matter(self, hub: HubServer) -> None:
        file = hub_file(hub)
        hub.commit(NAME, {LFS_PATH: os.urandom(6000)})
        assert file.read(100, 50) == CONTENT[100:150]
        assert hub_file(hub).etag != file.etag
        assert file.read(100, 50) == CONTENT[100:150]

    def test_a_forked_child_reads_with_its_own_connection(self, hub: HubServer) -> None:
        file = hub_file(hub)
        child = os.fork()
        if child == 0:
            os._exit(0 if file.read(10, 10) == CONTENT[10:20] else 1)
        assert os.waitpid(child, 0)[1] == 0


class TestWebFile:
    def test_retries_busy_servers(self, server: RangeServer) -> None:
        file = RemoteFile.open_url(f"{server.url}/a.tar")
        server.error_responses = [503, 429]
        assert file.read(100, 50) == CONTENT[100:150]
        assert file.display_name == f"{server.url}/a.tar"

    def test_detects_changes(self, server: RangeServer) -> None:
        file = RemoteFile.open_url(f"{server.url}/a.tar")
        (server.folder / "a.tar").write_bytes(CONTENT + b"1")
        assert_refused(file, "data.changed", "a.tar")
        (server.folder / "a.tar").write_bytes(CONTENT)
        server.validator = "two"
        assert_refused(file, "data.changed", "a.tar")

    @pytest.mark.parametrize(
        "flood, expected_text", [((bytes(2**16), 0.0), "more than"), ((b"x", 0.1), "too slow")]
    )
    def test_refuses_an_endless_response(
        self,
        server: RangeServer,
        flood: tuple[bytes, float],
        expected_text: str,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        monkeypatch.setattr(client, "READ_TIMEOUT_SECONDS", 0.3)
        monkeypatch.setattr(shard_file, "MAX_READ_TRIES", 2)
        file = RemoteFile.open_url(f"{server.url}/a.tar")
        server.flood = flood
        assert_refused(file, "hub.unreachable", "a.tar", expected_text)

    def test_error_messages(self, server: RangeServer) -> None:
        url = f"{server.url}/a.tar"
        for parameters in ("?token=secret", ";token=secret"):
            with refused("data.not_found", f"{server.url}/none.tar") as caught:
                address = server.url.replace("//", "//me:secret@")
                RemoteFile.open_url(f"{address}/none.tar{parameters}")
            assert "secret" not in str(caught.value)
        server.error_responses = [403]
        with refused("hub.forbidden", "403"):
            RemoteFile.open_url(url)
        for location in ("/a.tar", "ftp://x/y"):  # a loop, and a protocol that cannot be read
            server.error_responses = [location] * 30
            with refused("hub.wrong_answer", "a.tar"):
                RemoteFile.open_url(url)
        server.error_responses, server.supports_ranges = [], False
        with refused("hub.wrong_answer", "does not support range requests"):
            RemoteFile.open_url(url)
        for invalid_url in ("http:///a.tar", "http://\x7f/a.tar"):
            with refused("hub.wrong_answer", "check its URL"):
                RemoteFile.open_url(invalid_url)


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
        assert_refused(file, "data.changed", path)

    @pytest.mark.parametrize("is_replaced", [False, True])
    def test_detects_a_change_that_keeps_size_and_mtime(
        self, is_replaced: bool, tmp_path: Path
    ) -> None:
        path = tmp_path / "file"
        path.write_bytes(CONTENT)
        file, before = LocalFile.from_path(path), path.stat()
        while path.stat().st_ctime_ns == before.st_ctime_ns:  # the clock of the file system ticks
            new_path = tmp_path / "new" if is_replaced else path
            new_path.write_bytes(CONTENT[::-1])
            os.utime(new_path, ns=(before.st_atime_ns, before.st_mtime_ns))
            new_path.rename(path)
        assert path.stat().st_mtime_ns == before.st_mtime_ns
        assert_refused(file, "data.changed", path)


def test_a_stream_reads_like_a_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(CONTENT)
    stream: Any = open_stream(LocalFile.from_path(path), buffer_bytes=700)
    assert stream.read(3) == CONTENT[:3]
    assert stream.seek(-10, os.SEEK_END) == 4990
    assert stream.read() == CONTENT[-10:]
    assert stream.seek(4000) == 4000
    assert stream.read(600) == CONTENT[4000:4600]
    with pytest.raises(tarfile.ReadError):
        tarfile.TarFile(fileobj=open_stream(LocalFile.from_path(path)))
