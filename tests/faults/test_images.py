"""Every image file has one result, whoever reads it: train, predict, the demo, a table's rows."""

# C channels, H W pixels

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from image_corpus import CORPUS, encode_image, sample_image, single_color_png
from PIL import Image
from small_datasets import make_pixel_store, write_parquet
from torch import Tensor, nn

from finetune.data.decode import decode_image
from finetune.data.image_paths import find_images
from finetune.data.open_source import open_source
from finetune.demo.predictor import decode_upload
from finetune.errors import DataError
from finetune.inference import Classifier
from finetune.transforms.pipeline import Pipeline

pytestmark = pytest.mark.filterwarnings("ignore")
Result = np.ndarray | str
PROMISE = "one result, the same for train, predict, demo and tables: equal pixels or one message"
HEADER_MIB = 40  # more than the file itself, and far below any of the images
ROUTES = ("train", "train, nothing kept", "predict", "demo", "rows of a table")


def file_of(folder: Path, name: str) -> Path:
    """A file of the corpus: its place in the list is its name."""
    return folder / f"{list(CORPUS).index(name):03d}{CORPUS[name].suffix}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The whole corpus as one class, and a second class."""
    top = tmp_path_factory.mktemp("corpus")
    for name in ("odd", "plain"):
        (top / name).mkdir()
    for name, file in CORPUS.items():
        file_of(top / "odd", name).write_bytes(file.content)
    (top / "plain" / "a.png").write_bytes(encode_image(sample_image(), "PNG"))
    return top


def trained(folder: Path, keep: str) -> dict[str, Result]:
    """The content of a training run's store for each file; the rest is in quarantine."""
    split = open_source(f"folder:{folder}").splits["train"]
    store = make_pixel_store(split, keep=keep, num_workers=0, unreadable="quarantine")
    order = [np.array([index]) for index in range(len(store.split))]
    found: dict[str, Result] = {}
    for index, images in zip(order, store.read_batches(order), strict=True):
        name = store.split.name_of(int(index[0]))
        found[name] = images[0].permute(1, 2, 0).numpy()
    for index in range(len(split)):
        if split.name_of(index) not in found:
            with pytest.raises(DataError) as caught:
                split.decode(index)
            found[split.name_of(index)] = str(caught.value)
    return {f"{folder}/{name}": result for name, result in found.items()}


class Nothing(nn.Module):
    """A network that has two classes and does not look."""

    def forward(self, images_BCHW: Tensor) -> Tensor:
        return images_BCHW.new_zeros(len(images_BCHW), 2)


def predicted(folder: Path) -> dict[str, Result]:
    half = (0.5, 0.5, 0.5)
    sizes = {"image_size": (8, 8), "mean": half, "std": half, "interpolation": "bilinear"}
    pipeline = Pipeline("resize((8, 8))", train=False, **sizes)
    seen: dict[int, np.ndarray] = {}
    files = find_images([folder])
    rows = list(
        Classifier(Nothing(), pipeline, ["a", "b"], device="cpu").iter_predictions(
            files, on_decoded=lambda place, pixels_HWC: seen.update({place: pixels_HWC})
        )
    )
    return {
        row["path"]: row["error"] if "error" in row else seen[place]
        for place, row in enumerate(rows)
    }


def shown(folder: Path) -> dict[str, Result]:
    found: dict[str, Result] = {}
    for path, _ in find_images([folder]):
        try:
            found[path] = decode_upload(path)
        except DataError as error:
            found[path] = str(error)
    return found


def in_a_table(folder: Path, table: Path) -> dict[str, Result]:
    files = [path for path, _ in find_images([folder])]
    images = [{"bytes": Path(path).read_bytes(), "path": None} for path in files]
    write_parquet(table, [index % 2 for index in range(len(files))], images=images)
    split = open_source(f"parquet:{table}").splits["train"]
    found: dict[str, Result] = {}
    for index, path in enumerate(files):
        try:
            found[path] = split.decode(index)
        except DataError as error:
            found[path] = str(error)
    return found


@pytest.fixture(scope="module")
def results(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Result]]:
    """route -> path -> pixels or message."""
    table = tmp_path_factory.mktemp("table") / "train.parquet"
    made = (
        trained(folder, "memory"),
        trained(folder, "none"),
        predicted(folder),
        shown(folder),
        in_a_table(folder, table),
    )
    return dict(zip(ROUTES, made, strict=True))


@pytest.mark.parametrize("name", CORPUS)
def test_every_file_has_one_result(
    name: str,
    folder: Path,
    results: dict[str, dict[str, Result]],
    fault: Callable[..., None],
) -> None:
    expected, path = CORPUS[name].result, str(file_of(folder / "odd", name))
    for route in ROUTES:
        found = results[route][path]
        if isinstance(expected, str):
            assert isinstance(found, str), f"{route}: {name} was decoded"
            assert re.search(expected, found), f"{route}: {found}"
            assert len(found) < 400, found
            assert "\n" not in found
        else:
            assert not isinstance(found, str), f"{route}: {found}"
            assert found.dtype == np.uint8
            assert np.array_equal(found, expected), route
    decoded = sum(not isinstance(file.result, str) for file in CORPUS.values())
    measured = f"{len(CORPUS)} files, {decoded} decoded, {len(ROUTES)} ways"
    fault("image files of every kind", PROMISE, measured)


def loop(path: Path) -> None:
    path.symlink_to(path.name)


