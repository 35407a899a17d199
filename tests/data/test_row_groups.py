"""data/streaming/row_groups.py: a streamed set is the same set, on this machine and on the hub."""

from __future__ import annotations

import os
import pickle
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from hub_server import HubServer, point_at
from refusals import refused
from streamed import GROUP, NAME, bytes_sent, on_disk, shards, split_of

from finetune.data.source import Source, open_source
from finetune.data.splits import merge_val, split_train, take
from finetune.data.streaming.row_groups import ShardItems
from finetune.hub import client as hub_reads

FILES = shards(2, 20)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    monkeypatch.setattr(hub_reads, "FIRST_WAIT_SECONDS", 0.01)
    with HubServer() as hub:
        hub.add_repo(NAME, FILES, kind="dataset")
        point_at(hub, monkeypatch, tmp_path / "home")
        yield hub
        assert hub.mistakes == []


def items_of(source: Source, split: str = "train") -> ShardItems:
    found = source.splits[split].items
    assert isinstance(found, ShardItems)
    return found


def equal(streamed: Source, whole: Source) -> None:
    assert streamed.class_names == whole.class_names
    assert list(streamed.splits) == list(whole.splits)
    for name, split in whole.splits.items():
        other = streamed.splits[name]
        assert other.labels.tolist() == split.labels.tolist()
        assert len(split) > 0
        for index in range(len(split)):
            assert (other.read(index) == split.read(index)).all()
            assert other.items.content(index) == split.items.content(index)


class TestTheSameSet:
    def test_of_parquet_files(self, tmp_path: Path) -> None:
        name = on_disk(tmp_path, FILES)
        streamed = open_source(name, streaming=True)
        assert isinstance(items_of(streamed), ShardItems)
        equal(streamed, open_source(name))
        assert "streamed in 12 row groups" in streamed.description
        assert streamed.splits["train"].name_of(27).endswith("train-00001-of-00002.parquet row 7")

    def test_of_the_hub(self, hub: HubServer) -> None:
        streamed = open_source(f"hub:{NAME}", streaming=True)
        sizes = sum(map(len, FILES.values()))
        ends = sum(len(s.footer) for i in ("train", "test") for s in items_of(streamed, i)._shards)
        assert bytes_sent(hub) < ends + 0.05 * sizes + 3 * 2**16
        equal(streamed, open_source(f"hub:{NAME}"))
        assert f"revision {hub.commits(NAME)[0]}" in streamed.description
        name = streamed.splits["train"].name_of(27)
        assert name == f"hub:{NAME} data/train-00001-of-00002.parquet row 7"

    def test_with_the_splits_that_a_recipe_takes(self, tmp_path: Path) -> None:
        name = on_disk(tmp_path, FILES)
        streamed, whole = (
            split_train(take(open_source(name, streaming=on), "train", 30, 4), 0.2, 4)
            for on in (True, False)
        )
        equal_rows = zip(streamed.splits.values(), whole.splits.values(), strict=True)
        assert all((one.read(3) == other.read(3)).all() for one, other in equal_rows)
        assert [len(split) for split in streamed.splits.values()] == [24, 6, 20]

    def test_with_its_validation_images_in_train(self, tmp_path: Path) -> None:
        files = {name.replace("test", "val"): content for name, content in FILES.items()}
        name = on_disk(tmp_path, files)
        equal(*(merge_val(open_source(name, streaming=on)) for on in (True, False)))
        assert len(items_of(merge_val(open_source(name, streaming=True)))) == 60


class TestReading:
    def test_two_row_groups_stay(self, hub: HubServer) -> None:
        split = open_source(f"hub:{NAME}", streaming=True).splits["train"]
        hub.requests.clear()
        for index in (0, 1, GROUP, 5, GROUP + 1):
            split.read(index)
        assert hub.count("/cdn/") == 2
        split.read(2 * GROUP)
        split.read(0)
        assert hub.count("/cdn/") == 4

    def test_threads_and_another_process(self, hub: HubServer) -> None:
        split = open_source(f"hub:{NAME}", streaming=True).splits["train"]
        with ThreadPoolExecutor(8) as pool:
            found = list(pool.map(split.read, range(40)))
        again = pickle.loads(pickle.dumps(split))
        # what the ends say, which bear the first and the last picture of each row group
        assert len(pickle.dumps(split)) < sum(map(len, FILES.values()))
        assert all((again.read(index) == found[index]).all() for index in range(40))
        lock = split.items._lock  # type: ignore[attr-defined]
        lock.acquire()  # as another thread may hold it
        child = os.fork()
        if child == 0:
            os._exit(0 if (split.read(11) == found[11]).all() else 1)
        lock.release()
        assert os.waitpid(child, 0)[1] == 0

    def test_a_bad_image_is_named(self, tmp_path: Path) -> None:
        import pyarrow as pa
        import pyarrow.parquet as pq

        path = tmp_path / "train.parquet"
        rows = [{"bytes": b"no image", "path": "a.png"}, {"bytes": None, "path": None}] * 2
        pq.write_table(pa.table({"image": rows, "label": [0, 1, 0, 1]}), path, row_group_size=2)
        split = open_source(f"parquet:{path}", streaming=True).splits["train"]
        with refused("data.wrong_format", "train.parquet row 2", "a.png"):
            split.read(2)
        with refused("data.no_image", "train.parquet row 3"):
            split.read(3)
        assert isinstance(split.items, ShardItems)
        group = split.items.load(1, np.array([1]))  # of its rows the second alone
        assert len(group) == 1
        with refused("data.no_image", "train.parquet row 3"):
            group.read(1)

    def test_a_hub_table_names_no_file_of_this_machine(
        self, hub: HubServer, tmp_path: Path
    ) -> None:
        import io

        import pyarrow as pa
        import pyarrow.parquet as pq

        stream = io.BytesIO()
        rows = [{"bytes": None, "path": "/etc/hostname"}] * 2
        pq.write_table(pa.table({"image": rows, "label": [0, 1]}), stream)
        hub.add_repo("someone/bad", {"train.parquet": stream.getvalue()}, kind="dataset")
        with refused("data.unsafe", "train.parquet row 0", "/etc/hostname"):
            open_source("hub:someone/bad", streaming=True).splits["train"].read(0)


class TestFingerprint:
    def test_it_is_of_the_data_and_of_what_is_taken(self, tmp_path: Path) -> None:
        def prints(folder: str, files: dict[str, bytes]) -> str:
            source = open_source(on_disk(tmp_path / folder, files), streaming=True)
            return source.splits["train"].fingerprint

        first = prints("one", FILES)
        assert prints("two", FILES) == first  # wherever it lies
        other = dict(FILES)
        other["data/train-00001-of-00002.parquet"] = shards(2, 19)[
            "data/test-00000-of-00001.parquet"
        ]
        split = split_of(tmp_path)
        shorter = split_of(tmp_path, chosen=np.arange(59))
        assert len({first, prints("three", other), split.fingerprint, shorter.fingerprint}) == 4

    def test_on_the_hub(self, hub: HubServer) -> None:
        def prints() -> str:
            return open_source(f"hub:{NAME}", streaming=True).splits["train"].fingerprint

        first = prints()
        hub.commit(NAME, {"README.md": b"---\nlicense: mit\n---\n"})
        assert prints() == first
        name = "data/train-00000-of-00002.parquet"
        hub.commit(NAME, {name: FILES["data/train-00001-of-00002.parquet"]})
        assert prints() != first
