"""Caches that are damaged, of another time, another user or another file: no loss is another one.

Each trial leaves something wrong in the cache or changes the data behind it, and trains. The losses
must be those of a run on the same data whose cache is empty. Controls switch one proof off and show
that the same trial then fails.
"""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from faults_runs import Ended, fork, in_child, losses
from hypothesis import HealthCheck, given, seed, settings
from PIL import Image

from finetune import files
from finetune.data import decode_all, fingerprint, image_cache, image_store, notices, pixel_file
from finetune.data.items import FileItems
from finetune.data.source import open_source
from finetune.evaluation import features
from finetune.evaluation.features import read_cached
from finetune.recipe.load import parse_recipe
from finetune.training.train import train

pytestmark = pytest.mark.usefixtures("no_pictures")

RECIPE = """
model:
  name: vit_tiny_patch16_224
  args: {patch_size: 4, embed_dim: 16, depth: 1, num_heads: 2}
  pretrained: false
  image_size: 8
data: {source: SOURCE, train: resize, eval: resize, batch_size: 24, workers: 0, val_fraction: 0}
optim: {name: adamw, lr: 3e-3, schedule: constant, steps: 3}
run: {precision: fp32, threads: 1, log_every: 1, test: false}
"""
FROZEN = ["model.freeze=backbone"]
SIDE, IMAGES = 12, 24
CELL = SIDE * SIDE * 3
OTHER = 12345  # a user
LONG = pytest.mark.faults
root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")


class Case:
    """A data set, a cache, and runs on them."""

    def __init__(self, folder: Path, side: int = SIDE) -> None:
        self.folder = folder
        self.side = side
        self.data, self.cache = folder / "data", folder / "cache"
        self.runs = 0

    def image(self, number: int) -> Path:
        return self.data / "train" / "ab"[number % 2] / f"{number:02}.bmp"

    def paint(self, number: int, shade: int = 0) -> None:
        """Write an image; all have the same length."""
        path = self.image(number)
        path.parent.mkdir(parents=True, exist_ok=True)
        body = np.random.default_rng([number, shade]).bytes(self.side * self.side * 3)
        Image.frombytes("RGB", (self.side, self.side), body).save(path)

    def run(self, *overrides: str, cache: Path | None = None, resume: Path | None = None) -> Ended:
        """Train in a child, or resume there."""
        self.runs += 1
        self.out = resume or self.folder / f"run{self.runs}"
        recipe = parse_recipe(RECIPE.replace("SOURCE", f"folder:{self.data}"), overrides=overrides)

        def work() -> None:
            os.environ["FINETUNE_CACHE"] = str(cache or self.cache)
            handler = logging.StreamHandler(sys.stderr)
            logging.getLogger("finetune").addHandler(handler)
            signal.alarm(100)  # whoever waits for ever is found out
            train(recipe, self.out, resume=resume is not None)

        return in_child(work)

    def losses(self, *overrides: str, cache: Path | None = None) -> list[float]:
        ended = self.run(*overrides, cache=cache)
        assert ended.code == 0, ended.said
        assert "Traceback" not in ended.said
        self.said = ended.said
        return losses(self.out)

    def fresh(self, *overrides: str) -> list[float]:
        """The losses with an empty cache."""
        return self.losses(*overrides, cache=self.folder / f"fresh{self.runs}")

    def only(self, kind: str) -> Path:
        (path,) = (each for each in (self.cache / kind).iterdir() if each.name[0] != ".")
        return path


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything is kept, also of a few images, and nothing is too fresh for it."""
    for module in (decode_all, image_store):
        monkeypatch.setattr(module, "SMALL_BYTES", 0)
    monkeypatch.setattr(fingerprint, "_SMALL_BYTES", 0)
    monkeypatch.setattr(fingerprint, "_SETTLED_NS", -(10**18))
    monkeypatch.setattr(notices, "_logged", set())


@pytest.fixture
def case(tmp_path: Path) -> Case:
    made = Case(tmp_path)
    for number in range(IMAGES):
        made.paint(number)
    return made


@pytest.fixture
def many(monkeypatch: pytest.MonkeyPatch) -> None:
    """The images count as more than 1 GiB."""
    monkeypatch.setattr(fingerprint, "_CONTENT_BYTES", 10)


@pytest.fixture(scope="module")
def warm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, dict[str, list[float]]]]:
    """A data set with a full cache of pixels, features and hashes, and the losses of both runs."""
    made = Case(tmp_path_factory.mktemp("warm"))
    for number in range(IMAGES):
        made.paint(number)
    with pytest.MonkeyPatch.context() as patch:
        small.__wrapped__(patch)  # type: ignore[attr-defined]
        yield made.folder, {"pixels": made.losses(), "features": made.losses(*FROZEN)}


@pytest.fixture
def copy(warm: tuple[Path, dict[str, list[float]]], tmp_path: Path) -> Case:
    """A copy of it, with owners and times, for a trial to spoil."""
    shutil.copytree(warm[0] / "cache", tmp_path / "cache", symlinks=True)
    made = Case(tmp_path)
    made.data = warm[0] / "data"
    return made


ROW = "the cache of another time, another user, another file"
PROMISE = "found before it reaches the network: the losses are those with an empty cache"


# --- what lies in the cache -----------------------------------------------------------------------


def edited(change: Callable[[bytearray], object]) -> Callable[[Path], None]:
    def edit(path: Path) -> None:
        body = bytearray(path.read_bytes())
        changed = change(body)
        path.write_bytes(changed if isinstance(changed, bytes | bytearray) else body)

    return edit


def bit(place: float) -> Callable[[Path], None]:
    """One bit flipped, at a share of the file's length."""

    def flip(body: bytearray) -> None:
        body[min(int(place * len(body)), len(body) - 1)] ^= 1 << int(place * 1000) % 8

    return edited(flip)


