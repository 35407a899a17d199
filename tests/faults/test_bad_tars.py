"""Tar shards that cannot be trained on: exit 3, the cause in one message, and nothing unpacked."""

from __future__ import annotations

import gzip
import os
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest
from faults_bad import PROMISE, Bad, Content, parametrised, refuse
from samples import png
from tars import Member, samples, tar

GOOD = samples(0, 4)
IMAGES = [("a.png", png(1)), ("b.png", png(2))]


def raw(code: str, named: str, content: Content, *options: str) -> Bad:
    """A recipe on one shard with this content."""
    recipe = (
        "model: {name: embedded:vit_nano}\n"
        'data: {source: "tar:t.tar", batch_size: 2, val_fraction: 0}\n'
        "optim: {lr: 1e-3, steps: 2}\nrun: {precision: fp32, threads: 1}\n"
    )
    words = ["train", "r.yaml", "--out", "run", *options]
    return Bad(words, code, named, {"t.tar": content, "r.yaml": recipe}, leaves="run")


def made(code: str, named: str, *members: Member, options: tuple[str, ...] = ()) -> Bad:
    return raw(code, named, tar(members), *options)


def special(name: str, kind: bytes, target: str = "") -> tarfile.TarInfo:
    header = tarfile.TarInfo(name)
    header.type, header.linkname = kind, target
    return header


def sparse(name: str) -> tarfile.TarInfo:
    """A file of a terabyte that is one hole."""
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


def huge(size: int) -> bytes:
    """A shard whose first extended header claims to be this long."""
    header = tarfile.TarInfo("x")
    header.type, header.size = tarfile.XHDTYPE, size
    return header.tobuf(tarfile.GNU_FORMAT) + tar(GOOD)


