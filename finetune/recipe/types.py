"""The types of a recipe's values: strict about kinds, lax about how a number is written.

Each type describes in one phrase what it expects; the phrase becomes the error message.
"""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Callable, Container
from functools import partial
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field
from pydantic_core import PydanticCustomError

from finetune.errors import RecipeError
from finetune.recipe import yaml as recipe_yaml

__all__ = [
    "Arguments",
    "Auto",
    "Betas",
    "Blocks",
    "ClassNames",
    "ClassWeights",
    "EvalSentence",
    "LabelColumns",
    "Mean",
    "Metric",
    "MicroBatch",
    "Names",
    "Patterns",
    "Range",
    "Real",
    "Renames",
    "Repository",
    "Score",
    "Size",
    "Std",
    "Text",
    "TrainSentence",
    "When",
    "Whole",
    "Workers",
    "number",
]

# no leading zeros: 010 is 8 to YAML 1.1 and 10 to YAML 1.2
_NUMBER = re.compile(r"[-+]?(?:(?:0|[1-9]\d*)(?:\.\d*)?|\.\d+)(?:[eE][-+]?\d+)?", re.ASCII)
_LARGEST_SIDE = 8192  # pixels, as of the operations: more would ask for gigabytes an image
_LARGEST_WHOLE = 2**53  # beyond it a float cannot count
_METRIC = re.compile(
    r"(train|val|test)\.(top1|top5|loss|ece)|run\.epochs|"
    r"(val|test)\.(balanced_accuracy|macro_f1|micro_f1|map)"
)
_REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9_][\w.-]*", re.ASCII)
_WHEN = re.compile(r"end|first|best|(after )?epoch [1-9][0-9]*")


def _expected(phrase: str) -> PydanticCustomError:
    return PydanticCustomError("expected", "expected {expected}", {"expected": phrase})


def _from_recipe_error(message: str, code: str) -> PydanticCustomError:
    """Wrap a RecipeError, so that validation reports its message and code as they are."""
    return PydanticCustomError("recipe", "{message}", {"message": message, "code": code})


def number(value: Any) -> float | int:
    """Accept a finite number, also one written as text; a boolean is not a number."""
    if isinstance(value, str) and len(value) < 64 and _NUMBER.fullmatch(value.strip()):
        value = float(value)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise _expected("a number")
    if abs(value) > 1e300 or not math.isfinite(value):
        raise _expected("a finite number")
    return value


def _whole(value: Any) -> int:
    try:
        value = number(value)
    except PydanticCustomError:
        raise _expected("a whole number") from None
    if value != int(value):
        raise _expected("a whole number")
    if abs(value) > _LARGEST_WHOLE:
        raise _expected(f"a whole number of at most {_LARGEST_WHOLE}")
    return int(value)


def _text(value: Any) -> Any:
    if not isinstance(value, str) or not value.strip():
        raise _expected("text")
    return value


def _two_or_more_names(value: tuple[str, ...]) -> tuple[str, ...]:
    if len(value) < 2 or len(set(value)) < len(value):
        raise _expected("a list of at least two class names, each once")
    return value


def _label_columns(value: Any) -> Any:
    if not isinstance(value, (list, tuple)):
        return _text(value)
    names = tuple(_text(name) for name in value)
    if len(names) < 2 or len(set(names)) < len(names):
        raise _expected("the name of a column, or a list of at least two, each once")
    return names


def _class_weights(value: Any) -> Any:
    if value == "balanced":
        return value
    if not isinstance(value, dict) or not value:
        raise _expected("balanced, or a mapping {class: weight}")
    weights = {}
    for name, weight in value.items():
        with contextlib.suppress(PydanticCustomError):
            weights[name] = float(number(weight))
        if weights.get(name, -1) < 0:
            message = f"expected a number of at least 0 as the weight of class '{name}'"
            raise _from_recipe_error(message, "recipe.wrong_value")
    return weights


def _patterns(value: tuple[str, ...]) -> tuple[str, ...]:
    for pattern in value:
        try:
            re.compile(pattern)
        except (re.error, OverflowError, RecursionError) as error:
            raise _expected(f"regular expressions; '{pattern}' is none: {error}") from None
    if not value:
        raise _expected("at least one word or regular expression")
    return value


def _list(value: Any, *, of: int, each: str = "") -> Any:
    if not isinstance(value, (list, tuple)) or len(value) != of:
        raise _expected(f"a list of {of} numbers{each}")
    return value


_two = partial(_list, of=2)
_three = partial(_list, of=3, each=", each between 0 and 1 (not 0 to 255)")


def _image_size(value: Any) -> Any:
    try:
        pair = _two(value) if isinstance(value, (list, tuple)) else (value, value)
        sizes = tuple(_whole(item) for item in pair)
    except PydanticCustomError:
        sizes = (0, 0)
    if min(sizes) < 1:
        raise _expected("pixels: a whole number above 0, or a list [height, width]")
    if max(sizes) > _LARGEST_SIDE:
        raise _expected(f"at most {_LARGEST_SIDE} pixels a side")
    return sizes if isinstance(value, (list, tuple)) else sizes[0]


def _word_or_whole(words: Container[Any], least: int, phrase: str) -> Callable[[Any], Any]:
    def check(value: Any) -> Any:
        if value in words:
            return value
        try:
            number = _whole(value)
        except PydanticCustomError:
            number = least - 1
        if number < least:
            raise _expected(phrase)
        return number

    return check


def _auto_or_at_least(least: int) -> Callable[[Any], Any]:
    return _word_or_whole(("auto",), least, f"'auto' or a whole number of at least {least}")


