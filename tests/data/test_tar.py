"""Tar shards: every form of the source, the same images as files, and the order of streaming."""

from __future__ import annotations

import io
import json
import logging
import os
import pickle
import signal
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hub_server import HubServer, point_at
from huggingface_hub import constants
from PIL import Image
from refusals import refused
from samples import counts, png, store_of, write
from tars import RangeServer, samples, shards, tar

from finetune.data import tar as module
from finetune.data.decode import decode
from finetune.data.loader import Sampler
from finetune.data.source import Source, open_source
from finetune.data.splits import merge_val, split_train
from finetune.data.streaming import remote_file
from finetune.data.streaming.remote_file import LocalFile
from finetune.data.streaming.row_groups import ShardItems
from finetune.data.streaming.shuffle import lanes_of
from finetune.hub import client

LABELLED = [("a.png", png(1)), ("b.png", png(2))]


def bmp(shade: int) -> bytes:
    stream = io.BytesIO()
    Image.new("RGB", (8, 8), (shade, shade, shade)).save(stream, "BMP")
    return stream.getvalue()


def bodies(source: Source, split: str = "train") -> list[bytes]:
    chosen = source.splits[split]
    return [chosen.items.content(index) for index in range(len(chosen))]


def expected(first: int, number: int) -> list[bytes]:
    return [png(place) for place in range(first, first + number)]


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
def test_shards_by_folder_glob_and_braces(tmp_path: Path, pattern: str, streaming: bool) -> None:
    source = open_source(f"tar:{shards(tmp_path / 'd')}{pattern}", streaming=streaming)
    assert counts(source) == {"train": [9, 9], "test": [3, 3]}
    assert source.class_names == ["0", "1"]
    assert bodies(source) == expected(0, 18)
    assert bodies(source, "test") == expected(18, 6)
    assert source.description == f"4 tar shards{', streamed' * streaming}"
    train = source.splits["train"]
    assert isinstance(train.items, ShardItems) is streaming
    for index in (0, 7, 17):
        assert np.array_equal(train.read(index), decode(png(index)))
        assert np.array_equal(pickle.loads(pickle.dumps(train)).read(index), train.read(index))
    assert "set-train-0001.tar" in train.name_of(7)
    assert streaming or train.name_of(7) == "set-train-0001.tar 00007.png"


def test_braces_as_a_shell_reads_them() -> None:
    for pattern, names in (
        ("a{08..10}.tar", ["a08.tar", "a09.tar", "a10.tar"]),
        ("a{8..10}", ["a8", "a9", "a10"]),
        ("{a,b{1..2}c,}d", ["ad", "b1cd", "b2cd", "d"]),
        ("{a,b}{0..1}", ["a0", "a1", "b0", "b1"]),
        ("a{b}c{d,e}", ["a{b}c{d,e}"]),
        ("a{b,c", ["a{b,c"]),
        ("a}b", ["a}b"]),
        ("a{2..1}", []),
    ):
        assert list(module._expanded(pattern)) == names, pattern


def test_the_same_as_files_in_folders(tmp_path: Path) -> None:
    """Images, labels and so the fingerprint, the order and every figure."""
    shards(tmp_path / "d", train=1, each=40)
    for place in sorted(range(40), key=lambda place: place % 2):
        write(tmp_path / "f" / str(place % 2) / f"{place:05}.png", png(place))
    files = open_source(f"folder:{tmp_path}/f").splits["train"]
    tars = open_source(f"tar:{tmp_path}/d").splits["train"]
    by_class = tars.subset(np.argsort(tars.labels, kind="stable"))
    assert by_class.fingerprint == files.fingerprint != tars.fingerprint
    images = list(store_of(by_class).read_all([np.arange(40)]))
    assert np.array_equal(images[0], next(store_of(files).read_all([np.arange(40)])))


def test_a_split_of_its_own_and_one_taken(tmp_path: Path) -> None:
    folder = shards(tmp_path)
    (folder / "set-test-0000.tar").rename(folder / "set-validation-0000.tar")
    source = open_source(f"tar:{folder}")
    assert counts(source) == {"train": [9, 9], "val": [3, 3]}
    assert bodies(merge_val(source)) == expected(0, 24)
    taken = split_train(open_source(f"tar:{folder}/set-train-*"), 0.25, 0)
    assert {name: len(split) for name, split in taken.splits.items()} == {"train": 14, "val": 4}


def test_splits_by_folders(tmp_path: Path) -> None:
    for number, split in enumerate(("train", "valid")):
        write(tmp_path / split / "0.tar", tar(samples(4 * number, 4)))
    assert counts(open_source(f"tar:{tmp_path}")) == {"train": [2, 2], "val": [2, 2]}


