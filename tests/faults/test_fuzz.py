"""Anything at all for a recipe, a sentence, an image or weights: only errors of ours come out.

The quick part tries the same few examples each time; the long part many, found from fixed seeds.
"""

# H W pixels

from __future__ import annotations

import copy
import io
import json
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
import yaml
from hypothesis import HealthCheck, given, seed, settings
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
PROMISE = "no exception that is not an error of ours, each within seconds"
MOST_SECONDS = 20.0  # of one example, on a busy machine
QUICK = 80
MANY = 6000  # examples of each target in the long part
LENGTHS = [
    pytest.param(QUICK, id="quick"),
    pytest.param(MANY, id="long", marks=pytest.mark.faults),
]


def fuzz(strategy: Any, number: int, run: Callable[[Any], object]) -> tuple[int, int, float]:
    """Try examples that are the same in every run.

    Args:
        strategy: of hypothesis.
        number: of examples.
        run: gives True for an example that was taken, False for one that was refused.
    Returns: how many were tried, how many were taken, and the most seconds of computing for one.
    """
    tried, taken, longest = 0, 0, 0.0

    @seed(5)
    @settings(
        max_examples=number,
        deadline=None,
        database=None,
        derandomize=number == QUICK,
        suppress_health_check=list(HealthCheck),
    )
    @given(strategy)
    def once(example: Any) -> None:
        nonlocal tried, taken, longest
        started = time.process_time()  # a busy machine is not a slow parser
        taken += bool(run(example))
        tried += 1
        longest = max(longest, time.process_time() - started)

    once()
    assert tried >= number // 2
    assert longest < MOST_SECONDS
    return tried, taken, longest


# --- recipes and sentences -----------------------------------------------------------------------

GOOD: dict[str, Any] = {
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
SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(max_size=12),
    st.sampled_from(
        [-1, 0, 2**31, 2**53 + 1, 10**400, 1e308, "nan", "1e3", "~", "&a", "*a", "!!x"]
    ),
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4), st.dictionaries(st.text(max_size=8), inner, max_size=4)
    ),
    max_leaves=6,
)
# the characters that mean something to YAML, and a few that do not
YAML = st.text(alphabet="abm:-[]{},&*!|>'\"%@`#?~=<. \n\t01e\x00\u2028\ud7ff\ufeff", max_size=60)


def accepts(call: Callable[[], object], *errors: type[Exception]) -> bool:
    """True if a call succeeds; its errors must be of these kinds, with a readable message."""
    said = "-"
    try:
        call()
    except errors as error:
        said = str(error)
    assert 0 < len(said) < 20_000
    return said == "-"


def takes(text: str) -> bool:
    """True for a recipe; its resolved text must be that of an equal one."""
    taken = accepts(lambda: parse_recipe(text), RecipeError)
    if taken:
        recipe = parse_recipe(text)
        assert parse_recipe(recipe.to_yaml()) == recipe
    return taken


@pytest.mark.parametrize("number", LENGTHS)
def test_recipes_of_any_text(number: int, fault: Callable[..., None]) -> None:
    text = yaml.safe_dump(GOOD)

    def spliced(part: tuple[int, int, str]) -> str:
        start, length, new = part
        return text[:start] + new + text[start + length :]

    splices = st.tuples(st.integers(0, len(text)), st.integers(0, 9), YAML).map(spliced)
    texts = st.one_of(st.text(), YAML, splices)
    tell(fault, "recipes of any text", fuzz(texts, number, takes))


@pytest.mark.parametrize("number", LENGTHS)
def test_recipes_of_any_values(number: int, fault: Callable[..., None]) -> None:
    def run(changes: list[tuple[str, Any]]) -> bool:
        tree = json.loads(json.dumps(GOOD))
        for key, value in changes:
            section, _, name = key.partition(".")
            tree[section][name] = value
        return takes(yaml.safe_dump(tree))

    changes = st.lists(st.tuples(st.sampled_from(KEYS), VALUES), min_size=1, max_size=3)
    tell(fault, "recipes of any values", fuzz(changes, number, run))


