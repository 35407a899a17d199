"""hub/client.py: the bounds of trying again, what is told, and what the client may not notice."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from hub_server import HubServer, point_at
from hub_store import git_sha1
from huggingface_hub import get_session, hf_raise_for_status
from huggingface_hub.errors import HfHubHTTPError

from finetune.errors import DataError, HubError, WeightsError
from finetune.hub import client as hub_reads
from finetune.hub.client import Fault, checked, refusal, retried, say_once, was_cut, watching


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """What would have been waited, in seconds."""
    found: list[float] = []
    monkeypatch.setattr(hub_reads.time, "sleep", found.append)
    monkeypatch.setattr(hub_reads, "_said", set())
    return found


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    with HubServer() as hub:
        hub.add_repo("someone/net", {"a.txt": b"one"})
        point_at(hub, monkeypatch, tmp_path / "home")
        yield hub


class Failing:
    """Something that fails as often as it is told to."""

    def __init__(self, *faults: Exception) -> None:
        self.faults = list(faults)
        self.calls = 0

    def __call__(self) -> str:
        self.calls += 1
        if self.faults:
            raise self.faults.pop(0)
        return "done"


class TestRetried:
    def test_within_bounds(self, waits: list[float], capsys: pytest.CaptureFixture[str]) -> None:
        call = Failing(Fault("busy"), Fault("busy"), Fault("busy"))
        assert retried("a thing", call) == "done"
        assert waits == [0.5, 1.0, 2.0]
        assert capsys.readouterr().err == "finetune: a thing: busy; trying again\n"

    def test_no_further(self, waits: list[float]) -> None:
        call = Failing(*[Fault(f"busy {n}") for n in range(9)])
        with pytest.raises(Fault, match="busy 3"):
            retried("a thing", call)
        assert call.calls == 4

    def test_as_long_as_the_hub_asks(self, waits: list[float]) -> None:
        retried("a thing", Failing(Fault("busy", seconds=4), Fault("busy", seconds=9999)))
        assert waits == [4, hub_reads.LONGEST_WAIT_SECONDS]

    @pytest.mark.parametrize("has_copy, calls", [(False, 2), (True, 1)])
    def test_nobody_there(self, waits: list[float], has_copy: bool, calls: int) -> None:
        call = Failing(*[Fault("refused", unreachable=True) for _ in range(9)])
        with pytest.raises(Fault):
            retried("a thing", call, has_copy=has_copy)
        assert call.calls == calls
        assert sum(waits) < 1

    def test_definite_errors_are_not_tried_again(self, waits: list[float]) -> None:
        call = Failing(ValueError("no"))
        with pytest.raises(ValueError, match="no"):
            retried("a thing", call)
        assert call.calls == 1

    def test_one_rank_tells(
        self,
        waits: list[float],
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        say_once("here")
        say_once("here")
        monkeypatch.setenv("RANK", "1")
        say_once("there")
        assert capsys.readouterr().err == "finetune: here\n"


class TestWatching:
    def test_a_fault_leaves_at_once(self, hub: HubServer) -> None:
        url = f"{hub.url}/api/models/someone/net"
        hub.fail("GET /api/models", status=429, retry_after=7)
        with watching() as watch:
            with pytest.raises(Fault, match="429") as caught:
                get_session().get(url)
            assert caught.value.seconds == 7
            assert watch.fault is caught.value
            assert get_session().get(url).status_code == 200
        hub.stop()
        with watching(), pytest.raises(Fault) as gone:
            get_session().get(url)
        assert gone.value.unreachable

    def test_other_threads_are_left_alone(self, hub: HubServer) -> None:
        url = f"{hub.url}/api/models/someone/net"
        seen: list[object] = []

        def ask() -> None:
            try:
                seen.append(get_session().get(url).status_code)
            except Fault as fault:
                seen.append(fault)

        for everywhere in (False, True):
            hub.fail("GET /api/models")
            with watching(everywhere=everywhere):
                thread = threading.Thread(target=ask)
                thread.start()
                thread.join()
        assert seen[0] == 503
        assert isinstance(seen[1], Fault)

    def test_other_servers_are_left_alone(self, hub: HubServer) -> None:
        with HubServer() as other:
            other.fail(".", times=None)
            with watching() as watch:
                assert get_session().get(f"{other.url}/statistics").status_code == 503
            assert watch.fault is None

    def test_nothing_stays(self, hub: HubServer) -> None:
        session = get_session()
        with watching():
            assert "send" in vars(session)
        assert "send" not in vars(session)

    def test_a_refusal_is_remembered(self, hub: HubServer) -> None:
        with watching() as watch:
            assert watch.refusal() is None
            get_session().get(f"{hub.url}/api/models/someone/other")
            assert isinstance(watch.refusal(), HfHubHTTPError)

    def test_what_lies_behind_an_error(self, hub: HubServer) -> None:
        hub.fail("GET /api", kind="reset")
        with pytest.raises(Exception, match="disconnected") as caught:
            get_session().get(f"{hub.url}/api/models/someone/net")
        outer = RuntimeError("could not build")
        outer.__context__ = caught.value
        assert was_cut(outer)
        assert not was_cut(RuntimeError("could not build"))
        assert not was_cut(None)


class TestChecked:
    @pytest.mark.parametrize("name", ["sha256", "git"])
    def test_by_the_name_in_the_cache(self, tmp_path: Path, name: str) -> None:
        content = b"some bytes"
        sha256 = hashlib.sha256(content).hexdigest()
        blob = tmp_path / (sha256 if name == "sha256" else git_sha1(content))
        blob.write_bytes(content)
        link = tmp_path / "file"
        link.symlink_to(blob.name)
        assert checked(link) == (sha256 if name == "sha256" else "")
        blob.write_bytes(b"some Bytes")
        assert checked(link) is None
        assert checked(blob) == ""  # a file without a link, of which nothing is known
        assert checked(blob, etag=blob.name) is None


class TestRefusal:
    def error(self, hub: HubServer, path: str, **headers: str) -> Exception:
        with pytest.raises(HfHubHTTPError) as caught:
            hf_raise_for_status(get_session().get(hub.url + path, headers=headers))
        return caught.value

    def test_kinds(self, hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
        missing = self.error(hub, "/api/models/someone/other")
        for kind, noun in ((WeightsError, "repository"), (DataError, "data set")):
            found = refusal(missing, "here", None, missing=kind, noun=noun)
            assert type(found) is kind
            assert f"here: no such {noun}, or it is private" in str(found)
        revision = self.error(hub, "/api/models/someone/net/revision/v7")
        assert "no such revision" in str(refusal(revision, "here", "v7", missing=DataError))
        assert refusal(ValueError("x"), "here", None, missing=DataError) is None
        assert refusal(None, "here", None, missing=DataError) is None
        monkeypatch.setenv("HF_TOKEN", "hf_wrongWrong1234")
        headers = {"authorization": "Bearer hf_wrongWrong1234"}
        wrong = self.error(hub, "/api/models/someone/net", **headers)
        found = refusal(wrong, "here", None, missing=DataError)
        assert type(found) is HubError
        assert "refuses the token in HF_TOKEN (401)" in str(found)