def entry(**fields: Any) -> bytes:
    return json.dumps(fields).encode()


@pytest.mark.parametrize(
    "members,columns,names",
    [
        ([("a.cls", b"cat\n"), ("b.cls", b" dog")], {}, ["cat", "dog"]),
        ([("a.cls", b"10"), ("b.cls", b"9")], {}, ["9", "10"]),
        ([("a.json", entry(label=3)), ("b.json", entry(label=4))], {}, ["3", "4"]),
        ([("a.json", entry(cls="x")), ("b.json", entry(cls="y"))], {}, ["x", "y"]),
        # cls before json, wherever it stands
        ([("a.cls", b"1"), ("b.cls", b"0"), ("a.json", entry(label=7))], {}, ["0", "1"]),
        ([("a.json", entry(f=5, label=1)), ("b.json", entry(f=6))], {"label": "f"}, ["5", "6"]),
        ([("a.txt", b"u"), ("b.txt", b"v"), ("a.cls", b"1")], {"label": "txt"}, ["u", "v"]),
        ([("a.cls", b"0"), ("b.cls", b"1"), ("a.seg.png", b"")], {"image": "png"}, ["0", "1"]),
    ],
)
def test_labels(
    tmp_path: Path, members: list[Any], columns: dict[str, str], names: list[str]
) -> None:
    write(tmp_path / "t.tar", tar([*LABELLED, *members]))
    named = {f"{name}_column": value for name, value in columns.items()}
    source = open_source(f"tar:{tmp_path}/t.tar", **named)
    assert source.class_names == names
    assert sorted(source.splits["train"].labels.tolist()) == [0, 1]
    assert bodies(source) == [png(1), png(2)]