@pytest.mark.parametrize("number", LENGTHS)
def test_overrides(number: int, fault: Callable[..., None]) -> None:
    text = yaml.safe_dump(GOOD)

    def run(overrides: list[str]) -> bool:
        return accepts(lambda: parse_recipe(text, overrides=overrides), RecipeError)

    keys = st.one_of(st.sampled_from(KEYS), st.text(max_size=10))
    values = st.one_of(YAML, SCALARS.map(str), st.text(max_size=20))
    pairs = st.tuples(keys, st.sampled_from(["=", "", ".x=", "=="]), values).map("".join)
    tell(fault, "overrides", fuzz(st.lists(pairs, max_size=3), number, run))


@pytest.mark.parametrize("number", LENGTHS)
def test_sentences(number: int, fault: Callable[..., None]) -> None:
    odd = [
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
    words = st.sampled_from([*OPERATIONS, *marks, *odd])
    sentences = st.one_of(st.lists(words, max_size=20).map("".join), st.text())

    def run(sentence: str) -> bool:
        return accepts(lambda: parse_transform_spec(sentence), RecipeError)

    tell(fault, "the pipeline sentence", fuzz(sentences, number, run))


# --- images --------------------------------------------------------------------------------------


def images() -> dict[str, bytes]:
    pixels = sample_image(9, 13)
    exif = Image.Exif()
    exif[0x0112] = 6
    palette = Image.fromarray(pixels).quantize(8)
    alpha = np.dstack([pixels, pixels[..., 0]])
    several: dict[str, Any] = {"save_all": True, "append_images": [palette.convert("RGB")]}
    return {
        "JPEG": encode_image(pixels, "JPEG", exif=exif),
        "JPEG, progressive": encode_image(pixels, "JPEG", progressive=True),
        "JPEG, CMYK": encode_image(Image.fromarray(pixels).convert("CMYK"), "JPEG"),
        "PNG": encode_image(alpha, "PNG", exif=exif),
        "PNG, palette": encode_image(palette, "PNG", transparency=1),
        "PNG, 16 bits": encode_image(pixels[..., 0].astype(np.uint16) * 257, "PNG"),
        "WebP": encode_image(alpha, "WEBP", lossless=True),
        "GIF": encode_image(Image.fromarray(pixels), "GIF", **several),
        "TIFF": encode_image(pixels, "TIFF"),
        "TIFF, deflate": encode_image(alpha, "TIFF", compression="tiff_adobe_deflate"),
        "TIFF, float": encode_image(pixels[..., 0].astype(np.float32) / 255, "TIFF"),
        "BMP": encode_image(palette, "BMP"),
        "PPM": encode_image(pixels, "PPM"),
    }


IMAGES = images()
EDITS = st.lists(
    st.tuples(
        st.sampled_from(["set", "flip", "cut", "insert", "repeat"]),
        st.floats(0, 1),
        st.binary(min_size=1, max_size=8),
    ),
    min_size=1,
    max_size=6,
)


def edited(content: bytes, edits: list[tuple[str, float, bytes]]) -> bytes:
    """A file with some bytes set, flipped, cut away, put in or repeated."""
    changed = bytearray(content)
    for kind, share, new in edits:
        place = int(share * len(changed))
        if kind == "set":
            changed[place : place + len(new)] = new
        elif kind == "flip" and place < len(changed):
            changed[place] ^= new[0] or 1
        elif kind == "cut":
            del changed[place : place + 1 + new[0]]
        elif kind == "insert":
            changed[place:place] = new
        elif kind == "repeat":
            changed += changed[place : place + 64]
    return bytes(changed)


@pytest.mark.parametrize("number", LENGTHS)
def test_images(number: int, fault: Callable[..., None]) -> None:
    def run(example: tuple[str, list[tuple[str, float, bytes]]]) -> bool:
        content = edited(IMAGES[example[0]], example[1])

        def read() -> None:
            pixels_HWC = decode_image(content)
            assert pixels_HWC.dtype == np.uint8
            assert pixels_HWC.ndim == 3
            assert pixels_HWC.shape[2] == 3

        return accepts(read, DataError)

    examples = st.tuples(st.sampled_from(list(IMAGES)), EDITS)
    tell(fault, f"images of {len(IMAGES)} kinds with damaged bytes", fuzz(examples, number, run))


# --- weights -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def net(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_timm_folder(tmp_path_factory.mktemp("fuzz") / "net")


@pytest.mark.parametrize("kind", ["safetensors", "npz", "pth"])
@pytest.mark.parametrize("number", LENGTHS)
def test_tensors(number: int, kind: str, tmp_path: Path, fault: Callable[..., None]) -> None:
    tensors = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.ones(4)}
    path = tmp_path / f"w.{kind}"
    if kind == "safetensors":
        content = save(tensors)
    else:
        stream = io.BytesIO()
        if kind == "npz":
            np.savez(stream, **{name: tensor.numpy() for name, tensor in tensors.items()})
        else:
            torch.save(tensors, stream)
        content = stream.getvalue()

    def run(edits: list[tuple[str, float, bytes]]) -> bool:
        path.write_bytes(edited(content, edits))
        return accepts(lambda: read_tensors(path), WeightsError)

    tell(fault, f".{kind} with damaged bytes", fuzz(EDITS, min(number, 2000), run))


