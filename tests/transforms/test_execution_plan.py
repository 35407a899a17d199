from __future__ import annotations

import pytest
from refusals import refused

from finetune.transforms.execution_plan import (
    HeightWidth,
    check_output_size,
    plan_execution,
    size_after_operation,
)
from finetune.transforms.spec_parser import parse_transform_spec


def plan(text: str, size: HeightWidth, image_size: HeightWidth) -> list[tuple[str, HeightWidth]]:
    """Return the operations of each step, and the image size after it."""
    calls = parse_transform_spec(text)
    return [
        (", ".join(calls[position].name for position in step.positions), step.sizes[-1])
        for step in plan_execution(calls, size, image_size, text)
    ]


@pytest.mark.parametrize("size", [(32, 32), (400, 300)])
def test_operations_run_in_the_written_order(size: HeightWidth) -> None:
    assert plan("rotate(3) | resize | flip | color_jitter(0.2) | flip", size, (224, 224)) == [
        ("rotate", size),
        ("resize, flip", (224, 224)),
        ("color_jitter", (224, 224)),
        ("flip", (224, 224)),
    ]


@pytest.mark.parametrize(
    "text,size,expected",
    [
        ("resize", (10, 20), (48, 64)),
        ("resize(30)", (10, 20), (30, 60)),
        ("resize(30)", (20, 10), (60, 30)),
        ("resize(33)", (50, 75), (33, 49)),  # int(33 * 75 / 50), as torchvision
        ("resize((5, 6))", (10, 20), (5, 6)),
        ("resize(fit='contain')", (10, 20), (32, 64)),
        ("resize(fit='cover')", (10, 20), (48, 96)),
        ("resize(7, fit='contain')", (1, 90), (1, 7)),
        ("center_crop(7)", (10, 20), (7, 7)),
        ("random_crop((12, 24), padding=2)", (10, 20), (12, 24)),
        ("random_resized_crop", (10, 20), (48, 64)),
        ("flip", (10, 20), (10, 20)),
    ],
)
def test_size_after_operation(text: str, size: HeightWidth, expected: HeightWidth) -> None:
    assert size_after_operation(parse_transform_spec(text)[0], size, (48, 64)) == expected


@pytest.mark.parametrize(
    "text,expected_texts",
    [
        ("resize(64)", ["64x64", "48x48"]),
        ("resize | center_crop(32)", ["32x32", "48x48", "center_crop"]),
        ("center_crop((48, 32)) | flip", ["48x32", "48x48"]),
    ],
)
def test_rejects_a_wrong_output_size(text: str, expected_texts: list[str]) -> None:
    with refused("recipe.wrong_size", *expected_texts):
        check_output_size(parse_transform_spec(text), (48, 48), text)


@pytest.mark.parametrize(
    "text,image_size",
    [("resize(48)", (48, 64)), ("resize(64) | center_crop", (48, 48)), ("flip", (48, 48))],
)
def test_accepts_possible_output_sizes(text: str, image_size: HeightWidth) -> None:
    check_output_size(parse_transform_spec(text), image_size, text)


def test_a_wrong_output_size_names_both_sizes() -> None:
    with refused("recipe.wrong_size", "32x32 into 32x32", "48x48", "end with resize"):
        plan("flip", (32, 32), (48, 48))


def test_rejects_a_crop_larger_than_the_image() -> None:
    with refused("recipe.wrong_size", "48x48", "32x32"):
        plan("random_crop(48, padding=4)", (32, 32), (48, 48))
