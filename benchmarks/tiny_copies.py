"""Measure which copies of tiny images can be found, and which the doctor finds.

"ceiling" is the limit of what is possible: the distance of a changed image to the nearest other
image. That to its original, changed in the same way, is 0. "found" is what `finetune data doctor`
finds of changed copies of 150 images: first the kinds of plant_problems.py, then others, with other
strengths and filters.

    python benchmarks/tiny_copies.py embedded:digits
"""

from __future__ import annotations

import argparse
import io
from collections import Counter
from collections.abc import Callable

import numpy as np
import torch
from PIL import Image, ImageEnhance
from plant_problems import KINDS, change

from finetune.data.open_source import open_source
from finetune.doctor.image_scan import measure_pixels
from finetune.doctor.tiny_images import find_tiny_duplicates

NUM_COPIES = 150
Change = Callable[[Image.Image, np.random.Generator], Image.Image]


def encode(quality: int) -> Change:
    def apply(image: Image.Image, _: np.random.Generator) -> Image.Image:
        stream = io.BytesIO()
        image.save(stream, "JPEG", quality=quality)
        return Image.open(stream)

    return apply


def crop_and_resize(pixels: int, resampling: Image.Resampling) -> Change:
    """Return a function that crops `pixels` pixels off each side length."""

    def apply(image: Image.Image, generator: np.random.Generator) -> Image.Image:
        left, top = generator.integers(0, pixels + 1, 2)
        width, height = image.size
        box = (left, top, left + width - pixels, top + height - pixels)
        return image.crop(box).resize(image.size, resampling)

    return apply


def resize_and_back(scale: float, down: Image.Resampling, up: Image.Resampling) -> Change:
    def apply(image: Image.Image, _: np.random.Generator) -> Image.Image:
        small = [int(scale * side) for side in image.size]
        return image.resize(small, down).resize(image.size, up)

    return apply


def brighten(*factors: float) -> Change:
    return lambda image, generator: ImageEnhance.Brightness(image).enhance(
        generator.choice(factors)
    )


_FILTERS = Image.Resampling
PLANTED: dict[str, Change] = {
    kind: lambda image, generator, kind=kind: change(image, kind, generator) for kind in KINDS
}
OTHERS: dict[str, Change] = {
    "JPEG 40": encode(40),
    "JPEG 75": encode(75),
    "brightness 0.4 or 0.8": brighten(0.4, 0.8),
    "brightness 1.2 or 1.7": brighten(1.2, 1.7),
    "crop by 1 px, bilinear": crop_and_resize(1, _FILTERS.BILINEAR),
    "crop by 3 px, Lanczos": crop_and_resize(3, _FILTERS.LANCZOS),
    "mirror and JPEG 75": lambda image, generator: encode(75)(
        image.transpose(Image.Transpose.FLIP_LEFT_RIGHT), generator
    ),
    "crop by 1 px and JPEG 75": lambda image, generator: encode(75)(
        crop_and_resize(1, _FILTERS.BICUBIC)(image, generator), generator
    ),
    "resize to 75 %, Lanczos": resize_and_back(0.75, _FILTERS.LANCZOS, _FILTERS.LANCZOS),
    "resize to 65 %, box and bilinear": resize_and_back(0.65, _FILTERS.BOX, _FILTERS.BILINEAR),
    "resize to 50 %, nearest": resize_and_back(0.5, _FILTERS.NEAREST, _FILTERS.NEAREST),
}


def to_array(image: Image.Image) -> np.ndarray:
    return np.asarray(image.convert("RGB"))


def main() -> None:
    """Print a line for each kind of change."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("source")
    parser.add_argument("--images", type=int, help="so many, chosen at random; default: all")
    parser.add_argument("--draws", type=int, default=5)
    options = parser.parse_args()
    splits = open_source(options.source).splits.values()
    images = [split.decode(index) for split in splits for index in range(len(split))]
    order = np.random.default_rng(0).permutation(len(images))[: options.images]
    images = [images[index] for index in order]
    side = max(images[0].shape[:2])
    print("| change | ceiling: RMS distance of 255, smallest | 1 % | median |")
    print("|---|---|---|---|")
    originals = torch.from_numpy(np.stack(images)).float().flatten(1)
    for name, apply in PLANTED.items():
        changed = [
            to_array(apply(Image.fromarray(each), np.random.default_rng(0))) for each in images
        ]
        distances = torch.cdist(torch.from_numpy(np.stack(changed)).float().flatten(1), originals)
        nearest = distances.fill_diagonal_(torch.inf).amin(1) / originals.shape[1] ** 0.5
        cells = [f"{nearest.quantile(q):.1f}" for q in (0, 0.01, 0.5)]
        print(f"| {name} | {' | '.join(cells)} |")
    for kinds in (PLANTED, OTHERS):
        found, planted, wrong = Counter(), Counter(), []
        for draw in range(1, options.draws + 1):
            generator = np.random.default_rng(draw)
            rows = generator.permutation(len(images))[:NUM_COPIES].tolist()
            names = [list(kinds)[number % len(kinds)] for number in range(len(rows))]
            copies = [
                to_array(kinds[name](Image.fromarray(images[row]), generator))
                for name, row in zip(names, rows, strict=True)
            ]
            everything = images + copies
            facts = measure_pixels(everything.__getitem__, len(everything))
            thumbnails = np.stack([each.thumbnail_SS for each in facts.values()])
            pairs, _ = find_tiny_duplicates(torch.from_numpy(thumbnails), side)
            confirmed = set(map(tuple, pairs.tolist()))
            true = {(row, len(images) + i): names[i] for i, row in enumerate(rows)}
            planted.update(true.values())
            found.update(name for pair, name in true.items() if pair in confirmed)
            wrong.append(len(confirmed - true.keys()))
        print("\n| change | found |\n|---|---|")
        for name in kinds:
            print(f"| {name} | {found[name]} of {planted[name]} |")
        print(f"| all | {found.total()} of {planted.total()} |")
        print(f"\nwrong pairs by draw: {', '.join(map(str, wrong))}", flush=True)


if __name__ == "__main__":
    main()
