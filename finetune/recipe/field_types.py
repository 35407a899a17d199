"""Pydantic field types of recipes: strict, except that numbers may also be written as text.

Each type describes the expected value in one phrase, for the message "expected <phrase>, got …".
"""

from __future__ import annotations

import contextlib
import math
import os
import re
from collections.abc import Callable, Container
from functools import partial
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field
from pydantic_core import PydanticCustomError

from finetune.errors import RecipeError
from finetune.recipe import strict_yaml as recipe_yaml
from finetune.transforms.operations import MAX_IMAGE_SIDE

__all__ = [
    "AdamBetas",
    "BoolOrAuto",
    "ChannelMean",
    "ChannelStd",
    "ClaimTime",
    "ClassNames",
    "ClassWeights",
    "EvalTransformSpec",
    "FiniteFloat",
    "FreezeSetting",
    "GroupSetting",
    "HubRepository",
    "ImageSize",
    "Integer",
    "KeywordArguments",
    "LabelColumns",
    "LocalPath",
    "MetricName",
    "MicroBatchSize",
    "NonEmptyString",
    "NumWorkers",
    "NumberRange",
    "RegexList",
    "RenameRules",
    "SearchSpace",
    "SelectionMetric",
    "StringList",
    "TrainTransformSpec",
    "is_group_pattern",
    "parse_number",
]

# without leading zeros, because 010 is 8 in YAML 1.1 and 10 in YAML 1.2
_NUMBER = re.compile(r"[-+]?(?:(?:0|[1-9]\d*)(?:\.\d*)?|\.\d+)(?:[eE][-+]?\d+)?", re.ASCII)
_MAX_INTEGER = 2**53  # above this, float64 cannot represent every integer
_METRIC = re.compile(
    r"(train|val|test)\.(top1|top5|loss|ece)|run\.epochs|"
    r"(val|test)\.(balanced_accuracy|macro_f1|micro_f1|map)"
)
_REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9_][\w.-]*", re.ASCII)
_WHEN = re.compile(r"end|first|best|(after )?epoch [1-9][0-9]*")


def _expected_error(phrase: str) -> PydanticCustomError:
    return PydanticCustomError("expected", "expected {expected}", {"expected": phrase})


def _from_recipe_error(message: str, code: str) -> PydanticCustomError:
    """Wrap the message and code of a RecipeError, so that validation reports them unchanged."""
    return PydanticCustomError("recipe", "{message}", {"message": message, "code": code})


def parse_number(value: Any) -> float | int:
    """Return a finite number, also parsed from text such as "1e-3"; reject booleans."""
    if isinstance(value, str) and len(value) < 64 and _NUMBER.fullmatch(value.strip()):
        value = float(value)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise _expected_error("a number")
    if abs(value) > 1e300 or not math.isfinite(value):
        raise _expected_error("a finite number")
    return value


def _parse_integer(value: Any) -> int:
    try:
        value = parse_number(value)
    except PydanticCustomError:
        raise _expected_error("a whole number") from None
    if value != int(value):
        raise _expected_error("a whole number")
    if abs(value) > _MAX_INTEGER:
        raise _expected_error(f"a whole number of at most {_MAX_INTEGER}")
    return int(value)


def _check_non_empty(value: Any) -> Any:
    if not isinstance(value, str) or not value.strip():
        raise _expected_error("text")
    return value


def _check_class_names(value: tuple[str, ...]) -> tuple[str, ...]:
    if len(value) < 2 or len(set(value)) < len(value):
        raise _expected_error("a list of at least two different class names")
    return value


def _check_label_columns(value: Any) -> Any:
    if not isinstance(value, (list, tuple)):
        return _check_non_empty(value)
    names = tuple(_check_non_empty(name) for name in value)
    if len(names) < 2 or len(set(names)) < len(names):
        raise _expected_error("the name of a column, or a list of at least two different ones")
    return names


def _parse_class_weights(value: Any) -> Any:
    if value == "balanced":
        return value
    if not isinstance(value, dict) or not value:
        raise _expected_error("balanced, or a mapping {class: weight}")
    weights = {}
    for name, weight in value.items():
        with contextlib.suppress(PydanticCustomError):
            weights[name] = float(parse_number(weight))
        if weights.get(name, -1) < 0:
            message = f"expected a number of at least 0 as the weight of class '{name}'"
            raise _from_recipe_error(message, "recipe.wrong_value")
    return weights


def _check_regexes(value: tuple[str, ...]) -> tuple[str, ...]:
    for pattern in value:
        try:
            re.compile(pattern)
        except (re.error, OverflowError, RecursionError) as error:
            raise _expected_error(f"regular expressions; '{pattern}' is invalid: {error}") from None
    if not value:
        raise _expected_error("at least one word or regular expression")
    return value


def is_group_pattern(group: str) -> bool:
    """Whether data.group is a regular expression; otherwise it is the name of a column."""
    return "(" in group


