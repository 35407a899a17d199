"""Plant near-duplicates and leaks in a dataset, and measure how many `finetune data doctor` finds.

Writes a folder with images of SOURCE, with changed copies of 1 % of the training images among
them, and of 100 training images in the test split; `planted.csv` beside it lists them. Each copy
is cropped to 80 %, encoded as JPEG of quality 50, brightened or darkened, mirrored, or resized to
60 % and back.

    python benchmarks/plant_problems.py parquet:CIFAR10 /tmp/planted --weights embedded:vit_ti
"""

from __future__ import annotations

import argparse
import csv
import io
from pathlib import Path

import numpy as np
from PIL import Image, ImageEnhance

from finetune.data.open_source import open_source
from finetune.data.source import Source
from finetune.doctor.features import choose_weights, compute_features
from finetune.doctor.image_scan import find_feature_neighbors, measure_pixels
from finetune.doctor.near_duplicates import find_near_duplicates
from finetune.recipe.load import RunSection
from finetune.training.accelerator import create_accelerator

KINDS = ("crop", "jpeg", "brightness", "mirror", "resize")


def change(image: Image.Image, kind: str, generator: np.random.Generator) -> Image.Image:
    """Return a changed copy of an image."""
    width, height = image.size
    if kind == "crop":
        crop = (round(0.8 * width), round(0.8 * height))
        left, top = generator.integers(0, (width - crop[0] + 1, height - crop[1] + 1))
        box = (left, top, left + crop[0], top + crop[1])
        return image.crop(box).resize(image.size, Image.Resampling.BICUBIC)
    if kind == "jpeg":
        stream = io.BytesIO()
        image.save(stream, "JPEG", quality=50)
        return Image.open(stream)
    if kind == "brightness":
        return ImageEnhance.Brightness(image).enhance(generator.choice([0.6, 1.4]))
    if kind == "mirror":
        return image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    small = image.resize((int(0.6 * width), int(0.6 * height)), Image.Resampling.BILINEAR)
    return small.resize(image.size, Image.Resampling.BICUBIC)


def write_image(image: Image.Image, folder: Path, name: str) -> str:
    """Write an image to a new file of a folder. Returns: its name."""
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    image.save(folder / name)
    return name


def plant(source: Source, folder: Path, *, num_images: int, num_leaks: int) -> dict[str, str]:
    """Write the images with planted copies. Returns: the original of each copy."""
    generator, split = np.random.default_rng(0), source.splits["train"]
    rows = generator.permutation(len(split))[:num_images]
    chosen = generator.permutation(rows)[: num_images // 100 + num_leaks]
    copies: dict[str, str] = {}

    def write(image: Image.Image, part: str, row: int, suffix: str = "") -> str:
        label = source.class_names[int(split.labels[row])]
        return write_image(image, folder, f"{part}/{label}/{row}{suffix}.png")

    names = {row: write(Image.fromarray(split.decode(row)), "train", row) for row in rows}
    for number, row in enumerate(chosen):
        kind, part = KINDS[number % len(KINDS)], "test" if number < num_leaks else "train"
        copy = change(Image.fromarray(split.decode(row)), kind, generator)
        copies[write(copy, part, row, f"-{kind}")] = names[row]
    with (folder.parent / "planted.csv").open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([("copy", "original"), *copies.items()])
    return copies


def main() -> None:
    """Print what was found for each network."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("source")
    parser.add_argument("out", type=Path, help="a new folder, for images/ and planted.csv")
    parser.add_argument("--weights", action="append", default=[], help="measured one by one")
    parser.add_argument("--images", type=int, default=5000)
    parser.add_argument("--leaks", type=int, default=100)
    options = parser.parse_args()
    folder = options.out / "images"
    folder.mkdir(parents=True)
    original = open_source(options.source)
    copies = plant(original, folder, num_images=options.images, num_leaks=options.leaks)
    planted = open_source(f"folder:{folder}")
    splits = list(planted.splits.values())
    places = [(split, index) for split in splits for index in range(len(split))]
    names = [split.name_of(index).removeprefix(f"{folder}/") for split, index in places]
    accelerator = create_accelerator(RunSection())
    facts = measure_pixels(lambda row: places[row][0].decode(places[row][1]), len(places))
    print("| network | copies found | leaks found | wrong copies | groups of other images |")
    print("|---|---|---|---|---|")
    for candidate in choose_weights(planted, options.weights, accelerator.device):
        features = compute_features(planted, candidate, accelerator)
        assert features is not None  # there is one process
        groups, _ = find_near_duplicates([find_feature_neighbors(features)], facts.values())
        group_of = {names[row]: number for number, group in enumerate(groups) for row in group}
        found = {copy for copy, name in copies.items() if copy in group_of and name in group_of}
        found = {copy for copy in found if group_of[copy] == group_of[copies[copy]]}
        leaks = {copy for copy in copies if copy.startswith("test/")}
        wrong = len(copies.keys() & group_of.keys() - found)
        others = len(set(group_of.values()) - {group_of[copy] for copy in found})
        print(
            f"| {candidate.name} | {len(found - leaks)} of {len(copies) - len(leaks)} "
            f"| {len(found & leaks)} of {len(leaks)} | {wrong} | {others - wrong} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
