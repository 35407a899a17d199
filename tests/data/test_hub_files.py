"""hub_index.py against a local hub: which files at which commit, also after faults."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import huggingface_hub.constants
import pytest
from hub_server import HubServer, point_clients_at
from refusals import refused
from small_datasets import write_parquet

from finetune.data.open_source import open_source
from finetune.data.streaming.hub_files import DatasetFiles, list_parquet_files
from finetune.data.streaming.remote_file import HubDatasetFile, LocalFile
from finetune.hub import client as hub_client

NAME = "someone/things"
ALICE = "hf_aliceAlice1234"
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
ENDPOINTS = [
    r"GET /api/datasets/someone/things($|\?|/revision/)",
    r"(HEAD|GET) .*/README\.md",
    r"POST .*/paths-info/",
]


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    monkeypatch.setattr(hub_client, "FIRST_WAIT_SECONDS", 0.01)
    content = write_parquet(tmp_path / "one.parquet", [0, 1, 1, 0], names=["ant", "bee"])
    files = dict.fromkeys([*SHARDS, "data/test-00000-of-00001.parquet"], content.read_bytes())
    with HubServer() as hub:
        hub.add_repo(NAME, {**files, "README.md": CARD.encode()}, kind="dataset")
        hub.tag(NAME, "v1")
        hub.commit(NAME, {SHARDS[1]: None})
        hub.add_user("someone", token=ALICE)
        point_clients_at(hub, monkeypatch, tmp_path / "home")
        yield hub
        assert hub.server_errors == []


def list_files(
    revision: str | None = None, config: str | None = None, name: str = NAME
) -> DatasetFiles:
    return list_parquet_files(f"hub:{name}", name, config, revision)


def assert_refused(code: str, *expected_texts: str, **options: str) -> None:
    with refused(code, *expected_texts) as caught:
        list_files(**options)
    message = str(caught.value)
    assert "\n" not in message
    assert message.startswith("hub:")
    assert ALICE not in message
    assert "hf_wrong" not in message


class TestFiles:
    def test_each_revision_has_its_own_files(self, hub: HubServer) -> None:
        [new, old, _] = hub.commits(NAME)
        for revision, commit, train in ((None, new, SHARDS[:1]), ("v1", old, SHARDS)):
            listing = list_files(revision)
            assert listing.commit == commit
            assert {
                split: [file.path for file in group] for split, group in listing.files.items()
            } == {
                "train": train,
                "test": ["data/test-00000-of-00001.parquet"],
            }
            for file in (file for group in listing.files.values() for file in group):
                assert isinstance(file, HubDatasetFile)
                assert file.commit == commit
                content = hub.files(NAME, commit)[file.path]
                assert file.size == len(content)
                assert file.etag == hub.store.any_of(NAME).find(commit).files[file.path].etag
        assert hub.count(r"/cdn/|\.parquet") == 0  # no file content was read

    def test_selects_a_configuration(self, hub: HubServer) -> None:
        listing = list_files("v1", "small")
        assert list(listing.files) == ["train"]
        assert [file.path for file in listing.files["train"]] == SHARDS[:1]

    def test_takes_class_names_from_the_dataset_card(self, hub: HubServer, tmp_path: Path) -> None:
        # declares no class names
        parquet_path = write_parquet(tmp_path / "plain.parquet", [0, 1, 1, 0])
        card = (
            "---\ndataset_info:\n  features:\n  - {name: img, dtype: image}\n  - name: label\n"
            "    dtype: {class_label: {names: {'0': cat, '1': dog}}}\n---\n"
        )
        files = {"data/train.parquet": parquet_path.read_bytes(), "README.md": card.encode()}
        hub.add_repo("someone/declared", files, kind="dataset")
        names = [
            open_source("hub:someone/declared", streaming=streaming).class_names
            for streaming in (True, False)
        ]
        assert names == [["cat", "dog"], ["cat", "dog"]]


class TestRefusals:
    def test_error_messages(self, hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
        hub.add_repo(
            "someone/images", {"train/a/1.png": b"1", "train/b/2.png": b"2"}, kind="dataset"
        )
        hub.add_repo("someone/secret", {"data/train.parquet": b"1"}, kind="dataset", private=True)
        assert_refused("data.not_found", "nobody/things", name="nobody/things")
        assert_refused("data.not_found", "someone/secret", name="someone/secret")
        assert_refused("data.not_found", "'@v9'", revision="v9")
        assert_refused("data.not_loadable", "BuilderConfig 'large'", config="large")
        assert_refused("data.not_parquet", "1.png", "@refs/convert/parquet", name="someone/images")
        monkeypatch.setenv("HF_TOKEN", "hf_wrongWrong1234")
        assert_refused("hub.forbidden", "HF_TOKEN (401)")
        monkeypatch.setenv("HF_TOKEN", ALICE)
        assert list_files(name="someone/secret").files["train"][0].size == 1


class TestFaults:
    @pytest.mark.parametrize("endpoint", ENDPOINTS)
    @pytest.mark.parametrize("kind", ["status", "reset"])
    def test_retries_after_one_fault_on_any_request(
        self, hub: HubServer, endpoint: str, kind: str, capfd: pytest.CaptureFixture[str]
    ) -> None:
        hub.fail(endpoint, kind=kind)
        assert [file.path for file in list_files("v1").files["train"]] == SHARDS
        assert hub.faults[0].times == 0  # the fault did happen
        assert capfd.readouterr().err.count("trying again") <= 1

    def test_fails_if_the_fault_is_permanent(
        self, hub: HubServer, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("HF_TOKEN", ALICE)
        hub.fail(".", times=None, echo=True)
        assert_refused("hub.unreachable", "503")


class TestCache:
    def test_uses_the_cache_if_the_hub_is_down(
        self, hub: HubServer, capsys: pytest.CaptureFixture[str]
    ) -> None:
        old = hub.commits(NAME)[1]
        open_source(f"hub:{NAME}@v1")  # downloads
        hub.stop()
        listing = list_files("v1")
        assert listing.commit == old
        assert f"using revision {old} from the cache" in capsys.readouterr().err
        files = listing.files["train"]
        assert [file.path.name for file in files] == [Path(name).name for name in SHARDS]
        assert all(isinstance(file, LocalFile) for file in files)
        assert open_source(f"hub:{NAME}@v1", streaming=True).splits["train"].decode(7).ndim == 3

    def test_offline_uses_the_cache(self, hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
        import datasets

        old = hub.commits(NAME)[1]
        open_source(f"hub:{NAME}@v1")
        for owner in (huggingface_hub.constants, datasets.config):
            monkeypatch.setattr(owner, "HF_HUB_OFFLINE", True)
        hub.requests.clear()
        assert len(list_files("v1").files["train"]) == 2
        assert len(list_files(old, "small").files["train"]) == 1
        assert_refused("hub.unreachable", "HF_HUB_OFFLINE")
        assert hub.requests == []

    def test_ignores_a_cached_copy_with_a_missing_shard(
        self, hub: HubServer, tmp_path: Path
    ) -> None:
        open_source(f"hub:{NAME}@v1")
        hub.stop()
        [file] = (tmp_path / "home/hub").rglob(Path(SHARDS[1]).name)
        file.unlink()
        assert_refused("hub.unreachable", revision="v1")
