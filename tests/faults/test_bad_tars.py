"""Invalid tar shards: exit code 3, the cause in one message, and nothing is unpacked."""

from __future__ import annotations

import gzip
import os
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest
from bad_input import PROMISE, BadInput, Content, check_bad_input, parametrize_bad_inputs
from small_datasets import random_png
from tar_shards import Member, tar_bytes, tar_members

GOOD_MEMBERS = tar_members(0, 4)
IMAGES = [("a.png", random_png(1)), ("b.png", random_png(2))]


def tar_content(code: str, named: str, content: Content, *options: str) -> BadInput:
    """Case: a recipe on one shard with this content."""
    recipe = (
        "model: {name: embedded:vit_nano}\n"
        'data: {source: "tar:t.tar", batch_size: 2, val_fraction: 0}\n'
        "optim: {lr: 1e-3, steps: 2}\nrun: {precision: fp32, threads: 1}\n"
    )
    arguments = ["train", "r.yaml", "--out", "run", *options]
    return BadInput(arguments, code, named, {"t.tar": content, "r.yaml": recipe}, may_create="run")


def tar_with_members(
    code: str, named: str, *members: Member, options: tuple[str, ...] = ()
) -> BadInput:
    return tar_content(code, named, tar_bytes(members), *options)


def special_member(name: str, member_type: bytes, target: str = "") -> tarfile.TarInfo:
    header = tarfile.TarInfo(name)
    header.type, header.linkname = member_type, target
    return header


def sparse_member(name: str) -> tarfile.TarInfo:
    """Return the header of a sparse file of one terabyte."""
    header = tarfile.TarInfo(name)
    header.pax_headers = {
        "GNU.sparse.major": "1",
        "GNU.sparse.minor": "0",
        "GNU.sparse.name": name,
        "GNU.sparse.realsize": str(2**40),
        "GNU.sparse.numblocks": "0",
        "GNU.sparse.map": "0,0",
    }
    return header


def long_extended_header(size: int) -> bytes:
    """Return a shard whose first extended header claims to be this long."""
    header = tarfile.TarInfo("x")
    header.type, header.size = tarfile.XHDTYPE, size
    return header.tobuf(tarfile.GNU_FORMAT) + tar_bytes(GOOD_MEMBERS)