@pytest.mark.parametrize("number", LENGTHS)
def test_headers_of_safetensors(number: int, tmp_path: Path, fault: Callable[..., None]) -> None:
    path = tmp_path / "w.safetensors"
    good = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}

    def run(changes: dict[str, Any]) -> bool:
        text = json.dumps({"a": {**good, **changes}} if isinstance(changes, dict) else changes)
        path.write_bytes(struct.pack("<Q", len(text.encode())) + text.encode() + bytes(8))
        return accepts(lambda: read_tensors(path), WeightsError)

    parts = st.sampled_from(["dtype", "shape", "data_offsets", "more"])
    changes = st.one_of(st.dictionaries(parts, VALUES, max_size=3), VALUES)
    tell(fault, "headers of safetensors", fuzz(changes, min(number, 3000), run))


@pytest.mark.parametrize("number", LENGTHS)
def test_configurations(number: int, net: Path, fault: Callable[..., None]) -> None:
    good = json.loads((net / "config.json").read_text())
    places = [(None, key) for key in (*good, "labels", "calibration", "num_features")]
    for section in ("model_args", "pretrained_cfg"):
        places += [(section, key) for key in (*good[section], "label_offset", "class_token", "x")]

    def run(changes: list[tuple[tuple[str | None, str], Any]]) -> bool:
        tree = json.loads(json.dumps(good))
        for (section, key), value in changes:
            inner = tree if section is None else tree.get(section)
            if isinstance(inner, dict):
                inner[key] = copy.deepcopy(value)
        (net / "config.json").write_text(json.dumps(tree))
        return accepts(lambda: build_model(str(net), image_size=None), WeightsError, RecipeError)

    small = st.one_of(
        st.sampled_from([None, True, -1, 0, 1, 2, 3, 7, 8, 64, 2**40, 1e308, 0.5, "x", "", "map"]),
        st.sampled_from([[], {}, [1], [8, 8], [3, 32, 32], {"a": 1}, float("nan"), [[1]], "relu"]),
    )
    changes = st.lists(st.tuples(st.sampled_from(places), small), min_size=1, max_size=3)
    tell(fault, "config.json of any values", fuzz(changes, min(number, 1500), run))


def tell(fault: Callable[..., None], name: str, told: tuple[int, int, float]) -> None:
    tried, taken, _ = told
    fault(f"fuzzing: {name}", PROMISE, f"{tried:,} examples, {taken:,} of them taken")
