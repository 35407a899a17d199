"""From plain data to a checked recipe: overrides, and every problem in words with its place.

The keys of a recipe are not known here; they come from the model that is validated and from
`names.py`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any, TypeVar, get_args, get_origin

from pydantic import BaseModel, ValidationError

from finetune.errors import RecipeError, nearest
from finetune.recipe.names import REPLACES, hint_of, key_of
from finetune.recipe.yaml import Document, Key, Place, Problem, parse_value

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
    kinds: dict[str, Any] = {
        name: (*get_args(field.annotation), field.annotation)[0]  # of one that may be null
        for name, field in fields.items()
        if get_origin(field.annotation) is not tuple
    }
    return {
        name: kind
        for name, kind in kinds.items()
        if isinstance(kind, type) and issubclass(kind, BaseModel)
    }


def apply_override(document: Document, override: str, recipe: type[BaseModel]) -> None:
    """Put one `section.key=value` into a document, or add a problem to it.

    Args:
        document: the recipe so far; changed in place.
        override: as written on the command line.
        recipe: the model that has the sections.
    """
    name, equals, text = override.partition("=")
    parts = tuple(part.strip() for part in name.split("."))
    shown = override.encode("utf-8", "backslashreplace").decode()
    place = Place(f"override '{shown}'", float("inf"))

    def report(problem: str, code: str) -> None:
        document.problems.append(Problem(place.order, f"{place.where}: {problem}", code))

    if shown != override:
        return report("not UTF-8 text; write it as UTF-8", "recipe.syntax")
    if not equals or not all(parts):
        return report("expected section.key=value, for example optim.lr=1e-3", "recipe.syntax")
    if len(parts) == 1:
        return report(_without_section(parts[0], text, recipe), "recipe.unknown_key")
    if parts[0] in recipe.model_fields and parts[0] not in sections_of(recipe):
        problem = f"{parts[0]} is not changed from the command line; edit the file"
        return report(problem, "recipe.unknown_key")
    try:
        value = parse_value(text)
    except RecipeError as error:
        return report(f"{'.'.join(parts)}: {str(error).removeprefix('value:1: ')}", error.code)
    parent: Any = document.tree
    for depth, part in enumerate(parts[:-1], start=1):
        if parent.get(part) is None:
            document.places.setdefault(parts[:depth], place)
            parent[part] = {}
        parent = parent[part]
        if not isinstance(parent, dict):
            dotted = ".".join(parts[:depth])
            problem = f"{dotted} holds one value; it has no keys below it, set it whole"
            return report(problem, "recipe.unknown_key")
    _forget(document, parts)
    document.places[parts] = replace(place, text=text.strip())
    parent[parts[-1]] = value
    if value is not None and (other := REPLACES.get(parts)):
        _forget(document, other)
        parent.pop(other[-1], None)


def _forget(document: Document, parts: tuple[str, ...]) -> None:
    """Remove the places and problems of a value that is replaced."""
    for key in [key for key in document.places if key[: len(parts)] == parts]:
        del document.places[key]
    document.broken = {key for key in document.broken if key[: len(parts)] != parts}


def refuse_undone(overrides: Iterable[str]) -> None:
    """Refuse a command line on which one override undoes an earlier one.

    Raises: RecipeError naming both.
    """
    earlier: dict[tuple[str, ...], str] = {}
    for override in overrides:
        parts = tuple(part.strip() for part in override.partition("=")[0].split("."))
        replaced = None if _is_null(override) else REPLACES.get(parts)
        for key, undone in earlier.items():
            if key[: len(parts)] == parts or (key == replaced and not _is_null(undone)):
                raise RecipeError(
                    f"override '{override}': undoes '{undone}', given before it; keep one",
                    code="recipe.conflict",
                )
        earlier[parts] = override


def _is_null(override: str) -> bool:
    return override.partition("=")[2].strip().lower() in ("", "~", "null")


def validate(document: Document, recipe: type[T]) -> T:
    """Turn a document into a recipe.

    Args:
        document: the plain data with its places and the problems found so far.
    Raises: RecipeError with one line for every problem, from the top of the file to the bottom, and
        the code of the first.
    """
    result: T | None = None
    failed: set[Key] = set()
    try:
        result = recipe.model_validate(document.tree)
    except ValidationError as error:
        details = error.errors(include_url=False)
        parents = {tuple(d["loc"][:end]) for d in details for end in range(len(d["loc"]))}
        # To pydantic, a list whose items are wrong is too short as well.
        details = [d for d in details if d["type"] != "too_short" or d["loc"] not in parents]
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
        problems = sorted(document.problems, key=lambda problem: problem.order)
        lines = dict.fromkeys(problem.text for problem in problems)
        raise RecipeError("\n".join(lines), code=problems[0].code)
    return result


def _report_unknown(document: Document, details: list[Any], recipe: type[BaseModel]) -> set[Key]:
    """Report unknown keys. Returns: the keys that were probably meant."""
    meant: set[Key] = set()
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
        elif other := hint_of(name):
            hint = other
            meant |= {known_key} if (known_key := key_of(name)) else set()
        elif hint:
            meant.add((*key[:-1], hint.split("'")[1]))
        else:
            hint = _nearest_anywhere(name, sections) or f"; known: {', '.join(known)}"
        kind = "section" if len(key) == 1 else "key"
        document.report(key, f"unknown {kind}{hint}", code="recipe.unknown_key")
    return meant


def _report_missing(document: Document, key: Key, recipe: type[BaseModel]) -> None:
    if len(key) == 1:
        problem = f"missing section; see: finetune recipes help {key[0]}"
    else:
        field = _model_at(key[:-1], recipe).model_fields[str(key[-1])]
        problem = f"missing: {field.description}"
    document.report(key, problem, code="recipe.missing_key")


def _report_value(document: Document, key: Key, detail: Any) -> None:
    while key and not _has_value(document.tree, key):
        key = key[:-1]  # pydantic adds the type of a value to its path
    if document.is_broken(key):
        return
    kind, context, value = detail["type"], detail.get("ctx", {}), detail["input"]
    written = document.places[key].text if key in document.places else None
    if kind == "recipe":
        for line in str(context["message"]).splitlines():
            document.report(key, line.removeprefix("pipeline: "), code=context["code"])
        return
    choices: list[str] = []
    if kind == "expected":
        expected = context["expected"]
    elif kind == "literal_error":
        expected = context["expected"]
        choices = re.findall(r"'([^']*)'", expected)
    elif kind in _BOUNDS:
        # a whole bound is written in full: 4294967296, not 4.29497e+09
        bound = {name: f"{int(x) if x == int(x) else x}" for name, x in context.items()}
        expected = "a number " + _BOUNDS[kind].format(**bound)
    else:
        expected = _KINDS.get(kind, detail["msg"])
    hint = nearest(value, choices) if isinstance(value, str) else ""
    is_textual = bool(choices) or expected.startswith(("text", "'"))
    if isinstance(value, (bool, int, float)) and is_textual:
        hint = f"; quote it to mean text: '{written or value}'"
    problem = f"expected {expected}, got {_shown(value, written)}{hint}"
    document.report(key, problem, code="recipe.wrong_value")


def _report_conflicts(document: Document, recipe: type[BaseModel], failed: set[Key]) -> None:
    """Report values that do not go together; each of these values is right by itself."""
    tree = document.tree
    for path, values in _sections_in((), tree, recipe):
        model: Any = _model_at(path, recipe)
        depth = len(path)
        wrong = {key[depth] for key in failed if len(key) > depth and key[:depth] == path}
        wrong |= {key for key in values if document.is_broken((*path, key))}
        right = {key: value for key, value in values.items() if key not in wrong}
        for key, involved, problem in model.conflicts(right):
            if not involved & wrong:
                document.report((*path, key), problem, code="recipe.conflict")


def _sections_in(path: Key, values: Any, model: Any) -> Iterator[tuple[Key, dict[str, Any]]]:
    """A document's sections, those inside of others, too, and what stands in lists of them."""
    if isinstance(values, dict):
        yield path, values
        for name, field in model.model_fields.items():
            inner, kind = values.get(name), (*get_args(field.annotation), field.annotation)[0]
            if not isinstance(kind, type) or not issubclass(kind, BaseModel):
                continue
            if get_origin(field.annotation) is not tuple:
                yield from _sections_in((*path, name), inner, kind)
            elif isinstance(inner, list):
                for index, item in enumerate(inner):
                    yield from _sections_in((*path, name, index), item, kind)