def _check_group(value: str) -> str:
    if not is_group_pattern(value):
        return value
    try:
        num_groups = re.compile(value).groups
    except (re.error, OverflowError, RecursionError) as error:
        raise _expected_error(
            f"a column, or a regular expression; '{value}' is invalid: {error}"
        ) from None
    if num_groups != 1:
        raise _expected_error(
            "a column, or a regular expression with the group in one pair of parentheses, such as "
            r"'(patient\d+)'"
        )
    return value


def _check_length(value: Any, *, length: int, requirement: str = "") -> Any:
    if not isinstance(value, (list, tuple)) or len(value) != length:
        raise _expected_error(f"a list of {length} numbers{requirement}")
    return value


_check_pair = partial(_check_length, length=2)
_check_triple = partial(
    _check_length, length=3, requirement=", each between 0 and 1 (not 0 to 255)"
)


def _parse_image_size(value: Any) -> Any:
    try:
        pair = _check_pair(value) if isinstance(value, (list, tuple)) else (value, value)
        sizes = tuple(_parse_integer(item) for item in pair)
    except PydanticCustomError:
        sizes = (0, 0)
    if min(sizes) < 1:
        raise _expected_error("pixels: a whole number above 0, or a list [height, width]")
    if max(sizes) > MAX_IMAGE_SIDE:
        raise _expected_error(f"at most {MAX_IMAGE_SIDE} pixels per side")
    return sizes if isinstance(value, (list, tuple)) else sizes[0]


def _word_or_integer(words: Container[Any], minimum: int, phrase: str) -> Callable[[Any], Any]:
    def check(value: Any) -> Any:
        if value in words:
            return value
        try:
            number = _parse_integer(value)
        except PydanticCustomError:
            number = minimum - 1
        if number < minimum:
            raise _expected_error(phrase)
        return number

    return check


def _auto_or_integer(minimum: int) -> Callable[[Any], Any]:
    return _word_or_integer(("auto",), minimum, f"'auto' or a whole number of at least {minimum}")


def _check_bool_or_auto(value: Any) -> Any:
    if value == "auto" or isinstance(value, bool):
        return value
    raise _expected_error("'auto', true or false")


def _check_keyword_arguments(value: Any) -> Any:
    if not isinstance(value, dict):
        raise _expected_error("a mapping of keyword arguments")
    _check_finite(value)
    return value


def _check_finite(value: Any) -> None:
    """Reject NaN and infinity, also in nested mappings and lists."""
    if isinstance(value, float) and not math.isfinite(value):
        raise _expected_error("arguments that are finite numbers")
    items = value.values() if isinstance(value, dict) else value
    for item in items if isinstance(value, (dict, list, tuple)) else ():
        _check_finite(item)


def _check_rename_rules(value: Any) -> Any:
    """Check a mapping {regular expression: replacement}; load it first if `value` is a path."""
    if isinstance(value, str):
        value = _read_rename_file(value)
    if not isinstance(value, dict) or not all(
        isinstance(item, str) for pair in value.items() for item in pair
    ):
        raise _expected_error(
            "a mapping of regular expressions to replacements, or a file with one"
        )
    for pattern, replacement in value.items():
        try:
            re.sub(pattern, replacement, "")
        except (re.error, IndexError, OverflowError, RecursionError) as error:
            cause = f"'{pattern}' with '{replacement}' is invalid: {error}"
            raise _expected_error(f"regular expressions and replacements; {cause}") from None
    return value


def _check_search_values(values: Any) -> Any:
    """Check a list of values, or a range; `load.parse_recipe` checks that the key accepts them."""
    if isinstance(values, (list, tuple)) and values:
        return values
    keys = set(values) if isinstance(values, dict) else set()
    log = values.get("log", False) if keys else False
    if not {"low", "high"} <= keys <= {"low", "high", "log"} or not isinstance(log, bool):
        raise _expected_error("a list of values, or a range {low: 1e-4, high: 1e-2, log: true}")
    low, high = parse_number(values["low"]), parse_number(values["high"])
    problem = ""
    if low >= high:
        problem = f"low, {low:g}, is not below high, {high:g}; swap the two, or give a list"
    elif log and low <= 0:
        problem = f"log: true needs a low above 0, got {low:g}; raise it, or remove log"
    if problem:
        raise _from_recipe_error(problem, "recipe.wrong_value")
    return {"low": low, "high": high, "log": log}


def _read_rename_file(path: str) -> dict[str, Any]:
    try:
        document = recipe_yaml.parse_document(recipe_yaml.read_recipe_text(path), name=path)
        document.raise_first_problem()
    except RecipeError as error:
        is_mapping = "the sections" not in str(error)  # else the file has no mapping
        cause = str(error).partition(";")[0] if is_mapping else f"{path}: has no mapping"
        message = f"expected a YAML file with lines `regular expression: replacement`; {cause}"
        raise _from_recipe_error(message, error.code) from None
    return document.data


