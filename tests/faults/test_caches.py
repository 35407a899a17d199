"""A damaged, stale or foreign cache never changes a loss.

Each trial corrupts the cache or changes the data, and trains. The losses must equal those of a run
on the same data with an empty cache. Controls switch one check off and show that the same trial
then fails.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from forked_runs import ChildResult, fork_process, read_train_losses, run_in_child
from hypothesis import HealthCheck, given, seed, settings
from logs import logged
from PIL import Image

from finetune import cache, files
from finetune.data import (
    decode_split,
    fingerprint,
    pixel_cache,
    pixel_file,
    pixel_store,
    stat_signatures,
)
from finetune.data.encoded_images import FileImages
from finetune.data.open_source import open_source
from finetune.evaluation import feature_cache, feature_extraction
from finetune.evaluation.feature_cache import read_cached_features
from finetune.recipe.load import parse_recipe
from finetune.training.train import train

pytestmark = pytest.mark.usefixtures("no_plots")

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
FROZEN_BACKBONE = ["model.freeze=backbone"]
IMAGE_SIDE, NUM_IMAGES = 12, 24
IMAGE_BYTES = IMAGE_SIDE * IMAGE_SIDE * 3
OTHER_UID = 12345
LONG_TEST = pytest.mark.faults
requires_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")


class CacheCase:
    """A dataset, a cache, and runs that use them."""

    def __init__(self, folder: Path, side: int = IMAGE_SIDE) -> None:
        self.folder = folder
        self.side = side
        self.data, self.cache = folder / "data", folder / "cache"
        self.runs = 0

    def image_path(self, number: int) -> Path:
        return self.data / "train" / "ab"[number % 2] / f"{number:02}.bmp"

    def write_image(self, number: int, variant: int = 0) -> None:
        """Write an image; all files have the same length."""
        path = self.image_path(number)
        path.parent.mkdir(parents=True, exist_ok=True)
        pixels = np.random.default_rng([number, variant]).bytes(self.side * self.side * 3)
        Image.frombytes("RGB", (self.side, self.side), pixels).save(path)

    def run(
        self, *overrides: str, cache: Path | None = None, resume: Path | None = None
    ) -> ChildResult:
        """Train or resume in a child."""
        self.runs += 1
        self.out = resume or self.folder / f"run{self.runs}"
        recipe = parse_recipe(RECIPE.replace("SOURCE", f"folder:{self.data}"), overrides=overrides)

        def work() -> None:
            os.environ["FINETUNE_CACHE"] = str(cache or self.cache)
            signal.alarm(100)  # end a run that hangs
            train(recipe, self.out, resume=resume is not None)

        return run_in_child(work)

    def train_losses(self, *overrides: str, cache: Path | None = None) -> list[float]:
        result = self.run(*overrides, cache=cache)
        assert result.exit_code == 0, result.output
        assert "Traceback" not in result.output
        self.output = result.output
        return read_train_losses(self.out)

    def losses_with_empty_cache(self, *overrides: str) -> list[float]:
        """Train with an empty cache. Returns: the losses."""
        return self.train_losses(*overrides, cache=self.folder / f"fresh{self.runs}")

    def cached_file(self, kind: str) -> Path:
        (path,) = (entry for entry in (self.cache / kind).iterdir() if entry.name[0] != ".")
        return path


@pytest.fixture(autouse=True)
def cache_small_datasets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cache small datasets too, and files that have just been written."""
    for module in (decode_split, pixel_store):
        monkeypatch.setattr(module, "SMALL_SPLIT_BYTES", 0)
    monkeypatch.setattr(fingerprint, "_SMALL_SPLIT_BYTES", 0)
    monkeypatch.setattr(stat_signatures, "_SETTLED_NS", -(10**18))


@pytest.fixture
def case(tmp_path: Path) -> CacheCase:
    new_case = CacheCase(tmp_path)
    for number in range(NUM_IMAGES):
        new_case.write_image(number)
    return new_case


@pytest.fixture
def hash_files_separately(monkeypatch: pytest.MonkeyPatch) -> None:
    """Treat the images as more than 1 GiB."""
    monkeypatch.setattr(fingerprint, "_HASH_TOGETHER_BYTES", 10)


