"""A damaged, stale or foreign cache never changes a loss.

Each trial corrupts the cache or changes the data, and trains. The losses must equal those of a run
on the same data with an empty cache. Controls switch one check off and show that the same trial
then fails. What a module refuses in detail is tested beside it: `test_cache`, `test_pixel_file`,
`test_fingerprint` and `test_feature_cache`.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from forked_runs import ChildResult, fork_process, read_train_losses, run_in_child
from hypothesis import HealthCheck, given, seed, settings
from logs import forget_warnings, logged
from PIL import Image

from finetune import cache
from finetune.data import (
    decode_split,
    fingerprint,
    pixel_cache,
    pixel_file,
    pixel_store,
    recorded_digests,
    stat_signatures,
)
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
NUM_EXAMPLES = 5000
IMAGE_BYTES = IMAGE_SIDE * IMAGE_SIDE * 3
OTHER_UID = 12345


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
    monkeypatch.setattr(fingerprint, "MIN_STORED_BYTES", 0)
    monkeypatch.setattr(stat_signatures, "SETTLED_NS", -(10**18))


@pytest.fixture
def case(tmp_path: Path) -> CacheCase:
    new_case = CacheCase(tmp_path)
    for number in range(NUM_IMAGES):
        new_case.write_image(number)
    return new_case


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
        change(body)
        path.write_bytes(body)

    return edit


def zero(first: int, last: int) -> Callable[[Path], None]:
    def change(body: bytearray) -> None:
        body[first:last] = bytes(last - first)

    return rewrite(change)


def flip_bit(body: bytearray) -> None:
    body[len(body) // 4] ^= 4


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 100)


def forge_pixels(path: Path) -> None:
    """Forge zero pixels with all checksums."""
    with path.open("r+b") as file:
        table = pixel_file.read_pixel_table(file, path.stem, NUM_IMAGES)
        table.checksums[:] = zlib.crc32(bytes(IMAGE_BYTES))
        file.seek(0)
        file.write(bytes(NUM_IMAGES * IMAGE_BYTES))
        file.truncate()
        pixel_file.write_pixel_table(file, table, path.stem)


def forge(change: Callable[[Path], object]) -> Callable[[Path], None]:
    """Forge the pixels, and make the file or folder one that others could have forged."""

    def forge_and_change(path: Path) -> None:
        if path.suffix == ".pixels":
            forge_pixels(path)
        change(path)

    return forge_and_change


def give_away(path: Path) -> None:
    os.chown(path, OTHER_UID, OTHER_UID)


def put_lock(make: Callable[[Path], object]) -> Callable[[Path], None]:
    """Remove the file and put a bad lock in its place, so that a run has to decode."""

    def block(path: Path) -> None:
        path.unlink()
        make(path.with_name(f".{path.stem}.lock"))

    return block


FAULTS: dict[str, tuple[str, Callable[[Path], None]]] = {
    "pixels: images zeroed": ("pixels", zero(4 * IMAGE_BYTES, 23 * IMAGE_BYTES)),
    "pixels: truncated": ("pixels", truncate),
    "pixels: mode 666, forged": ("pixels", forge(lambda path: path.chmod(0o666))),
    "pixels: another user's, forged": ("pixels", forge(give_away)),
    "pixels: the lock is a link": ("pixels", put_lock(lambda path: path.symlink_to("made"))),
    "features: rows zeroed": ("features", zero(128 + 3 * 64, 128 + 20 * 64)),
    "hashes: a bit": ("hashes", rewrite(flip_bit)),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_corrupt_or_unsafe_cache_is_not_used(
    name: str,
    copied_cache: CacheCase,
    warm_cache: tuple[Path, dict[str, list[float]]],
    fault: Callable[..., None],
) -> None:
    if "another user" in name and os.geteuid():
        pytest.skip("only root can give a file away")
    kind, change = FAULTS[name]
    overrides = FROZEN_BACKBONE if kind == "features" else []
    change(copied_cache.cached_file(kind))
    expected = warm_cache[1]["features" if kind == "features" else "pixels"]
    assert copied_cache.train_losses(*overrides) == expected
    assert str(copied_cache.cache) in copied_cache.output or "damaged" in copied_cache.output
    assert not (copied_cache.cache / "pixels" / "made").exists()
    fault(FAULT, PROMISE)


class AnyChecksum:
    """Stands in for zlib: every checksum matches."""

    class Equal(int):
        def __eq__(self, other: object) -> bool:
            return True

        __hash__ = int.__hash__

    def crc32(self, body: object) -> int:
        return self.Equal()


@pytest.mark.parametrize(
    "kind, change, check",
    [
        (
            "pixels",
            zero(4 * IMAGE_BYTES, 23 * IMAGE_BYTES),
            (pixel_file, "zlib", AnyChecksum()),
        ),
        (
            "pixels",
            forge(lambda path: path.chmod(0o666)),
            (cache, "_check_owner", lambda *_: None),
        ),
        (
            "features",
            zero(128 + 3 * 64, 128 + 20 * 64),
            (feature_cache, "_feature_file_name", None),
        ),
    ],
    ids=["checksums", "mode", "sha256 of features"],
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
    """Replace the content of all files, and restore their times."""
    for number in range(NUM_IMAGES):
        state = case.image_path(number).stat()
        case.write_image(number, 1)
        os.utime(case.image_path(number), ns=(state.st_atime_ns, state.st_mtime_ns))


@pytest.mark.parametrize("overrides", [[], FROZEN_BACKBONE], ids=["pixels", "features"])
def test_changed_images_are_not_read_from_the_cache(
    overrides: list[str], case: CacheCase, fault: Callable[..., None]
) -> None:
    before, out = case.train_losses(*overrides), case.out
    rewrite_all_images(case)
    after = case.train_losses(*overrides)
    assert after == case.losses_with_empty_cache(*overrides) != before
    result = case.run(*overrides, resume=out)
    assert result.exit_code == 3, result.output
    assert "a new run with --out" in result.output
    fault(FAULT, PROMISE)


def digests_of_names_and_sizes(images: Any, rows: Any) -> Any:
    """Compute digests of names and sizes only."""
    sizes = images.encoded_sizes()
    texts = (f"{images.name_of(row)} {sizes[row]}" for row in rows.tolist())
    body = b"".join(recorded_digests.image_digest(text.encode()) for text in texts)
    return np.frombuffer(body, dtype=np.uint8).reshape(len(rows), -1)


def test_a_fingerprint_of_names_and_sizes_misses_changes(
    case: CacheCase, monkeypatch: pytest.MonkeyPatch, fault: Callable[..., None]
) -> None:
    """The control: with a fingerprint that ignores the content, the run uses stale pixels."""
    with monkeypatch.context() as patch:
        patch.setattr("finetune.data.source.compute_digests", digests_of_names_and_sizes)
        assert case.run().exit_code == 3, "each image is compared with its digest"
        patch.setattr(recorded_digests.RecordedDigests, "record", lambda *_: None)
        before = case.train_losses()
        rewrite_all_images(case)
        assert case.train_losses() == before != case.losses_with_empty_cache()
    fault(f"{FAULT}, one check off", "the control: the same trial must fail", "the loss is wrong")


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


@pytest.mark.parametrize("size", [4096, 20_000, 60_000])
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


@pytest.mark.parametrize("moment", ["rename", "write"])
def test_a_kill_while_the_cache_is_written(
    moment: str, case: CacheCase, monkeypatch: pytest.MonkeyPatch, fault: Callable[..., None]
) -> None:
    owner, name = (os, "replace") if moment == "rename" else (pixel_cache, "write_pixel_table")

    def kill_or_replace(source: Any, *arguments: Any, **kwargs: Any) -> None:
        if moment == "write" or ".pixels." in str(source):
            os.kill(os.getpid(), signal.SIGKILL)
        replace(source, *arguments, **kwargs)

    replace = os.replace
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, kill_or_replace)
        assert case.run().exit_code == -signal.SIGKILL
    assert [path.suffix for path in (case.cache / "pixels").iterdir()].count(".tmp") == 1
    assert case.train_losses() == case.losses_with_empty_cache()
    assert [path.suffix for path in (case.cache / "pixels").iterdir()] == [".pixels"]
    fault(FAULT, PROMISE)


def test_a_file_truncated_while_it_is_read(
    copied_cache: CacheCase,
    warm_cache: tuple[Path, dict[str, list[float]]],
    monkeypatch: pytest.MonkeyPatch,
    fault: Callable[..., None],
) -> None:
    read_batch, path = pixel_file.DecodedImages.read_batch, copied_cache.cached_file("pixels")

    def truncate_and_read(self: Any, *arguments: Any) -> Any:
        if path.exists():
            os.truncate(path, 100)
        return read_batch(self, *arguments)

    monkeypatch.setattr(pixel_file.DecodedImages, "read_batch", truncate_and_read)
    assert copied_cache.train_losses() == warm_cache[1]["pixels"]
    assert copied_cache.output.count("is damaged") == 1
    assert not list((copied_cache.cache / "pixels").iterdir()), "the damaged file was not removed"
    fault(FAULT, PROMISE)


# --- fuzzing --------------------------------------------------------------------------------------

BYTE_EDITS = st.lists(
    st.tuples(
        st.sampled_from(["flip", "cut", "set", "copy", "insert"]),
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
    return body


@pytest.mark.parametrize("kind", ["pixels", "features"])
def test_fuzzed_cache_files(
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
    options = decode_split.DecodeOptions(0, "stop", progress=False, timeout_seconds=9.0)
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
        max_examples=NUM_EXAMPLES,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(BYTE_EDITS)
    def check_one(edits: Any) -> None:
        nonlocal num_damaged
        edited = apply_byte_edits(body, edits)
        messages.clear()
        forget_warnings()
        path.unlink(missing_ok=True)
        path.write_bytes(edited)
        path.chmod(0o600)
        (check_pixels if kind == "pixels" else check_features)()
        assert bool(messages) == (edited != body)
        num_damaged += bool(messages)

    check_one()
    assert num_damaged > NUM_EXAMPLES // 3
    fault(
        f"fuzzing: cached {kind} with damaged bytes",
        "no wrong image or feature, and no exception other than FinetuneError",
        f"{NUM_EXAMPLES:,} examples, {num_damaged:,} of them detected as damaged",
    )