BROKEN = {
    "zero bytes": raw("data.damaged", "t.tar", b""),
    "text": raw("data.damaged", "t.tar", b"no archive, but a text" * 50),
    "cut in the middle": raw("data.damaged", "t.tar", tar(samples(0, 20))[:9000]),
    "cut before its end": raw("data.damaged", "t.tar", tar(GOOD)[: 4 * 2048]),
    "two archives in one": raw("data.damaged", "behind its end", tar(GOOD) + tar(GOOD)),
    "a huge header": raw("data.damaged", "t.tar", huge(2**33 - 1)),
    "a header beyond the end": raw("data.damaged", "t.tar", huge(60_000)),
    "gzip": raw("data.wrong_format", "gzip", gzip.compress(tar(GOOD))),
    "xz": raw("data.wrong_format", "xz", b"\xfd7zXZ\0" + bytes(600)),
    "a pipe": raw("data.not_a_file", "t.tar", os.mkfifo),
    "a folder of none": raw("data.empty", "tar:t.tar", Path.mkdir),
    "an empty archive": made("data.empty", "tar:t.tar"),
    "a table": raw("data.damaged", "t.tar", b"PAR1" * 200),
}
MEMBERS = {
    "an image without a label": made("data.no_labels", "1 image", *GOOD, ("x.png", png(1))),
    "no labels": made("data.no_labels", "2 images", *IMAGES),
    "a label without an image": made("data.no_image", "x", *GOOD, ("x.cls", b"1")),
    "an image twice": made("data.ambiguous", "'00000.png'", *GOOD, GOOD[1]),
    "a label twice": made("data.ambiguous", "'00000.cls'", *GOOD, GOOD[0]),
    "a sample twice": made("data.ambiguous", "00001", *GOOD, *GOOD[2:4]),
    "an image of two kinds": made("data.ambiguous", "'00000.jpg'", *GOOD, ("00000.jpg", png(1))),
    "a path upwards": made("data.unsafe", "../x.png", *GOOD, ("../x.png", b"")),
    "a path upwards, inside": made("data.unsafe", "a/../x.png", *GOOD, ("a/../x.png", b"")),
    "a path of the system": made("data.unsafe", "/etc/x.png", *GOOD, ("/etc/x.png", b"")),
    "a symbolic link": made(
        "data.unsafe", "x.png", *GOOD, special("x.png", tarfile.SYMTYPE, "/etc/passwd")
    ),
    "a hard link": made(
        "data.unsafe", "x.png", *GOOD, special("x.png", tarfile.LNKTYPE, "00000.png")
    ),
    "a device": made("data.unsafe", "x.png", *GOOD, special("x.png", tarfile.CHRTYPE)),
    "a pipe": made("data.unsafe", "x.png", *GOOD, special("x.png", tarfile.FIFOTYPE)),
    "a member of an unknown kind": made("data.unsafe", "x.png", *GOOD, special("x.png", b"Z")),
    "a file with holes": raw(
        "data.wrong_format", "x.png", tar([*GOOD, sparse("x.png")], format=tarfile.PAX_FORMAT)
    ),
    "integers and names": made(
        "data.wrong_labels", "'cat'", *IMAGES, ("a.cls", b"0"), ("b.cls", b"cat")
    ),
    "a label of bytes": made("data.wrong_labels", "a.cls", *IMAGES, ("a.cls", b"\xff\xfe")),
    "an empty label": made("data.wrong_labels", "a.cls", *IMAGES, ("a.cls", b"\n")),
    "a label of two lines": made("data.wrong_labels", "a.cls", *IMAGES, ("a.cls", b"x\ny")),
    "a label of megabytes": made("data.too_large", "a.cls", *IMAGES, ("a.cls", b"1" * 2**21)),
    "a label below 0": made(
        "data.wrong_labels", "-1 in row 0", *IMAGES, ("a.cls", b"-1"), ("b.cls", b"1")
    ),
    "labels that differ in case": made(
        "data.duplicate_class", "'Cat'", *IMAGES, ("a.cls", b"cat"), ("b.cls", b"Cat")
    ),
    "one class": made("data.one_class", "'1'", *IMAGES, ("a.cls", b"1"), ("b.cls", b"1")),
    "no JSON": made("data.damaged", "a.json", *IMAGES, ("a.json", b"{")),
    "nested JSON": made("data.damaged", "a.json", *IMAGES, ("a.json", b"[" * 100_000)),
    "JSON without the field": made("data.no_labels", "2 images", *IMAGES, ("a.json", b"{}")),
    "a fraction in JSON": made(
        "data.wrong_labels", "'0.5'", *IMAGES, ("a.json", b'{"label": 0.5}')
    ),
    "a list in JSON": made(
        *("data.wrong_labels", "'[1]'", *IMAGES),
        *(("a.json", b'{"label": [1]}'), ("b.json", b'{"label": 1}')),
    ),
    "a label where lists are asked": made(
        "data.wrong_labels", "00000.png", *GOOD, options=("data.task=multilabel",)
    ),
    "lists of two kinds": made(
        "data.wrong_labels",
        "'cat'",
        *IMAGES,
        ("a.json", b'{"label": [0]}'),
        ("b.json", b'{"label": [1, "cat"]}'),
        options=("data.task=multilabel",),
    ),
    "a null in a list": made(
        "data.wrong_labels",
        "a.json",
        *IMAGES,
        ("a.json", b'{"label": [0, null]}'),
        options=("data.task=multilabel",),
    ),
    "columns of tar": made(
        "data.no_column",
        "one field",
        *GOOD,
        options=("data.task=multilabel", "data.label_column=[a,b]"),
    ),
    "a huge number in JSON": made(
        "data.wrong_labels", "a.json", *IMAGES, ("a.json", b'{"cls": 9%s}' % (b"9" * 30))
    ),
    "a suffix that no image has": made(
        "data.no_image", "4 labels", *GOOD, options=("data.image_column=jpg",)
    ),
    "an image that cannot be read": made(
        "data.unreadable", "a.png", ("a.png", b"no"), IMAGES[1], ("a.cls", b"0"), ("b.cls", b"1")
    ),
}
SOURCES = {
    "a shard that is not there": Bad(
        ["data", "info", "tar:t-{0..2}.tar"], "data.not_found", "t-1.tar", {"t-0.tar": tar(GOOD)}
    ),
    "no file of a pattern": Bad(["data", "info", "tar:*.tar"], "data.empty", "tar:*.tar"),
    "a misspelt name": Bad("data info tar:tt.tar", "data.not_found", "'t.tar'", {"t.tar": b""}),
    "braces without an end": Bad(["data", "info", "tar:t-{0..2.tar"], "data.not_found", "t-{0"),
    "shards without number": Bad(
        ["data", "info", "tar:{0..999999999}.tar"], "data.too_large", "100,000"
    ),
    "an address of many": Bad(
        ["data", "info", "tar:https://example.org/*.tar"], "data.wrong_source", "*.tar"
    ),
    "an address of another kind": Bad(
        "data info tar:ftp://example.org/t.tar", "data.not_found", "ftp:"
    ),
    "a zero byte": Bad(["data", "info", "tar:a\0b"], "data.not_found", "tar:a"),
    "a folder of packed ones": Bad(
        "data info tar:d", "data.wrong_format", "gzip", {"d/t.tar.gz": gzip.compress(tar(GOOD))}
    ),
    "kept where it is streamed": raw(
        "recipe.conflict",
        "data.keep",
        tar(GOOD),
        "data.source=tar:https://example.org/t.tar",
        "data.keep=memory",
    ),
}


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@parametrised(BROKEN)
def test_broken_shards(bad: Bad, fault: Callable[..., None]) -> None:
    refuse(bad)
    fault("bad input: tar shards", PROMISE)


@parametrised(MEMBERS)
def test_members(bad: Bad, fault: Callable[..., None]) -> None:
    refuse(bad)
    fault("bad input: members of tar shards", PROMISE)


@parametrised(SOURCES)
def test_patterns(bad: Bad, fault: Callable[..., None]) -> None:
    refuse(bad)
    fault("bad input: patterns of tar shards", PROMISE)
