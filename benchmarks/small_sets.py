"""Write image folders with the splits train and test, to compare what `finetune train` chooses.

    python benchmarks/small_sets.py OUT CIFAR10 TINY_IMAGENET

`tiles` has drawn land covers, `letters` drawn letters, and `digits` the handwritten digits of
scikit-learn, enlarged from 8 to 32 px (10 classes of 100). The others are subsets of two folders
with parquet files: `cifar` (10 classes of 100 images), `longtail`, `noisy` (4 classes of 200, a
fifth of the training labels wrong), `tiny37` (37 classes of 30), `tiny20` (20 classes of 5) and
`photos` (25 classes of 30, enlarged to 64 px). Those of Tiny ImageNet are from its validation split
alone, because the embedded networks were pretrained on the other one.
"""

from __future__ import annotations

import argparse
import io
import math
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
from PIL import Image, ImageDraw, ImageFilter, ImageFont
from sklearn.datasets import load_digits

TONES = {
    "green": (80, 120, 60),
    "soil": (150, 120, 80),
    "gray": (130, 130, 130),
    "blue": (50, 80, 120),
}
GROUNDS = ("green", "green", "blue", "green", "green", "soil", "gray", "soil", "soil", "green")
SIDE = 64


def main() -> None:
    """Write all sets."""
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    for name in ("out", "cifar10", "tiny_imagenet"):
        parser.add_argument(name, type=Path)
    arguments = parser.parse_args()
    cifar, tiny, out = arguments.cifar10, arguments.tiny_imagenet, arguments.out
    write_drawn(out / "tiles", draw_tile, num_classes=10, num_train=200)
    write_drawn(out / "letters", draw_letter, num_classes=26, num_train=40)
    write_digits(out / "digits")
    write_subset(out / "cifar", cifar, dict.fromkeys(range(10), 100))
    write_subset(out / "longtail", cifar, {k: round(203 * (5 / 203) ** (k / 9)) for k in range(10)})
    write_subset(out / "noisy", cifar, dict.fromkeys(range(4), 200), noise=0.2)
    validation = tiny / "data" / "validation-00000-of-00001.parquet"
    write_subset(out / "tiny37", validation, dict.fromkeys(range(0, 185, 5), 30))
    write_subset(out / "tiny20", validation, dict.fromkeys(range(0, 200, 10), 5))
    write_subset(out / "photos", validation, dict.fromkeys(range(3, 200, 8), 30), side=SIDE)


def write_drawn(
    folder: Path,
    draw: Callable[[np.random.Generator, int], Image.Image],
    *,
    num_classes: int,
    num_train: int,
) -> None:
    """Draw a set with 50 test images a class."""
    for seed, (split, num_images) in enumerate({"train": num_train, "test": 50}.items()):
        for k in range(num_classes):
            rng = np.random.default_rng((seed, k))
            (out := folder / split / f"c{k:02d}").mkdir(parents=True)
            for number in range(num_images):
                noise = rng.normal(0, rng.uniform(2, 10), (SIDE, SIDE, 3))
                pixels = np.clip(np.asarray(draw(rng, k)) + noise, 0, 255)
                Image.fromarray(pixels.astype(np.uint8)).save(out / f"{number:03d}.jpg", quality=90)


