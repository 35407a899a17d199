"""Fuzzed recipes, transform specs, images and weights raise no exception except FinetuneError."""

# H W pixels

from __future__ import annotations

import copy
import io
import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
import yaml
from fuzzing import NUM_EXAMPLES, SCALARS, VALUES, fuzz
from image_corpus import encode_image, sample_image
from networks import write_timm_folder
from PIL import Image
from safetensors.torch import save

from finetune.data.decode import decode_image
from finetune.errors import DataError, RecipeError, WeightsError
from finetune.models.build import build_model
from finetune.models.weights.read import read_tensors
from finetune.recipe.load import DataSection, ModelSection, OptimSection, RunSection, parse_recipe
from finetune.transforms.operations import OPERATIONS
from finetune.transforms.spec_parser import parse_transform_spec

pytestmark = pytest.mark.filterwarnings("ignore")
PROMISE = "no exception other than FinetuneError, each within seconds"


# --- recipes and transform specs -----------------------------------------------------------------

VALID_RECIPE: dict[str, Any] = {
    "model": {"name": "vit_tiny", "image_size": 32, "args": {"depth": 1}},
    "data": {"source": "embedded:digits", "train": "resize(32) | flip", "mean": [0.5, 0.5, 0.5]},
    "optim": {"lr": 0.001, "steps": 4, "warmup_steps": 1, "betas": [0.9, 0.99]},
    "run": {"seed": 0, "trackers": []},
    "claims": [{"metric": "val.top1", "value": 0.9, "source": "s"}],
}
KEYS = [
    f"{section}.{key}"
    for section, kind in (
        ("model", ModelSection),
        ("data", DataSection),
        ("optim", OptimSection),
        ("run", RunSection),
    )
    for key in kind.model_fields
]
# characters with a meaning in YAML, and a few without
YAML_TEXT = st.text(
    alphabet="abm:-[]{},&*!|>'\"%@`#?~=<. \n\t01e\x00\u2028\ud7ff\ufeff", max_size=60
)


def succeeds(call: Callable[[], object], *errors: type[Exception]) -> bool:
    """Return whether a call succeeds; it may only raise these errors, with a message."""
    message = "-"
    try:
        call()
    except errors as error:
        message = str(error)
    assert 0 < len(message) < 20_000
    return message == "-"


def is_valid_recipe(text: str) -> bool:
    """Return whether a recipe is valid; then its YAML must parse to an equal recipe."""
    is_valid = succeeds(lambda: parse_recipe(text), RecipeError)
    if is_valid:
        recipe = parse_recipe(text)
        assert parse_recipe(recipe.to_yaml()) == recipe
    return is_valid


def test_random_recipe_text(fault: Callable[..., None]) -> None:
    text = yaml.safe_dump(VALID_RECIPE)

    def splice(part: tuple[int, int, str]) -> str:
        start, length, new = part
        return text[:start] + new + text[start + length :]

    splices = st.tuples(st.integers(0, len(text)), st.integers(0, 9), YAML_TEXT).map(splice)
    texts = st.one_of(st.text(), YAML_TEXT, splices)
    add_row(fault, "random recipe text", fuzz(texts, NUM_EXAMPLES, is_valid_recipe))


def test_random_recipe_values(fault: Callable[..., None]) -> None:
    def run(changes: list[tuple[str, Any]]) -> bool:
        tree = json.loads(json.dumps(VALID_RECIPE))
        for key, value in changes:
            section, _, name = key.partition(".")
            tree[section][name] = value
        return is_valid_recipe(yaml.safe_dump(tree))

    changes = st.lists(st.tuples(st.sampled_from(KEYS), VALUES), min_size=1, max_size=3)
    add_row(fault, "recipes with random values", fuzz(changes, NUM_EXAMPLES, run))