@pytest.fixture(scope="module")
def warm_cache(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[tuple[Path, dict[str, list[float]]]]:
    """A dataset with cached pixels, features and hashes, and the losses of both runs."""
    new_case = CacheCase(tmp_path_factory.mktemp("warm"))
    for number in range(NUM_IMAGES):
        new_case.write_image(number)
    with pytest.MonkeyPatch.context() as patch:
        cache_small_datasets.__wrapped__(patch)  # type: ignore[attr-defined]
        yield (
            new_case.folder,
            {
                "pixels": new_case.train_losses(),
                "features": new_case.train_losses(*FROZEN_BACKBONE),
            },
        )


@pytest.fixture
def copied_cache(warm_cache: tuple[Path, dict[str, list[float]]], tmp_path: Path) -> CacheCase:
    """A copy of the warm cache, with owners and times, for a trial to corrupt."""
    shutil.copytree(warm_cache[0] / "cache", tmp_path / "cache", symlinks=True)
    new_case = CacheCase(tmp_path)
    new_case.data = warm_cache[0] / "data"
    return new_case


FAULT = "a damaged or stale cache, or one of another user"
PROMISE = "found before it reaches the network: the losses equal those with an empty cache"


# --- faults of cached files -----------------------------------------------------------------------


def rewrite(change: Callable[[bytearray], object]) -> Callable[[Path], None]:
    def edit(path: Path) -> None:
        body = bytearray(path.read_bytes())
        changed = change(body)
        path.write_bytes(changed if isinstance(changed, bytes | bytearray) else body)

    return edit


def flip_bit(position: float) -> Callable[[Path], None]:
    """Flip one bit; position: a fraction of the length of the file."""

    def change(body: bytearray) -> None:
        body[min(int(position * len(body)), len(body) - 1)] ^= 1 << int(position * 1000) % 8

    return rewrite(change)


def swap_blocks(first: int, second: int, size: int, start: int = 0) -> Callable[[Path], None]:
    def change(body: bytearray) -> None:
        one, two = (slice(start + n * size, start + (n + 1) * size) for n in (first, second))
        body[one], body[two] = body[two], body[one]

    return rewrite(change)


def zero_blocks(first: int, last: int, size: int, start: int = 0) -> Callable[[Path], None]:
    def change(body: bytearray) -> None:
        body[start + first * size : start + last * size] = bytes((last - first) * size)

    return rewrite(change)


def change_length(num_bytes: int) -> Callable[[Path], None]:
    return rewrite(
        lambda body: body[: len(body) + num_bytes] if num_bytes <= 0 else body + bytes(num_bytes)
    )


def replace_by_link(path: Path) -> None:
    path.rename(path.with_suffix(".real"))
    path.symlink_to(path.with_suffix(".real").name)


def replace_by_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path, 0o600)


def forge_pixels_and_checksums(path: Path) -> None:
    """Forge pixels and their checksums, but not the checksum of the table."""
    body = bytearray(path.read_bytes())
    body[: NUM_IMAGES * IMAGE_BYTES] = bytes(NUM_IMAGES * IMAGE_BYTES)
    rows = np.frombuffer(body, pixel_file.ROW_DTYPE, NUM_IMAGES, NUM_IMAGES * IMAGE_BYTES).copy()
    rows["crc"] = pixel_file.zlib.crc32(bytes(IMAGE_BYTES))
    body[NUM_IMAGES * IMAGE_BYTES : NUM_IMAGES * (IMAGE_BYTES + pixel_file.ROW_DTYPE.itemsize)] = (
        rows.tobytes()
    )
    path.write_bytes(body)


def forge_file(path: Path) -> None:
    """Forge zero pixels with all checksums."""
    with path.open("r+b") as file:
        table = pixel_file.read_pixel_table(file.fileno(), path.stem, NUM_IMAGES)
        rows = table.rows.copy()
        rows["crc"] = pixel_file.zlib.crc32(bytes(IMAGE_BYTES))
        file.write(bytes(NUM_IMAGES * IMAGE_BYTES))
        file.truncate(NUM_IMAGES * IMAGE_BYTES)
        table = pixel_file.PixelTable(rows, table.indices, table.failed)
        pixel_file.write_pixel_table(file.fileno(), table, path.stem)


def forge_as_other_user(path: Path) -> None:
    if path.suffix == ".pixels":
        forge_file(path)
    os.chown(path, OTHER_UID, OTHER_UID)


