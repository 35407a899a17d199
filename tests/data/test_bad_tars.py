"""Damaged and hostile tar shards: one clear error, bounded memory, and nothing is unpacked."""

from __future__ import annotations

import gzip
import logging
import os
import struct
import tarfile
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from refusals import refused
from small_datasets import random_png
from tar_shards import Member, tar_bytes, tar_members

from finetune.data.open_source import open_source
from finetune.errors import DataError

BLOCK = tarfile.BLOCKSIZE
GOOD_MEMBERS = tar_members(0, 4)
IMAGES = [("a.png", random_png(1)), ("b.png", random_png(2))]


def assert_refused(path: Path, code: str, *named: str, **options: Any) -> None:
    """Opening the shard fails, and creates no file next to it or in the working directory."""
    files_before = sorted(path.parent.rglob("*"))
    with refused(code, path.name, *named):
        open_source(f"tar:{path}", **options)
    assert sorted(path.parent.rglob("*")) == files_before


@pytest.fixture(autouse=True)
def in_tmp_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setenv("FINETUNE_CACHE", str(tmp_path / "cache"))


# --- whole shards --------------------------------------------------------------------------------


def change_header_field(field: slice, value: bytes) -> Callable[[bytes], bytes]:
    """Return a function that changes a field of the second header and its checksum."""

    def change(shard_bytes: bytes) -> bytes:
        header = bytearray(shard_bytes[2 * BLOCK : 3 * BLOCK])
        header[field] = value
        header[148:156] = b" " * 8
        header[148:156] = b"%06o\0 " % sum(header)
        return shard_bytes[: 2 * BLOCK] + bytes(header) + shard_bytes[3 * BLOCK :]

    return change


SIZE_FIELD, TYPE_FIELD = slice(124, 136), slice(156, 157)
DAMAGED_SHARDS = {
    "a negative size": change_header_field(SIZE_FIELD, b"\xff" * 8 + struct.pack(">i", -1024)),
    "a header that points to itself": change_header_field(
        SIZE_FIELD, b"\xff" * 8 + struct.pack(">i", -512)
    ),
    "a size of exabytes": change_header_field(
        SIZE_FIELD, b"\x80" + struct.pack(">q", 2**60).rjust(11, b"\0")
    ),
    "a size beyond the end": change_header_field(SIZE_FIELD, b"%011o\0" % 2**20),
    "a long name of a gigabyte": lambda shard_bytes: change_header_field(
        SIZE_FIELD, b"%011o\0" % 2**30
    )(change_header_field(TYPE_FIELD, b"L")(shard_bytes)),
    "an extended header of a gigabyte": lambda shard_bytes: change_header_field(
        SIZE_FIELD, b"%011o\0" % 2**30
    )(change_header_field(TYPE_FIELD, b"x")(shard_bytes)),
    "an extended header of negative size": lambda shard_bytes: change_header_field(
        SIZE_FIELD, b"\xff" * 8 + struct.pack(">i", -1024)
    )(change_header_field(TYPE_FIELD, b"g")(shard_bytes)),
    "a wrong checksum": lambda shard_bytes: (
        shard_bytes[: 2 * BLOCK] + b"?" + shard_bytes[2 * BLOCK + 1 :]
    ),
    "truncated in a header": lambda shard_bytes: shard_bytes[: 2 * BLOCK + 100],
    "truncated in an image": lambda shard_bytes: shard_bytes[: 3 * BLOCK + 10],
    "truncated between two members": lambda shard_bytes: shard_bytes[: 2 * BLOCK],
    "two archives in one file": lambda shard_bytes: shard_bytes + shard_bytes,
    "zeros after the end": lambda shard_bytes: shard_bytes + bytes(2**21),
    "plain text": lambda _: b"no archive, but a text" * 50,
    "a parquet file": lambda _: b"PAR1" * 200,
    "zero bytes": lambda _: b"",
    "headers without an end": lambda shard_bytes: tar_bytes(extended_headers(3000)),
}


def extended_headers(number: int) -> list[tarfile.TarInfo]:
    """Return extended headers, each of which applies to the next one."""
    header = tarfile.TarInfo("x")
    header.type = tarfile.XHDTYPE
    return [header] * number


@pytest.mark.parametrize("change", DAMAGED_SHARDS.values(), ids=list(DAMAGED_SHARDS))
def test_damaged_shards(change: Callable[[bytes], bytes], tmp_path: Path) -> None:
    path = tmp_path / "here/t.tar"
    path.write_bytes(change(tar_bytes(tar_members(0, 3))))
    assert_refused(path, "data.damaged")