def test_random_overrides(fault: Callable[..., None]) -> None:
    text = yaml.safe_dump(VALID_RECIPE)

    def run(overrides: list[str]) -> bool:
        return succeeds(lambda: parse_recipe(text, overrides=overrides), RecipeError)

    keys = st.one_of(st.sampled_from(KEYS), st.text(max_size=10))
    values = st.one_of(YAML_TEXT, SCALARS.map(str), st.text(max_size=20))
    pairs = st.tuples(keys, st.sampled_from(["=", "", ".x=", "=="]), values).map("".join)
    add_row(fault, "random overrides", fuzz(st.lists(pairs, max_size=3), NUM_EXAMPLES, run))


def test_random_transform_specs(fault: Callable[..., None]) -> None:
    unusual = [
        "1e999",
        "10**9",
        "**{}",
        "*[]",
        "lambda: 0",
        "'x'",
        "None",
        "[",
        "]",
        "\n",
        "__import__",
    ]
    marks = ["size", "scale", "p", "degrees", "(", ")", "=", ",", " | ", "|", "-", "1", "0.5"]
    words = st.sampled_from([*OPERATIONS, *marks, *unusual])
    specs = st.one_of(st.lists(words, max_size=20).map("".join), st.text())

    def run(spec: str) -> bool:
        return succeeds(lambda: parse_transform_spec(spec), RecipeError)

    add_row(fault, "random transform specs", fuzz(specs, NUM_EXAMPLES, run))


# --- images --------------------------------------------------------------------------------------


def encode_images() -> dict[str, bytes]:
    pixels = sample_image(9, 13)
    exif = Image.Exif()
    exif[0x0112] = 6
    palette = Image.fromarray(pixels).quantize(8)
    alpha = np.dstack([pixels, pixels[..., 0]])
    animation: dict[str, Any] = {"save_all": True, "append_images": [palette.convert("RGB")]}
    return {
        "JPEG": encode_image(pixels, "JPEG", exif=exif),
        "JPEG, progressive": encode_image(pixels, "JPEG", progressive=True),
        "JPEG, CMYK": encode_image(Image.fromarray(pixels).convert("CMYK"), "JPEG"),
        "PNG": encode_image(alpha, "PNG", exif=exif),
        "PNG, palette": encode_image(palette, "PNG", transparency=1),
        "PNG, 16 bits": encode_image(pixels[..., 0].astype(np.uint16) * 257, "PNG"),
        "WebP": encode_image(alpha, "WEBP", lossless=True),
        "GIF": encode_image(Image.fromarray(pixels), "GIF", **animation),
        "TIFF": encode_image(pixels, "TIFF"),
        "TIFF, deflate": encode_image(alpha, "TIFF", compression="tiff_adobe_deflate"),
        "TIFF, float": encode_image(pixels[..., 0].astype(np.float32) / 255, "TIFF"),
        "BMP": encode_image(palette, "BMP"),
        "PPM": encode_image(pixels, "PPM"),
    }


IMAGES = encode_images()
EDITS = st.lists(
    st.tuples(
        st.sampled_from(["set", "flip", "cut", "insert", "repeat"]),
        st.floats(0, 1),
        st.binary(min_size=1, max_size=8),
    ),
    min_size=1,
    max_size=6,
)


def apply_edits(content: bytes, edits: list[tuple[str, float, bytes]]) -> bytes:
    """Return the content with bytes set, flipped, removed, inserted or repeated."""
    edited = bytearray(content)
    for kind, fraction, new in edits:
        position = int(fraction * len(edited))
        if kind == "set":
            edited[position : position + len(new)] = new
        elif kind == "flip" and position < len(edited):
            edited[position] ^= new[0] or 1
        elif kind == "cut":
            del edited[position : position + 1 + new[0]]
        elif kind == "insert":
            edited[position:position] = new
        elif kind == "repeat":
            edited += edited[position : position + 64]
    return bytes(edited)