def swapped(first: int, second: int, size: int, start: int = 0) -> Callable[[Path], None]:
    def swap(body: bytearray) -> None:
        one, two = (slice(start + n * size, start + (n + 1) * size) for n in (first, second))
        body[one], body[two] = body[two], body[one]

    return edited(swap)


def zeroed(first: int, last: int, size: int, start: int = 0) -> Callable[[Path], None]:
    def zero(body: bytearray) -> None:
        body[start + first * size : start + last * size] = bytes((last - first) * size)

    return edited(zero)


def cut(number: int) -> Callable[[Path], None]:
    return edited(lambda body: body[: len(body) + number] if number <= 0 else body + bytes(number))


def linked(path: Path) -> None:
    path.rename(path.with_suffix(".real"))
    path.symlink_to(path.with_suffix(".real").name)


def pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path, 0o600)


def forged(path: Path) -> None:
    """Pixels with the checksums that fit them, but not the table's."""
    body = bytearray(path.read_bytes())
    body[: IMAGES * CELL] = bytes(IMAGES * CELL)
    rows = np.frombuffer(body, pixel_file.ROW, IMAGES, IMAGES * CELL).copy()
    rows["crc"] = pixel_file.zlib.crc32(bytes(CELL))
    body[IMAGES * CELL : IMAGES * (CELL + pixel_file.ROW.itemsize)] = rows.tobytes()
    path.write_bytes(body)


def wholly_forged(path: Path) -> None:
    """Zeros with everything that fits them."""
    with path.open("r+b") as file:
        table = pixel_file.read_table(file.fileno(), path.stem, IMAGES)
        rows = table.rows.copy()
        rows["crc"] = pixel_file.zlib.crc32(bytes(CELL))
        file.write(bytes(IMAGES * CELL))
        file.truncate(IMAGES * CELL)
        table = pixel_file.Table(rows, table.indices, table.failed)
        pixel_file.write_table(file.fileno(), table, path.stem)


