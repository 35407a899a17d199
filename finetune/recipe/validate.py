"""From plain data to a checked recipe: overrides, and every problem in words with its place.

Nothing here knows the keys of a recipe; the sections are given by the model that is validated.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any, TypeVar, get_args, get_origin

from pydantic import BaseModel, ValidationError

from finetune.errors import RecipeError, nearest
from finetune.recipe.yaml import Document, Key, Place, parse_value

__all__ = ["apply_override", "refuse_undone", "sections_of", "validate"]

T = TypeVar("T", bound=BaseModel)

_BOUNDS = {
    "greater_than": "above {gt}",
    "greater_than_equal": "of at least {ge}",
    "less_than": "below {lt}",
    "less_than_equal": "of at most {le}",
}
_KINDS = {
    "bool_type": "true or false",
    "model_type": "a mapping of keys",
    "model_attributes_type": "a mapping of keys",
    "dict_type": "a mapping",
    "list_type": "a list",
    "tuple_type": "a list",
}


def sections_of(recipe: type[BaseModel]) -> dict[str, type[BaseModel]]:
    """Return the sections that are mappings, by name."""
    fields = recipe.model_fields
    kinds = {name: field.annotation for name, field in fields.items()}
    return {
        name: kind
        for name, kind in kinds.items()
        if not get_origin(kind) and isinstance(kind, type) and issubclass(kind, BaseModel)
    }


def apply_override(document: Document, override: str, recipe: type[BaseModel]) -> None:
    """Put one `section.key=value` into a document; what is wrong with it is added to its problems.

    Args:
        document: the recipe so far; changed in place.
        override: as written on the command line.
        recipe: the model that knows the sections.
    """
    written, equals, text = override.partition("=")
    parts = tuple(part.strip() for part in written.split("."))
    shown = override.encode("utf-8", "backslashreplace").decode()
    where = f"override '{shown}'"
    sections = sections_of(recipe)

    def report(problem: str) -> None:
        document.problems.append((float("inf"), f"{where}: {problem}"))

    if shown != override:
        return report("not UTF-8 text; write it as UTF-8")
    if not equals or not all(parts):
        return report("expected section.key=value, for example optim.lr=1e-3")
    if len(parts) == 1:
        return report(_without_section(parts[0], text, recipe))
    if parts[0] in recipe.model_fields and parts[0] not in sections:
        return report(f"{parts[0]} is not changed from the command line; edit the file")
    try:
        value = parse_value(text)
    except RecipeError as error:
        return report(f"{'.'.join(parts)}: {str(error).removeprefix('value:1: ')}")
    holder: Any = document.tree
    for depth, part in enumerate(parts[:-1], start=1):
        if holder.get(part) is None:
            document.places.setdefault(parts[:depth], Place(where, float("inf")))
            holder[part] = {}
        holder = holder[part]
        if not isinstance(holder, dict):
            return report(
                f"{'.'.join(parts[:depth])} holds one value; it has no keys below it, set it whole"
            )
    for key in [key for key in document.places if key[: len(parts)] == parts]:
        del document.places[key]  # what stood there before is gone, and its places with it
    document.broken = {key for key in document.broken if key[: len(parts)] != parts}
    document.places[parts] = Place(where, float("inf"), text.strip())
    holder[parts[-1]] = value


def refuse_undone(overrides: Iterable[str]) -> None:
    """Refuse overrides of one command line of which a later one undoes an earlier one.

    Raises: RecipeError naming both.
    """
    given: dict[tuple[str, ...], str] = {}
    for override in overrides:
        parts = tuple(part.strip() for part in override.partition("=")[0].split("."))
        for earlier, written in given.items():
            if earlier[: len(parts)] == parts:
                raise RecipeError(
                    f"override '{override}': undoes '{written}', given before it; keep one"
                )
        given[parts] = override


def validate(document: Document, recipe: type[T]) -> T:
    """Turn a document into a recipe.

    Args:
        document: the plain data with its places and the problems found so far.
        recipe: the model to build.
    Raises: RecipeError with one line for every problem, from the top of the file to the bottom.
    """
    result: T | None = None
    failed: set[Key] = set()
    try:
        result = recipe.model_validate(document.tree)
    except ValidationError as error:
        details = error.errors(include_url=False)
        failed = {tuple(detail["loc"]) for detail in details if detail["type"] != "conflict"}
        meant = _report_unknown(document, details, recipe)
        for detail in details:
            key = tuple(detail["loc"])
            if detail["type"] == "missing" and not meant & {key, key[:1]}:
                _report_missing(document, key, recipe)
            elif detail["type"] not in ("missing", "extra_forbidden", "conflict"):
                _report_value(document, key, detail)
        _report_conflicts(document, recipe, failed)
    if document.problems or result is None:
        lines = [text for _, text in sorted(document.problems, key=lambda item: item[0])]
        raise RecipeError("\n".join(dict.fromkeys(lines)))
    return result


def _report_unknown(document: Document, details: list[Any], recipe: type[BaseModel]) -> set[Key]:
    """Report the unknown keys; return the keys that were probably meant."""
    meant = set()
    for detail in details:
        if detail["type"] != "extra_forbidden":
            continue
        key = tuple(detail["loc"])
        name = str(key[-1])
        known = list(_model_at(key[:-1], recipe).model_fields)
        sections = sections_of(recipe)
        homes = [s for s, model in sections.items() if name in model.model_fields and s != key[0]]
        hint = nearest(name, known)
        if homes:
            hint = f"; it belongs to {homes[0]}: '{homes[0]}.{name}'"
        elif hint:
            meant.add((*key[:-1], hint.split("'")[1]))
        else:
            hint = _nearest_anywhere(name, sections) or f"; known: {', '.join(known)}"
        document.report(key, f"unknown {'section' if len(key) == 1 else 'key'}{hint}")
    return meant


def _report_missing(document: Document, key: Key, recipe: type[BaseModel]) -> None:
    field = _model_at(key[:-1], recipe).model_fields[str(key[-1])]
    if len(key) == 1:
        document.report(key, f"missing section; see: finetune recipes help {key[0]}")
    else:
        document.report(key, f"missing: {field.description}")


def _report_value(document: Document, key: Key, detail: Any) -> None:
    while key and not _is_there(document.tree, key):
        key = key[:-1]  # a kind of the value, which pydantic adds to the way to it
    if document.is_broken(key):
        return
    kind, context, value = detail["type"], detail.get("ctx", {}), detail["input"]
    written = document.place(key).text
    if kind == "sentence":
        for line in str(context["cause"]).splitlines():
            document.report(key, line.removeprefix("pipeline: "))
        return
    choices: list[str] = []
    if kind == "expected":
        what = context["what"]
    elif kind == "literal_error":
        what = context["expected"]
        choices = re.findall(r"'([^']*)'", what)
    elif kind in _BOUNDS:
        # a whole bound is written in full: 4294967296, not 4.29497e+09
        bound = {name: f"{int(x) if x == int(x) else x}" for name, x in context.items()}
        what = "a number " + _BOUNDS[kind].format(**bound)
    else:
        what = _KINDS.get(kind, detail["msg"])
    hint = nearest(value, choices) if isinstance(value, str) else ""
    textual = bool(choices) or what.startswith(("text", "'"))
    if isinstance(value, (bool, int, float)) and textual:
        hint = f"; quote it to mean text: '{written or value}'"
    document.report(key, f"expected {what}, got {_shown(value, written)}{hint}")


def _report_conflicts(document: Document, recipe: type[BaseModel], failed: set[Key]) -> None:
    """Report values that do not go together, wherever all the values that take part are right."""
    tree = document.tree
    parts: list[tuple[Key, Any]] = [((name,), tree.get(name)) for name in sections_of(recipe)]
    for name in set(recipe.model_fields) - set(sections_of(recipe)):
        items = tree.get(name)
        if isinstance(items, list):
            parts += [((name, index), item) for index, item in enumerate(items)]
    for at, values in parts:
        if not isinstance(values, dict):
            continue
        model: Any = _model_at(at, recipe)
        wrong = {key[len(at)] for key in failed if len(key) > len(at) and key[: len(at)] == at}
        wrong |= {key for key in values if document.is_broken((*at, key))}
        right = {key: value for key, value in values.items() if key not in wrong}
        for key, taking_part, problem in model.conflicts(right):
            if not taking_part & wrong:
                document.report((*at, key), problem)


def _without_section(name: str, text: str, recipe: type[BaseModel]) -> str:
    sections = sections_of(recipe)
    if name in sections:
        key = next(iter(sections[name].model_fields))
        return f"{name} is a whole section; set its keys one by one: '{name}.{key}=…'"
    if name in recipe.model_fields:
        return f"{name} is not changed from the command line; edit the file"
    homes = [section for section, model in sections.items() if name in model.model_fields]
    if homes:
        found = " or ".join(f"'{home}.{name}={text}'" for home in homes)
        return f"no section; did you mean {found}?"
    hint = _nearest_anywhere(name, sections) or nearest(name, recipe.model_fields)
    return f"unknown key '{name}', and no section{hint}"


def _nearest_anywhere(name: str, sections: dict[str, type[BaseModel]]) -> str:
    keys = {key: section for section, model in sections.items() for key in model.model_fields}
    found = nearest(name, keys)
    return found.replace("'", f"'{keys[found.split(chr(39))[1]]}.", 1) if found else ""


def _model_at(key: Key, recipe: type[BaseModel]) -> type[BaseModel]:
    """Find the model of a section, or of one item of a list of sections."""
    if not key:
        return recipe
    kind: Any = recipe.model_fields[str(key[0])].annotation
    return get_args(kind)[0] if get_origin(kind) else kind


def _is_there(tree: Any, key: Key) -> bool:
    for part in key:
        known = (
            tree if isinstance(tree, dict) else range(len(tree) if isinstance(tree, list) else 0)
        )
        if part not in known:
            return False
        tree = tree[part]
    return True


def _shown(value: Any, written: str | None) -> str:
    """Show a value as it was written, with what YAML made of it where that may surprise."""
    if value is None:
        return "nothing"
    if isinstance(value, dict):
        return "a mapping"
    if isinstance(value, bool):
        return f"{written or str(value).lower()}, which YAML reads as a boolean"
    text = repr(value) if not isinstance(value, (list, tuple)) else str(list(value))
    return text if len(text) <= 60 else text[:57] + "..."
