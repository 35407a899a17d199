"""Parser of transform specs such as `resize(384) | flip | rotate(15)` (no torch here).

A transform spec is a chain of operations joined by ` | `. Each operation is a name, optionally with
Python literals as positional or keyword arguments. The spec is parsed but never evaluated; only the
operations in `operations.py` and plain literals are accepted.
"""

from __future__ import annotations

import ast
import itertools
import math
import warnings
from dataclasses import dataclass
from typing import Any

from finetune.errors import RecipeError, did_you_mean
from finetune.transforms.operations import OPERATIONS, Operation, Parameter

__all__ = ["TransformCall", "parse_transform_spec"]

MAX_CHARACTERS = 2000  # enough for any pipeline, and cheap to parse


@dataclass(frozen=True)
class TransformCall:
    """One operation of a transform spec, with all arguments including defaults."""

    name: str
    arguments: dict[str, Any]

    @property
    def operation(self) -> Operation:
        return OPERATIONS[self.name]


def parse_transform_spec(text: str, *, train: bool = True) -> list[TransformCall]:
    """Parse a transform spec into calls, each with every argument filled in.

    Args:
        text: the spec, for example "random_crop(32, padding=4) | flip".
        train: True for training transforms, which must not contain `corrupt`; False for evaluation
            transforms, which must not contain any random operation except `corrupt`.
    Raises: RecipeError naming every unknown operation, unknown argument and wrong value.
    """
    problems: list[RecipeError] = []
    calls = [_parse_call(node, problems) for node in _split_operations(text)]
    if problems:
        raise RecipeError("\n".join(map(str, problems)), code=problems[0].code)
    _check_order(calls, train=train)
    return calls


def _split_operations(text: str) -> list[ast.expr]:
    """Return one syntax tree node per operation, in written order."""
    if not text.strip():
        message = "pipeline: empty; write for example 'resize | flip'"
        raise RecipeError(message, code="recipe.wrong_value")
    if len(text) > MAX_CHARACTERS:
        raise RecipeError(
            f"pipeline: {len(text)} characters, above the limit of {MAX_CHARACTERS}; shorten it",
            code="recipe.wrong_value",
        )
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Python warns about unusual literals
            # a recipe may write the spec over several lines
            node = ast.parse(" ".join(text.split()), mode="eval").body
    except (SyntaxError, ValueError, MemoryError, RecursionError) as error:
        cause = getattr(error, "msg", None) or type(error).__name__
        raise RecipeError(
            f"pipeline {_truncate(text)}: syntax error ({cause}); write operations joined by "
            "' | ', for example 'resize | flip(p=0.5)'",
            code="recipe.syntax",
        ) from None
    nodes: list[ast.expr] = []
    while isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
        nodes.append(node.right)
        node = node.left
    return [node, *reversed(nodes)]


def _parse_call(node: ast.expr, problems: list[RecipeError]) -> TransformCall:
    """Convert one syntax tree node into a call; append errors to `problems`."""
    function_node, positional, keywords = node, [], []
    if isinstance(node, ast.Call):
        function_node, positional, keywords = node.func, node.args, node.keywords
    name = function_node.id if isinstance(function_node, ast.Name) else ""
    if name not in OPERATIONS:
        problems.append(_unknown_operation_error(node, name))
        return TransformCall(name, {})
    parameters = OPERATIONS[name].parameters
    num_before = len(problems)
    if len(positional) > len(parameters):
        message = f"{name}: {len(positional)} arguments, but it takes at most {len(parameters)}"
        problems.append(RecipeError(message, code="recipe.wrong_value"))
    # zip drops the extra arguments, which are reported above
    given: list[tuple[str | None, ast.expr]] = [*zip(parameters, positional, strict=False)]
    given += [(keyword.arg, keyword.value) for keyword in keywords]
    values: dict[str, Any] = {}
    for key, value in given:
        try:
            _parse_argument(name, key, value, values)
        except RecipeError as problem:
            problems.append(problem)
    for key, parameter in parameters.items():
        if parameter.required and key not in values and len(problems) == num_before:
            example = "'noise', 3" if name == "corrupt" else "15"
            message = f"{name}: argument {key} is missing; write for example {name}({example})"
            problems.append(RecipeError(message, code="recipe.missing_key"))
    return TransformCall(
        name, {key: values.get(key, spec.default) for key, spec in parameters.items()}
    )


def _unknown_operation_error(node: ast.expr, name: str) -> RecipeError:
    if not name:
        return RecipeError(
            f"pipeline: {_source_text(node)} is not an operation; "
            "write name or name(argument=value)",
            code="recipe.syntax",
        )
    return RecipeError(
        f"pipeline: unknown operation '{name}'{did_you_mean(name, OPERATIONS) or '.'} "
        f"Known: {', '.join(OPERATIONS)}",
        code="recipe.unknown_name",
    )