def forge_folder_of_other_user(path: Path) -> None:
    forge_as_other_user(path)
    os.chown(path.parent, OTHER_UID, OTHER_UID)


def forge_with_mode(mode: int) -> Callable[[Path], None]:
    def open_up(path: Path) -> None:
        if path.suffix == ".pixels":
            forge_file(path)
        path.chmod(mode)

    return open_up


def forge_with_folder_mode(mode: int, up: int = 1) -> Callable[[Path], None]:
    def open_up(path: Path) -> None:
        if path.suffix == ".pixels":
            forge_file(path)
        path.parents[up - 1].chmod(mode)

    return open_up


def forge_behind_folder_link(path: Path) -> None:
    forge_file(path)
    path.parent.rename(path.parent.with_name("elsewhere"))
    path.parent.symlink_to("elsewhere")


def bad_lock(make: Callable[[Path], object]) -> Callable[[Path], None]:
    """Remove the file and put a bad lock in its place, so that a run has to decode."""

    def block(path: Path) -> None:
        path.unlink()
        make(path.with_name(f".{path.stem}.lock"))

    return block


def lock_of_other_user(path: Path) -> None:
    path.touch(0o600)
    os.chown(path, OTHER_UID, OTHER_UID)


def file_of_another_key(path: Path) -> None:
    """Put a valid file of other images under this name."""
    split = open_source("embedded:digits").splits["test"].subset(np.arange(NUM_IMAGES))
    folder = path.parents[1] / "other"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FINETUNE_CACHE", str(folder))
        options = pixel_cache.DecodeOptions(0, "stop", progress=False, timeout_seconds=9.0)
        pixel_cache.decode_with_cache(split, options, num_bytes=9)
    (cached_file,) = (folder / "pixels").iterdir()
    cached_file.rename(path)


PIXEL_FAULTS: dict[str, Callable[[Path], None]] = {
    **{f"bit at {n / 16:.2f}": flip_bit(n / 16) for n in range(16)},
    **{
        f"bit in the table at -{n}": rewrite(lambda b, n=n: flip_bit_at(b, -n))
        for n in (1, 40, 90, 130)
    },
    **{f"images {n} and {n + 7} swapped": swap_blocks(n, n + 7, IMAGE_BYTES) for n in (0, 5, 16)},
    **{
        f"images {a} to {b} zeroed": zero_blocks(a, b, IMAGE_BYTES)
        for a, b in ((0, 1), (4, 23), (0, 24))
    },
    **{f"length {n:+}": change_length(n) for n in (-1, -100, -800, -IMAGE_BYTES, -9000, 1, 4096)},
    "rows of the table swapped": swap_blocks(
        2, 3, pixel_file.ROW_DTYPE.itemsize, NUM_IMAGES * IMAGE_BYTES
    ),
    "empty": rewrite(lambda body: b""),
    "forged pixels and checksums": forge_pixels_and_checksums,
    "a file of another key": file_of_another_key,
    "a link": replace_by_link,
    "a named pipe": replace_by_pipe,
    "a folder": lambda path: (path.unlink(), path.mkdir())[1],
    "mode 666, forged": forge_with_mode(0o666),
    "mode 620, forged": forge_with_mode(0o620),
    "folder mode 1777, forged": forge_with_folder_mode(0o1777),
    "folder mode 770, forged": forge_with_folder_mode(0o770),
    "cache mode 1777, forged": forge_with_folder_mode(0o1777, 2),
    "folder is a link, forged": forge_behind_folder_link,
    "the lock is a named pipe": bad_lock(os.mkfifo),
    "the lock is a link": bad_lock(lambda path: path.symlink_to("made")),
    "the lock is a folder": bad_lock(Path.mkdir),
}
PIXEL_FAULTS_AS_ROOT: dict[str, Callable[[Path], None]] = {
    "another user's, forged": forge_as_other_user,
    "another user's folder, forged": forge_folder_of_other_user,
    "the lock is another user's": bad_lock(lock_of_other_user),
}
FEATURE_FAULTS: dict[str, Callable[[Path], None]] = {
    **{f"bit at {n / 4:.2f}": flip_bit(n / 4) for n in range(5)},
    "rows swapped": swap_blocks(1, 2, 64, 128),
    "rows zeroed": zero_blocks(3, 20, 64, 128),
    "truncated": change_length(-64),
    "longer": change_length(64 * NUM_IMAGES),
    "a link": replace_by_link,
    "a named pipe": replace_by_pipe,
    "mode 666": forge_with_mode(0o666),
    "folder mode 1777": forge_with_folder_mode(0o1777),
}
HASH_FAULTS: dict[str, Callable[[Path], None]] = {
    "a bit": flip_bit(0.7),
    "records swapped": swap_blocks(0, 1, 72, 40),
    "truncated": change_length(-72),
    "a named pipe": replace_by_pipe,
    "mode 666": forge_with_mode(0o666),
}