def another_users(path: Path) -> None:
    if path.suffix == ".pixels":
        wholly_forged(path)
    os.chown(path, OTHER, OTHER)


def others_folder(path: Path) -> None:
    another_users(path)
    os.chown(path.parent, OTHER, OTHER)


def open_to(mode: int) -> Callable[[Path], None]:
    def open_up(path: Path) -> None:
        if path.suffix == ".pixels":
            wholly_forged(path)
        path.chmod(mode)

    return open_up


def open_folder(mode: int, up: int = 1) -> Callable[[Path], None]:
    def open_up(path: Path) -> None:
        if path.suffix == ".pixels":
            wholly_forged(path)
        path.parents[up - 1].chmod(mode)

    return open_up


def folder_link(path: Path) -> None:
    wholly_forged(path)
    path.parent.rename(path.parent.with_name("elsewhere"))
    path.parent.symlink_to("elsewhere")


def lock(make: Callable[[Path], object]) -> Callable[[Path], None]:
    """A wrong lock in the way of a run that has to decode."""

    def block(path: Path) -> None:
        path.unlink()
        make(path.with_name(f".{path.stem}.lock"))

    return block


def others_lock(path: Path) -> None:
    path.touch(0o600)
    os.chown(path, OTHER, OTHER)


def of_another_key(path: Path) -> None:
    """A whole file of other images under this name."""
    part = open_source("embedded:digits").splits["test"].subset(np.arange(IMAGES))
    folder = path.parents[1] / "other"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FINETUNE_CACHE", str(folder))
        how = image_cache.How(0, "stop", progress=False, timeout_seconds=9.0)
        image_cache.cached_images(part, how, num_bytes=9, tell=print)
    (other,) = (folder / "pixels").iterdir()
    other.rename(path)


PIXELS: dict[str, Callable[[Path], None]] = {
    **{f"bit at {n / 16:.2f}": bit(n / 16) for n in range(16)},
    **{
        f"bit in the table at -{n}": edited(lambda b, n=n: flip_at(b, -n)) for n in (1, 40, 90, 130)
    },
    **{f"images {n} and {n + 7} swapped": swapped(n, n + 7, CELL) for n in (0, 5, 16)},
    **{f"images {a} to {b} zeroed": zeroed(a, b, CELL) for a, b in ((0, 1), (4, 23), (0, 24))},
    **{f"length {n:+}": cut(n) for n in (-1, -100, -800, -CELL, -9000, 1, 4096)},
    "rows of the table swapped": swapped(2, 3, pixel_file.ROW.itemsize, IMAGES * CELL),
    "empty": edited(lambda body: b""),
    "forged pixels and checksums": forged,
    "the file of another key": of_another_key,
    "a link": linked,
    "a named pipe": pipe,
    "a folder": lambda path: (path.unlink(), path.mkdir())[1],
    "mode 666, forged": open_to(0o666),
    "mode 620, forged": open_to(0o620),
    "its folder 1777, forged": open_folder(0o1777),
    "its folder 770, forged": open_folder(0o770),
    "the cache 1777, forged": open_folder(0o1777, 2),
    "its folder is a link, forged": folder_link,
    "the lock is a named pipe": lock(os.mkfifo),
    "the lock is a link": lock(lambda path: path.symlink_to("made")),
    "the lock is a folder": lock(Path.mkdir),
}
BY_ROOT: dict[str, Callable[[Path], None]] = {
    "another user's, forged": another_users,
    "another user's folder, forged": others_folder,
    "the lock is another user's": lock(others_lock),
}
FEATURES: dict[str, Callable[[Path], None]] = {
    **{f"bit at {n / 4:.2f}": bit(n / 4) for n in range(5)},
    "rows swapped": swapped(1, 2, 64, 128),
    "rows zeroed": zeroed(3, 20, 64, 128),
    "cut": cut(-64),
    "longer": cut(64 * IMAGES),
    "a link": linked,
    "a named pipe": pipe,
    "mode 666": open_to(0o666),
    "its folder 1777": open_folder(0o1777),
}
HASHES: dict[str, Callable[[Path], None]] = {
    "a bit": bit(0.7),
    "records swapped": swapped(0, 1, 72, 40),
    "cut": cut(-72),
    "a named pipe": pipe,
    "mode 666": open_to(0o666),
}


