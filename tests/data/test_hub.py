"""data/hub.py against the loopback hub: revisions, each fault on each call, the cache."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import huggingface_hub.constants
import numpy as np
import pytest
from hub_server import HubServer, point_at
from refusals import refused
from samples import make_parquet

from finetune.data.source import Source, open_source
from finetune.hub import client as hub_reads

NAME = "someone/things"
ALICE = "hf_aliceAlice1234"
CALLS = [
    r"GET /api/datasets/someone/things($|\?|/revision/)",
    r"HEAD .*/README\.md",
    r"GET .*/README\.md",
    r"HEAD .*/\.huggingface\.yaml",
    r"GET .*/tree/",
    r"HEAD .*\.parquet",
    r"GET /cdn/",
]


def files_of(folder: Path, labels: list[int]) -> dict[str, bytes]:
    folder.mkdir(exist_ok=True)
    files = {}
    for split, some in {"train": labels, "test": labels[:1]}.items():
        path = make_parquet(folder / f"{split}.parquet", some, names=["ant", "bee"])
        files[f"data/{split}-00000-of-00001.parquet"] = path.read_bytes()
    return files


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    monkeypatch.setattr(hub_reads, "FIRST_WAIT_SECONDS", 0.01)
    monkeypatch.setattr(hub_reads, "_said", set())
    with HubServer() as hub:
        card = {"README.md": b"---\nlicense: mit\n---\n"}
        hub.add_repo(NAME, {**files_of(tmp_path / "one", [0, 1, 1]), **card}, kind="dataset")
        hub.tag(NAME, "v1")
        hub.commit(NAME, files_of(tmp_path / "two", [0, 1, 1, 0]))
        hub.add_user("someone", token=ALICE)
        point_at(hub, monkeypatch, tmp_path / "home")
        yield hub
        assert hub.mistakes == []


def labels(source: Source) -> list[int]:
    return np.asarray(source.splits["train"].labels).tolist()


def refuse(name: str, code: str, *named: str) -> None:
    with refused(code, name, *named) as caught:
        open_source(name)
    assert "\n" not in str(caught.value)
    assert ALICE not in str(caught.value)


class TestRevisions:
    def test_each_is_its_own(self, hub: HubServer) -> None:
        [new, old, _] = hub.commits(NAME)
        asked = {
            f"hub:{NAME}": ([0, 1, 1, 0], new),
            f"hub:{NAME}@v1": ([0, 1, 1], old),
            f"hub:{NAME}@main": ([0, 1, 1, 0], new),
            f"hub:{NAME}@{old}": ([0, 1, 1], old),
        }
        for name, (expected, commit) in asked.items():
            source = open_source(name)
            assert labels(source) == expected
            assert f"revision {commit}" in source.description
            assert source.splits["train"].read(0).ndim == 3

    def test_refusals(self, hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
        refuse("hub:nobody/things", "data.not_found", "`hf auth login`")
        refuse(f"hub:{NAME}@v9", "data.not_found", "'@v9'")
        refuse(f"hub:{NAME}:large", "data.not_loadable", "BuilderConfig 'large'")
        monkeypatch.setenv("HF_TOKEN", "hf_wrongWrong1234")
        refuse(f"hub:{NAME}", "hub.forbidden", "HF_TOKEN (401)")

    def test_private_and_gated(
        self, hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        for key in ("private", "gated"):
            files = files_of(tmp_path / key, [0, 1])
            hub.add_repo(f"someone/{key}", files, kind="dataset", **{key: True})
        refuse("hub:someone/private", "data.not_found")
        refuse("hub:someone/gated", "hub.forbidden")
        monkeypatch.setenv("HF_TOKEN", ALICE)
        assert labels(open_source("hub:someone/private")) == [0, 1]
        assert labels(open_source("hub:someone/gated")) == [0, 1]


class TestFaults:
    @pytest.mark.parametrize("call", CALLS)
    @pytest.mark.parametrize("kind", ["status", "reset"])
    def test_one_on_any_call(
        self, hub: HubServer, call: str, kind: str, capfd: pytest.CaptureFixture[str]
    ) -> None:
        hub.fail(call, kind=kind)
        assert labels(open_source(f"hub:{NAME}@v1")) == [0, 1, 1]
        assert hub.faults[0].times == 0  # it did happen
        assert capfd.readouterr().err.count("trying again") == 1

    @pytest.mark.parametrize("call", [CALLS[0], CALLS[-1]])
    def test_for_ever(self, hub: HubServer, call: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("HF_TOKEN", ALICE)
        hub.fail(call, times=None, echo=True)
        refuse(f"hub:{NAME}", "hub.unreachable", "503")

    def test_nobody_there(self, hub: HubServer) -> None:
        hub.stop()
        started = time.monotonic()
        refuse(f"hub:{NAME}", "hub.unreachable")
        assert time.monotonic() - started < 5

    @pytest.mark.parametrize("call", [r"GET .*/README\.md", r"GET /cdn/"])
    def test_other_bytes_are_fetched_again(
        self, hub: HubServer, call: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        now = time.time
        monkeypatch.setattr(time, "time", lambda: now() + 60)  # the disk's clock goes behind ours
        hub.fail(call, kind="corrupt")
        source = open_source(f"hub:{NAME}@v1")
        assert labels(source) == [0, 1, 1]
        assert source.splits["train"].read(2).ndim == 3
        assert hub.faults[0].times == 0
        assert hub.count(call) > (1 if "README" in call else 2)

    def test_other_bytes_for_ever(self, hub: HubServer, tmp_path: Path) -> None:
        hub.fail(r"GET /cdn/", kind="corrupt", times=None)
        refuse(f"hub:{NAME}", "hub.unreachable")
        good = set(hub.files(NAME).values())
        left = [p for p in (tmp_path / "home/hub").rglob("blobs/*") if p.is_file()]
        assert all(path.read_bytes() in good for path in left)

    @pytest.mark.parametrize("call", CALLS[3:5])
    def test_a_fault_gives_no_other_revision(self, hub: HubServer, call: str) -> None:
        # `datasets` would take the copy of v1 in its cache for the one that it cannot fetch
        open_source(f"hub:{NAME}@v1")
        hub.fail(call)
        assert labels(open_source(f"hub:{NAME}")) == [0, 1, 1, 0]
        assert hub.faults[0].times == 0

    def test_nor_does_it_for_ever(self, hub: HubServer) -> None:
        old = hub.commits(NAME)[1]
        open_source(f"hub:{NAME}@v1")
        hub.fail(CALLS[4], times=None)
        refuse(f"hub:{NAME}", "hub.unreachable", "503", old)
        hub.fail(".", times=None)
        refuse(f"hub:{NAME}:large", "hub.unreachable")


class TestCache:
    def test_nobody_there(
        self, hub: HubServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        [new, old, _] = hub.commits(NAME)
        for name in (f"hub:{NAME}@v1", f"hub:{NAME}"):
            open_source(name)
        hub.stop()
        started = time.monotonic()
        assert labels(open_source(f"hub:{NAME}@v1")) == [0, 1, 1]
        assert labels(open_source(f"hub:{NAME}")) == [0, 1, 1, 0]
        [other] = [copy for copy in (tmp_path / "home").glob("**/default/*/*") if copy.name == new]
        os.utime(other, (time.time() + 9, time.time() + 9))  # the clock was set back since
        assert labels(open_source(f"hub:{NAME}@{old}")) == [0, 1, 1]
        assert time.monotonic() - started < 5
        told = capsys.readouterr().err
        assert told.count(f"using revision {old} from the cache") == 2
        assert told.count(f"using revision {new} from the cache") == 1
        assert not huggingface_hub.constants.HF_HUB_OFFLINE

    def test_offline(self, hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
        import datasets

        open_source(f"hub:{NAME}@v1")
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
        monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
        hub.requests.clear()
        assert labels(open_source(f"hub:{NAME}@v1")) == [0, 1, 1]
        old = hub.commits(NAME)[1]
        refuse(f"hub:{NAME}@v2", "data.not_cached", old)
        refuse(f"hub:{NAME}@{'a' * 40}", "data.not_cached", old)
        assert hub.requests == []
