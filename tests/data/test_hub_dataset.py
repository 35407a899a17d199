"""hub_dataset.py against a local hub: revisions, listings, faults on every endpoint, the cache."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import huggingface_hub.constants
import numpy as np
import pytest
from hub_server import HubServer, point_clients_at
from refusals import refused
from small_datasets import write_parquet
from streaming_dataset import disable_retry_waits

from finetune.data import hub_dataset
from finetune.data.hub_dataset import list_parquet_files
from finetune.data.open_source import open_source
from finetune.data.source import Source
from finetune.hub import client as hub_client

NAME = "someone/things"
ALICE = "hf_aliceAlice1234"
ENDPOINTS = [
    r"GET /api/datasets/someone/things($|\?|/revision/)",
    r"HEAD .*/README\.md",
    r"GET .*/README\.md",
    r"HEAD .*/\.huggingface\.yaml",
    r"GET .*/tree/",
    r"HEAD .*\.parquet",
    r"GET /cdn/",
]


def dataset_files(folder: Path, labels: list[int]) -> dict[str, bytes]:
    folder.mkdir(exist_ok=True)
    files = {}
    for split, split_labels in {"train": labels, "test": labels[:1]}.items():
        path = write_parquet(folder / f"{split}.parquet", split_labels, names=["ant", "bee"])
        files[f"data/{split}-00000-of-00001.parquet"] = path.read_bytes()
    return files


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    monkeypatch.setattr(hub_client, "FIRST_WAIT_SECONDS", 0.01)
    with HubServer() as hub:
        card = {"README.md": b"---\nlicense: mit\n---\n"}
        hub.add_repo(NAME, {**dataset_files(tmp_path / "one", [0, 1, 1]), **card}, kind="dataset")
        hub.tag(NAME, "v1")
        hub.commit(NAME, dataset_files(tmp_path / "two", [0, 1, 1, 0]))
        hub.add_user("someone", token=ALICE)
        point_clients_at(hub, monkeypatch, tmp_path / "home")
        yield hub
        assert hub.server_errors == []


def labels(source: Source) -> list[int]:
    return np.asarray(source.splits["train"].labels).tolist()


def assert_refused(name: str, code: str, *expected_texts: str, streaming: bool = False) -> None:
    with refused(code, name, *expected_texts) as caught:
        open_source(name, streaming=streaming)
    assert "\n" not in str(caught.value)
    assert ALICE not in str(caught.value)


class TestRevisions:
    def test_each_revision_has_its_own_data(self, hub: HubServer) -> None:
        [new, old, _] = hub.commits(NAME)
        expected_by_name = {
            f"hub:{NAME}": ([0, 1, 1, 0], new),
            f"hub:{NAME}@v1": ([0, 1, 1], old),
            f"hub:{NAME}@main": ([0, 1, 1, 0], new),
            f"hub:{NAME}@{old}": ([0, 1, 1], old),
        }
        for name, (expected, commit) in expected_by_name.items():
            source = open_source(name)
            assert labels(source) == expected
            assert f"revision {commit}" in source.description
            assert source.splits["train"].decode(0).ndim == 3

    def test_rejects_unknown_revisions_and_wrong_tokens(
        self, hub: HubServer, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        assert_refused("hub:nobody/things", "data.not_found", "`hf auth login`")
        assert_refused(f"hub:{NAME}@v9", "data.not_found", "'@v9'")
        assert_refused(f"hub:{NAME}:large", "data.not_loadable", "BuilderConfig 'large'")
        monkeypatch.setenv("HF_TOKEN", "hf_wrongWrong1234")
        assert_refused(f"hub:{NAME}", "hub.forbidden", "HF_TOKEN (401)")

    def test_private_and_gated_datasets(
        self, hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        for key in ("private", "gated"):
            files = dataset_files(tmp_path / key, [0, 1])
            hub.add_repo(f"someone/{key}", files, kind="dataset", **{key: True})
        assert_refused("hub:someone/private", "data.not_found")
        assert_refused("hub:someone/gated", "hub.forbidden")
        monkeypatch.setenv("HF_TOKEN", ALICE)
        assert labels(open_source("hub:someone/private")) == [0, 1]
        assert labels(open_source("hub:someone/gated")) == [0, 1]


class TestFaults:
    @pytest.mark.parametrize(
        "kind, endpoint",
        [*(("status", endpoint) for endpoint in ENDPOINTS), ("reset", ENDPOINTS[-1])],
    )
    def test_retries_after_one_fault_on_any_request(
        self, hub: HubServer, endpoint: str, kind: str
    ) -> None:
        hub.fail(endpoint, kind=kind)
        assert labels(open_source(f"hub:{NAME}@v1")) == [0, 1, 1]
        assert hub.faults[0].times == 0  # the fault did happen

    @pytest.mark.parametrize("endpoint", [ENDPOINTS[0], ENDPOINTS[-1]])
    def test_fails_if_the_fault_is_permanent(
        self, hub: HubServer, endpoint: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("HF_TOKEN", ALICE)
        hub.fail(endpoint, times=None, echo=True)
        assert_refused(f"hub:{NAME}", "hub.unreachable", "503")

    def test_fails_quickly_if_the_hub_is_down(self, hub: HubServer) -> None:
        hub.stop()
        started = time.monotonic()
        assert_refused(f"hub:{NAME}", "hub.unreachable")
        assert time.monotonic() - started < 5

    @pytest.mark.parametrize("endpoint", [r"GET .*/README\.md", r"GET /cdn/"])
    def test_fetches_corrupt_bytes_again(
        self, hub: HubServer, endpoint: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        now = time.time
        monkeypatch.setattr(time, "time", lambda: now() + 60)  # the disk's clock is behind ours
        hub.fail(endpoint, kind="corrupt")
        source = open_source(f"hub:{NAME}@v1")
        assert labels(source) == [0, 1, 1]
        assert source.splits["train"].decode(2).ndim == 3
        assert hub.faults[0].times == 0
        assert hub.count(endpoint) > (1 if "README" in endpoint else 2)

    def test_fails_if_bytes_stay_corrupt(self, hub: HubServer, tmp_path: Path) -> None:
        hub.fail(r"GET /cdn/", kind="corrupt", times=None)
        assert_refused(f"hub:{NAME}", "hub.unreachable")
        valid_contents = set(hub.files(NAME).values())
        remaining_blobs = [p for p in (tmp_path / "home/hub").rglob("blobs/*") if p.is_file()]
        assert all(path.read_bytes() in valid_contents for path in remaining_blobs)

    @pytest.mark.parametrize("endpoint", ENDPOINTS[3:5])
    def test_a_fault_does_not_fall_back_to_another_revision(
        self, hub: HubServer, endpoint: str
    ) -> None:
        # `datasets` alone would use its cached copy of v1 for the revision that it cannot fetch
        open_source(f"hub:{NAME}@v1")
        hub.fail(endpoint)
        assert labels(open_source(f"hub:{NAME}")) == [0, 1, 1, 0]
        assert hub.faults[0].times == 0

    def test_a_permanent_fault_does_not_fall_back_to_another_revision(
        self, hub: HubServer, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(time, "sleep", lambda seconds: None)
        old = hub.commits(NAME)[1]
        open_source(f"hub:{NAME}@v1")
        hub.fail(ENDPOINTS[4], times=None)
        assert_refused(f"hub:{NAME}", "hub.unreachable", "dropped", old)
        hub.fail(".", times=None)
        assert_refused(f"hub:{NAME}:large", "hub.unreachable")


class TestCache:
    def test_uses_the_cache_if_the_hub_is_down(
        self, hub: HubServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        [new, old, _] = hub.commits(NAME)
        for name in (f"hub:{NAME}@v1", f"hub:{NAME}"):
            open_source(name)
        hub.stop()
        started = time.monotonic()
        assert labels(open_source(f"hub:{NAME}@v1")) == [0, 1, 1]
        assert labels(open_source(f"hub:{NAME}")) == [0, 1, 1, 0]
        [cached_copy] = [
            copy for copy in (tmp_path / "home").glob("**/default/*/*") if copy.name == new
        ]
        # as if the clock had been set back
        os.utime(cached_copy, (time.time() + 9, time.time() + 9))
        assert labels(open_source(f"hub:{NAME}@{old}")) == [0, 1, 1]
        assert time.monotonic() - started < 5
        stderr = capsys.readouterr().err
        assert stderr.count(f"using revision {old} from the cache") == 2
        assert stderr.count(f"using revision {new} from the cache") == 1
        assert not huggingface_hub.constants.HF_HUB_OFFLINE

    def test_offline_uses_the_cache(self, hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
        import datasets

        open_source(f"hub:{NAME}@v1")
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
        monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
        hub.requests.clear()
        assert labels(open_source(f"hub:{NAME}@v1")) == [0, 1, 1]
        old = hub.commits(NAME)[1]
        assert_refused(f"hub:{NAME}@v2", "data.not_cached", old)
        assert_refused(f"hub:{NAME}@{'a' * 40}", "data.not_cached", old)
        assert hub.requests == []

    @pytest.mark.parametrize("offline", [False, True])
    def test_an_exchanged_file_is_not_prepared_again(
        self, offline: bool, hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        import datasets

        open_source(f"hub:{NAME}@v1")
        [snapshot] = (tmp_path / "home/hub").glob("datasets--*/snapshots/*")
        other = dataset_files(tmp_path / "other", [1, 0, 0])["data/train-00000-of-00001.parquet"]
        (snapshot / "data/train-00000-of-00001.parquet").resolve().write_bytes(other)
        if not offline:
            shutil.rmtree(datasets.config.HF_DATASETS_CACHE)
        else:  # with HF_HUB_OFFLINE set, `datasets` prepares the files, but not if it is patched in
            copies = iter(([], [tmp_path], []))
            monkeypatch.setattr(hub_dataset, "_datasets_copies", lambda _: next(copies))
            monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
            monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
            assert_refused(f"hub:{NAME}@v1", "data.damaged", "train-00000-of-00001.parquet")
            return
        assert labels(open_source(f"hub:{NAME}@v1")) == [0, 1, 1]


SHARDS = [f"data/train-0000{number}-of-00002.parquet" for number in range(2)]
CARD = """---
license: mit
configs:
- config_name: default
  data_files:
  - {split: train, path: data/train-*}
  - {split: test, path: data/test-*}