def flip_at(body: bytearray, place: int) -> None:
    body[place] ^= 4


QUICK = {"bit at 0.25", "images 4 to 23 zeroed", "length -100", "a named pipe", "mode 666, forged"}
QUICK |= {"the lock is a link", "another user's, forged", "rows swapped", "records swapped"}


def trials(kind: str, changes: dict[str, Callable[[Path], None]], *marks: Any) -> list[Any]:
    return [
        pytest.param(
            kind,
            change,
            id=f"{kind}: {name}",
            marks=[*marks, *([] if name in QUICK else [LONG])],
        )
        for name, change in changes.items()
    ]


@pytest.mark.parametrize(
    "kind, change",
    [
        *trials("pixels", PIXELS),
        *trials("pixels", BY_ROOT, root),
        *trials("features", FEATURES),
        *trials("features", {"another user's": another_users}, root),
        *trials("hashes", HASHES),
        *trials("hashes", {"another user's": another_users}, root),
    ],
)
def test_a_wrong_cache(
    kind: str,
    change: Callable[[Path], None],
    copy: Case,
    warm: tuple[Path, dict[str, list[float]]],
    fault: Callable[..., None],
) -> None:
    overrides = FROZEN if kind == "features" else []
    change(copy.only(kind))
    expected = warm[1]["features" if kind == "features" else "pixels"]
    assert copy.losses(*overrides) == expected
    assert str(copy.cache) in copy.said or kind == "hashes" or "is damaged" in copy.said, copy.said
    assert not (copy.cache / "pixels" / "made").exists()
    fault(ROW, PROMISE)


@pytest.mark.parametrize(
    "kind, change, proof",
    [
        ("pixels", zeroed(4, 23, CELL), (pixel_file.Images, "_is_intact", lambda *_: True)),
        ("pixels", open_to(0o666), (files, "_check_owner", lambda *_: None)),
        ("pixels", open_folder(0o1777), (files, "_check_owner", lambda *_: None)),
        pytest.param("pixels", another_users, (files, "_check_owner", lambda *_: None), marks=root),
        ("features", zeroed(3, 20, 64, 128), (features, "_name_of", None)),
    ],
    ids=["checksums", "mode", "folder", "owner", "sha256 of features"],
)
def test_without_a_proof_the_trial_fails(
    kind: str,
    change: Callable[[Path], None],
    proof: tuple[Any, str, Any],
    copy: Case,
    warm: tuple[Path, dict[str, list[float]]],
    monkeypatch: pytest.MonkeyPatch,
    fault: Callable[..., None],
) -> None:
    path = copy.only(kind)
    change(path)
    place, name, instead = proof
    monkeypatch.setattr(place, name, instead or (lambda key, values: path.name))
    assert copy.losses(*(FROZEN if kind == "features" else [])) != warm[1][kind]
    fault(
        f"{ROW}, a proof switched off", "the control: the same trial must fail", "the loss is wrong"
    )


