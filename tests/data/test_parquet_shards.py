"""parquet_shards.py: ends, label columns and row groups of parquet files, and nothing more."""

from __future__ import annotations

import os
import pickle
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from refusals import refused
from samples import make_parquet
from streamed import CLASSES, GROUP, shard

from finetune.data.columns import declared_names
from finetune.data.streaming import parquet_shards as shards
from finetune.data.streaming import remote_file as ranges
from finetune.data.streaming.parquet_shards import Shard, label_column, open_shards
from finetune.data.streaming.remote_file import LocalFile


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "train.parquet"
    path.write_bytes(shard(0, 40))
    return path


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """The parts that are read from now on."""
    found: list[tuple[int, int]] = []
    whole = ranges.LocalFile.read

    def noted(self: LocalFile, first: int, length: int) -> bytes:
        found.append((first, length))
        return whole(self, first, length)

    monkeypatch.setattr(ranges.LocalFile, "read", noted)
    return found


def opened(*files: Path) -> list[Shard]:
    return open_shards([LocalFile.at(file) for file in files])


class TestOpening:
    def test_the_end_says_it_all(self, file: Path, read: list[tuple[int, int]]) -> None:
        [one] = opened(file)
        assert one.lengths() == [GROUP] * 6 + [4]
        assert one.schema.equals(pq.read_schema(file), check_metadata=True)
        assert declared_names(one.schema, "label") == CLASSES
        assert len(read) == 1
        again = pickle.loads(pickle.dumps(one))
        assert again.metadata.num_rows == 40

    def test_a_long_end_takes_a_second_look(
        self, file: Path, read: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(shards, "_TAIL_BYTES", 100)
        assert opened(file)[0].metadata.num_rows == 40
        assert [length for _, length in read] == [100, len(opened(file)[0].footer)]

    @pytest.mark.parametrize("content", [b"", b"PAR1", b"x" * 500, b"\xff" * 60 + b"\x7fPAR1"])
    def test_what_is_none(self, tmp_path: Path, content: bytes) -> None:
        path = tmp_path / "page.parquet"
        path.write_bytes(content)
        with refused("data.damaged", "page.parquet"):
            opened(path)

    def test_a_damaged_end(self, file: Path) -> None:
        content = bytearray(file.read_bytes())
        content[-300:-20] = bytes(280)
        file.write_bytes(content)
        with refused("data.damaged", "train.parquet"):
            opened(file)


class TestReading:
    def test_labels_alone(self, file: Path, tmp_path: Path, read: list[tuple[int, int]]) -> None:
        other = tmp_path / "other.parquet"
        other.write_bytes(shard(40, 15))
        both = opened(file, other)
        read.clear()
        found = label_column(both, "label", "image")
        assert found.to_pylist() == [row * 7 % 3 for row in range(55)]
        assert len(read) == 7 + 3  # row groups
        assert sum(length for _, length in read) < 0.1 * (
            file.stat().st_size + other.stat().st_size
        )

    def test_a_row_group_is_one_read(self, file: Path, read: list[tuple[int, int]]) -> None:
        [one] = opened(file)
        read.clear()
        whole = pq.read_table(file).column("image").to_pylist()
        for group in (0, 3, 6):
            assert one.read(group, "image").to_pylist() == whole[GROUP * group :][:GROUP]
        assert len(read) == 3
        assert one.num_bytes(3, "image") == pytest.approx(read[1][1], rel=0.1)

    def test_damage_is_noticed_by_the_pages_checksum(self, file: Path) -> None:
        [one] = opened(file)
        chunk = one.metadata.row_group(2).column(0)
        content = bytearray(file.read_bytes())
        content[chunk.dictionary_page_offset + chunk.total_compressed_size // 2] ^= 1
        file.write_bytes(content)
        os.utime(file, ns=(0, one.file.modified_ns))  # a disk's fault changes no time
        with refused("data.damaged", "train.parquet", "row group 2", "CRC"):
            one.read(2, "image")
        assert one.read(3, "image").num_chunks

    def test_damage_on_the_way_is_read_again(
        self, file: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        [one] = opened(file)
        whole, damaged = LocalFile.read, []

        def once(self: LocalFile, first: int, length: int) -> bytes:
            found = bytearray(whole(self, first, length))
            if not damaged:
                damaged.append(found[length // 2])
                found[length // 2] ^= 1
            return bytes(found)

        monkeypatch.setattr(ranges.LocalFile, "read", once)
        assert len(one.read(2, "image")) == GROUP
        assert damaged

    def test_columns_that_do_not_fit(self, file: Path, tmp_path: Path) -> None:
        odd = make_parquet(tmp_path / "odd.parquet", [0, 1], image="picture")
        with refused("data.no_column", "odd.parquet", "'image'"):
            label_column(opened(file, odd), "label", "image")
        pq.write_table(pa.table({"image": ["a.png"], "label": [0]}), tmp_path / "text.parquet")
        with refused("data.wrong_format", "text.parquet"):
            label_column(opened(tmp_path / "text.parquet"), "label", "image")
        words = make_parquet(tmp_path / "words.parquet", ["a", "b"], image="image")
        with refused("data.damaged"):
            label_column(opened(file, words), "label", "image")