def flip_bit_at(body: bytearray, offset: int) -> None:
    body[offset] ^= 4


QUICK_FAULTS = {
    "bit at 0.25",
    "images 4 to 23 zeroed",
    "length -100",
    "a named pipe",
    "mode 666, forged",
}
QUICK_FAULTS |= {"the lock is a link", "another user's, forged", "rows swapped", "records swapped"}


def parametrize_faults(
    kind: str, changes: dict[str, Callable[[Path], None]], *marks: Any
) -> list[Any]:
    return [
        pytest.param(
            kind,
            change,
            id=f"{kind}: {name}",
            marks=[*marks, *([] if name in QUICK_FAULTS else [LONG_TEST])],
        )
        for name, change in changes.items()
    ]


@pytest.mark.parametrize(
    "kind, change",
    [
        *parametrize_faults("pixels", PIXEL_FAULTS),
        *parametrize_faults("pixels", PIXEL_FAULTS_AS_ROOT, requires_root),
        *parametrize_faults("features", FEATURE_FAULTS),
        *parametrize_faults("features", {"another user's": forge_as_other_user}, requires_root),
        *parametrize_faults("hashes", HASH_FAULTS),
        *parametrize_faults("hashes", {"another user's": forge_as_other_user}, requires_root),
    ],
)
def test_a_corrupt_or_unsafe_cache_is_not_used(
    kind: str,
    change: Callable[[Path], None],
    copied_cache: CacheCase,
    warm_cache: tuple[Path, dict[str, list[float]]],
    fault: Callable[..., None],
) -> None:
    overrides = FROZEN_BACKBONE if kind == "features" else []
    change(copied_cache.cached_file(kind))
    expected = warm_cache[1]["features" if kind == "features" else "pixels"]
    assert copied_cache.train_losses(*overrides) == expected
    assert (
        str(copied_cache.cache) in copied_cache.output
        or kind == "hashes"
        or "is damaged" in copied_cache.output
    ), copied_cache.output
    assert not (copied_cache.cache / "pixels" / "made").exists()
    fault(FAULT, PROMISE)


@pytest.mark.parametrize(
    "kind, change, check",
    [
        (
            "pixels",
            zero_blocks(4, 23, IMAGE_BYTES),
            (pixel_file.DecodedImages, "_is_intact", lambda *_: True),
        ),
        ("pixels", forge_with_mode(0o666), (cache, "_check_owner", lambda *_: None)),
        ("pixels", forge_with_folder_mode(0o1777), (cache, "_check_owner", lambda *_: None)),
        pytest.param(
            "pixels",
            forge_as_other_user,
            (cache, "_check_owner", lambda *_: None),
            marks=requires_root,
        ),
        ("features", zero_blocks(3, 20, 64, 128), (feature_cache, "_feature_file_name", None)),
    ],
    ids=["checksums", "mode", "folder", "owner", "sha256 of features"],
)
def test_without_the_check_the_losses_are_wrong(
    kind: str,
    change: Callable[[Path], None],
    check: tuple[Any, str, Any],
    copied_cache: CacheCase,
    warm_cache: tuple[Path, dict[str, list[float]]],
    monkeypatch: pytest.MonkeyPatch,
    fault: Callable[..., None],
) -> None:
    path = copied_cache.cached_file(kind)
    change(path)
    owner, name, replacement = check
    monkeypatch.setattr(owner, name, replacement or (lambda key, values: path.name))
    assert (
        copied_cache.train_losses(*(FROZEN_BACKBONE if kind == "features" else []))
        != warm_cache[1][kind]
    )
    fault(f"{FAULT}, one check off", "the control: the same trial must fail", "the loss is wrong")


