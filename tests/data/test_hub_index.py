"""hub_index.py against the loopback hub: which files, at which commit, through faults."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import huggingface_hub.constants
import pytest
from hub_server import HubServer, point_at
from refusals import refused
from samples import make_parquet

from finetune.data.source import open_source
from finetune.data.streaming.hub_index import Shards, find_shards
from finetune.data.streaming.remote_file import HubFile, LocalFile
from finetune.hub import client as hub_reads

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
CALLS = [
    r"GET /api/datasets/someone/things($|\?|/revision/)",
    r"(HEAD|GET) .*/README\.md",
    r"POST .*/paths-info/",
]


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    monkeypatch.setattr(hub_reads, "FIRST_WAIT_SECONDS", 0.01)
    monkeypatch.setattr(hub_reads, "_said", set())
    content = make_parquet(tmp_path / "one.parquet", [0, 1, 1, 0], names=["ant", "bee"])
    files = dict.fromkeys([*SHARDS, "data/test-00000-of-00001.parquet"], content.read_bytes())
    with HubServer() as hub:
        hub.add_repo(NAME, {**files, "README.md": CARD.encode()}, kind="dataset")
        hub.tag(NAME, "v1")
        hub.commit(NAME, {SHARDS[1]: None})
        hub.add_user("someone", token=ALICE)
        point_at(hub, monkeypatch, tmp_path / "home")
        yield hub
        assert hub.mistakes == []


def find(revision: str | None = None, config: str | None = None, name: str = NAME) -> Shards:
    return find_shards(f"hub:{name}", name, config, revision)


def refuse(code: str, *named: str, **options: str) -> None:
    with refused(code, *named) as caught:
        find(**options)
    text = str(caught.value)
    assert "\n" not in text
    assert text.startswith("hub:")
    assert ALICE not in text
    assert "hf_wrong" not in text


class TestFiles:
    def test_each_revision_has_its_own(self, hub: HubServer) -> None:
        [new, old, _] = hub.commits(NAME)
        for revision, commit, train in ((None, new, SHARDS[:1]), ("v1", old, SHARDS)):
            found = find(revision)
            assert found.commit == commit
            assert {split: [f.path for f in group] for split, group in found.files.items()} == {
                "train": train,
                "test": ["data/test-00000-of-00001.parquet"],
            }
            for file in (file for group in found.files.values() for file in group):
                assert isinstance(file, HubFile)
                assert file.commit == commit
                content = hub.files(NAME, commit)[file.path]
                assert file.size == len(content)
                assert (
                    file.content_name == hub.store.any_of(NAME).find(commit).files[file.path].etag
                )
        assert hub.count(r"/cdn/|\.parquet") == 0  # nothing of them was read

    def test_a_configuration(self, hub: HubServer) -> None:
        found = find("v1", "small")
        assert list(found.files) == ["train"]
        assert [file.path for file in found.files["train"]] == SHARDS[:1]

    def test_what_the_card_declares_counts(self, hub: HubServer, tmp_path: Path) -> None:
        plain = make_parquet(tmp_path / "plain.parquet", [0, 1, 1, 0])  # names no class
        card = (
            "---\ndataset_info:\n  features:\n  - {name: img, dtype: image}\n  - name: label\n"
            "    dtype: {class_label: {names: {'0': cat, '1': dog}}}\n---\n"
        )
        files = {"data/train.parquet": plain.read_bytes(), "README.md": card.encode()}
        hub.add_repo("someone/declared", files, kind="dataset")
        names = [
            open_source("hub:someone/declared", streaming=streaming).class_names
            for streaming in (True, False)
        ]
        assert names == [["cat", "dog"], ["cat", "dog"]]


class TestRefusals:
    def test_in_words(self, hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
        hub.add_repo(
            "someone/images", {"train/a/1.png": b"1", "train/b/2.png": b"2"}, kind="dataset"
        )
        hub.add_repo("someone/secret", {"data/train.parquet": b"1"}, kind="dataset", private=True)
        refuse("data.not_found", "nobody/things", name="nobody/things")
        refuse("data.not_found", "someone/secret", name="someone/secret")
        refuse("data.not_found", "'@v9'", revision="v9")
        refuse("data.not_loadable", "BuilderConfig 'large'", config="large")
        refuse("data.not_parquet", "1.png", "@refs/convert/parquet", name="someone/images")
        monkeypatch.setenv("HF_TOKEN", "hf_wrongWrong1234")
        refuse("hub.forbidden", "HF_TOKEN (401)")
        monkeypatch.setenv("HF_TOKEN", ALICE)
        assert find(name="someone/secret").files["train"][0].size == 1


class TestFaults:
    @pytest.mark.parametrize("call", CALLS)
    @pytest.mark.parametrize("kind", ["status", "reset"])
    def test_one_on_any_call(
        self, hub: HubServer, call: str, kind: str, capfd: pytest.CaptureFixture[str]
    ) -> None:
        hub.fail(call, kind=kind)
        assert [file.path for file in find("v1").files["train"]] == SHARDS
        assert hub.faults[0].times == 0  # it did happen
        assert capfd.readouterr().err.count("trying again") <= 1

    def test_for_ever(self, hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("HF_TOKEN", ALICE)
        hub.fail(".", times=None, echo=True)
        refuse("hub.unreachable", "503")


class TestCache:
    def test_nobody_there(self, hub: HubServer, capsys: pytest.CaptureFixture[str]) -> None:
        old = hub.commits(NAME)[1]
        open_source(f"hub:{NAME}@v1")  # downloads
        hub.stop()
        found = find("v1")
        assert found.commit == old
        assert f"using revision {old} from the cache" in capsys.readouterr().err
        files = found.files["train"]
        assert [file.path.name for file in files] == [Path(name).name for name in SHARDS]
        assert all(isinstance(file, LocalFile) for file in files)
        assert open_source(f"hub:{NAME}@v1", streaming=True).splits["train"].read(7).ndim == 3

    def test_set_offline(self, hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
        import datasets

        old = hub.commits(NAME)[1]
        open_source(f"hub:{NAME}@v1")
        for owner in (huggingface_hub.constants, datasets.config):
            monkeypatch.setattr(owner, "HF_HUB_OFFLINE", True)
        hub.requests.clear()
        assert len(find("v1").files["train"]) == 2
        assert len(find(old, "small").files["train"]) == 1
        refuse("hub.unreachable", "HF_HUB_OFFLINE")
        assert hub.requests == []

    def test_a_copy_with_a_shard_missing_is_none(self, hub: HubServer, tmp_path: Path) -> None:
        open_source(f"hub:{NAME}@v1")
        hub.stop()
        [file] = (tmp_path / "home/hub").rglob(Path(SHARDS[1]).name)
        file.unlink()
        refuse("hub.unreachable", revision="v1")
