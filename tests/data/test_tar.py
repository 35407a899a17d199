"""Tar shards: every form of the source, the same images as in folders, and streaming order."""

from __future__ import annotations

import io
import json
import logging
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hub_server import HubServer, point_clients_at
from huggingface_hub import constants
from PIL import Image
from refusals import refused
from small_datasets import class_counts, make_pixel_store, random_png, write_file
from streaming_dataset import disable_retry_waits
from tar_shards import (
    SUFFIXES,
    RangeServer,
    tar_bytes,
    tar_members,
    two_image_members,
    write_tar_shards,
)

from finetune.data import tar as tar_module
from finetune.data import tar_index
from finetune.data.decode import decode_image
from finetune.data.open_source import open_source
from finetune.data.sampler import DistributedBatchSampler
from finetune.data.source import Source
from finetune.data.splits import hold_out_validation, merge_val
from finetune.data.streaming.shard_file import LocalFile
from finetune.data.streaming.shuffle import build_shuffle_streams
from finetune.data.streaming.streamed_images import StreamedImages
from finetune.hub import client

TWO_IMAGES = [("a.png", random_png(1)), ("b.png", random_png(2))]


def bmp_bytes(gray_level: int) -> bytes:
    stream = io.BytesIO()
    Image.new("RGB", (8, 8), (gray_level, gray_level, gray_level)).save(stream, "BMP")
    return stream.getvalue()


def read_all_bytes(source: Source, split: str = "train") -> list[bytes]:
    images_of_split = source.splits[split]
    return [images_of_split.images.read_bytes(index) for index in range(len(images_of_split))]


def expected_pngs(first: int, count: int) -> list[bytes]:
    return [random_png(index) for index in range(first, first + count)]


@pytest.mark.parametrize(
    "pattern",
    [
        "",
        "/*.tar",
        "/set-{train-{0000..0002},test-0000}.tar",
        "/{set-train-{0000..0002}.tar,set-test-0000.tar}",
        "/set-t*-{0000..0002}.tar",
    ],
)
@pytest.mark.parametrize("streaming", [False, True])
def test_opens_shards_by_folder_glob_and_braces(
    tmp_path: Path, pattern: str, streaming: bool
) -> None:
    source = open_source(f"tar:{write_tar_shards(tmp_path / 'd')}{pattern}", streaming=streaming)
    assert class_counts(source) == {"train": [9, 9], "test": [3, 3]}
    assert source.class_names == ["0", "1"]
    assert read_all_bytes(source) == expected_pngs(0, 18)
    assert read_all_bytes(source, "test") == expected_pngs(18, 6)
    assert source.description == f"4 tar shards{', streamed' * streaming}"
    train = source.splits["train"]
    assert isinstance(train.images, StreamedImages) is streaming
    for index in (0, 7, 17):
        assert np.array_equal(train.decode(index), decode_image(random_png(index)))
    assert "set-train-0001.tar" in train.name_of(7)
    assert streaming or train.name_of(7) == "set-train-0001.tar 00007.png"


@pytest.mark.parametrize("pattern", ["", "/*.tar"])
def test_warns_of_a_missing_number(
    tmp_path: Path, pattern: str, caplog: pytest.LogCaptureFixture
) -> None:
    folder = write_tar_shards(tmp_path / "d")
    open_source(f"tar:{folder}{pattern}")
    assert not caplog.messages
    (Path(folder) / "set-train-0001.tar").unlink()
    open_source(f"tar:{folder}{pattern}")
    assert "1 number is missing, for example" in caplog.messages[0]
    assert "set-train-0001.tar" in caplog.messages[0]