def test_damaged_images(fault: Callable[..., None]) -> None:
    def run(example: tuple[str, list[tuple[str, float, bytes]]]) -> bool:
        content = apply_edits(IMAGES[example[0]], example[1])

        def read() -> None:
            pixels_HWC = decode_image(content)
            assert pixels_HWC.dtype == np.uint8
            assert pixels_HWC.ndim == 3
            assert pixels_HWC.shape[2] == 3

        return succeeds(read, DataError)

    examples = st.tuples(st.sampled_from(list(IMAGES)), EDITS)
    add_row(
        fault,
        f"images in {len(IMAGES)} formats with damaged bytes",
        fuzz(examples, NUM_EXAMPLES, run),
    )


# --- weights -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_timm_folder(tmp_path_factory.mktemp("fuzz") / "net")


@pytest.mark.parametrize("suffix", ["safetensors", "npz", "pth"])
def test_damaged_weight_files(suffix: str, tmp_path: Path, fault: Callable[..., None]) -> None:
    tensors = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.ones(4)}
    path = tmp_path / f"w.{suffix}"
    if suffix == "safetensors":
        content = save(tensors)
    else:
        stream = io.BytesIO()
        if suffix == "npz":
            np.savez(stream, **{name: tensor.numpy() for name, tensor in tensors.items()})
        else:
            torch.save(tensors, stream)
        content = stream.getvalue()

    def run(edits: list[tuple[str, float, bytes]]) -> bool:
        path.write_bytes(apply_edits(content, edits))
        return succeeds(lambda: read_tensors(path), WeightsError)

    add_row(fault, f".{suffix} with damaged bytes", fuzz(EDITS, 2000, run))


def test_random_safetensors_headers(tmp_path: Path, fault: Callable[..., None]) -> None:
    path = tmp_path / "w.safetensors"
    valid_entry = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}

    def run(changes: dict[str, Any]) -> bool:
        text = json.dumps(
            {"a": {**valid_entry, **changes}} if isinstance(changes, dict) else changes
        )
        path.write_bytes(struct.pack("<Q", len(text.encode())) + text.encode() + bytes(8))
        return succeeds(lambda: read_tensors(path), WeightsError)

    parts = st.sampled_from(["dtype", "shape", "data_offsets", "more"])
    changes = st.one_of(st.dictionaries(parts, VALUES, max_size=3), VALUES)
    add_row(fault, "random safetensors headers", fuzz(changes, 3000, run))


def test_random_config_values(model_folder: Path, fault: Callable[..., None]) -> None:
    valid_config = json.loads((model_folder / "config.json").read_text())
    keys = [(None, key) for key in (*valid_config, "labels", "calibration", "num_features")]
    for section in ("model_args", "pretrained_cfg"):
        keys += [
            (section, key) for key in (*valid_config[section], "label_offset", "class_token", "x")
        ]

    def run(changes: list[tuple[tuple[str | None, str], Any]]) -> bool:
        tree = json.loads(json.dumps(valid_config))
        for (section, key), value in changes:
            inner = tree if section is None else tree.get(section)
            if isinstance(inner, dict):
                inner[key] = copy.deepcopy(value)
        (model_folder / "config.json").write_text(json.dumps(tree))
        return succeeds(
            lambda: build_model(str(model_folder), image_size=None), WeightsError, RecipeError
        )

    values = st.one_of(
        st.sampled_from([None, True, -1, 0, 1, 2, 3, 7, 8, 64, 2**40, 1e308, 0.5, "x", "", "map"]),
        st.sampled_from([[], {}, [1], [8, 8], [3, 32, 32], {"a": 1}, float("nan"), [[1]], "relu"]),
    )
    changes = st.lists(st.tuples(st.sampled_from(keys), values), min_size=1, max_size=3)
    add_row(fault, "config.json with random values", fuzz(changes, 1500, run))


def add_row(fault: Callable[..., None], name: str, counts: tuple[int, int, float]) -> None:
    tried, accepted, _ = counts
    fault(f"fuzzing: {name}", PROMISE, f"{tried:,} examples, {accepted:,} of them accepted")