BROKEN_SHARDS = {
    "zero bytes": tar_content("data.damaged", "t.tar", b""),
    "plain text": tar_content("data.damaged", "t.tar", b"no archive, but a text" * 50),
    "truncated in the middle": tar_content(
        "data.damaged", "t.tar", tar_bytes(tar_members(0, 20))[:9000]
    ),
    "truncated before the end": tar_content(
        "data.damaged", "t.tar", tar_bytes(GOOD_MEMBERS)[: 4 * 2048]
    ),
    "two archives in one": tar_content(
        "data.damaged", "after the end", tar_bytes(GOOD_MEMBERS) + tar_bytes(GOOD_MEMBERS)
    ),
    "a huge header": tar_content("data.damaged", "t.tar", long_extended_header(2**33 - 1)),
    "a header beyond the end": tar_content("data.damaged", "t.tar", long_extended_header(60_000)),
    "gzip": tar_content("data.wrong_format", "gzip", gzip.compress(tar_bytes(GOOD_MEMBERS))),
    "xz": tar_content("data.wrong_format", "xz", b"\xfd7zXZ\0" + bytes(600)),
    "a pipe": tar_content("data.not_a_file", "t.tar", os.mkfifo),
    "a folder without shards": tar_content("data.empty", "tar:t.tar", Path.mkdir),
    "an empty archive": tar_with_members("data.empty", "tar:t.tar"),
    "a parquet file": tar_content("data.damaged", "t.tar", b"PAR1" * 200),
}
BAD_MEMBERS = {
    "an image without a label": tar_with_members(
        "data.no_labels", "1 image", *GOOD_MEMBERS, ("x.png", random_png(1))
    ),
    "no labels": tar_with_members("data.no_labels", "2 images", *IMAGES),
    "a label without an image": tar_with_members(
        "data.no_image", "x", *GOOD_MEMBERS, ("x.cls", b"1")
    ),
    "an image twice": tar_with_members(
        "data.ambiguous", "'00000.png'", *GOOD_MEMBERS, GOOD_MEMBERS[1]
    ),
    "a label twice": tar_with_members(
        "data.ambiguous", "'00000.cls'", *GOOD_MEMBERS, GOOD_MEMBERS[0]
    ),
    "a sample twice": tar_with_members(
        "data.ambiguous", "00001", *GOOD_MEMBERS, *GOOD_MEMBERS[2:4]
    ),
    "an image in two formats": tar_with_members(
        "data.ambiguous", "'00000.jpg'", *GOOD_MEMBERS, ("00000.jpg", random_png(1))
    ),
    "a path outside": tar_with_members("data.unsafe", "../x.png", *GOOD_MEMBERS, ("../x.png", b"")),
    "a path with .. inside": tar_with_members(
        "data.unsafe", "a/../x.png", *GOOD_MEMBERS, ("a/../x.png", b"")
    ),
    "an absolute path": tar_with_members(
        "data.unsafe", "/etc/x.png", *GOOD_MEMBERS, ("/etc/x.png", b"")
    ),
    "a symbolic link": tar_with_members(
        "data.unsafe",
        "x.png",
        *GOOD_MEMBERS,
        special_member("x.png", tarfile.SYMTYPE, "/etc/passwd"),
    ),
    "a hard link": tar_with_members(
        "data.unsafe", "x.png", *GOOD_MEMBERS, special_member("x.png", tarfile.LNKTYPE, "00000.png")
    ),
    "a device": tar_with_members(
        "data.unsafe", "x.png", *GOOD_MEMBERS, special_member("x.png", tarfile.CHRTYPE)
    ),
    "a pipe": tar_with_members(
        "data.unsafe", "x.png", *GOOD_MEMBERS, special_member("x.png", tarfile.FIFOTYPE)
    ),
    "a member of unknown type": tar_with_members(
        "data.unsafe", "x.png", *GOOD_MEMBERS, special_member("x.png", b"Z")
    ),
    "a sparse file": tar_content(
        "data.wrong_format",
        "x.png",
        tar_bytes([*GOOD_MEMBERS, sparse_member("x.png")], format=tarfile.PAX_FORMAT),
    ),
    "integers and names": tar_with_members(
        "data.wrong_labels", "'cat'", *IMAGES, ("a.cls", b"0"), ("b.cls", b"cat")
    ),
    "a label that is not UTF-8": tar_with_members(
        "data.wrong_labels", "a.cls", *IMAGES, ("a.cls", b"\xff\xfe")
    ),
    "an empty label": tar_with_members("data.wrong_labels", "a.cls", *IMAGES, ("a.cls", b"\n")),
    "a label of two lines": tar_with_members(
        "data.wrong_labels", "a.cls", *IMAGES, ("a.cls", b"x\ny")
    ),
    "a label of 2 MiB": tar_with_members(
        "data.too_large", "a.cls", *IMAGES, ("a.cls", b"1" * 2**21)
    ),
    "a negative label": tar_with_members(
        "data.wrong_labels", "-1 in row 0", *IMAGES, ("a.cls", b"-1"), ("b.cls", b"1")
    ),
    "labels that differ in case": tar_with_members(
        "data.duplicate_class", "'Cat'", *IMAGES, ("a.cls", b"cat"), ("b.cls", b"Cat")
    ),
    "one class": tar_with_members(
        "data.one_class", "'1'", *IMAGES, ("a.cls", b"1"), ("b.cls", b"1")
    ),
    "no JSON": tar_with_members("data.damaged", "a.json", *IMAGES, ("a.json", b"{")),
    "nested JSON": tar_with_members("data.damaged", "a.json", *IMAGES, ("a.json", b"[" * 100_000)),
    "JSON without the field": tar_with_members(
        "data.no_labels", "2 images", *IMAGES, ("a.json", b"{}")
    ),
    "a fraction in JSON": tar_with_members(
        "data.wrong_labels", "'0.5'", *IMAGES, ("a.json", b'{"label": 0.5}')
    ),
    "a list in JSON": tar_with_members(
        *("data.wrong_labels", "'[1]'", *IMAGES),
        *(("a.json", b'{"label": [1]}'), ("b.json", b'{"label": 1}')),
    ),
    "a label instead of a list": tar_with_members(
        "data.wrong_labels", "00000.png", *GOOD_MEMBERS, options=("data.task=multilabel",)
    ),
    "lists of integers and names": tar_with_members(
        "data.wrong_labels",
        "'cat'",
        *IMAGES,
        ("a.json", b'{"label": [0]}'),
        ("b.json", b'{"label": [1, "cat"]}'),
        options=("data.task=multilabel",),
    ),
    "a null in a list": tar_with_members(
        "data.wrong_labels",
        "a.json",
        *IMAGES,
        ("a.json", b'{"label": [0, null]}'),
        options=("data.task=multilabel",),
    ),
    "label columns for tar": tar_with_members(
        "data.no_column",
        "one JSON field",
        *GOOD_MEMBERS,
        options=("data.task=multilabel", "data.label_column=[a,b]"),
    ),
    "a huge number in JSON": tar_with_members(
        "data.wrong_labels", "a.json", *IMAGES, ("a.json", b'{"cls": 9%s}' % (b"9" * 30))
    ),
    "a suffix that no image has": tar_with_members(
        "data.no_image", "4 labels", *GOOD_MEMBERS, options=("data.image_column=jpg",)
    ),
    "an image that cannot be read": tar_with_members(
        "data.unreadable", "a.png", ("a.png", b"no"), IMAGES[1], ("a.cls", b"0"), ("b.cls", b"1")
    ),
}
SOURCES = {
    "a missing shard": BadInput(
        ["data", "info", "tar:t-{0..2}.tar"],
        "data.not_found",
        "t-1.tar",
        {"t-0.tar": tar_bytes(GOOD_MEMBERS)},
    ),
    "no file of a pattern": BadInput(["data", "info", "tar:*.tar"], "data.empty", "tar:*.tar"),
    "a misspelled name": BadInput(
        "data info tar:tt.tar", "data.not_found", "'t.tar'", {"t.tar": b""}
    ),
    "braces without an end": BadInput(
        ["data", "info", "tar:t-{0..2.tar"], "data.not_found", "t-{0"
    ),
    "a billion shards": BadInput(
        ["data", "info", "tar:{0..999999999}.tar"], "data.too_large", "100,000"
    ),
    "a URL with a pattern": BadInput(
        ["data", "info", "tar:https://example.org/*.tar"], "data.wrong_source", "*.tar"
    ),
    "a URL of another scheme": BadInput(
        "data info tar:ftp://example.org/t.tar", "data.not_found", "ftp:"
    ),
    "a NUL byte": BadInput(["data", "info", "tar:a\0b"], "data.not_found", "tar:a"),
    "a folder of gzip files": BadInput(
        "data info tar:d",
        "data.wrong_format",
        "gzip",
        {"d/t.tar.gz": gzip.compress(tar_bytes(GOOD_MEMBERS))},
    ),
    "data.keep with a streamed source": tar_content(
        "recipe.conflict",
        "data.keep",
        tar_bytes(GOOD_MEMBERS),
        "data.source=tar:https://example.org/t.tar",
        "data.keep=memory",
    ),
}


@pytest.fixture(autouse=True)
def in_tmp_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@parametrize_bad_inputs(BROKEN_SHARDS)
def test_broken_shards(bad: BadInput, fault: Callable[..., None]) -> None:
    check_bad_input(bad)
    fault("bad input: tar shards", PROMISE)


@parametrize_bad_inputs(BAD_MEMBERS)
def test_tar_members(bad: BadInput, fault: Callable[..., None]) -> None:
    check_bad_input(bad)
    fault("bad input: tar members", PROMISE)


@parametrize_bad_inputs(SOURCES)
def test_tar_patterns(bad: BadInput, fault: Callable[..., None]) -> None:
    check_bad_input(bad)
    fault("bad input: tar patterns", PROMISE)