def _check_transform_spec(value: str, *, train: bool) -> str:
    from finetune.transforms.spec_parser import parse_transform_spec

    try:
        calls = parse_transform_spec(value, train=train)
    except RecipeError as error:
        raise _from_recipe_error(str(error), error.code) from None
    if any(
        call.name == "corrupt" for call in calls
    ):  # the published model would corrupt its input images
        message = "corrupt is not allowed in recipes; remove it, and use finetune eval --corrupt"
        raise _from_recipe_error(message, "recipe.conflict")
    return value


def _matches(pattern: re.Pattern[str], phrase: str) -> AfterValidator:
    def check(value: str) -> str:
        if not pattern.fullmatch(value):
            raise _expected_error(phrase)
        return value

    return AfterValidator(check)


Integer = Annotated[int, BeforeValidator(_parse_integer)]
FiniteFloat = Annotated[float, BeforeValidator(parse_number)]
NonEmptyString = Annotated[str, BeforeValidator(_check_non_empty)]
GroupSetting = Annotated[NonEmptyString, AfterValidator(_check_group)]
LocalPath = Annotated[  # absolute, so a run finds the file again from any folder
    NonEmptyString, AfterValidator(lambda path: os.path.abspath(os.path.expanduser(path)))
]
StringList = Annotated[
    tuple[NonEmptyString, ...], BeforeValidator(lambda v: (v,) if isinstance(v, str) else v)
]
RegexList = Annotated[StringList, AfterValidator(_check_regexes)]
ClassNames = Annotated[StringList, AfterValidator(_check_class_names)]
SelectionMetric = Literal[  # the validation metric that selects the best checkpoint or run
    "val.top1",
    "val.top5",
    "val.balanced_accuracy",
    "val.macro_f1",
    "val.loss",
    "val.map",
    "val.micro_f1",
]
LabelColumns = Annotated[str | tuple[str, ...], BeforeValidator(_check_label_columns)]
ClassWeights = Annotated[
    Literal["balanced"] | dict[str, float], BeforeValidator(_parse_class_weights)
]
ImageSize = Annotated[int | tuple[int, int], BeforeValidator(_parse_image_size)]
_parse_freeze = _word_or_integer(
    ("none", "backbone"), 0, "'none', 'backbone' or a number of blocks"
)
FreezeSetting = Annotated[Literal["none", "backbone"] | int, BeforeValidator(_parse_freeze)]
BoolOrAuto = Annotated[bool | Literal["auto"], BeforeValidator(_check_bool_or_auto)]
MicroBatchSize = Annotated[Literal["auto"] | int, BeforeValidator(_auto_or_integer(1))]
NumWorkers = Annotated[Literal["auto"] | int, BeforeValidator(_auto_or_integer(0))]
KeywordArguments = Annotated[dict[str, Any], BeforeValidator(_check_keyword_arguments)]
TrainTransformSpec = Annotated[
    NonEmptyString, AfterValidator(partial(_check_transform_spec, train=True))
]
RenameRules = Annotated[dict[str, str] | str, BeforeValidator(_check_rename_rules)]
SearchSpace = dict[str, Annotated[Any, BeforeValidator(_check_search_values)]]
EvalTransformSpec = Annotated[
    NonEmptyString, AfterValidator(partial(_check_transform_spec, train=False))
]
HubRepository = Annotated[
    NonEmptyString, _matches(_REPOSITORY, "owner/name of a repository on the Hub")
]
MetricName = Annotated[
    NonEmptyString,
    _matches(
        _METRIC,
        "run.epochs, or train, val or test, a dot, and top1, top5, loss or ece (val and test also "
        "have balanced_accuracy, macro_f1, micro_f1 and map), for example 'val.top1'",
    ),
]
ClaimTime = Annotated[
    NonEmptyString, _matches(_WHEN, "'end', 'first', 'best', 'epoch N' or 'after epoch N'")
]
_UnitInterval = Annotated[FiniteFloat, Field(ge=0, le=1)]
_PositiveUnitInterval = Annotated[FiniteFloat, Field(gt=0, le=1)]
_AdamBeta = Annotated[FiniteFloat, Field(ge=0, lt=1)]
ChannelMean = Annotated[
    tuple[_UnitInterval, _UnitInterval, _UnitInterval], BeforeValidator(_check_triple)
]
ChannelStd = Annotated[
    tuple[_PositiveUnitInterval, _PositiveUnitInterval, _PositiveUnitInterval],
    BeforeValidator(_check_triple),
]
AdamBetas = Annotated[tuple[_AdamBeta, _AdamBeta], BeforeValidator(_check_pair)]
NumberRange = Annotated[tuple[FiniteFloat, FiniteFloat], BeforeValidator(_check_pair)]