PLACES: dict[str, tuple[Callable[[Path], object], str]] = {
    "a link to nothing": (lambda path: path.symlink_to("gone.png"), "a broken link"),
    "a link to itself": (loop, "cannot be opened"),
    "a named pipe": (os.mkfifo, "a pipe or a device"),
    "a link to a device": (lambda path: path.symlink_to("/dev/zero"), "a pipe or a device"),
    "a folder": (Path.mkdir, "is a folder, not a file"),
    "nothing": (lambda path: None, "no such file"),
}


@pytest.mark.parametrize("name", PLACES)
def test_places_that_are_no_files(name: str, tmp_path: Path, fault: Callable[..., None]) -> None:
    make, said = PLACES[name]
    path = tmp_path / "x.jpg"
    make(path)
    for read in (decode_image, decode_upload):
        with pytest.raises(DataError, match=said):
            read(path)
    (row,) = predicted(path).values()
    assert isinstance(row, str)
    assert said in row or "a folder without images" in row
    fault("image names without a file behind them", "refused at once, nothing is waited for")


UNREADABLE = """
import os, sys
from finetune.data.decode import decode
from finetune.errors import DataError
os.setgid(65534); os.setuid(65534)
try:
    decode(sys.argv[1])
except DataError as error:
    print(error)
"""


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become somebody else")
def test_a_file_that_may_not_be_read(tmp_path: Path, fault: Callable[..., None]) -> None:
    for parent in (tmp_path, *tmp_path.parents):
        if parent.stat().st_uid == 0 and not parent.stat().st_mode & 1:
            parent.chmod(parent.stat().st_mode | 0o11)  # so that it is the file that refuses
    path = tmp_path / "x.png"
    path.write_bytes(encode_image(sample_image(), "PNG"))
    path.chmod(0o600)
    done = subprocess.run(
        [sys.executable, "-c", UNREADABLE, str(path)], capture_output=True, text=True, timeout=120
    )
    assert done.stdout == f"{path}: cannot be opened (Permission denied)\n", done.stderr
    fault("an image that may not be read", "the message says so", "as another user, in a child")


def test_a_name_that_is_not_utf8(tmp_path: Path, fault: Callable[..., None]) -> None:
    pixels = sample_image()
    path = Path(os.fsdecode(os.fsencode(tmp_path) + b"/a/\xff\xfe.png"))
    path.parent.mkdir()
    path.write_bytes(encode_image(pixels, "PNG"))
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "0.png").write_bytes(encode_image(pixels, "PNG"))
    for found in (decode_image(path), decode_upload(path), *predicted(tmp_path / "a").values()):
        assert np.array_equal(found, pixels)
    assert all(np.array_equal(found, pixels) for found in trained(tmp_path, "none").values())
    fault("an image whose name is not UTF-8", "decoded as any other")


# --- memory --------------------------------------------------------------------------------------

PEAK = """
import re, sys
from pathlib import Path
from finetune.data.decode import decode
from finetune.errors import DataError
from PIL import Image
Image.init()
def peak():  # not getrusage's, which begins with that of the process that started this one
    status = Path("/proc/self/status").read_text()
    return int(re.search(r"VmHWM:\\s+(\\d+)", status)[1]) / 1024
for name in sys.argv[1:]:
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins again from here
    before = peak()
    try:
        decode(Path(name))
        said = "decoded"
    except DataError as error:
        said = str(error)
    print(f"{peak() - before:.1f} {said}")
"""


def growth(paths: list[Path]) -> list[tuple[float, str]]:
    """MiB by which the peak of a process of its own grew with each file, and what was said."""
    done = subprocess.run(
        [sys.executable, "-c", PEAK, *map(str, paths)], capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""  # PIL's warnings
    parted = [line.partition(" ") for line in done.stdout.splitlines()]
    assert len(parted) == len(paths)
    return [(float(number), said) for number, _, said in parted]


def test_memory_is_bounded_by_the_header(folder: Path, fault: Callable[..., None]) -> None:
    names = [name for name in CORPUS if "megapixel" in name or "2**62" in name or "bomb" in name]
    assert len(names) >= 20
    measured = growth([file_of(folder / "odd", name) for name in names])
    for name, (mebibytes, said) in zip(names, measured, strict=True):
        assert mebibytes < HEADER_MIB, f"{name}: {mebibytes} MiB"
        assert re.search(str(CORPUS[name].result), said)
    most = max(mebibytes for mebibytes, _ in measured)
    promise = f"refused by the header, before memory is asked for: less than {HEADER_MIB} MiB"
    fault("images too large to be decoded", promise, f"at most {most:.0f} MiB, {len(names)} files")


@pytest.mark.faults
def test_memory_of_the_largest_that_is_decoded(tmp_path: Path, fault: Callable[..., None]) -> None:
    large = (8_000, 8_000)
    files = {
        "grey": single_color_png(*large, color_type=0),
        "RGB": single_color_png(*large, color_type=2),
        "alpha": single_color_png(*large, color_type=6),
        "16 bits": encode_image(np.zeros(large, np.uint16), "PNG"),
        "palette": encode_image(Image.new("P", large), "PNG", transparency=0),
    }
    worst = 0.0
    for name, content in files.items():
        path = tmp_path / f"{name}.png"
        path.write_bytes(content)
        ((mebibytes, said),) = growth([path])
        assert said == "decoded"
        worst = max(worst, mebibytes * 2**20 / 64e6)
    assert 3 < worst < 30
    promise = "memory in proportion to the pixels: less than 30 bytes each"
    fault("images as large as the limit", promise, f"{worst:.1f} bytes a pixel at 64 megapixels")
