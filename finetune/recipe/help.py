"""Help on recipe keys: text for `finetune recipes help`, and the JSON schema for editors."""

from __future__ import annotations

import types
import typing
from collections.abc import Iterator
from typing import Any, Literal

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from finetune.errors import RecipeError, did_you_mean
from finetune.recipe.aliases import alias_hint
from finetune.recipe.schema import Recipe
from finetune.recipe.validate import section_class
from finetune.transforms.operations import OPERATIONS, format_operations_help, format_signature

__all__ = ["explain_topic", "format_keys_help", "json_schema", "list_keys"]

_TYPE_NAMES = {
    int: "whole number",
    float: "number",
    str: "text",
    bool: "true or false",
    dict: "mapping",
}


def json_schema() -> dict[str, Any]:
    """Return the JSON schema of a recipe, for autocompletion in editors."""
    schema = Recipe.model_json_schema()
    schema.pop("title", None)
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "finetune recipe",
        **schema,
    }


def explain_topic(topic: str = "") -> tuple[list[dict[str, Any]], str]:
    """Explain a section, a key or a transform operation.

    Args:
        topic: a section, section.key, or the name of a transform operation; empty for all keys.
    Returns: a list of dicts for JSON output, and the same as text for a terminal.
    Raises: RecipeError for an unknown topic.
    """
    name = topic.strip()
    for prefix in ("data.train.", "data.eval."):
        name = name.removeprefix(prefix)
    operation = OPERATIONS.get(name)
    if operation is None:
        return list_keys(topic), format_keys_help(topic)
    signature = format_signature(name)
    row = {"operation": name, "signature": signature, "description": operation.help}
    text = (
        f"{signature}\n    {operation.help}\n\nThis is a transform operation; data.train and "
        "data.eval join operations by ' | '.\nAll operations: finetune recipes help data.train"
    )
    return [row], text


def list_keys(topic: str = "") -> list[dict[str, Any]]:
    """List keys with their types, defaults and descriptions.

    Args:
        topic: a section or section.key; empty for all keys.
    Raises: RecipeError for an unknown section or key.
    """
    rows: list[dict[str, Any]] = []
    for section, field in Recipe.model_fields.items():
        for name, inner in _iter_keys(section, field):
            rows.append(
                {
                    "section": section,
                    "key": name,
                    "type": _type_name(inner.annotation),
                    "required": inner.is_required(),
                    "default": None if inner.is_required() else inner.get_default(),
                    "description": inner.description,
                }
            )
    wanted = topic.strip().removesuffix(".")
    chosen = [
        row
        for row in rows
        if wanted in ("", row["section"], row["key"], _without_brackets(row["key"]))
    ]
    if not chosen:
        names = [*Recipe.model_fields, *(_without_brackets(row["key"]) for row in rows)]
        by_last_part = {name.rsplit(".", 1)[-1]: name for name in reversed(names)}
        hint = did_you_mean(wanted, [*names, *OPERATIONS])
        if not hint and wanted in by_last_part:
            hint = f"; did you mean '{by_last_part[wanted]}'?"
        hint = alias_hint(wanted.rpartition(".")[2]) or hint
        see = "" if "; see: " in hint else "; see: finetune recipes help"
        raise RecipeError(f"{topic}: no such section or key{hint}{see}", code="recipe.unknown_key")
    return chosen


def format_keys_help(topic: str = "") -> str:
    """Format `list_keys` for a terminal; for data.train and data.eval, append the operations."""
    lines: list[str] = []
    section = None
    rows = list_keys(topic)
    for row in rows:
        if row["section"] != section:
            section = row["section"]
            kind = section_class(Recipe.model_fields[section])
            purpose = (kind.__doc__ or "").strip() if kind else ""
            title = f"{section}: {purpose}" if purpose else section
            lines += ["", title] if lines else [title]
        default = "required" if row["required"] else f"default {_format_default(row['default'])}"
        lines.append(f"  {row['key']}  ({row['type']}; {default})")
        lines.append(f"      {row['description']}")
    if len(rows) == 1 and rows[0]["key"] in ("data.train", "data.eval"):
        title = "Operations, joined by ' | ' in the order in which they run:"
        lines += ["", title, format_operations_help()]
    elif not topic:
        lines += [
            "",
            "Override a key for one run: finetune train RECIPE section.key=value",
            "Image transforms: finetune recipes help data.train",
        ]
    return "\n".join(lines)


def _iter_keys(section: str, field: FieldInfo) -> Iterator[tuple[str, FieldInfo]]:
    """Yield (dotted key, field) for a section; the keys of a nested section follow its own key."""
    brackets = "[]" if typing.get_origin(field.annotation) is tuple else ""
    kind = section_class(field)
    if kind is None and "." not in section:
        yield section, field
    for key, inner in kind.model_fields.items() if kind else ():
        yield f"{section}{brackets}.{key}", inner
        yield from _iter_keys(f"{section}{brackets}.{key}", inner)


def _without_brackets(key: str) -> str:
    return key.replace("[]", "")


def _type_name(annotation: Any) -> str:
    """Describe the type of a field in words, for users."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        return _type_name(arguments[0])
    if origin is Literal:
        return " | ".join(arguments)
    if origin in (typing.Union, types.UnionType):
        return " | ".join(dict.fromkeys(_type_name(argument) for argument in arguments))
    if origin is tuple:
        has_any_length = arguments[-1] is Ellipsis
        inner = [_type_name(argument) for argument in arguments if argument is not Ellipsis]
        return f"list of {inner[0]}" if has_any_length else f"[{', '.join(inner)}]"
    if annotation is type(None):
        return "null"
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return "mapping"
    return _TYPE_NAMES.get(origin or annotation, getattr(annotation, "__name__", str(annotation)))


def _format_default(default: Any) -> str:
    if default is None:
        return "null"
    if isinstance(default, bool):
        return str(default).lower()
    if default in ((), {}):
        return "empty"
    return str(default)