def _auto_or_not(value: Any) -> Any:
    if value == "auto" or isinstance(value, bool):
        return value
    raise _expected("'auto', true or false")


def _plain_values(value: Any) -> Any:
    if not isinstance(value, dict):
        raise _expected("a mapping of keyword arguments")
    _check_plain(value)
    return value


def _check_plain(value: Any) -> None:
    if isinstance(value, dict):
        if not all(isinstance(key, str) for key in value):
            raise _expected("arguments whose names are text")
        for item in value.values():
            _check_plain(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            _check_plain(item)
    elif isinstance(value, float) and not math.isfinite(value):
        raise _expected("arguments that are finite numbers")
    elif value is not None and not isinstance(value, (bool, int, float, str)):
        raise _expected("arguments that are plain values")


def _renames(value: Any) -> Any:
    """Check {regular expression: replacement}, which is a mapping or the name of its file."""
    if isinstance(value, str):
        value = _read_renames(value)
    if not isinstance(value, dict) or not all(
        isinstance(item, str) for pair in value.items() for item in pair
    ):
        raise _expected("a mapping of regular expressions to replacements, or the file of one")
    for pattern, replacement in value.items():
        try:
            re.sub(pattern, replacement, "")
        except (re.error, IndexError, OverflowError, RecursionError) as error:
            cause = f"'{pattern}' with '{replacement}' is none: {error}"
            raise _expected(f"regular expressions and replacements; {cause}") from None
    return value


def _read_renames(name: str) -> dict[str, Any]:
    try:
        document = recipe_yaml.read_document(recipe_yaml.read_text(name), name=name)
        document.raise_first()
    except RecipeError as error:
        is_mapping = "the sections" not in str(error)  # of a recipe; this mapping has none
        cause = str(error).partition(";")[0] if is_mapping else f"{name}: is none"
        message = f"expected a YAML file of `regular expression: replacement`; {cause}"
        raise _from_recipe_error(message, error.code) from None
    return document.tree


def _sentence(value: str, *, train: bool) -> str:
    from finetune.transforms.grammar import parse

    try:
        calls = parse(value, train=train)
    except RecipeError as error:
        raise _from_recipe_error(str(error), error.code) from None
    if any(call.name == "corrupt" for call in calls):  # it would become the published model's own
        message = "corrupt is not for recipes; remove it, and use finetune eval --corrupt"
        raise _from_recipe_error(message, "recipe.conflict")
    return value


def _like(pattern: re.Pattern[str], phrase: str) -> AfterValidator:
    def check(value: str) -> str:
        if not pattern.fullmatch(value):
            raise _expected(phrase)
        return value

    return AfterValidator(check)


Whole = Annotated[int, BeforeValidator(_whole)]
Real = Annotated[float, BeforeValidator(number)]
Text = Annotated[str, BeforeValidator(_text)]
Names = Annotated[tuple[Text, ...], BeforeValidator(lambda v: (v,) if isinstance(v, str) else v)]
Patterns = Annotated[Names, AfterValidator(_patterns)]
ClassNames = Annotated[Names, AfterValidator(_two_or_more_names)]
Score = Literal[  # a figure of validation by which checkpoints, or runs, are chosen
    "val.top1",
    "val.top5",
    "val.balanced_accuracy",
    "val.macro_f1",
    "val.loss",
    "val.map",
    "val.micro_f1",
]
LabelColumns = Annotated[str | tuple[str, ...], BeforeValidator(_label_columns)]
ClassWeights = Annotated[Literal["balanced"] | dict[str, float], BeforeValidator(_class_weights)]
Size = Annotated[int | tuple[int, int], BeforeValidator(_image_size)]
_freeze = _word_or_whole(("none", "backbone"), 0, "'none', 'backbone' or a number of blocks")
Blocks = Annotated[Literal["none", "backbone"] | int, BeforeValidator(_freeze)]
Auto = Annotated[bool | Literal["auto"], BeforeValidator(_auto_or_not)]
MicroBatch = Annotated[Literal["auto"] | int, BeforeValidator(_auto_or_at_least(1))]
Workers = Annotated[Literal["auto"] | int, BeforeValidator(_auto_or_at_least(0))]
Arguments = Annotated[dict[str, Any], BeforeValidator(_plain_values)]
TrainSentence = Annotated[Text, AfterValidator(partial(_sentence, train=True))]
Renames = Annotated[dict[str, str] | str, BeforeValidator(_renames)]
EvalSentence = Annotated[Text, AfterValidator(partial(_sentence, train=False))]
Repository = Annotated[Text, _like(_REPOSITORY, "owner/name of a repository on the hub")]
Metric = Annotated[
    Text,
    _like(
        _METRIC,
        "run.epochs, or train, val or test, a dot, and top1, top5, loss or ece (of val and test "
        "balanced_accuracy, macro_f1, micro_f1 or map, too): 'val.top1'",
    ),
]
When = Annotated[Text, _like(_WHEN, "'end', 'first', 'best', 'epoch N' or 'after epoch N'")]
_Colour = Annotated[Real, Field(ge=0, le=1)]
_Spread = Annotated[Real, Field(gt=0, le=1)]
_Beta = Annotated[Real, Field(ge=0, lt=1)]
Mean = Annotated[tuple[_Colour, _Colour, _Colour], BeforeValidator(_three)]
Std = Annotated[tuple[_Spread, _Spread, _Spread], BeforeValidator(_three)]
Betas = Annotated[tuple[_Beta, _Beta], BeforeValidator(_two)]
Range = Annotated[tuple[Real, Real], BeforeValidator(_two)]
