"""Every image file has one result for all readers: train, predict, demo and parquet rows."""

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

from finetune.data.image_paths import find_images
from finetune.data.open_source import open_source
from finetune.demo.predictor import decode_upload
from finetune.errors import DataError
from finetune.inference import Classifier
from finetune.transforms.pipeline import Pipeline

pytestmark = pytest.mark.filterwarnings("ignore")
Result = np.ndarray | str
PROMISE = "one result, the same for train, predict, demo and tables: equal pixels or one message"
MAX_HEADER_MIB = 40  # more than the file itself, far less than the decoded image
READERS = ("train", "train, data.keep=none", "predict", "demo", "parquet rows")


def corpus_path(corpus_folder: Path, name: str) -> Path:
    """Return the path of a corpus file; its index in the corpus is its name."""
    return corpus_folder / f"{list(CORPUS).index(name):03d}{CORPUS[name].suffix}"


@pytest.fixture(scope="module")
def corpus_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An image folder: the whole corpus as one class, and a second class."""
    folder = tmp_path_factory.mktemp("corpus")
    for name in ("odd", "plain"):
        (folder / name).mkdir()
    for name, file in CORPUS.items():
        corpus_path(folder / "odd", name).write_bytes(file.content)
    (folder / "plain" / "a.png").write_bytes(encode_image(sample_image(), "PNG"))
    return folder


def decode_for_training(corpus_folder: Path, keep: str) -> dict[str, Result]:
    """Read each file from the pixel store of a training run, or its error if quarantined."""
    split = open_source(f"folder:{corpus_folder}").splits["train"]
    store = make_pixel_store(split, keep=keep, num_workers=0, unreadable="quarantine", messages=[])
    order = [np.array([index]) for index in range(len(store.split))]
    results: dict[str, Result] = {}
    for index, images in zip(order, store.read_batches(order), strict=True):
        name = store.split.name_of(int(index[0]))
        results[name] = images[0].permute(1, 2, 0).numpy()
    for index in range(len(split)):
        if split.name_of(index) not in results:
            with pytest.raises(DataError) as caught:
                split.decode(index)
            results[split.name_of(index)] = str(caught.value)
    return {f"{corpus_folder}/{name}": result for name, result in results.items()}


class ConstantModel(nn.Module):
    """A network with two classes that ignores its input."""

    def forward(self, images_BCHW: Tensor) -> Tensor:
        return images_BCHW.new_zeros(len(images_BCHW), 2)


def decode_for_predict(corpus_folder: Path) -> dict[str, Result]:
    half = (0.5, 0.5, 0.5)
    sizes = {"image_size": (8, 8), "mean": half, "std": half, "interpolation": "bilinear"}
    pipeline = Pipeline("resize((8, 8))", train=False, **sizes)
    pixels_by_index: dict[int, np.ndarray] = {}
    files = find_images([corpus_folder])
    rows = list(
        Classifier(ConstantModel(), pipeline, ["a", "b"], device="cpu").iter_predictions(
            files, on_decoded=lambda index, pixels_HWC: pixels_by_index.update({index: pixels_HWC})
        )
    )
    return {
        row["path"]: row["error"] if "error" in row else pixels_by_index[index]
        for index, row in enumerate(rows)
    }


def decode_for_demo(corpus_folder: Path) -> dict[str, Result]:
    results: dict[str, Result] = {}
    for path, _ in find_images([corpus_folder]):
        try:
            results[path] = decode_upload(path)
        except DataError as error:
            results[path] = str(error)
    return results


def decode_from_parquet(corpus_folder: Path, table: Path) -> dict[str, Result]:
    files = [path for path, _ in find_images([corpus_folder])]
    images = [{"bytes": Path(path).read_bytes(), "path": None} for path in files]
    write_parquet(table, [index % 2 for index in range(len(files))], images=images)
    split = open_source(f"parquet:{table}").splits["train"]
    results: dict[str, Result] = {}
    for index, path in enumerate(files):
        try:
            results[path] = split.decode(index)
        except DataError as error:
            results[path] = str(error)
    return results


@pytest.fixture(scope="module")
def results(
    corpus_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, dict[str, Result]]:
    """Map reader to path to pixels or message."""
    table = tmp_path_factory.mktemp("table") / "train.parquet"
    results_by_reader = (
        decode_for_training(corpus_folder, "memory"),
        decode_for_training(corpus_folder, "none"),
        decode_for_predict(corpus_folder),
        decode_for_demo(corpus_folder),
        decode_from_parquet(corpus_folder, table),
    )
    return dict(zip(READERS, results_by_reader, strict=True))


@pytest.mark.parametrize("name", CORPUS)
def test_every_reader_gives_the_same_result(
    name: str,
    corpus_folder: Path,
    results: dict[str, dict[str, Result]],
    fault: Callable[..., None],
) -> None:
    expected, path = CORPUS[name].result, str(corpus_path(corpus_folder / "odd", name))
    for reader in READERS:
        result = results[reader][path]
        if isinstance(expected, str):
            assert isinstance(result, str), f"{reader}: {name} was decoded"
            assert re.search(expected, result), f"{reader}: {result}"
            assert len(result) < 400, result
            assert "\n" not in result
        else:
            assert not isinstance(result, str), f"{reader}: {result}"
            assert result.dtype == np.uint8
            assert np.array_equal(result, expected), reader
    decoded = sum(not isinstance(file.result, str) for file in CORPUS.values())
    measured = f"{len(CORPUS)} files, {decoded} decoded, {len(READERS)} readers"
    fault("image files of every format", PROMISE, measured)


UNREADABLE = """
import os, sys
from finetune.data.decode import decode_image
from finetune.errors import DataError
os.setgid(65534); os.setuid(65534)
try:
    decode_image(sys.argv[1])
