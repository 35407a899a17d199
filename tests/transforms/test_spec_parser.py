"""The syntax of transform specs: valid specs, errors, and no evaluation of code."""

from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from refusals import refused

from finetune.errors import RecipeError
from finetune.transforms.operations import OPERATIONS
from finetune.transforms.spec_parser import MAX_CHARACTERS, parse_transform_spec


def test_fills_in_every_argument() -> None:
    calls = parse_transform_spec(
        "resize | random_crop(32, padding=4) | rotate((-5, 10)) | mixup(0.2)"
    )
    assert [call.name for call in calls] == ["resize", "random_crop", "rotate", "mixup"]
    assert calls[0].arguments == {"size": None, "interpolation": None, "fit": None}
    assert calls[1].arguments == {"size": 32, "padding": 4}
    assert calls[2].arguments == {"degrees": (-5, 10), "interpolation": "nearest"}
    assert calls[3].arguments == {"alpha": 0.2}


def test_reads_negative_numbers_and_newlines() -> None:
    calls = parse_transform_spec("\n  resize((48, 32))\n | random_erasing(value=-1.5)  \n")
    assert calls[0].arguments["size"] == (48, 32)
    assert calls[1].arguments["value"] == -1.5


@pytest.mark.parametrize(
    "text,code,expected_texts",
    [
        ("rezise | flip", "unknown_name", ["'rezise'", "'resize'"]),
        ("flip(probability=1)", "unknown_key", ["flip", "'probability'", "Known: p"]),
        ("color_jitter(brigthness=1)", "unknown_key", ["'brightness'"]),
        ("resize(interpolation='bicubik')", "wrong_value", ["'bicubic'"]),
        ("flip('often')", "wrong_value", ["p='often'", "from 0 to 1"]),
        ("flip(True)", "wrong_value", ["p=True"]),
        ("flip(1.5)", "wrong_value", ["p=1.5", "from 0 to 1"]),
        ("flip(p=None)", "wrong_value", ["p=None"]),
        ("resize(-3)", "wrong_value", ["size=-3", "from 1 to"]),
        ("resize(0)", "wrong_value", ["size=0"]),
        ("resize(2.5)", "wrong_value", ["size=2.5"]),
        ("resize((1, 2, 3))", "wrong_value", ["size=(1, 2, 3)"]),
        ("resize(10**10)", "syntax", ["10 ** 10"]),
        ("resize(99999999)", "wrong_value", ["from 1 to 8192"]),
        ("random_crop(padding=-1)", "wrong_value", ["padding=-1"]),
        ("rotate", "missing_key", ["degrees"]),
        ("rotate(1e999)", "wrong_value", ["degrees=inf", "from 0 to 360"]),
        ("rotate(-15)", "wrong_value", ["degrees=-15", "from 0 to 360"]),
        ("color_jitter(hue=0.7)", "wrong_value", ["hue=0.7", "0.5"]),
        ("random_resized_crop(scale=(1, 0.1))", "wrong_value", ["scale=(1, 0.1)"]),
        ("random_resized_crop(scale=0.5)", "wrong_value", ["scale=0.5"]),
        ("random_resized_crop(ratio=(0, 1))", "wrong_value", ["ratio=(0, 1)"]),
        ("rand_augment(magnitude=31)", "conflict", ["magnitude=31", "num_magnitude_bins=31"]),
        ("flip(0.5, p=0.5)", "duplicate_key", ["p"]),
        ("flip(0.5, 0.5)", "wrong_value", ["2 arguments", "at most 1"]),
        ("flip(*[1])", "syntax", ["*[1]"]),
        ("flip(**{})", "syntax", ["**"]),
        ("flip | | flip", "syntax", ["'flip | | flip'"]),
        ("flip((", "syntax", ["'flip(('"]),
        ("flip))", "syntax", ["'flip))'"]),
        ("flip; flip", "syntax", ["'flip; flip'"]),
        ("flip\0", "syntax", [r"'flip\x00'"]),
        ("flip + flip", "syntax", ["flip + flip"]),
        ("", "wrong_value", ["pipeline: "]),
        ("   ", "wrong_value", ["pipeline: "]),
        ("mixup | flip", "conflict", ["flip cannot come after mixup"]),
        ("normalise | rotate(3)", "conflict", ["rotate cannot come after normalise"]),
        ("random_erasing | resize", "conflict", ["resize cannot come after random_erasing"]),
        ("mixup | mixup", "duplicate_key", ["mixup", "2 times"]),
        ("normalise | corrupt('jpeg', 1)", "conflict", ["corrupt cannot come after normalise"]),
    ],
)
def test_rejects_invalid_specs(text: str, code: str, expected_texts: list[str]) -> None:
    with pytest.raises(RecipeError) as caught:
        parse_transform_spec(text)
    assert caught.value.code == f"recipe.{code}"
    for expected_text in expected_texts:
        assert expected_text in str(caught.value)
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize(
    "text",
    [
        "__import__('os').system('touch broken')",
        "flip(__import__('os'))",
        "flip(p=open('x'))",
        "flip(p=(lambda: 1)())",
        "(flip)(p=[x for x in (1,)])",
        "OPERATIONS['flip']",
        "parse.__globals__",
        "f'{1}'",
    ],
)
def test_never_evaluates_code(text: str) -> None:
    with refused("recipe.syntax"):
        parse_transform_spec(text)


@pytest.mark.parametrize(
    "text",
    [
        "flip" * MAX_CHARACTERS,
        "(" * (MAX_CHARACTERS // 2) + ")" * (MAX_CHARACTERS // 2),
        "-" * (MAX_CHARACTERS - 1) + "1",
        "flip(" + "-" * (MAX_CHARACTERS - 10) + "1)",
        "flip(" + "[" * 90 + "]" * 90 + ")",
    ],
    ids=["long", "brackets", "signs", "argument signs", "argument brackets"],
)
def test_rejects_deep_nesting(text: str) -> None:
    with pytest.raises(RecipeError) as caught:
        parse_transform_spec(text)
    assert len(str(caught.value)) < 400


def test_reports_all_errors_together() -> None:
    with pytest.raises(RecipeError) as caught:
        parse_transform_spec("rezise | flip(2) | rotat(3)")
    assert len(str(caught.value).splitlines()) == 3


@pytest.mark.parametrize(
    "name", [name for name, op in OPERATIONS.items() if op.is_random and name != "corrupt"]
)
def test_rejects_random_operations_in_evaluation(name: str) -> None:
    text = "rotate(5)" if name == "rotate" else name
    assert parse_transform_spec(text)
    with refused("recipe.conflict", f"pipeline: {name} "):
        parse_transform_spec(text, train=False)


@given(st.text(alphabet="flipresz|(),=.0123456789-'[]{}*_ \n", max_size=60))
@settings(max_examples=200, deadline=None)
def test_returns_calls_or_raises_a_recipe_error(text: str) -> None:
    try:
        calls = parse_transform_spec(text)
    except RecipeError:
        return
    assert calls
    assert all(set(call.arguments) == set(OPERATIONS[call.name].parameters) for call in calls)


def test_does_not_import_torch() -> None:
    code = "import sys, finetune.transforms.spec_parser; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