def test_a_valid_cache_is_used(
    copied_cache: CacheCase,
    warm_cache: tuple[Path, dict[str, list[float]]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pixel_cache, "decode_split", lambda *_, **__: pytest.fail("decodes"))
    monkeypatch.setattr(
        feature_extraction, "compute_features", lambda *_, **__: pytest.fail("computes")
    )
    assert copied_cache.train_losses() == warm_cache[1]["pixels"]
    assert copied_cache.train_losses(*FROZEN_BACKBONE) == warm_cache[1]["features"]
    other_output = copied_cache.output
    for expected in ("cached features", "read from the cache", str(copied_cache.folder)):
        other_output = other_output.replace(expected, "")
    assert "cache" not in other_output


# --- changes of the data --------------------------------------------------------------------------


def rewrite_all_images(case: CacheCase) -> None:
    for number in range(NUM_IMAGES):
        case.write_image(number, 1)


def rewrite_and_restore_times(case: CacheCase) -> None:
    for number in range(NUM_IMAGES):
        state = case.image_path(number).stat()
        case.write_image(number, 1)
        os.utime(case.image_path(number), ns=(state.st_atime_ns, state.st_mtime_ns))


def delete_and_recreate(case: CacheCase) -> None:
    """The new files usually have the same inodes."""
    for number in range(NUM_IMAGES):
        state = case.image_path(number).stat()
        case.image_path(number).unlink()
        case.write_image(number, 1)
        os.utime(case.image_path(number), ns=(state.st_atime_ns, state.st_mtime_ns))


def swap_images_by_rename(case: CacheCase) -> None:
    one, two = case.image_path(0), case.image_path(1)
    one.rename(case.folder / "x")
    two.rename(one)
    (case.folder / "x").rename(two)


def flip_bit_in_image(case: CacheCase) -> None:
    flip_bit(0.9)(case.image_path(5))


def swap_class_folders(case: CacheCase) -> None:
    a, b = (case.data / "train" / name for name in "ab")
    a.rename(case.folder / "x")
    b.rename(a)
    (case.folder / "x").rename(b)


def write_through_mmap(case: CacheCase) -> None:
    pixels = np.memmap(case.image_path(3), dtype=np.uint8, mode="r+")
    pixels[-300:] ^= 255
    pixels.flush()


DATA_CHANGES = [
    rewrite_all_images,
    rewrite_and_restore_times,
    delete_and_recreate,
    swap_images_by_rename,
    flip_bit_in_image,
    swap_class_folders,
]
DATA_CHANGES += [write_through_mmap]


@pytest.mark.parametrize(
    "large",
    [
        pytest.param(False, id="one hash", marks=LONG_TEST),
        pytest.param(True, id="treated as above 1 GiB"),
    ],
)
@pytest.mark.parametrize("kind", ["pixels", "features"])
@pytest.mark.parametrize(
    "change", [DATA_CHANGES[0], *(pytest.param(one, marks=LONG_TEST) for one in DATA_CHANGES[1:])]
)
def test_changed_images_are_not_read_from_the_cache(
    change: Callable[[CacheCase], None],
    kind: str,
    large: bool,
    case: CacheCase,
    request: pytest.FixtureRequest,
    fault: Callable[..., None],
) -> None:
    if large:
        request.getfixturevalue("hash_files_separately")
    overrides = FROZEN_BACKBONE if kind == "features" else []
    before, out = case.train_losses(*overrides), case.out
    change(case)
    after = case.train_losses(*overrides)
    assert after == case.losses_with_empty_cache(*overrides) != before
    result = case.run(*overrides, resume=out)
    assert result.exit_code == 3, result.output
    assert "another --out" in result.output
    fault(FAULT, PROMISE)


def fingerprint_of_names_and_sizes(images: Any, rows: Any, labels: Any) -> Any:
    """Compute a fingerprint of names and sizes only."""
    sizes = images.encoded_sizes()[rows]
    names = [images.name_of(row) for row in rows.tolist()]
    text = repr((names, sizes.tolist(), labels.tolist()))
    return hashlib.sha256(text.encode()).hexdigest(), images.stat_signatures(rows)


def test_a_fingerprint_of_names_and_sizes_misses_changes(
    case: CacheCase,
    monkeypatch: pytest.MonkeyPatch,
    hash_files_separately: None,
    fault: Callable[..., None],
) -> None:
    """The control: with a fingerprint that ignores the content, the run uses stale pixels."""
    with monkeypatch.context() as patch:
        patch.setattr("finetune.data.source.compute_fingerprint", fingerprint_of_names_and_sizes)
        before = case.train_losses()
        rewrite_all_images(case)
        assert case.train_losses() == before != case.losses_with_empty_cache()
    fault(f"{FAULT}, one check off", "the control: the same trial must fail", "the loss is wrong")


@pytest.mark.parametrize("coarse", [True, False], ids=["one-second times", "nanoseconds"])
@pytest.mark.parametrize(
    "step", [-3600, 0, 3600], ids=["clock back", "clock unchanged", "clock ahead"]
)
def test_changes_within_the_clock_resolution_are_found(
    step: int,
    coarse: bool,
    case: CacheCase,
    hash_files_separately: None,
    monkeypatch: pytest.MonkeyPatch,
    fault: Callable[..., None],
) -> None:
    """Images change twice within a second, with coarse file times and a clock that jumps."""
    if coarse and step > 0:
        pytest.skip("not promised: whole-second times with a clock one hour ahead")
    real_stat = os.stat

    class WholeSecondStat:
        def __init__(self, state: os.stat_result) -> None:
            for name in ("st_dev", "st_ino", "st_size"):
                setattr(self, name, getattr(state, name))
            for name in ("st_mtime_ns", "st_ctime_ns"):
                setattr(self, name, getattr(state, name) // 10**9 * 10**9)

    class OsWithWholeSeconds:
        environ, stat = os.environ, staticmethod(lambda path: WholeSecondStat(real_stat(path)))
        fspath, fsencode, fdopen, dup = os.fspath, os.fsencode, os.fdopen, os.dup

    monkeypatch.setattr(stat_signatures, "_SETTLED_NS", 2 * 10**9)
    if coarse:
        monkeypatch.setattr(stat_signatures, "os", OsWithWholeSeconds)
    clock, clock_offset = time.time_ns, [float(step)]  # seconds
    monkeypatch.setattr(
        stat_signatures.time, "time_ns", lambda: clock() + int(clock_offset[0] * 10**9)
    )

    def compute_fingerprint() -> str:
        with monkeypatch.context() as patch:
            patch.setenv("FINETUNE_CACHE", str(case.cache))
            return open_source(f"folder:{case.data}").splits["train"].fingerprint

    fingerprints = []
    for variant in range(6):
        for number in range(0, NUM_IMAGES, 7):
            case.write_image(number, variant)
        fingerprints.append(compute_fingerprint())
    assert len(set(fingerprints)) == 6
    if step >= 0:
        clock_offset[0] += 3.1
        assert compute_fingerprint() == compute_fingerprint() == fingerprints[-1]
        monkeypatch.setattr(
            FileImages, "read_bytes", lambda *_: pytest.fail("reads the file again")
        )
        assert compute_fingerprint() == fingerprints[-1]
    fault(FAULT, PROMISE)


def test_an_image_changed_during_decoding_is_not_cached(
    case: CacheCase, monkeypatch: pytest.MonkeyPatch, fault: Callable[..., None]
) -> None:
    decode = pixel_cache.decode_split

    def change_and_decode(*args: Any, **kwargs: Any) -> Any:
        case.write_image(3, 1)
        return decode(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(pixel_cache, "decode_split", change_and_decode)
        changed = case.train_losses()
    assert "changed during decoding" in case.output
    assert not list((case.cache / "pixels").iterdir())
    case.write_image(3)
    assert case.train_losses() == case.losses_with_empty_cache() != changed
    fault(FAULT, PROMISE)


# --- other runs, full disks, kills ----------------------------------------------------------------


@pytest.mark.parametrize("overrides", [[], FROZEN_BACKBONE], ids=["pixels", "features"])
def test_three_runs_on_an_empty_cache(
    overrides: list[str], case: CacheCase, fault: Callable[..., None]
) -> None:
    recipe = parse_recipe(RECIPE.replace("SOURCE", f"folder:{case.data}"), overrides=overrides)
    expected = case.losses_with_empty_cache(*overrides)

    def work(number: int) -> None:
        os.environ["FINETUNE_CACHE"] = str(case.cache)
        train(recipe, case.folder / f"race{number}")

    children = [fork_process(lambda number=number: work(number), 2) for number in range(3)]
    assert [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children] == [0] * 3
    for number in range(3):
        assert read_train_losses(case.folder / f"race{number}") == expected
    temporary_files = [
        path for path in case.cache.rglob("*") if path.is_file() and path.name[0] == "."
    ]
    assert temporary_files == []
    fault(FAULT, PROMISE)


@pytest.mark.parametrize(
    "size", [20_000, *(pytest.param(n, marks=LONG_TEST) for n in (4096, 60_000))]
)
def test_a_full_cache_disk(size: int, case: CacheCase, fault: Callable[..., None]) -> None:
    mount_point = case.folder / "disk"
    mount_point.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={size},mode=700", "faults", str(mount_point)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode:
        pytest.skip(f"no tmpfs can be mounted: {result.stderr.strip()}")
    try:
        for overrides in ([], FROZEN_BACKBONE):
            expected = case.losses_with_empty_cache(*overrides)
            for _ in range(2):
                assert case.train_losses(*overrides, cache=mount_point / "cache") == expected
    finally:
        subprocess.run(["umount", "-l", str(mount_point)], check=True)
    fault(FAULT, PROMISE)


@pytest.mark.parametrize(
    "function",
    [
        "replace",
        *(pytest.param(n, marks=LONG_TEST) for n in ("_write_all", "write_pixel_table", "fsync")),
    ],
)
def test_a_kill_while_the_cache_is_written(
    function: str, case: CacheCase, monkeypatch: pytest.MonkeyPatch, fault: Callable[..., None]
) -> None:
    modules = {"_write_all": pixel_file, "write_pixel_table": pixel_cache, "fsync": files.os}
    with monkeypatch.context() as patch:
        kill = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)  # noqa: E731
        if function in ("fsync", "replace"):
            write = cache.CacheFolder.write

            def write_armed(self: Any, key: str) -> Any:
                setattr(files.os, function, kill)
                return write(self, key)

            patch.setattr(cache.CacheFolder, "write", write_armed)
        else:
            patch.setattr(modules[function], function, kill)
        assert case.run().exit_code == -signal.SIGKILL
    assert case.train_losses() == case.losses_with_empty_cache()
    assert [path.name for path in (case.cache / "pixels").iterdir() if path.name[0] == "."] == []
    fault(FAULT, PROMISE)


def test_a_file_truncated_while_it_is_read(
    copied_cache: CacheCase,
    warm_cache: tuple[Path, dict[str, list[float]]],
    monkeypatch: pytest.MonkeyPatch,
    fault: Callable[..., None],
) -> None:
    read_batch = pixel_file.DecodedImages.read_batch

    def truncate_and_read(self: Any, *arguments: Any) -> Any:
        os.truncate(copied_cache.cached_file("pixels"), 100) if copied_cache.cached_file(
            "pixels"
        ).stat().st_size > 100 else None
        return read_batch(self, *arguments)

    def read_again_on_damage(self: Any, *arguments: Any) -> Any:
        try:
            return truncate_and_read(self, *arguments)
        except ValueError:  # the file was removed as damaged
            return read_batch(self, *arguments)

    monkeypatch.setattr(pixel_file.DecodedImages, "read_batch", read_again_on_damage)
    assert copied_cache.train_losses() == warm_cache[1]["pixels"]
    assert copied_cache.output.count("is damaged") == 1
    assert not list((copied_cache.cache / "pixels").iterdir()), "the damaged file was not removed"
    fault(FAULT, PROMISE)


@pytest.mark.faults
@pytest.mark.parametrize("side", [2040, 4160], ids=["300 MB", "1.2 GB"])
def test_large_datasets(
    side: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: Callable[..., None]
) -> None:
    """Without patches: all checks on, all limits unchanged."""
    monkeypatch.undo()
    case, image_bytes = CacheCase(tmp_path, side), side * side * 3
    for number in range(NUM_IMAGES):
        case.write_image(number)
    assert (NUM_IMAGES * image_bytes > 2**30) == (side == 4160)
    time.sleep(2.1)
    losses = case.train_losses()
    assert case.cached_file("hashes")
    zero_blocks(4, 23, image_bytes)(case.cached_file("pixels"))
    assert case.train_losses() == losses
    assert "is damaged" in case.output
    rewrite_all_images(case)
    result = case.run(cache=tmp_path / "cache")
    assert result.exit_code == 0, result.output
    changed_losses = read_train_losses(case.out)
    assert changed_losses != losses
    shutil.rmtree(case.cache)
    assert case.train_losses() == changed_losses
    fault(
        "datasets of 300 MB and 1.2 GB: images zeroed in the cache; all images replaced",
        PROMISE,
    )


# --- fuzzing --------------------------------------------------------------------------------------

BYTE_EDITS = st.lists(
    st.tuples(
        st.sampled_from(["flip", "cut", "set", "copy", "insert", "digest"]),
        st.floats(0, 1),
        st.floats(0, 1),
        st.binary(max_size=40),
    ),
    min_size=1,
    max_size=4,
)


def apply_byte_edits(body: bytes, edits: list[Any]) -> bytes:
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
            body = body[:a] + body[b : b + IMAGE_BYTES] + body[a + len(body[b : b + IMAGE_BYTES]) :]
        elif kind == "insert":
            body = body[:a] + piece + body[a:]
        elif kind == "digest" and len(body) > 200:
            # a tail of any bytes with a matching sha256
            body = body[:-300] + piece + body[-300 + len(piece) : -32]
            tail = body[NUM_IMAGES * IMAGE_BYTES :]
            footer = pixel_file._FOOTER.size - 32
            body += hashlib.sha256(tail[-footer:] + tail[:-footer]).digest()
    return body


@pytest.mark.parametrize(
    "num_examples",
    [pytest.param(200, id="quick"), pytest.param(5000, id="long", marks=LONG_TEST)],
)
@pytest.mark.parametrize("kind", ["pixels", "features"])
def test_fuzzed_cache_files(
    num_examples: int,
    kind: str,
    copied_cache: CacheCase,
    monkeypatch: pytest.MonkeyPatch,
    fault: Callable[..., None],
) -> None:
    monkeypatch.setenv("FINETUNE_CACHE", str(copied_cache.cache))
    path = copied_cache.cached_file(kind)
    body, num_damaged = path.read_bytes(), 0
    split = open_source(f"folder:{copied_cache.data}").splits["train"]
    expected = [split.decode(index) for index in range(NUM_IMAGES)]
    values_ND = (
        np.frombuffer(body[128:], np.float32).reshape(NUM_IMAGES, -1) if kind != "pixels" else None
    )
    options = pixel_cache.DecodeOptions(0, "stop", progress=False, timeout_seconds=9.0)
    messages: list[str] = []

    def check_pixels() -> None:
        with logged(messages):
            decoded = pixel_cache.decode_with_cache(split, options, num_bytes=9)
        assert isinstance(decoded, pixel_cache.DecodedSplit), decoded
        assert np.array_equal(decoded.indices, range(NUM_IMAGES))
        for image, reference in zip(decoded.images, expected, strict=True):
            assert np.array_equal(image.permute(1, 2, 0).numpy(), reference)

    def check_features() -> None:
        key = path.stem.partition("-")[0]
        with logged(messages):
            features = read_cached_features(path.parent, key, num_images=NUM_IMAGES)
        assert features is None or np.array_equal(features, values_ND)

    @seed(7)
    @settings(
        max_examples=num_examples,
        deadline=None,
        database=None,
        derandomize=num_examples == 200,
        suppress_health_check=list(HealthCheck),
    )
    @given(BYTE_EDITS)
    def check_one(edits: Any) -> None:
        nonlocal num_damaged
        edited = apply_byte_edits(body, edits)
        messages.clear()
        path.unlink(missing_ok=True)
        path.write_bytes(edited)
        path.chmod(0o600)
        (check_pixels if kind == "pixels" else check_features)()
        # An edited table with a matching sha256 is either correct or refused.
        assert messages or edited == body or kind == "pixels", "no message"
        num_damaged += bool(messages)

    check_one()
    assert num_damaged > num_examples // 2
    fault(
        f"fuzzing: cached {kind} with damaged bytes",
        "no wrong image or feature, and no exception other than FinetuneError",
        f"{num_examples:,} examples, {num_damaged:,} of them detected as damaged",
    )