def draw_tile(rng: np.random.Generator, k: int) -> Image.Image:
    """Draw one of ten land covers, seen from above."""
    image = Image.new("RGB", (96, 96), tone(rng, GROUNDS[k]))
    draw, r = ImageDraw.Draw(image), rng.uniform

    def boxes(count: float, low: float, high: float, name: str) -> None:
        for _ in range(int(count)):
            x, y = r(0, 96, 2)
            draw.rectangle((x, y, x + r(low, high), y + r(low, high)), fill=tone(rng, name))

    def circle(x: float, y: float, radius: float) -> None:
        draw.ellipse((x - radius, y - radius, x + radius, y + radius), fill=tone(rng, "green"))

    if k == 0:  # crops
        width, fill = r(3, 8), tone(rng, "soil")
        for x in np.arange(0, 96, 2 * width):
            draw.rectangle((x, 0, x + width, 96), fill=fill)
    elif k == 1:  # forest
        for _ in range(250):
            circle(*r(0, 96, 2), r(2, 6))
    elif k == 2:  # sea
        for x, y in r(0, 96, (20, 2)):
            draw.line((x, y, x + r(5, 15), y + r(-2, 2)), fill=tone(rng, "gray"))
    elif k == 3:  # river
        height, length, width = r(5, 15), r(7, 13), int(r(6, 14))
        curve = [(x, 48 + height * math.sin(x / length)) for x in range(0, 97, 4)]
        draw.line(curve, fill=tone(rng, "blue"), width=width)
    elif k == 4:  # road
        draw.line((0, 48, 96, r(30, 66)), fill=tone(rng, "gray"), width=int(r(6, 12)))
    elif k == 5:  # houses
        boxes(r(15, 30), 5, 10, "gray")
    elif k == 6:  # industry
        boxes(r(3, 6), 20, 45, "soil")
    elif k == 7:  # orchard
        distance, radius = r(9, 14), r(2, 4)
        for x in np.arange(0, 96, distance):
            for y in np.arange(0, 96, distance):
                circle(x, y, radius)
    elif k == 8:  # pastures
        for _ in range(int(r(3, 6))):
            draw.polygon(
                (r(0, 96, 2) + r(-40, 40, (4, 2))).ravel().tolist(), fill=tone(rng, "green")
            )
    else:  # lake
        (x, y), (width, height) = r(30, 66, 2), r(12, 28, 2)
        draw.ellipse((x - width, y - height, x + width, y + height), fill=tone(rng, "blue"))
    image = image.rotate(r(0, 360), resample=Image.Resampling.BILINEAR).crop((16, 16, 80, 80))
    return image.filter(ImageFilter.GaussianBlur(r(0.2, 0.8)))


def tone(rng: np.random.Generator, name: str) -> tuple[int, int, int]:
    """Return a random color close to a named one."""
    red, green, blue = np.clip(rng.normal(TONES[name], 35), 0, 255).astype(int).tolist()
    return red, green, blue


def draw_letter(rng: np.random.Generator, k: int) -> Image.Image:
    """Draw a letter in random colors, at a random place, size and angle."""
    background = rng.integers(0, 256, 3)
    color = (background + rng.integers(60, 196, 3)) % 256
    image = Image.new("RGB", (SIDE, SIDE), tuple(background.tolist()))
    font = ImageFont.load_default(int(rng.integers(24, 46)))
    place = tuple(rng.integers(26, 38, 2).tolist())
    ImageDraw.Draw(image).text(place, chr(65 + k), tuple(color.tolist()), font=font, anchor="mm")
    return image.rotate(rng.uniform(-20, 20), fillcolor=tuple(background.tolist()))


def write_digits(folder: Path) -> None:
    """Write handwritten digits, with all others as test images."""
    digits = load_digits()
    for label in range(10):
        for number, pixels in enumerate(digits.images[digits.target == label]):
            split = "train" if number < 100 else "test"
            (out := folder / split / f"c{label}").mkdir(parents=True, exist_ok=True)
            image = Image.fromarray((pixels * (255 / 16)).astype(np.uint8)).convert("RGB")
            image.resize((32, 32), Image.Resampling.BILINEAR).save(out / f"{number:03d}.png")


def write_subset(
    folder: Path,
    parquet: Path,
    counts: Mapping[int, int],
    *,
    side: int | None = None,
    noise: float = 0.0,
) -> None:
    """Write the first images of some classes, and at most 50 test images of each.

    Args:
        parquet: a folder with the splits train and test, or a file; the test images are those after
            the training images.
        counts: training images by label.
        side: side to which images are enlarged; None to keep their size.
        noise: share of the training images that get the label of another class.
    """
    rng, classes = np.random.default_rng(0), list(counts)
    files = [parquet] if parquet.is_file() else sorted(parquet.rglob("t*.parquet"), reverse=True)
    left = {"train": dict(counts), "test": dict.fromkeys(counts, 50)}
    for file in files:
        splits = [name for name in left if parquet.is_file() or file.name.startswith(name)]
        table = pq.read_table(file)
        images = table.column("image" if "image" in table.column_names else "img")
        labels = table.column("label").to_pylist()
        for number, (image, label) in enumerate(zip(images, labels, strict=True)):
            split = next((name for name in splits if left[name].get(label)), None)
            if split is None:
                continue
            left[split][label] -= 1
            if split == "train" and rng.random() < noise:
                label = rng.choice([other for other in classes if other != label])
            (out := folder / split / f"c{label:03d}").mkdir(parents=True, exist_ok=True)
            encoded = image["bytes"].as_py()
            if side is not None:
                resized = Image.open(io.BytesIO(encoded)).convert("RGB").resize((side, side))
                resized.save(buffer := io.BytesIO(), "JPEG", quality=90)
                encoded = buffer.getvalue()
            (out / f"{number:06d}.jpg").write_bytes(encoded)


if __name__ == "__main__":
    main()
