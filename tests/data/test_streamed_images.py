"""streamed_images.py: a streamed dataset equals the loaded one, for local and hub files."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from hub_server import HubServer, point_clients_at
from refusals import refused
from streaming_dataset import (
    REPO_NAME,
    ROW_GROUP_SIZE,
    dataset_shards,
    make_streamed_split,
    write_to_disk,
)

from finetune.data.open_source import open_source
from finetune.data.source import Source
from finetune.data.splits import hold_out_validation, merge_val, subsample
from finetune.data.streaming.streamed_images import StreamedImages
from finetune.hub import client as hub_client

FILES = dataset_shards(2, 20)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    monkeypatch.setattr(hub_client, "FIRST_WAIT_SECONDS", 0.01)
    with HubServer() as hub:
        hub.add_repo(REPO_NAME, FILES, kind="dataset")
        point_clients_at(hub, monkeypatch, tmp_path / "home")
        yield hub
        assert hub.server_errors == []


def streamed_images(source: Source, split: str = "train") -> StreamedImages:
    images = source.splits[split].images
    assert isinstance(images, StreamedImages)
    return images


def assert_same_data(streamed: Source, loaded: Source) -> None:
    assert streamed.class_names == loaded.class_names
    assert list(streamed.splits) == list(loaded.splits)
    for name, split in loaded.splits.items():
        streamed_split = streamed.splits[name]
        assert streamed_split.labels.tolist() == split.labels.tolist()
        assert len(split) > 0
        for index in range(len(split)):
            assert (streamed_split.decode(index) == split.decode(index)).all()
            assert streamed_split.images.read_bytes(index) == split.images.read_bytes(index)


class TestEqualsLoadedDataset:
    def test_parquet_files(self, tmp_path: Path) -> None:
        name = write_to_disk(tmp_path, FILES)
        streamed = open_source(name, streaming=True)
        assert isinstance(streamed_images(streamed), StreamedImages)
        assert_same_data(streamed, open_source(name))
        assert "streamed in 12 row groups" in streamed.description
        assert streamed.splits["train"].name_of(27).endswith("train-00001-of-00002.parquet row 7")

    def test_hub_dataset(self, hub: HubServer) -> None:
        streamed = open_source(f"hub:{REPO_NAME}", streaming=True)
        assert hub.count("/cdn/") == 2 * 3 + 12  # ETag and footer of a file, labels of a row group
        assert_same_data(streamed, open_source(f"hub:{REPO_NAME}"))
        assert f"revision {hub.commits(REPO_NAME)[0]}" in streamed.description
        name = streamed.splits["train"].name_of(27)
        assert name == f"hub:{REPO_NAME} data/train-00001-of-00002.parquet row 7"

    def test_with_subsampling_and_validation(self, tmp_path: Path) -> None:
        name = write_to_disk(tmp_path, FILES)
        streamed, loaded = (
            hold_out_validation(
                subsample(open_source(name, streaming=streaming), "train", 30, 4), 0.2, 4
            )
            for streaming in (True, False)
        )
        split_pairs = zip(streamed.splits.values(), loaded.splits.values(), strict=True)
        assert all(
            (streamed_split.decode(3) == loaded_split.decode(3)).all()
            for streamed_split, loaded_split in split_pairs
        )
        assert [len(split) for split in streamed.splits.values()] == [24, 6, 20]

    def test_with_merged_validation(self, tmp_path: Path) -> None:
        files = {name.replace("test", "val"): content for name, content in FILES.items()}
        name = write_to_disk(tmp_path, files)
        assert_same_data(
            *(merge_val(open_source(name, streaming=streaming)) for streaming in (True, False))
        )
        assert len(streamed_images(merge_val(open_source(name, streaming=True)))) == 60


class TestReading:
    def test_caches_two_row_groups(self, hub: HubServer) -> None:
        split = open_source(f"hub:{REPO_NAME}", streaming=True).splits["train"]
        hub.requests.clear()
        for index in (0, 1, ROW_GROUP_SIZE, 5, ROW_GROUP_SIZE + 1):
            split.decode(index)
        assert hub.count("/cdn/") == 2
        split.decode(2 * ROW_GROUP_SIZE)
        split.decode(0)
        assert hub.count("/cdn/") == 4

    def test_reads_in_threads_and_other_processes(self, hub: HubServer) -> None:
        split = open_source(f"hub:{REPO_NAME}", streaming=True).splits["train"]
        with ThreadPoolExecutor(8) as pool:
            images = list(pool.map(split.decode, range(40)))
        assert all((split.decode(index) == images[index]).all() for index in range(40))
        lock = split.images._lock  # type: ignore[attr-defined]
        lock.acquire()  # as if another thread held it
        child = os.fork()
        if child == 0:
            os._exit(0 if (split.decode(11) == images[11]).all() else 1)
        lock.release()
        assert os.waitpid(child, 0)[1] == 0

    def test_names_an_invalid_image(self, tmp_path: Path) -> None:
        import pyarrow as pa
        import pyarrow.parquet as pq

        path = tmp_path / "train.parquet"
        rows = [{"bytes": b"no image", "path": "a.png"}, {"bytes": None, "path": None}] * 2
        pq.write_table(pa.table({"image": rows, "label": [0, 1, 0, 1]}), path, row_group_size=2)
        split = open_source(f"parquet:{path}", streaming=True).splits["train"]
        with refused("data.wrong_format", "train.parquet row 2", "a.png"):
            split.decode(2)
        with refused("data.no_image", "train.parquet row 3"):
            split.decode(3)
        assert isinstance(split.images, StreamedImages)
        group = split.images.load_group(1, np.array([1]))  # only the second of its rows
        assert len(group) == 1
        with refused("data.no_image", "train.parquet row 3"):
            group.decode(1)

    def test_rejects_hub_rows_that_name_local_files(self, hub: HubServer, tmp_path: Path) -> None:
        import io

        import pyarrow as pa
        import pyarrow.parquet as pq

        stream = io.BytesIO()
        rows = [{"bytes": None, "path": "/etc/hostname"}] * 2
        pq.write_table(pa.table({"image": rows, "label": [0, 1]}), stream)
        hub.add_repo("someone/bad", {"train.parquet": stream.getvalue()}, kind="dataset")
        with refused("data.unsafe", "train.parquet row 0", "/etc/hostname"):
            open_source("hub:someone/bad", streaming=True).splits["train"].decode(0)


class TestFingerprint:
    def test_depends_on_the_data_and_the_selected_rows(self, tmp_path: Path) -> None:
        def fingerprint(folder: str, files: dict[str, bytes]) -> str:
            source = open_source(write_to_disk(tmp_path / folder, files), streaming=True)
            return source.splits["train"].fingerprint

        first = fingerprint("one", FILES)
        assert fingerprint("two", FILES) == first  # in any folder
        other_files = dict(FILES)
        other_files["data/train-00001-of-00002.parquet"] = dataset_shards(2, 19)[
            "data/test-00000-of-00001.parquet"
        ]
        split = make_streamed_split(tmp_path)
        shorter = make_streamed_split(tmp_path, indices=np.arange(59))
        assert (
            len({first, fingerprint("three", other_files), split.fingerprint, shorter.fingerprint})
            == 4
        )

    def test_depends_on_the_files_of_the_hub_dataset(self, hub: HubServer) -> None:
        def fingerprint() -> str:
            return open_source(f"hub:{REPO_NAME}", streaming=True).splits["train"].fingerprint

        first = fingerprint()
        hub.commit(REPO_NAME, {"README.md": b"---\nlicense: mit\n---\n"})
        assert fingerprint() == first
        name = "data/train-00000-of-00002.parquet"
        hub.commit(REPO_NAME, {name: FILES["data/train-00001-of-00002.parquet"]})
        assert fingerprint() != first