@pytest.mark.parametrize(
    "write, code, named",
    [
        (lambda path: path.write_bytes(gzip.compress(b"x")), "data.wrong_format", "gzip"),
        (lambda path: path.write_bytes(b"\xfd7zXZ\0"), "data.wrong_format", "xz"),
        (os.mkfifo, "data.not_a_file", "t.tar"),
        (Path.mkdir, "data.empty", "t.tar"),
        (lambda path: path.write_bytes(tar_bytes([])), "data.empty", "t.tar"),
    ],
)
def test_shards_of_another_format(
    write: Callable[[Path], object], code: str, named: str, tmp_path: Path
) -> None:
    path = tmp_path / "here/t.tar"
    write(path)
    assert_refused(path, code, named)


def test_does_not_read_a_huge_header(tmp_path: Path) -> None:
    path = tmp_path / "here/t.tar"
    (header,) = extended_headers(1)
    header.size = 2**26
    path.write_bytes(header.tobuf(tarfile.GNU_FORMAT))
    os.truncate(path, 2**27)
    tracemalloc.start()
    assert_refused(path, "data.damaged", "a header of 67,108,864 bytes")
    assert tracemalloc.get_traced_memory()[1] < 2**23
    tracemalloc.stop()


def test_does_not_keep_all_members_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`tarfile` would keep every member that it has read, a kilobyte each."""
    path = tmp_path / "here/t.tar"
    path.write_bytes(tar_bytes(tar_members(0, 500)))
    num_members = []
    fromtarfile = tarfile.TarInfo.fromtarfile.__func__  # type: ignore[attr-defined]

    def counting_fromtarfile(cls: Any, archive: Any) -> Any:
        num_members.append(len(archive.members))
        return fromtarfile(cls, archive)

    monkeypatch.setattr(tarfile.TarInfo, "fromtarfile", classmethod(counting_fromtarfile))
    assert len(open_source(f"tar:{path}").splits["train"]) == 500
    assert max(num_members) <= 1


def test_random_bytes_raise_only_data_errors(tmp_path: Path) -> None:
    """Change random bytes of the first headers."""
    shard_bytes = tar_bytes(tar_members(0, 2))
    path = tmp_path / "here/t.tar"
    generator = np.random.default_rng(0)
    outcomes = set()
    logging.disable(logging.WARNING)
    for _ in range(150):
        damaged = bytearray(shard_bytes)
        for position in generator.integers(0, 6 * BLOCK, 3).tolist():
            damaged[position] = int(generator.integers(256))
        path.write_bytes(damaged)
        try:
            open_source(f"tar:{path}")
            outcomes.add("read")
        except DataError as error:
            outcomes.add(error.code)
        os.unlink(path)
    logging.disable(logging.NOTSET)
    assert "read" in outcomes
    assert len(outcomes) > 1


# --- members -------------------------------------------------------------------------------------


def special_member(member_type: bytes, target: str = "") -> tarfile.TarInfo:
    header = tarfile.TarInfo("x.png")
    header.type, header.linkname = member_type, target
    return header


def sparse_member() -> tarfile.TarInfo:
    """Return the header of a sparse file of one terabyte."""
    header = tarfile.TarInfo("x.png")
    header.pax_headers = {
        "GNU.sparse.major": "1",
        "GNU.sparse.minor": "0",
        "GNU.sparse.name": "x.png",
        "GNU.sparse.realsize": str(2**40),
        "GNU.sparse.numblocks": "0",
        "GNU.sparse.map": "0,0",
    }
    return header


# error code, named text, and members that follow the good ones
UNSAFE_MEMBERS: dict[str, tuple[str, str, Member]] = {
    "a path outside": ("data.unsafe", "../x.png", ("../x.png", b"")),
    "a path with .. inside": ("data.unsafe", "a/../x.png", ("a/../x.png", b"")),
    "an absolute path": ("data.unsafe", "/etc/x.png", ("/etc/x.png", b"")),
    "a symbolic link": (
        "data.unsafe",
        "x.png",
        special_member(tarfile.SYMTYPE, "/etc/passwd"),
    ),
    "a hard link": ("data.unsafe", "x.png", special_member(tarfile.LNKTYPE, "00000.png")),
    "a device": ("data.unsafe", "x.png", special_member(tarfile.CHRTYPE)),
    "a pipe": ("data.unsafe", "x.png", special_member(tarfile.FIFOTYPE)),
    "a member of unknown type": ("data.unsafe", "x.png", special_member(b"Z")),
    "a sparse file": ("data.wrong_format", "x.png", sparse_member()),
    "an image without a label": ("data.no_labels", "1 image", ("x.png", random_png(1))),
    "a label without an image": ("data.no_image", "x", ("x.cls", b"1")),
    "an image twice": ("data.ambiguous", "'00000.png'", GOOD_MEMBERS[1]),
    "a label twice": ("data.ambiguous", "'00000.cls'", GOOD_MEMBERS[0]),
    "an image in two formats": ("data.ambiguous", "'00000.jpg'", ("00000.jpg", random_png(1))),
}
# error code, named text, and label members of the images a.png and b.png
WRONG_LABELS: dict[str, tuple[str, str, list[Member]]] = {
    "none": ("data.no_labels", "2 images", []),
    "integers and names": ("data.wrong_labels", "'cat'", [("a.cls", b"0"), ("b.cls", b"cat")]),
    "not UTF-8": ("data.wrong_labels", "a.cls", [("a.cls", b"\xff\xfe")]),
    "empty": ("data.wrong_labels", "a.cls", [("a.cls", b"\n")]),
    "two lines": ("data.wrong_labels", "a.cls", [("a.cls", b"x\ny")]),
    "2 MiB": ("data.too_large", "a.cls", [("a.cls", b"1" * 2**21)]),
    "no JSON": ("data.damaged", "a.json", [("a.json", b"{")]),
    "nested JSON": ("data.damaged", "a.json", [("a.json", b"[" * 100_000)]),
    "JSON without the field": ("data.no_labels", "2 images", [("a.json", b"{}")]),
    "a fraction": ("data.wrong_labels", "'0.5'", [("a.json", b'{"label": 0.5}')]),
    "a huge number": ("data.wrong_labels", "a.json", [("a.json", b'{"cls": 9%s}' % (b"9" * 30))]),
    "a list": (
        "data.wrong_labels",
        "'[1]'",
        [("a.json", b'{"label": [1]}'), ("b.json", b'{"label": 1}')],
    ),
    "other numbers in JSON": (
        "data.ambiguous",
        "'1' in JSON instead of 0",
        [("a.cls", b"0"), ("a.json", b'{"label": "1"}'), ("b.cls", b"1")],
    ),
    "two names of an index": (
        "data.ambiguous",
        "'dog' in JSON instead of 'cat'",
        [
            *(("a.cls", b"0"), ("a.json", b'{"label": "cat"}')),
            *(("b.cls", b"0"), ("b.json", b'{"label": "dog"}')),
        ],
    ),
    "a field twice": ("data.damaged", "two entries", [("a.json", b'{"label": 0, "label": 1}')]),
}
# the same, for multi-label data
WRONG_LABEL_LISTS: dict[str, tuple[str, str, list[Member]]] = {
    "no lists": ("data.wrong_labels", "a.png", [("a.cls", b"0"), ("b.cls", b"1")]),
    "integers and names": (
        "data.wrong_labels",
        "'cat'",
        [("a.json", b'{"label": [0]}'), ("b.json", b'{"label": [1, "cat"]}')],
    ),
    "a null": ("data.wrong_labels", "a.json", [("a.json", b'{"label": [0, null]}')]),
}


@pytest.mark.parametrize("code, named, member", UNSAFE_MEMBERS.values(), ids=list(UNSAFE_MEMBERS))
def test_unsafe_and_unmatched_members(
    code: str, named: str, member: Member, tmp_path: Path
) -> None:
    path = tmp_path / "here/t.tar"
    path.write_bytes(tar_bytes([*GOOD_MEMBERS, member], format=tarfile.PAX_FORMAT))
    assert_refused(path, code, named)


@pytest.mark.parametrize("code, named, members", WRONG_LABELS.values(), ids=list(WRONG_LABELS))
def test_wrong_labels(code: str, named: str, members: list[Member], tmp_path: Path) -> None:
    path = tmp_path / "here/t.tar"
    path.write_bytes(tar_bytes([*IMAGES, *members]))
    with refused(code, named):
        open_source(f"tar:{path}")


@pytest.mark.parametrize(
    "code, named, members", WRONG_LABEL_LISTS.values(), ids=list(WRONG_LABEL_LISTS)
)
def test_wrong_label_lists(code: str, named: str, members: list[Member], tmp_path: Path) -> None:
    path = tmp_path / "here/t.tar"
    path.write_bytes(tar_bytes([*IMAGES, *members]))
    with refused(code, named):
        open_source(f"tar:{path}", multilabel=True)


def test_columns_that_no_member_has(tmp_path: Path) -> None:
    path = tmp_path / "here/t.tar"
    path.write_bytes(tar_bytes(GOOD_MEMBERS))
    assert_refused(path, "data.no_image", "4 labels", image_column="jpg")
    assert_refused(
        path, "data.no_column", "one JSON field", label_column=("a", "b"), multilabel=True
    )