def test_a_warm_cache_is_used_at_all(
    copy: Case, warm: tuple[Path, dict[str, list[float]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(image_cache, "visit", lambda *_, **__: pytest.fail("decodes"))
    monkeypatch.setattr(features, "compute", lambda *_, **__: pytest.fail("computes"))
    assert copy.losses() == warm[1]["pixels"]
    assert copy.losses(*FROZEN) == warm[1]["features"]
    notices = copy.said.replace("read from the cache", "").replace(str(copy.folder), "")
    assert "cache" not in notices


# --- the data behind it ---------------------------------------------------------------------------


def repainted(case: Case) -> None:
    for number in range(IMAGES):
        case.paint(number, 1)


def times_restored(case: Case) -> None:
    for number in range(IMAGES):
        state = case.image(number).stat()
        case.paint(number, 1)
        os.utime(case.image(number), ns=(state.st_atime_ns, state.st_mtime_ns))


def removed_and_made(case: Case) -> None:
    """As a rule with the same inodes."""
    for number in range(IMAGES):
        state = case.image(number).stat()
        case.image(number).unlink()
        case.paint(number, 1)
        os.utime(case.image(number), ns=(state.st_atime_ns, state.st_mtime_ns))


def renamed_over(case: Case) -> None:
    one, two = case.image(0), case.image(1)
    one.rename(case.folder / "x")
    two.rename(one)
    (case.folder / "x").rename(two)


def one_bit(case: Case) -> None:
    bit(0.9)(case.image(5))


def folders_swapped(case: Case) -> None:
    a, b = (case.data / "train" / name for name in "ab")
    a.rename(case.folder / "x")
    b.rename(a)
    (case.folder / "x").rename(b)


def mapped_write(case: Case) -> None:
    pixels = np.memmap(case.image(3), dtype=np.uint8, mode="r+")
    pixels[-300:] ^= 255
    pixels.flush()


DATA = [repainted, times_restored, removed_and_made, renamed_over, one_bit, folders_swapped]
DATA += [mapped_write]


@pytest.mark.parametrize(
    "large",
    [pytest.param(False, id="one hash", marks=LONG), pytest.param(True, id="as above 1 GiB")],
)
@pytest.mark.parametrize("kind", ["pixels", "features"])
@pytest.mark.parametrize("change", [DATA[0], *(pytest.param(one, marks=LONG) for one in DATA[1:])])
def test_images_that_changed_behind_the_cache(
    change: Callable[[Case], None],
    kind: str,
    large: bool,
    case: Case,
    request: pytest.FixtureRequest,
    fault: Callable[..., None],
) -> None:
    if large:
        request.getfixturevalue("many")
    overrides = FROZEN if kind == "features" else []
    before, out = case.losses(*overrides), case.out
    change(case)
    after = case.losses(*overrides)
    assert after == case.fresh(*overrides) != before
    refused = case.run(*overrides, resume=out)
    assert refused.code == 3, refused.said
    assert "another --out" in refused.said
    fault(ROW, PROMISE)


def by_names(items: Any, rows: Any, labels: Any) -> Any:
    """The fingerprint that earlier versions took of a set above 1 GiB."""
    return fingerprint.fingerprint_by_names(items, rows, labels), items.states(rows)


def test_names_and_sizes_alone_would_train_on_stale_pixels(
    case: Case, monkeypatch: pytest.MonkeyPatch, many: None, fault: Callable[..., None]
) -> None:
    """The control of the above: as it was in earlier versions."""

    with monkeypatch.context() as patch:
        patch.setattr("finetune.data.source.fingerprint_of", by_names)
        before = case.losses()
        repainted(case)
        assert case.losses() == before != case.fresh()
    fault(
        f"{ROW}, a proof switched off", "the control: the same trial must fail", "the loss is wrong"
    )


def test_a_run_of_more_than_1_gib_by_an_earlier_version_is_resumed(
    case: Case, monkeypatch: pytest.MonkeyPatch, many: None, fault: Callable[..., None]
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("finetune.data.source.fingerprint_of", by_names)
        case.losses()
    out, other = case.out, shutil.copytree(case.out, case.folder / "other")
    for steps, told in ((5, True), (7, False)):  # then it has the hash of the content
        ended = case.run(f"optim.steps={steps}", resume=out)
        assert ended.code == 0, ended.said
        assert ("by their names and sizes" in ended.said) == told
    case.image(3).write_bytes(case.image(3).read_bytes() + b"longer")
    assert case.run(resume=other).code == 3
    assert case.run("optim.steps=7", resume=out).code == 3
    fault(
        "a run on more than 1 GiB by a version that knew names and sizes, at --resume",
        "goes on and says so; 3 where a name or a size is another one",
    )


@pytest.mark.parametrize("coarse", [True, False], ids=["one-second times", "nanoseconds"])
@pytest.mark.parametrize("step", [-3600, 0, 3600], ids=["clock back", "clock kept", "clock on"])
def test_times_that_tell_little(
    step: int,
    coarse: bool,
    case: Case,
    many: None,
    monkeypatch: pytest.MonkeyPatch,
    fault: Callable[..., None],
) -> None:
    """Images change twice within a second, on a file system and a clock that show less of it."""
    if coarse and step > 0:
        pytest.skip("not promised: times of whole seconds, and a clock an hour ahead of theirs")
    look = os.stat

    class Coarse:
        def __init__(self, state: os.stat_result) -> None:
            for name in ("st_dev", "st_ino", "st_size"):
                setattr(self, name, getattr(state, name))
            for name in ("st_mtime_ns", "st_ctime_ns"):
                setattr(self, name, getattr(state, name) // 10**9 * 10**9)

    class Os:
        environ, stat = os.environ, staticmethod(lambda path: Coarse(look(path)))
        fspath, fsencode, fdopen, dup = os.fspath, os.fsencode, os.fdopen, os.dup

    monkeypatch.setattr(fingerprint, "_SETTLED_NS", 2 * 10**9)
    if coarse:
        monkeypatch.setattr(fingerprint, "os", Os)
    clock, ahead = time.time_ns, [float(step)]  # seconds
    monkeypatch.setattr(fingerprint.time, "time_ns", lambda: clock() + int(ahead[0] * 10**9))

    def prints() -> str:
        with monkeypatch.context() as patch:
            patch.setenv("FINETUNE_CACHE", str(case.cache))
            return open_source(f"folder:{case.data}").splits["train"].fingerprint

    seen = []
    for shade in range(6):
        for number in range(0, IMAGES, 7):
            case.paint(number, shade)
        seen.append(prints())
    assert len(set(seen)) == 6
    if step >= 0:
        ahead[0] += 3.1
        assert prints() == prints() == seen[-1]
        monkeypatch.setattr(FileItems, "content", lambda *_: pytest.fail("is read again"))
        assert prints() == seen[-1]
    fault(ROW, PROMISE)


def test_an_image_that_changes_while_it_is_decoded_is_not_kept(
    case: Case, monkeypatch: pytest.MonkeyPatch, fault: Callable[..., None]
) -> None:
    visit = image_cache.visit

    def meanwhile(*args: Any, **kwargs: Any) -> Any:
        case.paint(3, 1)
        return visit(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(image_cache, "visit", meanwhile)
        changed = case.losses()
    assert "changed while it was decoded" in case.said
    assert not list((case.cache / "pixels").iterdir())
    case.paint(3)
    assert case.losses() == case.fresh() != changed
    fault(ROW, PROMISE)


# --- other runs, full disks, kills ----------------------------------------------------------------


@pytest.mark.parametrize("overrides", [[], FROZEN], ids=["pixels", "features"])
def test_two_runs_on_a_cold_cache(
    overrides: list[str], case: Case, fault: Callable[..., None]
) -> None:
    recipe = parse_recipe(RECIPE.replace("SOURCE", f"folder:{case.data}"), overrides=overrides)
    expected = case.fresh(*overrides)

    def work(number: int) -> None:
        os.environ["FINETUNE_CACHE"] = str(case.cache)
        train(recipe, case.folder / f"race{number}")

    children = [fork(lambda number=number: work(number), 2) for number in range(3)]
    assert [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children] == [0] * 3
    for number in range(3):
        assert losses(case.folder / f"race{number}") == expected
    kept = [path for path in case.cache.rglob("*") if path.is_file() and path.name[0] == "."]
    assert kept == []
    fault(ROW, PROMISE)


@pytest.mark.parametrize("room", [20_000, *(pytest.param(n, marks=LONG) for n in (4096, 60_000))])
def test_a_full_disk_of_the_cache(room: int, case: Case, fault: Callable[..., None]) -> None:
    place = case.folder / "disk"
    place.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={room},mode=700", "faults", str(place)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"no tmpfs can be mounted: {done.stderr.strip()}")
    try:
        for overrides in ([], FROZEN):
            expected = case.fresh(*overrides)
            for _ in range(2):
                assert case.losses(*overrides, cache=place / "cache") == expected
    finally:
        subprocess.run(["umount", "-l", str(place)], check=True)
    fault(ROW, PROMISE)


@pytest.mark.parametrize(
    "moment",
    ["replace", *(pytest.param(n, marks=LONG) for n in ("_write", "write_table", "fsync"))],
)
def test_a_kill_while_the_cache_is_written(
    moment: str, case: Case, monkeypatch: pytest.MonkeyPatch, fault: Callable[..., None]
) -> None:
    places = {"_write": pixel_file, "write_table": image_cache, "fsync": files.os}
    with monkeypatch.context() as patch:
        kill = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)  # noqa: E731
        if moment in ("fsync", "replace"):
            write = files.CacheFolder.write

            def armed(self: Any, key: str) -> Any:
                setattr(files.os, moment, kill)
                return write(self, key)

            patch.setattr(files.CacheFolder, "write", armed)
        else:
            patch.setattr(places[moment], moment, kill)
        assert case.run().code == -signal.SIGKILL
    assert case.losses() == case.fresh()
    assert [path.name for path in (case.cache / "pixels").iterdir() if path.name[0] == "."] == []
    fault(ROW, PROMISE)


def test_a_file_that_is_cut_off_while_it_is_read(
    copy: Case,
    warm: tuple[Path, dict[str, list[float]]],
    monkeypatch: pytest.MonkeyPatch,
    fault: Callable[..., None],
) -> None:
    batch = pixel_file.Images.batch

    def meanwhile(self: Any, *which: Any) -> Any:
        os.truncate(copy.only("pixels"), 100) if copy.only("pixels").stat().st_size > 100 else None
        return batch(self, *which)

    def careful(self: Any, *which: Any) -> Any:
        try:
            return meanwhile(self, *which)
        except ValueError:  # it was removed as damaged
            return batch(self, *which)

    monkeypatch.setattr(pixel_file.Images, "batch", careful)
    assert copy.losses() == warm[1]["pixels"]
    assert copy.said.count("is damaged") == 1
    assert not list((copy.cache / "pixels").iterdir()), "the next run makes it anew"
    fault(ROW, PROMISE)


@pytest.mark.faults
@pytest.mark.parametrize("side", [2040, 4160], ids=["300 MB", "1.2 GB"])
def test_large_sets(
    side: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: Callable[..., None]
) -> None:
    """As they are: nothing is switched off, and no limit is another one."""
    monkeypatch.undo()
    case, cell = Case(tmp_path, side), side * side * 3
    for number in range(IMAGES):
        case.paint(number)
    assert (IMAGES * cell > 2**30) == (side == 4160)
    time.sleep(2.1)
    first = case.losses()
    assert case.only("hashes")
    zeroed(4, 23, cell)(case.only("pixels"))
    assert case.losses() == first
    assert "is damaged" in case.said
    repainted(case)
    ended = case.run(cache=tmp_path / "cache")
    assert ended.code == 0, ended.said
    changed = losses(case.out)
    assert changed != first
    shutil.rmtree(case.cache)
    assert case.losses() == changed
    fault(
        "a set of 300 MB and of 1.2 GB: images zeroed in the cache, all replaced by others",
        PROMISE,
    )


# --- any bytes ------------------------------------------------------------------------------------

EDITS = st.lists(
    st.tuples(
        st.sampled_from(["flip", "cut", "set", "copy", "insert", "digest"]),
        st.floats(0, 1),
        st.floats(0, 1),
        st.binary(max_size=40),
    ),
    min_size=1,
    max_size=4,
)


def spoiled(body: bytes, edits: list[Any]) -> bytes:
    for kind, first, second, piece in edits:
        a, b = int(first * len(body)), int(second * len(body))
        if kind == "flip" and body:
            a = min(a, len(body) - 1)
            body = body[:a] + bytes([body[a] ^ (1 << b % 8)]) + body[a + 1 :]
        elif kind == "cut":
            body = body[:a]
        elif kind == "set":
            body = body[:a] + piece + body[a + len(piece) :]
        elif kind == "copy":
            body = body[:a] + body[b : b + CELL] + body[a + len(body[b : b + CELL]) :]
        elif kind == "insert":
            body = body[:a] + piece + body[a:]
        elif kind == "digest" and len(body) > 200:
            # a tail of any bytes under the sha256 that fits it
            body = body[:-300] + piece + body[-300 + len(piece) : -32]
            tail = body[IMAGES * CELL :]
            footer = pixel_file._FOOTER.size - 32
            body += hashlib.sha256(tail[-footer:] + tail[:-footer]).digest()
    return body


@pytest.mark.parametrize(
    "number",
    [pytest.param(200, id="quick"), pytest.param(5000, id="long", marks=LONG)],
)
@pytest.mark.parametrize("kind", ["pixels", "features"])
def test_any_bytes(
    number: int, kind: str, copy: Case, monkeypatch: pytest.MonkeyPatch, fault: Callable[..., None]
) -> None:
    monkeypatch.setenv("FINETUNE_CACHE", str(copy.cache))
    path = copy.only(kind)
    body, refusals = path.read_bytes(), 0
    split = open_source(f"folder:{copy.data}").splits["train"]
    expected = [split.read(index) for index in range(IMAGES)]
    values_ND = (
        np.frombuffer(body[128:], np.float32).reshape(IMAGES, -1) if kind != "pixels" else None
    )
    how = image_cache.How(0, "stop", progress=False, timeout_seconds=9.0)
    said: list[str] = []
    monkeypatch.setattr(image_cache, "notice", said.append)
    monkeypatch.setattr(features, "say", said.append)

    def pixels_are_right() -> None:
        found = image_cache.cached_images(split, how, num_bytes=9, tell=said.append)
        assert isinstance(found, image_cache.Decoded), found
        assert np.array_equal(found.indices, range(IMAGES))
        for image, right in zip(found.images, expected, strict=True):
            assert np.array_equal(image.permute(1, 2, 0).numpy(), right)

    def features_are_right() -> None:
        key = path.stem.partition("-")[0]
        found = read_cached(path.parent, key, num_images=IMAGES)
        assert found is None or np.array_equal(found, values_ND)

    @seed(7)
    @settings(
        max_examples=number,
        deadline=None,
        database=None,
        derandomize=number == 200,
        suppress_health_check=list(HealthCheck),
    )
    @given(EDITS)
    def once(edits: Any) -> None:
        nonlocal refusals
        wrong = spoiled(body, edits)
        said.clear()
        path.unlink(missing_ok=True)
        path.write_bytes(wrong)
        path.chmod(0o600)
        (pixels_are_right if kind == "pixels" else features_are_right)()
        # (a table may be written anew under its own sha256: then it is right, or was refused)
        assert said or wrong == body or kind == "pixels", "nothing was said"
        refusals += bool(said)

    once()
    assert refusals > number // 2
    fault(
        f"fuzzing: the cache of {kind} with damaged bytes",
        "no image or feature is another one, no exception that is not an error of ours",
        f"{number:,} examples, {refusals:,} of them found damaged",
    )