- config_name: small
  data_files: [{split: train, path: data/train-00000-*}]
---
"""


class TestListParquetFiles:
    @pytest.fixture
    def sharded(self, hub: HubServer, tmp_path: Path) -> str:
        """A dataset whose newest commit has one training shard less than v1."""
        content = write_parquet(tmp_path / "shard.parquet", [0, 1], names=["ant", "bee"])
        paths = [*SHARDS, "data/test-00000-of-00001.parquet"]
        files = {**dict.fromkeys(paths, content.read_bytes()), "README.md": CARD.encode()}
        hub.add_repo("someone/sharded", files, kind="dataset")
        hub.tag("someone/sharded", "v1")
        hub.commit("someone/sharded", {SHARDS[1]: None})
        return "someone/sharded"

    def test_each_revision_and_configuration_has_its_own_files(
        self, hub: HubServer, sharded: str
    ) -> None:
        [new, old, _] = hub.commits(sharded)
        for config, revision, commit, train in (
            (None, None, new, SHARDS[:1]),
            (None, "v1", old, SHARDS),
            ("small", "v1", old, SHARDS[:1]),
        ):
            listing = list_parquet_files("hub:x", sharded, config, revision)
            assert listing.commit == commit
            assert listing.paths["train"] == train
            assert list(listing.paths) == (["train"] if config else ["train", "test"])
        assert hub.count(r"/cdn/|\.parquet") == 0  # no file was read

    def test_takes_class_names_from_the_dataset_card(self, hub: HubServer, tmp_path: Path) -> None:
        # declares no class names
        parquet_path = write_parquet(tmp_path / "plain.parquet", [0, 1, 1, 0])
        card = (
            "---\ndataset_info:\n  features:\n  - {name: img, dtype: image}\n  - name: label\n"
            "    dtype: {class_label: {names: {'0': cat, '1': dog}}}\n---\n"
        )
        files = {"data/train.parquet": parquet_path.read_bytes(), "README.md": card.encode()}
        hub.add_repo("someone/declared", files, kind="dataset")
        for streaming in (True, False):
            source = open_source("hub:someone/declared", streaming=streaming)
            assert source.class_names == ["cat", "dog"]

    def test_rejects_unknown_names_and_other_formats(
        self, hub: HubServer, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        hub.add_repo("someone/images", {"train/a/1.png": b"x"}, kind="dataset")
        for name, code, expected_text in (
            ("nobody/things", "data.not_found", "`hf auth login`"),
            (f"{NAME}@v9", "data.not_found", "'@v9'"),
            (f"{NAME}:large", "data.not_loadable", "BuilderConfig 'large'"),
            ("someone/images", "data.not_parquet", "@refs/convert/parquet"),
        ):
            assert_refused(f"hub:{name}", code, expected_text, streaming=True)
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
        assert_refused(f"hub:{NAME}", "hub.unreachable", "HF_HUB_OFFLINE", streaming=True)

    @pytest.mark.parametrize("kind", ["status", "reset"])
    @pytest.mark.parametrize("endpoint", [ENDPOINTS[0], r"GET .*\.parquet"])
    def test_retries_after_one_fault_on_any_request(
        self, hub: HubServer, endpoint: str, kind: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        disable_retry_waits(monkeypatch)
        hub.fail(endpoint, kind=kind)
        assert labels(open_source(f"hub:{NAME}@v1", streaming=True)) == [0, 1, 1]
        assert hub.faults[0].times == 0  # the fault did happen

    def test_fails_if_the_hub_is_down(self, hub: HubServer) -> None:
        open_source(f"hub:{NAME}@v1")  # streaming does not use this copy
        hub.stop()
        assert_refused(f"hub:{NAME}@v1", "hub.unreachable", streaming=True)