except DataError as error:
    print(error)
"""


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_a_file_without_read_permission(tmp_path: Path, fault: Callable[..., None]) -> None:
    for parent in (tmp_path, *tmp_path.parents):
        if parent.stat().st_uid == 0 and not parent.stat().st_mode & 1:
            parent.chmod(parent.stat().st_mode | 0o11)  # so that only the file is unreadable
    path = tmp_path / "x.png"
    path.write_bytes(encode_image(sample_image(), "PNG"))
    path.chmod(0o600)
    result = subprocess.run(
        [sys.executable, "-c", UNREADABLE, str(path)], capture_output=True, text=True, timeout=120
    )
    assert result.stdout == f"{path}: cannot be opened (Permission denied)\n", result.stderr
    fault("an image without read permission", "the message gives the reason", "as another user")


# --- memory --------------------------------------------------------------------------------------

PEAK_MEMORY = """
import re, sys
from pathlib import Path
from finetune.data.decode import decode_image
from finetune.errors import DataError
from PIL import Image
Image.init()
def peak():  # getrusage would start at the peak of the parent process
    status = Path("/proc/self/status").read_text()
    return int(re.search(r"VmHWM:\\s+(\\d+)", status)[1]) / 1024
for name in sys.argv[1:]:
    Path("/proc/self/clear_refs").write_text("5")  # reset the peak
    before = peak()
    try:
        decode_image(Path(name))
        message = "decoded"
    except DataError as error:
        message = str(error)
    print(f"{peak() - before:.1f} {message}")
"""


def memory_growth(paths: list[Path]) -> list[tuple[float, str]]:
    """Return the growth of peak memory in MiB and the message for each file, in a subprocess."""
    result = subprocess.run(
        [sys.executable, "-c", PEAK_MEMORY, *map(str, paths)],
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""  # PIL's warnings
    parts = [line.partition(" ") for line in result.stdout.splitlines()]
    assert len(parts) == len(paths)
    return [(float(mebibytes), message) for mebibytes, _, message in parts]


def test_large_images_are_refused_by_their_header(
    corpus_folder: Path, fault: Callable[..., None]
) -> None:
    names = [name for name in CORPUS if "megapixel" in name or "2**62" in name or "bomb" in name]
    assert len(names) >= 20
    measured = memory_growth([corpus_path(corpus_folder / "odd", name) for name in names])
    for name, (mebibytes, message) in zip(names, measured, strict=True):
        assert mebibytes < MAX_HEADER_MIB, f"{name}: {mebibytes} MiB"
        assert re.search(str(CORPUS[name].result), message)
    max_mebibytes = max(mebibytes for mebibytes, _ in measured)
    promise = f"refused by the header, before memory is allocated: less than {MAX_HEADER_MIB} MiB"
    fault(
        "images too large to be decoded",
        promise,
        f"at most {max_mebibytes:.0f} MiB, {len(names)} files",
    )


def test_memory_of_the_largest_accepted_image(tmp_path: Path, fault: Callable[..., None]) -> None:
    size = (8_000, 8_000)
    files = {
        "gray": single_color_png(*size, color_type=0),
        "RGB": single_color_png(*size, color_type=2),
        "alpha": single_color_png(*size, color_type=6),
        "16 bits": encode_image(np.zeros(size, np.uint16), "PNG"),
        "palette": encode_image(Image.new("P", size), "PNG", transparency=0),
    }
    max_bytes_per_pixel = 0.0
    for name, content in files.items():
        path = tmp_path / f"{name}.png"
        path.write_bytes(content)
        ((mebibytes, message),) = memory_growth([path])
        assert message == "decoded"
        max_bytes_per_pixel = max(max_bytes_per_pixel, mebibytes * 2**20 / 64e6)
    assert 3 < max_bytes_per_pixel < 30
    promise = "memory in proportion to the pixels: less than 30 bytes per pixel"
    fault(
        "images as large as the limit",
        promise,
        f"{max_bytes_per_pixel:.1f} bytes a pixel at 64 megapixels",
    )