def test_numbers_that_do_not_count_shards_are_no_gap(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = Path(write_tar_shards(tmp_path / "d"))
    for old, new in (("0000", "1700000000"), ("0001", "1800000000"), ("0002", "9900000000")):
        (folder / f"set-train-{old}.tar").rename(folder / f"set-train-{new}.tar")
    open_source(f"tar:{folder}")
    assert not caplog.messages


def test_expands_braces() -> None:
    for pattern, names in (
        ("a{08..10}.tar", ["a08.tar", "a09.tar", "a10.tar"]),
        ("a{8..10}", ["a8", "a9", "a10"]),
        ("s-{train-{1..2},test}.tar", ["s-train-1.tar", "s-test.tar", "s-train-2.tar"]),
        ("{a,b}{0..1}", ["a0", "a1", "b0", "b1"]),
        ("a{b}c{d,e}", ["a{b}cd", "a{b}ce"]),
        ("a{b,c", ["a{b,c"]),
        ("a}b", ["a}b"]),
        ("a{2..1}", []),
    ):
        assert list(dict.fromkeys(tar_module._expand_braces(pattern))) == names, pattern


def test_equals_image_files_in_class_folders(tmp_path: Path) -> None:
    """Images and labels are equal, so the fingerprint, the order and every metric are too."""
    write_tar_shards(tmp_path / "d", train=1, each=40)
    for index in sorted(range(40), key=lambda index: index % 2):
        write_file(tmp_path / "f" / str(index % 2) / f"{index:05}.png", random_png(index))
    from_files = open_source(f"folder:{tmp_path}/f").splits["train"]
    from_tar = open_source(f"tar:{tmp_path}/d").splits["train"]
    by_class = from_tar.subset(np.argsort(from_tar.labels, kind="stable"))
    assert by_class.fingerprint == from_files.fingerprint != from_tar.fingerprint
    batches = list(make_pixel_store(by_class).read_batches([np.arange(40)]))
    assert np.array_equal(
        batches[0], next(make_pixel_store(from_files).read_batches([np.arange(40)]))
    )


def test_validation_split_given_or_held_out(tmp_path: Path) -> None:
    folder = write_tar_shards(tmp_path)
    (folder / "set-test-0000.tar").rename(folder / "set-validation-0000.tar")
    source = open_source(f"tar:{folder}")
    assert class_counts(source) == {"train": [9, 9], "val": [3, 3]}
    assert read_all_bytes(merge_val(source)) == expected_pngs(0, 24)
    held_out = hold_out_validation(open_source(f"tar:{folder}/set-train-*"), 0.25, 0)
    assert {name: len(split) for name, split in held_out.splits.items()} == {"train": 14, "val": 4}


def test_reads_splits_from_folders(tmp_path: Path) -> None:
    for number, split in enumerate(("train", "valid")):
        write_file(tmp_path / split / "0.tar", tar_bytes(tar_members(4 * number, 4)))
    assert class_counts(open_source(f"tar:{tmp_path}")) == {"train": [2, 2], "val": [2, 2]}


def json_bytes(**fields: Any) -> bytes:
    return json.dumps(fields).encode()


@pytest.mark.parametrize(
    "members,columns,names",
    [
        ([("a.cls", b"cat\n"), ("b.cls", b" dog")], {}, ["cat", "dog"]),
        ([("a.cls", b"10"), ("b.cls", b"9")], {}, ["9", "10"]),
        ([("a.cls", b"01"), ("b.cls", b"10")], {}, ["01", "10"]),
        ([("a.json", json_bytes(label=3)), ("b.json", json_bytes(label=4))], {}, ["3", "4"]),
        ([("a.json", json_bytes(cls="x")), ("b.json", json_bytes(cls="y"))], {}, ["x", "y"]),
        # an index may have its name in json
        ([("a.cls", b"1"), ("b.cls", b"0"), ("a.json", json_bytes(label="cat"))], {}, ["0", "1"]),
        (
            [("a.json", json_bytes(f=5, label=1)), ("b.json", json_bytes(f=6))],
            {"label": "f"},
            ["5", "6"],
        ),
        ([("a.txt", b"u"), ("b.txt", b"v"), ("a.cls", b"1")], {"label": "txt"}, ["u", "v"]),
        ([("a.cls", b"0"), ("b.cls", b"1"), ("a.seg.png", b"")], {"image": "png"}, ["0", "1"]),
    ],
)
def test_reads_labels_from_cls_json_and_text(
    tmp_path: Path, members: list[Any], columns: dict[str, str], names: list[str]
) -> None:
    write_file(tmp_path / "t.tar", tar_bytes([*TWO_IMAGES, *members]))
    column_options = {f"{name}_column": value for name, value in columns.items()}
    source = open_source(f"tar:{tmp_path}/t.tar", **column_options)
    assert source.class_names == names
    assert sorted(source.splits["train"].labels.tolist()) == [0, 1]
    assert read_all_bytes(source) == [random_png(1), random_png(2)]


@pytest.mark.parametrize(
    "members",
    [
        [("a.cls", b"1"), ("b.cls", b"0"), ("a.json", json_bytes(label=0))],
        [("a.json", json_bytes(label=1, **{"class": 0})), ("b.json", json_bytes(label=0))],
        [("a.json", json_bytes(label=1)), ("b.json", json_bytes(**{"class": 0}))],
    ],
)
def test_refuses_labels_that_contradict_each_other(tmp_path: Path, members: list[Any]) -> None:
    write_file(tmp_path / "t.tar", tar_bytes([*TWO_IMAGES, *members]))
    with refused("data.ambiguous", "t.tar"):
        open_source(f"tar:{tmp_path}/t.tar")


def test_refuses_two_spellings_of_one_integer(tmp_path: Path) -> None:
    for name, label in (("train-0", b"1"), ("train-1", b"01")):
        members = [("a.cls", label), ("b.cls", b"2")]
        write_file(tmp_path / f"{name}.tar", tar_bytes([*TWO_IMAGES, *members]))
    with refused("data.duplicate_class", "'01'", "'1'"):
        open_source(f"tar:{tmp_path}")


def test_reads_names_of_every_tar_format(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Names may start with ./, contain folders, exceed a header, or use another encoding."""
    long_name = "d" * 90 + "/" + "k" * 120
    names = ["./a", "x/a", long_name, "caf\udce9"]
    members = [(f"{name}{suffix}", b"") for name in names for suffix in (".JPG", ".Cls")]
    members_with_content = [
        (name, random_png(index // 2) if name.endswith("JPG") else b"%d" % (index // 2 % 2))
        for index, (name, _) in enumerate(members)
    ]
    other_members = [("._a.jpg", b"x"), ("readme", b"x"), ("x/a.txt", b"x")]
    for tar_format in (0, 1, 2):  # ustar, GNU and pax
        path = tmp_path / f"{tar_format}.tar"
        write_file(
            path,
            tar_bytes([*members_with_content, *other_members], format=tar_format)
            if tar_format
            else tar_bytes(members_with_content[:4], format=0),
        )
        source = open_source(f"tar:{path}")
        assert read_all_bytes(source) == expected_pngs(0, 4 if tar_format else 2)
    assert source.splits["train"].name_of(2) == f"2.tar {long_name}.JPG"
    assert source.splits["train"].name_of(3) == "2.tar caf\\xe9.JPG"
    assert "ignored 3 members of other types: ._a.jpg, readme, txt" in caplog.text


def test_rejects_missing_and_too_many_shards(tmp_path: Path) -> None:
    folder = write_tar_shards(tmp_path / "d")
    for pattern, code, expected_text in (
        ("d/set-train-{0000..0003}.tar", "data.not_found", "set-train-0003.tar"),
        ("d/*.tarr", "data.empty", "*.tarr"),
        ("d/{0..99999}{0..99999}", "data.too_large", "100,000"),
        ("dd", "data.not_found", "/d'"),
    ):
        with refused(code, expected_text):
            open_source(f"tar:{tmp_path}/{pattern}")
    (folder / "set-train-0001.tar").write_bytes(tar_bytes([]))  # one of several shards may be empty
    assert class_counts(open_source(f"tar:{folder}"))["train"] == [6, 6]


# --- streaming -----------------------------------------------------------------------------------


@pytest.fixture
def reads_made(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """(offset, length) of every read; row groups have about three images."""
    reads: list[tuple[int, int]] = []
    original_read = LocalFile.read

    def recording_read(self: LocalFile, first: int, length: int) -> bytes:
        reads.append((first, length))
        return original_read(self, first, length)

    monkeypatch.setattr(tar_index, "GROUP_BYTES", 6 * 1024)
    monkeypatch.setattr(LocalFile, "read", recording_read)
    return reads


def test_streams_each_sample_once_per_epoch_from_any_step(
    tmp_path: Path, reads_made: list[tuple[int, int]]
) -> None:
    split = open_source(f"tar:{write_tar_shards(tmp_path, each=20)}", streaming=True).splits[
        "train"
    ]
    assert isinstance(split.images, StreamedImages)
    assert len(split.images.group_starts) > 9
    sampler = DistributedBatchSampler(
        60, batch_size=6, seed=3, shuffle_streams=build_shuffle_streams(split)
    )
    batches = [sampler.micro_batches(step)[0][1] for step in range(20)]
    assert [
        sorted(np.concatenate(epoch_batches).tolist())
        for epoch_batches in (batches[:10], batches[10:])
    ] == [list(range(60))] * 2
    images = [[*batch] for batch in make_pixel_store(split, num_workers=2).read_batches(batches)]
    for batch, pixels in zip(batches, images, strict=True):
        for index, image in zip(batch.tolist(), pixels, strict=True):
            assert np.array_equal(image.permute(1, 2, 0), decode_image(random_png(index)))
    resumed = make_pixel_store(split, num_workers=2).read_batches(batches[13:])
    assert all(np.array_equal(a, b) for a, b in zip(next(resumed), images[13], strict=True))


def test_reads_only_the_needed_bytes(tmp_path: Path, reads_made: list[tuple[int, int]]) -> None:
    split = open_source(f"tar:{write_tar_shards(tmp_path, each=20)}", streaming=True).splits[
        "train"
    ]
    reads_made.clear()
    next(make_pixel_store(split, num_workers=1).read_batches([np.array([0])]))
    size = (tmp_path / "set-train-0000.tar").stat().st_size
    assert sum(length for _, length in reads_made) < size / 4


# --- over HTTP -----------------------------------------------------------------------------------


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RangeServer]:
    disable_retry_waits(monkeypatch)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    with RangeServer(write_tar_shards(tmp_path / "d")) as server:
        yield server


PATTERN = "set-{train-{0000..0002},test-0000}.tar"


class TestHttpServer:
    def test_equals_local_shards(self, server: RangeServer) -> None:
        source = open_source(f"tar:{server.url}/{PATTERN}")
        assert class_counts(source) == {"train": [9, 9], "test": [3, 3]}
        assert source.description == "4 tar shards, streamed"
        upper_case = open_source(f"tar:{server.url.replace('http', 'HTTP')}/{PATTERN}")
        assert class_counts(upper_case) == class_counts(source)
        server.error_responses = [503, 429]
        assert read_all_bytes(source) == expected_pngs(0, 18)
        assert source.splits["train"].name_of(7) == f"{server.url}/set-train-0001.tar row 1"

    def test_reads_no_headers_the_second_time(self, server: RangeServer) -> None:
        first = open_source(f"tar:{server.url}/{PATTERN}").splits["train"]
        server.requests.clear()
        reopened = open_source(f"tar:{server.url}/{PATTERN}").splits["train"]
        assert reopened.fingerprint == first.fingerprint
        assert sorted({request[1:] for request in server.requests}) == [(0, 0)]
        server.requests.clear()
        server.validator = "two"  # as if the content had changed
        assert open_source(f"tar:{server.url}/{PATTERN}").splits["train"].fingerprint
        assert max(last for _, _, last in server.requests) > 0

    def test_suffixes_of_one_shard_have_different_fingerprints(self, server: RangeServer) -> None:
        write_file(server.folder / "a.tar", tar_bytes(two_image_members()))
        fingerprints = [
            open_source(f"tar:{server.url}/a.tar", image_column=suffix).splits["train"].fingerprint
            for suffix in (*SUFFIXES, *SUFFIXES)
        ]
        assert fingerprints[:2] == fingerprints[2:]
        assert len(set(fingerprints)) == 2

    def test_servers_may_send_the_same_etag_for_other_images(self, server: RangeServer) -> None:
        split = open_source(f"tar:{server.url}/{PATTERN}").splits["train"]
        with RangeServer(server.folder) as other:
            copy = open_source(f"tar:{other.url}/{PATTERN}").splits["train"]
            assert copy.fingerprint == split.fingerprint  # the data may have moved
            assert copy.cache_key() != split.cache_key()

    def test_a_query_may_select_the_shard(self, server: RangeServer) -> None:
        """Of two files, a server may send one ETag; a signature is no other file."""
        server.validator = "one"
        splits = []
        for query, labels in (("a", b"01"), ("b", b"10"), ("b&X-Amz-Signature=1", b"10")):
            members = [("0.cls", labels[:1]), ("0.png", random_png(1))]
            members += [("1.cls", labels[1:]), ("1.png", random_png(2))]
            write_file(server.folder / "get", tar_bytes(members))
            splits.append(open_source(f"tar:{server.url}/get?file={query}").splits["train"])
        assert [split.labels.tolist() for split in splits] == [[0, 1], [1, 0], [1, 0]]
        keys = [split.cache_key() for split in splits]
        assert keys[0] != keys[1] == keys[2]
        write_file(server.folder / "get", tar_bytes(members))  # the labels of b
        other = open_source(f"tar:{server.url}/get?file=c").splits["train"]
        assert other.labels.tolist() == splits[1].labels.tolist()
        assert other.fingerprint != splits[1].fingerprint == splits[2].fingerprint

    @pytest.mark.parametrize("validator", ["", 'W/"one"'])
    def test_server_without_strong_etag_and_date(self, server: RangeServer, validator: str) -> None:
        """No cached content may be used for another file; all images have one size."""
        images = [bmp_bytes(shade) for shade in (0, 90)]
        for number, image_bytes in enumerate(images):
            members = [
                ("0.cls", b"0"),
                ("0.bmp", image_bytes),
                ("1.cls", b"1"),
                ("1.bmp", image_bytes),
            ]
            write_file(server.folder / f"{number}/set.tar", tar_bytes(members))
        server.validator = validator
        first, reopened, other_split = (
            open_source(f"tar:{server.url}/{folder}/set.tar").splits["train"] for folder in "001"
        )
        assert first.fingerprint == reopened.fingerprint
        assert [split.cache_key() for split in (first, reopened, other_split)] == [None] * 3

    def test_distinguishes_queries_of_one_path(self, server: RangeServer) -> None:
        server.validator = "Mon, 23 Nov 2026 14:00:00 GMT"
        labels_by_query = []
        for number, labels in enumerate(([0, 1], [1, 0])):
            members = [
                (f"{index}.{suffix}", body)
                for index, label in enumerate(labels)
                for suffix, body in (("cls", b"%d" % label), ("png", random_png(1)))
            ]
            write_file(server.folder / "get.tar", tar_bytes(members))  # as ?id= would select it
            split = open_source(f"tar:{server.url}/get.tar?id={number}").splits["train"]
            labels_by_query.append(split.labels.tolist())
        assert labels_by_query == [[0, 1], [1, 0]]

    def test_reads_a_small_part_of_large_shards(
        self, server: RangeServer, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        members = [
            (f"{index}.{suffix}", body)
            for index in range(4)
            for suffix, body in (
                ("cls", b"%d" % (index % 2)),
                ("png", random_png(0) + bytes(10**6)),
            )
        ]
        write_file(server.folder / "large.tar", tar_bytes(members))
        monkeypatch.setattr(tar_index, "GROUP_BYTES", 2**19)
        split = open_source(f"tar:{server.url}/large.tar").splits["train"]
        header_bytes = sum(last + 1 - first for _, first, last in server.requests)
        assert header_bytes < 2_000_000  # of 4 MB
        server.requests.clear()
        assert split.images.read_bytes(3)[: len(random_png(0))] == random_png(0)
        assert sum(last + 1 - first for _, first, last in server.requests) < 1_100_000

    def test_error_messages(self, server: RangeServer) -> None:
        password = server.url.replace("//", "//me:secret@")
        for name, code, expected_text in (
            (f"{password}/none.tar?token=secret", "data.not_found", f"{server.url}/none.tar"),
            (f"{server.url}/*.tar", "data.wrong_source", "*.tar"),
            ("ftp://x/a.tar", "data.not_found", "ftp://x/a.tar"),
        ):
            with refused(code, expected_text) as caught:
                open_source(f"tar:{name}")
            assert "secret" not in str(caught.value)

    def test_a_signal_stops_waiting_for_a_server(self) -> None:
        """Ctrl-C stops the requests for all shards, and no thread keeps the process alive."""
        with socket.create_server(("127.0.0.1", 0)) as silent_server:
            pattern = f"tar:http://127.0.0.1:{silent_server.getsockname()[1]}/{{00..40}}.tar"
            command = [sys.executable, "-m", "finetune", "data", "info", pattern]
            with subprocess.Popen(command, env=os.environ | {"HF_HUB_OFFLINE": "0"}) as process:
                connection, _ = silent_server.accept()
                process.send_signal(signal.SIGINT)
                assert process.wait(client.READ_TIMEOUT_SECONDS / 2) == 130
                connection.close()

    def test_offline_is_an_error(
        self, server: RangeServer, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
        with refused("hub.unreachable", "HF_HUB_OFFLINE"):
            open_source(f"tar:{server.url}/{PATTERN}")


@pytest.mark.parametrize("form", ["{url}/datasets/someone/things/resolve/main", "hf"])
def test_hub_dataset(
    form: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Reads one commit, with the user's token, which no other server receives."""
    caplog.set_level(logging.WARNING)
    files = {
        f"data/{path.name}": path.read_bytes()
        for path in write_tar_shards(tmp_path / "d").iterdir()
    }
    with HubServer() as hub:
        hub.add_repo("someone/things", files, kind="dataset", private=True)
        hub.add_user("someone", token="hf_aliceAlice1234")
        point_clients_at(hub, monkeypatch, tmp_path / "home", token="hf_aliceAlice1234")
        base_url = "hf://datasets/someone/things@main" if form == "hf" else form.format(url=hub.url)
        source = open_source(f"tar:{base_url}/data/{PATTERN}")
        hub.commit("someone/things", dict.fromkeys(files, b""))
        assert read_all_bytes(source) == expected_pngs(0, 18)
        assert class_counts(source)["test"] == [3, 3]
        with refused("data.not_found", "data/none.tar"):
            open_source(f"tar:{base_url}/data/none.tar")
        assert hub.server_errors == []
