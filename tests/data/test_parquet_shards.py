"""parquet_shards.py reads only the footers, label columns and row groups of parquet files."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from refusals import refused
from small_datasets import write_parquet
from streaming_dataset import CLASSES, ROW_GROUP_SIZE, shard_bytes

from finetune.data.columns import declared_class_names
from finetune.data.streaming.parquet_shards import ParquetShard, open_shards, read_label_column
from finetune.data.streaming.shard_file import LocalFile


@pytest.fixture
def parquet_path(tmp_path: Path) -> Path:
    path = tmp_path / "train.parquet"
    path.write_bytes(shard_bytes(0, 40))
    return path


@pytest.fixture
def reads_made(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """(offset, length) of every read from now on."""
    reads: list[tuple[int, int]] = []
    read = LocalFile.read

    def recording_read(self: LocalFile, first: int, length: int) -> bytes:
        reads.append((first, length))
        return read(self, first, length)

    monkeypatch.setattr(LocalFile, "read", recording_read)
    return reads


def open_files(*files: Path) -> list[ParquetShard]:
    return open_shards([LocalFile.from_path(path) for path in files])


class TestOpening:
    def test_reads_only_the_footer(
        self, parquet_path: Path, reads_made: list[tuple[int, int]]
    ) -> None:
        [parquet_shard] = open_files(parquet_path)
        assert parquet_shard.group_lengths() == [ROW_GROUP_SIZE] * 6 + [4]
        assert parquet_shard.schema.equals(pq.read_schema(parquet_path), check_metadata=True)
        assert declared_class_names(parquet_shard.schema, "label") == CLASSES
        assert len(reads_made) == 2  # the metadata, and the whole footer to hash it
        assert parquet_shard.metadata.num_rows == 40

    @pytest.mark.parametrize("content", [b"", b"PAR1", b"x" * 500, b"\xff" * 60 + b"\x7fPAR1"])
    def test_rejects_files_that_are_not_parquet(self, tmp_path: Path, content: bytes) -> None:
        path = tmp_path / "page.parquet"
        path.write_bytes(content)
        with refused("data.damaged", "page.parquet"):
            open_files(path)

    def test_rejects_a_damaged_footer(self, parquet_path: Path) -> None:
        content = bytearray(parquet_path.read_bytes())
        content[-300:-20] = bytes(280)
        parquet_path.write_bytes(content)
        with refused("data.damaged", "train.parquet"):
            open_files(parquet_path)


class TestReadingColumns:
    def test_reads_only_the_label_column(
        self, parquet_path: Path, tmp_path: Path, reads_made: list[tuple[int, int]]
    ) -> None:
        other_path = tmp_path / "other.parquet"
        other_path.write_bytes(shard_bytes(40, 15))
        both_shards = open_files(parquet_path, other_path)
        reads_made.clear()
        labels = read_label_column(both_shards, "label", "image")
        assert labels.to_pylist() == [row * 7 % 3 for row in range(55)]
        assert len(reads_made) == 7 + 3  # row groups
        assert sum(length for _, length in reads_made) < 0.1 * (
            parquet_path.stat().st_size + other_path.stat().st_size
        )

    def test_a_row_group_takes_one_read(
        self, parquet_path: Path, reads_made: list[tuple[int, int]]
    ) -> None:
        [parquet_shard] = open_files(parquet_path)
        reads_made.clear()
        images = pq.read_table(parquet_path).column("image").to_pylist()
        for group in (0, 3, 6):
            assert (
                parquet_shard.read_group(group, "image").to_pylist()
                == images[ROW_GROUP_SIZE * group :][:ROW_GROUP_SIZE]
            )
        assert len(reads_made) == 3
        assert parquet_shard.group_num_bytes(3, "image") == pytest.approx(reads_made[1][1], rel=0.1)

    def test_page_checksums_detect_damage(self, parquet_path: Path) -> None:
        [parquet_shard] = open_files(parquet_path)
        chunk = parquet_shard.metadata.row_group(2).column(0)
        content = bytearray(parquet_path.read_bytes())
        content[chunk.dictionary_page_offset + chunk.total_compressed_size // 2] ^= 1
        parquet_path.write_bytes(content)
        [parquet_shard] = open_files(parquet_path)  # disk damage does not change the times
        with refused("data.damaged", "train.parquet", "row group 2", "CRC"):
            parquet_shard.read_group(2, "image")
        assert parquet_shard.read_group(3, "image").num_chunks

    def test_rejects_columns_that_do_not_match(self, parquet_path: Path, tmp_path: Path) -> None:
        other_columns = write_parquet(tmp_path / "odd.parquet", [0, 1], image="picture")
        with refused("data.no_column", "odd.parquet", "'image'"):
            read_label_column(open_files(parquet_path, other_columns), "label", "image")
        pq.write_table(pa.table({"image": ["a.png"], "label": [0]}), tmp_path / "text.parquet")
        with refused("data.wrong_format", "text.parquet"):
            read_label_column(open_files(tmp_path / "text.parquet"), "label", "image")
        text_labels = write_parquet(tmp_path / "words.parquet", ["a", "b"], image="image")
        with refused("data.split_mismatch", "words.parquet", "class names"):
            read_label_column(open_files(parquet_path, text_labels), "label", "image")
        numbers = write_parquet(tmp_path / "numbers.parquet", [0, 1], image="image")
        with refused("data.damaged"):
            read_label_column(open_files(numbers, text_labels), "label", "image")
