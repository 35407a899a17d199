"""The grammar of image pipelines: `resize(384) | flip | rotate(15)` (no torch here).

A sentence is a chain of operations joined by ` | `, each a name with Python literals as arguments,
by position or by keyword. Nothing in it is ever evaluated: the text is parsed, and only the names
of the table of operations and plain literals are accepted. The table is in `operations.py`.
"""

from __future__ import annotations

import ast
import itertools
import math
import warnings
from dataclasses import dataclass
from typing import Any

from finetune.errors import RecipeError, nearest
from finetune.transforms.operations import OPERATIONS, Operation, Parameter

__all__ = ["Call", "parse"]

MAX_CHARACTERS = 2000  # long enough for any pipeline, short enough that parsing cannot be a burden


@dataclass(frozen=True)
class Call:
    """One operation of a sentence with all its arguments, defaults included."""

    name: str
    arguments: dict[str, Any]

    @property
    def operation(self) -> Operation:
        return OPERATIONS[self.name]


def parse(text: str, *, train: bool = True) -> list[Call]:
    """Read a sentence into calls, each with every argument filled in.

    Args:
        text: for example "random_crop(32, padding=4) | flip".
        train: whether random operations are allowed; without them `corrupt` is.
    Raises: RecipeError naming every unknown operation, argument and wrong value at once.
    """
    problems: list[RecipeError] = []
    calls = [_read_call(node, problems) for node in _split(text)]
    if problems:
        raise RecipeError("\n".join(map(str, problems)), code=problems[0].code)
    _check_order(calls, train=train)
    return calls


def _split(text: str) -> list[ast.expr]:
    """Return one syntax node per operation, in the order written."""
    if not isinstance(text, str) or not text.strip():
        message = "pipeline: empty; write for example 'resize | flip'"
        raise RecipeError(message, code="recipe.wrong_value")
    if len(text) > MAX_CHARACTERS:
        raise RecipeError(
            f"pipeline: {len(text)} characters; at most {MAX_CHARACTERS} are read, shorten it",
            code="recipe.wrong_value",
        )
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Python warns of odd literals
            # a sentence may be written over several lines of a recipe
            node = ast.parse(" ".join(text.split()), mode="eval").body
    except (SyntaxError, ValueError, MemoryError, RecursionError) as error:
        cause = getattr(error, "msg", None) or type(error).__name__
        raise RecipeError(
            f"pipeline {_short(text)}: not readable ({cause}); write operations joined by ' | ', "
            "for example 'resize | flip(p=0.5)'",
            code="recipe.syntax",
        ) from None
    nodes: list[ast.expr] = []
    while isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
        nodes.append(node.right)
        node = node.left
    return [node, *reversed(nodes)]


def _read_call(node: ast.expr, problems: list[RecipeError]) -> Call:
    """Turn one syntax node into a call; each problem of it is added to `problems`."""
    function, positional, keywords = node, [], []
    if isinstance(node, ast.Call):
        function, positional, keywords = node.func, node.args, node.keywords
    name = function.id if isinstance(function, ast.Name) else ""
    if name not in OPERATIONS:
        problems.append(_unknown_operation(node, name))
        return Call(name, {})
    parameters = OPERATIONS[name].parameters
    num_before = len(problems)
    if len(positional) > len(parameters):
        message = f"{name}: {len(positional)} arguments, takes at most {len(parameters)}"
        problems.append(RecipeError(message, code="recipe.wrong_value"))
    # zip drops the surplus on purpose: it has just been reported
    written: list[tuple[str | None, ast.expr]] = [*zip(parameters, positional, strict=False)]
    written += [(keyword.arg, keyword.value) for keyword in keywords]
    values: dict[str, Any] = {}
    for key, value in written:
        try:
            _read_argument(name, key, value, values)
        except RecipeError as problem:
            problems.append(problem)
    for key, parameter in parameters.items():
        if parameter.required and key not in values and len(problems) == num_before:
            example = "'noise', 3" if name == "corrupt" else "15"
            message = f"{name}: needs {key}, for example {name}({example})"
            problems.append(RecipeError(message, code="recipe.missing_key"))
    return Call(name, {key: values.get(key, spec.default) for key, spec in parameters.items()})


def _unknown_operation(node: ast.expr, name: str) -> RecipeError:
    if not name:
        return RecipeError(
            f"pipeline: {_source(node)} is not an operation; write name or name(argument=value)",
            code="recipe.syntax",
        )
    return RecipeError(
        f"pipeline: unknown operation '{name}'{nearest(name, OPERATIONS)} "
        f"Known: {', '.join(OPERATIONS)}",
        code="recipe.unknown_name",
    )