def _parse_argument(name: str, key: str | None, node: ast.expr, values: dict[str, Any]) -> None:
    """Check one argument of an operation and add it to `values`. Raises: RecipeError."""
    parameters = OPERATIONS[name].parameters
    if key is None:
        message = f"{name}: ** is not allowed; write each argument out"
        raise RecipeError(message, code="recipe.syntax")
    if key not in parameters:
        known = ", ".join(parameters) or "none"
        raise RecipeError(
            f"{name}: unknown argument '{key}'{did_you_mean(key, parameters) or '.'} "
            f"Known: {known}",
            code="recipe.unknown_key",
        )
    if key in values:
        raise RecipeError(
            f"{name}: argument {key} is given twice; keep one", code="recipe.duplicate_key"
        )
    try:
        value = ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        raise RecipeError(
            f"{name}: {key} must be a literal number, a tuple or a quoted string, not "
            f"{_source_text(node)}",
            code="recipe.syntax",
        ) from None
    try:
        values[key] = _check_value(value, parameters[key])
    except ValueError as error:
        message = f"{name}: {key}={_truncate(value)} {error}"
        raise RecipeError(message, code="recipe.wrong_value") from None


def _check_value(value: Any, parameter: Parameter) -> Any:
    """Return the checked value.

    Raises: ValueError whose text continues "<argument>=<value> …" in the error message.
    """
    if parameter.kind == "choice":
        return _check_choice(value, parameter)
    if value is None and parameter.default is None and not parameter.required:
        return None
    low, high = parameter.low, parameter.high
    bounds = f"at least {low:g}" if high == math.inf else f"from {low:g} to {high:g}"
    integer_only = parameter.kind in ("size", "integer")
    noun = "a whole number" if integer_only else "a number"
    if isinstance(value, (tuple, list)):
        if parameter.kind in ("number", "integer"):
            raise ValueError(f"must be {noun} {bounds}")
        if len(value) != 2 or not all(_is_number(x, integer_only, low, high) for x in value):
            accepted = "two numbers" if parameter.kind == "range" else f"{noun} or two of them"
            raise ValueError(f"must be {accepted} {bounds}")
        if parameter.kind != "size" and value[0] > value[1]:
            raise ValueError("must start with the smaller number")
        if parameter.kind == "range" and value[1] <= 0:
            raise ValueError("must have a second number above 0")
        return tuple(value)
    if parameter.kind == "range":
        raise ValueError(f"must be two numbers {bounds}, such as {parameter.default}")
    # for a symmetric range, a single number x means [-x, x]
    floor = 0.0 if parameter.kind == "symmetric_range" else low
    if not _is_number(value, integer_only, floor, high):
        floor_bounds = bounds if floor == low else f"from 0 to {high:g}"
        raise ValueError(f"must be {noun} {floor_bounds}")
    return value


def _check_choice(value: Any, parameter: Parameter) -> Any:
    is_optional = parameter.default is None and not parameter.required
    if value in parameter.choices or (value is None and is_optional):
        return value
    choices = parameter.choices
    raise ValueError(f"must be one of {', '.join(choices)}{did_you_mean(str(value), choices)}")


def _is_number(value: Any, integer_only: bool, low: float, high: float) -> bool:
    kinds = (int,) if integer_only else (int, float)
    return isinstance(value, kinds) and not isinstance(value, bool) and low <= value <= high


def _check_order(calls: list[TransformCall], *, train: bool) -> None:
    """Check order, duplicates and randomness of the operations. Raises: RecipeError."""
    stages = {"geometry": 0, "pixels": 0, "normalize": 1, "erase": 2, "mix": 3}
    for call, following in itertools.pairwise(calls):
        if stages[following.operation.role] < stages[call.operation.role]:
            raise RecipeError(
                f"pipeline: {following.name} cannot come after {call.name}; write "
                "geometry and color operations first, then normalise, random_erasing, mixup and "
                "cutmix",
                code="recipe.conflict",
            )
    names = [call.name for call in calls]
    for name in ("normalise", "mixup", "cutmix"):
        if names.count(name) > 1:
            message = f"pipeline: {name} appears {names.count(name)} times; keep one"
            raise RecipeError(message, code="recipe.duplicate_key")
    for call in calls:
        if call.name == "rand_augment":
            magnitude, bins = call.arguments["magnitude"], call.arguments["num_magnitude_bins"]
            if magnitude >= bins:
                raise RecipeError(
                    f"rand_augment: magnitude={magnitude} must be below num_magnitude_bins={bins}",
                    code="recipe.conflict",
                )
    random = [call.name for call in calls if call.operation.is_random]
    if train and "corrupt" in random:
        raise RecipeError(
            "pipeline: corrupt cannot be used for training; remove it, and evaluate the trained "
            "model with finetune eval --corrupt",
            code="recipe.conflict",
        )
    if not train and {*random} - {"corrupt"}:
        raise RecipeError(
            f"pipeline: {', '.join(random)} is random, but evaluation must give the same image "
            "each time; use resize and center_crop",
            code="recipe.conflict",
        )


def _source_text(node: ast.expr) -> str:
    try:
        return _truncate(ast.unparse(node), quote=False)
    except RecursionError:
        return "this expression"


def _truncate(value: object, quote: bool = True) -> str:
    text = repr(value) if quote else str(value)
    return text if len(text) <= 60 else text[:57] + "..."
