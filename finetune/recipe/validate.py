"""Validate recipe data with pydantic, apply overrides, and explain every problem.

This module does not depend on the recipe schema: it takes all keys from the pydantic model that the
caller passes, and from `aliases.py`.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any, TypeVar, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from finetune.errors import RecipeError, did_you_mean, redact_secrets
from finetune.recipe.aliases import MUTUALLY_EXCLUSIVE_KEYS, alias_hint, resolve_alias
from finetune.recipe.strict_yaml import KeyPath, Problem, SourceLocation, YamlDocument, parse_value

__all__ = [
    "apply_override",
    "check_override_conflicts",
    "section_class",
    "section_classes",
    "validate_document",
]

T = TypeVar("T", bound=BaseModel)

_BOUNDS = {
    "greater_than": "above {gt}",
    "greater_than_equal": "of at least {ge}",
    "less_than": "below {lt}",
    "less_than_equal": "of at most {le}",
}
_TYPE_NAMES = {
    "bool_type": "true or false",
    "model_type": "a mapping of keys",
    "model_attributes_type": "a mapping of keys",
    "dict_type": "a mapping",
    "list_type": "a list",
    "tuple_type": "a list",
}


def section_class(field: FieldInfo) -> type[BaseModel] | None:
    """Return the section class of a field or of its list items; None for a plain value."""
    kind: Any = field.annotation
    while arguments := get_args(kind):  # tuple[Section, ...] | None: take Section
        kind = arguments[0]
    return kind if isinstance(kind, type) and issubclass(kind, BaseModel) else None


def section_classes(recipe_class: type[BaseModel]) -> dict[str, type[BaseModel]]:
    """Return {name: class} of all sections, except those that are lists of sections."""
    return {
        name: kind
        for name, field in recipe_class.model_fields.items()
        if (kind := section_class(field)) and get_origin(field.annotation) is not tuple
    }


def apply_override(
    document: YamlDocument,
    override: str,
    recipe_class: type[BaseModel],
    *,
    location: SourceLocation | None = None,
) -> None:
    """Apply one override `section.key=value` to a document; if invalid, add a problem instead.

    Args:
        document: the parsed recipe; changed in place.
        override: the override as written on the command line.
        recipe_class: the pydantic model of the recipe.
        location: where it was written; None for the command line.
    """
    name, equals, text = override.partition("=")
    parts = tuple(part.strip() for part in name.split("."))
    printable = override.encode("utf-8", "backslashreplace").decode()
    location = location or SourceLocation(f"override '{printable}'", float("inf"))

    def report(problem: str, code: str) -> None:
        document.problems.append(Problem(location.sort_key, f"{location.label}: {problem}", code))

    if printable != override:
        return report("not UTF-8 text; write it as UTF-8", "recipe.syntax")
    if not equals or not all(parts):
        return report("expected section.key=value, for example optim.lr=1e-3", "recipe.syntax")
    if parts[0] in recipe_class.model_fields and parts[0] not in section_classes(recipe_class):
        problem = f"{parts[0]} cannot be changed on the command line; edit the file"
        return report(problem, "recipe.unknown_key")
    if len(parts) == 1:
        return report(
            _explain_key_without_section(parts[0], text, recipe_class), "recipe.unknown_key"
        )
    try:
        value = parse_value(text)
    except RecipeError as error:
        return report(f"{'.'.join(parts)}: {str(error).removeprefix('value:1: ')}", error.code)
    parent: Any = document.data
    for depth, part in enumerate(parts[:-1], start=1):
        if parent.get(part) is None:
            document.locations.setdefault(parts[:depth], location)
            parent[part] = {}
        parent = parent[part]
        if not isinstance(parent, dict):
            dotted = ".".join(parts[:depth])
            problem = f"{dotted} is a single value without keys; set it as a whole"
            return report(problem, "recipe.unknown_key")
    _discard_value(document, parts)
    document.locations[parts] = replace(location, raw_text=text.strip())
    parent[parts[-1]] = value
    if value is not None and (other := MUTUALLY_EXCLUSIVE_KEYS.get(parts)):
        _discard_value(document, other)
        parent.pop(other[-1], None)


def _discard_value(document: YamlDocument, parts: tuple[str, ...]) -> None:
    """Forget the locations and reported keys of a value that an override replaces."""
    for key in [key for key in document.locations if key[: len(parts)] == parts]:
        del document.locations[key]
    document.reported_keys = {key for key in document.reported_keys if key[: len(parts)] != parts}


def check_override_conflicts(overrides: Iterable[str]) -> None:
    """Check that no override on a command line replaces an earlier one.

    Raises: RecipeError naming both overrides.
    """
    earlier: dict[tuple[str, ...], str] = {}
    for override in overrides:
        parts = tuple(part.strip() for part in override.partition("=")[0].split("."))
        replaced = None if _is_null_override(override) else MUTUALLY_EXCLUSIVE_KEYS.get(parts)
        for key, earlier_override in earlier.items():
            if key[: len(parts)] == parts or (
                key == replaced and not _is_null_override(earlier_override)
            ):
                raise RecipeError(
                    f"override '{override}': replaces the earlier '{earlier_override}'; keep one",
                    code="recipe.conflict",
                )
        earlier[parts] = override


def _is_null_override(override: str) -> bool:
    return override.partition("=")[2].strip().lower() in ("", "~", "null")


def validate_document(document: YamlDocument, recipe_class: type[T]) -> T:
    """Validate a document and return the recipe.

    Args:
        document: the parsed recipe with the problems found so far.
        recipe_class: the pydantic model to validate with.
    Raises: RecipeError with one line per problem, in the order of the file, and the code of the
        first problem.
    """
    result: T | None = None
    invalid_keys: set[KeyPath] = set()
    try:
        result = recipe_class.model_validate(document.data)
    except ValidationError as error:
        details = error.errors(include_url=False)
        parents = {tuple(d["loc"][:end]) for d in details for end in range(len(d["loc"]))}
        # pydantic also reports a list with invalid items as too short; drop that error
        details = [d for d in details if d["type"] != "too_short" or d["loc"] not in parents]
        invalid_keys = {tuple(detail["loc"]) for detail in details if detail["type"] != "conflict"}
        intended_keys = _report_unknown_keys(document, details, recipe_class)
        for detail in details:
            key = tuple(detail["loc"])
            if detail["type"] == "missing" and not intended_keys & {key, key[:1]}:
                _report_missing_key(document, key, recipe_class)
            elif detail["type"] not in ("missing", "extra_forbidden", "conflict"):
                _report_wrong_value(document, key, detail)
        _report_conflicts(document, recipe_class, invalid_keys)
    if document.problems or result is None:
        problems = sorted(document.problems, key=lambda problem: problem.sort_key)
        lines = dict.fromkeys(problem.text for problem in problems)
        raise RecipeError("\n".join(lines), code=problems[0].code)
    return result


def _report_unknown_keys(
    document: YamlDocument, details: list[Any], recipe_class: type[BaseModel]
) -> set[KeyPath]:
    """Report unknown keys. Returns: the valid keys that the user probably meant."""
    intended_keys: set[KeyPath] = set()
    for detail in details:
        if detail["type"] != "extra_forbidden":
            continue
        key = tuple(detail["loc"])
        name = str(key[-1])
        valid_names = list(_section_class_at(key[:-1], recipe_class).model_fields)
        sections = section_classes(recipe_class)
        owners = [s for s, model in sections.items() if name in model.model_fields and s != key[0]]
        if owners:
            hint = f"; it belongs to section {owners[0]}: '{owners[0]}.{name}'"
        elif hint := alias_hint(name):
            intended_keys |= {known_key} if (known_key := resolve_alias(name)) else set()
        elif close := difflib.get_close_matches(name, valid_names, n=1):
            hint = f"; did you mean '{close[0]}'?"
            intended_keys.add((*key[:-1], close[0]))
        else:
            hint = _suggest_key_of_any_section(name, sections)
            hint = hint or f"; known: {', '.join(valid_names)}"
        kind = "section" if len(key) == 1 else "key"
        document.add_problem(key, f"unknown {kind}{hint}", code="recipe.unknown_key")
    return intended_keys


def _report_missing_key(
    document: YamlDocument, key: KeyPath, recipe_class: type[BaseModel]
) -> None:
    if len(key) == 1:
        problem = f"missing section; see: finetune recipes help {key[0]}"
    else:
        field = _section_class_at(key[:-1], recipe_class).model_fields[str(key[-1])]
        problem = f"missing: {field.description}"
    document.add_problem(key, problem, code="recipe.missing_key")


def _report_wrong_value(document: YamlDocument, key: KeyPath, detail: Any) -> None:
    while key and not _has_value(document.data, key):
        key = key[:-1]  # for unions, pydantic appends the type to the path
    if document.is_reported(key):
        return
    kind, context, value = detail["type"], detail.get("ctx", {}), detail["input"]
    written = document.locations[key].raw_text if key in document.locations else None
    if kind == "recipe":
        for line in str(context["message"]).splitlines():
            document.add_problem(key, line.removeprefix("pipeline: "), code=context["code"])
        return
    choices: list[str] = []
    if kind == "expected":
        expected = context["expected"]
    elif kind == "literal_error":
        expected = context["expected"]
        choices = re.findall(r"'([^']*)'", expected)
    elif kind in _BOUNDS:
        # format integer bounds in full: 4294967296, not 4.29497e+09
        bound = {name: f"{int(x) if x == int(x) else x}" for name, x in context.items()}
        expected = "a number " + _BOUNDS[kind].format(**bound)
    else:
        expected = _TYPE_NAMES.get(kind, detail["msg"])
    hint = did_you_mean(value, choices) if isinstance(value, str) else ""
    is_textual = bool(choices) or expected.startswith(("text", "'"))
    if isinstance(value, (bool, int, float)) and is_textual:
        hint = f"; quote it to mean text: '{written or value}'"
    problem = f"expected {expected}, got {_format_value(value, written)}{hint}"
    document.add_problem(key, problem, code="recipe.wrong_value")


def _report_conflicts(
    document: YamlDocument, recipe_class: type[BaseModel], failed: set[KeyPath]
) -> None:
    """Report conflicts between keys whose values are valid on their own."""
    data = document.data
    for path, values in _iter_sections((), data, recipe_class):
        model: Any = _section_class_at(path, recipe_class)
        depth = len(path)
        invalid = {key[depth] for key in failed if len(key) > depth and key[:depth] == path}
        invalid |= {key for key in values if document.is_reported((*path, key))}
        valid = {key: value for key, value in values.items() if key not in invalid}
        for key, involved, problem in model.conflicts(valid):
            if not involved & invalid:
                document.add_problem((*path, key), problem, code="recipe.conflict")


def _iter_sections(
    path: KeyPath, values: Any, model: Any
) -> Iterator[tuple[KeyPath, dict[str, Any]]]:
    """Yield (path, values) of all sections, including nested sections and items of lists."""
    if isinstance(values, dict):
        yield path, values
        for name, field in model.model_fields.items():
            inner, kind = values.get(name), section_class(field)
            if kind is None:
                continue
            if get_origin(field.annotation) is not tuple:
                yield from _iter_sections((*path, name), inner, kind)
            elif isinstance(inner, list):
                for index, item in enumerate(inner):
                    yield from _iter_sections((*path, name, index), item, kind)


def _explain_key_without_section(name: str, text: str, recipe_class: type[BaseModel]) -> str:
    sections = section_classes(recipe_class)
    if name in sections:
        key = next(iter(sections[name].model_fields))
        return f"{name} is a section; set its keys one by one: '{name}.{key}=…'"
    owners = [section for section, model in sections.items() if name in model.model_fields]
    if owners:
        choices = " or ".join(f"'{home}.{name}={text}'" for home in owners)
        return f"the section is missing; did you mean {choices}?"
    hint = alias_hint(name, text) or _suggest_key_of_any_section(name, sections)
    hint = hint or did_you_mean(name, recipe_class.model_fields)
    return f"unknown key '{name}' without a section{hint}"


def _suggest_key_of_any_section(name: str, sections: dict[str, type[BaseModel]]) -> str:
    keys = {key: section for section, model in sections.items() for key in model.model_fields}
    close = difflib.get_close_matches(name, keys, n=1)
    return f"; did you mean '{keys[close[0]]}.{close[0]}'?" if close else ""


def _section_class_at(key: KeyPath, recipe_class: type[BaseModel]) -> type[BaseModel]:
    """Return the class of the section at `key`, or of one item in a list of sections."""
    for part in key:
        if isinstance(part, str):  # not an index into a list of sections
            kind = section_class(recipe_class.model_fields[part])
            assert kind is not None, f"{key} is not a section"
            recipe_class = kind
    return recipe_class


def _has_value(tree: Any, key: KeyPath) -> bool:
    for part in key:
        children = dict(enumerate(tree)) if isinstance(tree, list) else tree
        if not isinstance(children, dict) or part not in children:
            return False
        tree = children[part]
    return True


def _format_value(value: Any, written: str | None) -> str:
    """Format a value for an error message; say that YAML reads yes, no, on and off as booleans."""
    if value is None:
        return "nothing"
    if isinstance(value, dict):
        return "a mapping"
    if isinstance(value, bool):
        return f"{written or str(value).lower()}, which YAML reads as a boolean"
    if isinstance(value, str):  # after "=", a password is recognized, as in KEY=me:word@host
        value = redact_secrets(f"x={value}").removeprefix("x=")
    text = repr(value) if not isinstance(value, (list, tuple)) else str(list(value))
    return text if len(text) <= 60 else text[:57] + "..."