def _read_argument(name: str, key: str | None, node: ast.expr, values: dict[str, Any]) -> None:
    """Check one argument of an operation and put it into `values`. Raises: RecipeError."""
    parameters = OPERATIONS[name].parameters
    if key is None:
        message = f"{name}: ** is not allowed; write each argument out"
        raise RecipeError(message, code="recipe.syntax")
    if key not in parameters:
        known = ", ".join(parameters) or "none"
        raise RecipeError(
            f"{name}: unknown argument '{key}'{nearest(key, parameters)} Known: {known}",
            code="recipe.unknown_key",
        )
    if key in values:
        raise RecipeError(f"{name}: argument {key} is given twice", code="recipe.duplicate_key")
    try:
        value = ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        raise RecipeError(
            f"{name}: {key} must be a plain number, tuple or quoted word, not {_source(node)}",
            code="recipe.syntax",
        ) from None
    try:
        values[key] = _check(value, parameters[key])
    except ValueError as error:
        message = f"{name}: {key}={_short(value)} {error}"
        raise RecipeError(message, code="recipe.wrong_value") from None


def _check(value: Any, parameter: Parameter) -> Any:
    """Return the value in its final type. Raises: ValueError with the end of a message."""
    if parameter.kind == "choice":
        return _check_choice(value, parameter)
    if value is None and parameter.default is None and not parameter.required:
        return None
    low, high = parameter.low, parameter.high
    within = f"at least {low:g}" if high == math.inf else f"from {low:g} to {high:g}"
    integer = parameter.kind in ("size", "integer")
    one = "a whole number" if integer else "a number"
    if isinstance(value, (tuple, list)):
        if parameter.kind in ("number", "integer"):
            raise ValueError(f"must be {one} {within}")
        if len(value) != 2 or not all(_is_number(x, integer, low, high) for x in value):
            single = "" if parameter.kind == "pair" else f"{one} or "
            raise ValueError(f"must be {single}two of them {within}")
        if parameter.kind != "size" and value[0] > value[1]:
            raise ValueError("must have its smaller number first")
        if parameter.kind == "pair" and value[1] <= 0:
            raise ValueError("must have a second number above 0")
        return tuple(value)
    if parameter.kind == "pair":
        raise ValueError(f"must be two numbers {within}, such as {parameter.default}")
    # a spread written as one number is the half-width of a symmetric range
    floor = 0.0 if parameter.kind == "spread" else low
    if not _is_number(value, integer, floor, high):
        bounds = within if floor == low else f"from 0 to {high:g}"
        raise ValueError(f"must be {one} {bounds}")
    return value


def _check_choice(value: Any, parameter: Parameter) -> Any:
    may_be_left_out = parameter.default is None and not parameter.required
    if value in parameter.choices or (value is None and may_be_left_out):
        return value
    choices = parameter.choices
    raise ValueError(f"must be one of {', '.join(choices)}{nearest(str(value), choices)}")


def _is_number(value: Any, integer: bool, low: float, high: float) -> bool:
    kinds = (int,) if integer else (int, float)
    return isinstance(value, kinds) and not isinstance(value, bool) and low <= value <= high


def _check_order(calls: list[Call], *, train: bool) -> None:
    """Refuse operations that cannot run in the order written. Raises: RecipeError."""
    stages = {"geometry": 0, "pixels": 0, "normalise": 1, "erase": 2, "mix": 3}
    for call, following in itertools.pairwise(calls):
        if stages[following.operation.role] < stages[call.operation.role]:
            raise RecipeError(
                f"pipeline: {following.name} cannot come after {call.name}; the order is "
                "geometry and colour, normalise, random_erasing, mixup and cutmix",
                code="recipe.conflict",
            )
    names = [call.name for call in calls]
    for name in ("normalise", "mixup", "cutmix"):
        if names.count(name) > 1:
            message = f"pipeline: {name} is written {names.count(name)} times; keep one"
            raise RecipeError(message, code="recipe.duplicate_key")
    for call in calls:
        if call.name == "rand_augment":
            magnitude, bins = call.arguments["magnitude"], call.arguments["num_magnitude_bins"]
            if magnitude >= bins:
                raise RecipeError(
                    f"rand_augment: magnitude={magnitude} must be below num_magnitude_bins={bins}",
                    code="recipe.conflict",
                )
    random = [call.name for call in calls if call.operation.random]
    if train and "corrupt" in random:
        raise RecipeError(
            "pipeline: corrupt is not for training; remove it, and measure the trained model with "
            "finetune eval --corrupt",
            code="recipe.conflict",
        )
    if not train and {*random} - {"corrupt"}:
        raise RecipeError(
            f"pipeline: {', '.join(random)} is random and this pipeline must give the same image "
            "each time; use resize and center_crop",
            code="recipe.conflict",
        )


def _source(node: ast.expr) -> str:
    try:
        return _short(ast.unparse(node), quote=False)
    except RecursionError:
        return "this expression"


def _short(value: object, quote: bool = True) -> str:
    text = repr(value) if quote else str(value)
    return text if len(text) <= 60 else text[:57] + "..."