def test_names_of_other_archivers(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """With ./ before them, in folders, longer than a header, in another encoding."""
    long = "d" * 90 + "/" + "k" * 120
    names = ["./a", "x/a", long, "caf\udce9"]
    members = [(f"{name}{end}", b"") for name in names for end in (".JPG", ".Cls")]
    filled = [
        (name, png(place // 2) if name.endswith("JPG") else b"%d" % (place // 2 % 2))
        for place, (name, _) in enumerate(members)
    ]
    extra = [("._a.jpg", b"x"), ("readme", b"x"), ("x/a.txt", b"x")]
    for kind in (0, 1, 2):  # POSIX's, GNU's and the extended one
        path = tmp_path / f"{kind}.tar"
        write(path, tar([*filled, *extra], format=kind) if kind else tar(filled[:4], format=0))
        source = open_source(f"tar:{path}")
        assert bodies(source) == expected(0, 4 if kind else 2)
    assert source.splits["train"].name_of(2) == f"2.tar {long}.JPG"
    assert source.splits["train"].name_of(3) == "2.tar caf\\xe9.JPG"
    assert "ignored 3 members of other kinds: ._a.jpg, readme, txt" in caplog.text


def test_what_is_missing_or_too_much(tmp_path: Path) -> None:
    folder = shards(tmp_path / "d")
    for pattern, code, named in (
        ("d/set-train-{0000..0003}.tar", "data.not_found", "set-train-0003.tar"),
        ("d/*.tarr", "data.empty", "*.tarr"),
        ("d/{0..99999}{0..99999}", "data.too_large", "100,000"),
        ("dd", "data.not_found", "'d'"),
    ):
        with refused(code, named):
            open_source(f"tar:{tmp_path}/{pattern}")
    (folder / "set-train-0001.tar").write_bytes(tar([]))  # of several shards one may be empty
    assert counts(open_source(f"tar:{folder}"))["train"] == [6, 6]


# --- streaming -----------------------------------------------------------------------------------


@pytest.fixture
def parts(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """What is read of files, with row groups of about three images."""
    read: list[tuple[int, int]] = []
    whole = LocalFile.read

    def noted(self: LocalFile, first: int, length: int) -> bytes:
        read.append((first, length))
        return whole(self, first, length)

    monkeypatch.setattr(module, "_GROUP_BYTES", 6 * 1024)
    monkeypatch.setattr(LocalFile, "read", noted)
    return read


def test_each_sample_once_an_epoch_and_from_any_step(
    tmp_path: Path, parts: list[tuple[int, int]]
) -> None:
    split = open_source(f"tar:{shards(tmp_path, each=20)}", streaming=True).splits["train"]
    assert isinstance(split.items, ShardItems)
    assert len(split.items.starts) > 9
    assert parts == []  # the headers are read from the open shard
    sampler = Sampler(60, batch_size=6, seed=3, lanes=lanes_of(split))
    batches = [sampler.micro_batches(step)[0][1] for step in range(20)]
    assert [sorted(np.concatenate(e).tolist()) for e in (batches[:10], batches[10:])] == [
        list(range(60))
    ] * 2
    images = [[*batch] for batch in store_of(split, workers=2).read_all(batches)]
    for batch, pixels in zip(batches, images, strict=True):
        for index, image in zip(batch.tolist(), pixels, strict=True):
            assert np.array_equal(image.permute(1, 2, 0), decode(png(index)))
    later = store_of(split, workers=2).read_all(batches[13:])
    assert all(np.array_equal(a, b) for a, b in zip(next(later), images[13], strict=True))


def test_only_what_is_needed_is_read(tmp_path: Path, parts: list[tuple[int, int]]) -> None:
    split = open_source(f"tar:{shards(tmp_path, each=20)}", streaming=True).splits["train"]
    next(store_of(split, workers=1).read_all([np.array([0])]))
    size = (tmp_path / "set-train-0000.tar").stat().st_size
    assert sum(length for _, length in parts) < size / 4


# --- at addresses --------------------------------------------------------------------------------


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RangeServer]:
    for owner, name, value in (
        (constants, "HF_HUB_OFFLINE", False),
        (client, "FIRST_WAIT_SECONDS", 0.01),
        (client, "_said", set()),
        (remote_file, "PATIENCE_SECONDS", 0.0),
        (remote_file, "_PAUSE_SECONDS", 0.01),
    ):
        monkeypatch.setattr(owner, name, value)
    with RangeServer(shards(tmp_path / "d")) as server:
        yield server


PATTERN = "set-{train-{0000..0002},test-0000}.tar"


class TestServer:
    def test_the_same_images(self, server: RangeServer) -> None:
        source = open_source(f"tar:{server.url}/{PATTERN}")
        assert counts(source) == {"train": [9, 9], "test": [3, 3]}
        assert source.description == "4 tar shards, streamed"
        server.failing = [503, 429]
        assert bodies(source) == expected(0, 18)
        assert source.splits["train"].name_of(7) == f"{server.url}/set-train-0001.tar row 1"

    def test_the_second_time_no_header_is_read(self, server: RangeServer) -> None:
        first = open_source(f"tar:{server.url}/{PATTERN}").splits["train"]
        server.asked.clear()
        again = open_source(f"tar:{server.url}/{PATTERN}").splits["train"]
        assert again.fingerprint == first.fingerprint
        assert sorted({asked[1:] for asked in server.asked}) == [(0, 0)]
        server.asked.clear()
        server.tag = "two"  # another content
        assert open_source(f"tar:{server.url}/{PATTERN}").splits["train"].fingerprint
        assert max(last for _, _, last in server.asked) > 0

    def test_a_server_that_does_not_tell_files_apart(self, server: RangeServer) -> None:
        """Nothing that is kept may be taken for another file's: their images have one size."""
        pictures = [bmp(shade) for shade in (0, 90)]
        for number, picture in enumerate(pictures):
            members = [("0.cls", b"0"), ("0.bmp", picture), ("1.cls", b"1"), ("1.bmp", picture)]
            write(server.folder / f"{number}/set.tar", tar(members))
        server.tag = ""
        first, again, other = (
            open_source(f"tar:{server.url}/{folder}/set.tar").splits["train"] for folder in "001"
        )
        assert first.fingerprint == again.fingerprint
        assert len({first.cache_key, again.cache_key, other.cache_key}) == 3
        assert not first.is_unchanged()

    def test_one_path_and_two_queries(self, server: RangeServer) -> None:
        server.tag = "Mon, 23 Nov 2026 14:00:00 GMT"
        found = []
        for number, labels in enumerate(([0, 1], [1, 0])):
            members = [
                (f"{n}.{end}", body)
                for n, label in enumerate(labels)
                for end, body in (("cls", b"%d" % label), ("png", png(1)))
            ]
            write(server.folder / "get.tar", tar(members))  # as ?id= would choose it
            split = open_source(f"tar:{server.url}/get.tar?id={number}").splits["train"]
            found.append(split.labels.tolist())
        assert found == [[0, 1], [1, 0]]

    def test_a_small_part_of_large_shards(
        self, server: RangeServer, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        members = [
            (f"{place}.{end}", body)
            for place in range(4)
            for end, body in (("cls", b"%d" % (place % 2)), ("png", png(0) + bytes(10**6)))
        ]
        write(server.folder / "large.tar", tar(members))
        monkeypatch.setattr(module, "_GROUP_BYTES", 2**19)
        split = open_source(f"tar:{server.url}/large.tar").splits["train"]
        headers = sum(last + 1 - first for _, first, last in server.asked)
        assert headers < 2_000_000  # of 4
        server.asked.clear()
        assert split.items.content(3)[: len(png(0))] == png(0)
        assert sum(last + 1 - first for _, first, last in server.asked) < 1_100_000

    def test_refusals(self, server: RangeServer) -> None:
        password = server.url.replace("//", "//me:secret@")
        for name, code, named in (
            (f"{password}/none.tar?token=secret", "data.not_found", f"{server.url}/none.tar"),
            (f"{server.url}/*.tar", "data.wrong_source", "*.tar"),
            ("ftp://x/a.tar", "data.not_found", "ftp://x/a.tar"),
        ):
            with refused(code, named) as caught:
                open_source(f"tar:{name}")
            assert "secret" not in str(caught.value).replace(f"tar:{name}", "")
        for status, code in ((403, "hub.forbidden"), (500, "hub.unreachable")):
            server.failing = [status] * client.TRIES
            with refused(code, str(status), "set-test-0000.tar"):
                open_source(f"tar:{server.url}/set-test-0000.tar")
            assert server.failing == [status] * (client.TRIES - 1 if status == 403 else 0)
        server.sends_parts = False
        with refused("hub.wrong_answer", "does not send parts"):
            open_source(f"tar:{server.url}/set-test-0000.tar")
        for place, named in (("/set-test-0000.tar", "redirects"), ("ftp://x/y", "protocol")):
            server.failing = [place] * 30
            with refused("hub.wrong_answer", named, "set-test-0000.tar"):
                open_source(f"tar:{server.url}/set-test-0000.tar")
        for url in ("http:///a.tar", "http://a b/a.tar", "http://\x7f/a.tar"):
            with refused("hub.wrong_answer", "check its address"):
                open_source(f"tar:{url}")

    @pytest.mark.parametrize(
        "flood, named", [((bytes(2**16), 0.0), "more than"), ((b"x", 0.1), "too slow")]
    )
    def test_an_answer_that_does_not_end(
        self,
        server: RangeServer,
        flood: tuple[bytes, float],
        named: str,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        monkeypatch.setattr(remote_file, "_ANSWER_SECONDS", 0.3)
        server.flood = flood
        with refused("hub.unreachable", "set-test-0000.tar", named):
            open_source(f"tar:{server.url}/set-test-0000.tar")

    def test_a_shard_that_changes(self, server: RangeServer) -> None:
        split = open_source(f"tar:{server.url}/set-train-0000.tar").splits["train"]
        server.tag = "two"
        with refused("data.changed", "set-train-0000.tar"):
            split.read(0)

    def test_a_signal_ends_the_wait_for_a_server(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Of the shards at once, and nothing waits for them when the process ends."""
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(remote_file, "_ANSWER_SECONDS", 3.0)

        def stop(*_: object) -> None:
            raise KeyboardInterrupt

        before, others = signal.signal(signal.SIGUSR1, stop), {*threading.enumerate()}
        try:
            with socket.create_server(("127.0.0.1", 0)) as silent:
                pattern = f"tar:http://127.0.0.1:{silent.getsockname()[1]}/{{00..40}}.tar"
                threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGUSR1)).start()
                began = time.monotonic()
                with pytest.raises(KeyboardInterrupt):
                    open_source(pattern)
        finally:
            signal.signal(signal.SIGUSR1, before)
        assert time.monotonic() - began < 2
        assert all(thread.daemon for thread in {*threading.enumerate()} - others)

    def test_offline(self, server: RangeServer, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
        with refused("hub.unreachable", "HF_HUB_OFFLINE"):
            open_source(f"tar:{server.url}/{PATTERN}")


@pytest.mark.parametrize("form", ["{url}/datasets/someone/things/resolve/main", "hf"])
def test_a_data_set_of_the_hub(
    form: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """At one commit, with the user's token, which no other server sees."""
    caplog.set_level(logging.WARNING)
    files = {f"data/{path.name}": path.read_bytes() for path in shards(tmp_path / "d").iterdir()}
    with HubServer() as hub:
        hub.add_repo("someone/things", files, kind="dataset", private=True)
        hub.add_user("someone", token="hf_aliceAlice1234")
        point_at(hub, monkeypatch, tmp_path / "home", token="hf_aliceAlice1234")
        top = "hf://datasets/someone/things@main" if form == "hf" else form.format(url=hub.url)
        source = open_source(f"tar:{top}/data/{PATTERN}")
        hub.commit("someone/things", dict.fromkeys(files, b""))
        assert bodies(source) == expected(0, 18)
        assert counts(source)["test"] == [3, 3]
        with refused("data.not_found", "data/none.tar"):
            open_source(f"tar:{top}/data/none.tar")
        assert hub.mistakes == []