def _without_section(name: str, text: str, recipe: type[BaseModel]) -> str:
    sections = sections_of(recipe)
    if name in sections:
        key = next(iter(sections[name].model_fields))
        return f"{name} is a whole section; set its keys one by one: '{name}.{key}=…'"
    if name in recipe.model_fields:
        return f"{name} is not changed from the command line; edit the file"
    homes = [section for section, model in sections.items() if name in model.model_fields]
    if homes:
        choices = " or ".join(f"'{home}.{name}={text}'" for home in homes)
        return f"no section; did you mean {choices}?"
    hint = hint_of(name, text) or _nearest_anywhere(name, sections)
    hint = hint or nearest(name, recipe.model_fields)
    return f"unknown key '{name}', and no section{hint}"


def _nearest_anywhere(name: str, sections: dict[str, type[BaseModel]]) -> str:
    keys = {key: section for section, model in sections.items() for key in model.model_fields}
    hint = nearest(name, keys)
    return hint.replace("'", f"'{keys[hint.split(chr(39))[1]]}.", 1) if hint else ""


def _model_at(key: Key, recipe: type[BaseModel]) -> type[BaseModel]:
    """Find the model of a section, or of one item of a list of sections."""
    for part in key:
        if isinstance(part, str):  # else the place in a list of sections
            kind: Any = recipe.model_fields[part].annotation
            while get_origin(kind):  # a list of sections, one that may be null
                kind = get_args(kind)[0]
            recipe = kind
    return recipe


def _has_value(tree: Any, key: Key) -> bool:
    for part in key:
        children = dict(enumerate(tree)) if isinstance(tree, list) else tree
        if not isinstance(children, dict) or part not in children:
            return False
        tree = children[part]
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
