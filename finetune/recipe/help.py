"""The keys of a recipe, for people (`finetune recipes help`) and for editors (JSON schema)."""

from __future__ import annotations

import types
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from finetune.errors import RecipeError, nearest
from finetune.recipe.load import Recipe, load_recipe
from finetune.recipe.names import hint_of

__all__ = ["help_table", "help_text", "json_schema", "list_folder"]

_NAMES = {int: "whole number", float: "number", str: "text", bool: "true or false", dict: "mapping"}


def json_schema() -> dict[str, Any]:
    """Return the JSON schema of a recipe, in the dialect that editors read."""
    schema = Recipe.model_json_schema()
    schema.pop("title", None)
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "finetune recipe",
        **schema,
    }


def help_table(topic: str = "") -> list[dict[str, Any]]:
    """List keys with their types, defaults and descriptions.

    Args:
        topic: a section, a section.key, or nothing for all keys.
    Raises: RecipeError if there is no such section or key.
    """
    rows: list[dict[str, Any]] = []
    for section, field in Recipe.model_fields.items():
        for name, inner in _keys_of(section, field):
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
    chosen = [row for row in rows if wanted in ("", row["section"], row["key"], _plain(row["key"]))]
    if not chosen:
        names = [*Recipe.model_fields, *(_plain(row["key"]) for row in rows)]
        by_last_part = {name.rsplit(".", 1)[-1]: name for name in reversed(names)}
        hint = nearest(wanted, names)
        if not hint and wanted in by_last_part:
            hint = f"; did you mean '{by_last_part[wanted]}'?"
        hint = hint_of(wanted.rpartition(".")[2]) or hint
        raise RecipeError(
            f"{topic}: no such section or key{hint}; see: finetune recipes help",
            code="recipe.unknown_key",
        )
    return chosen


def help_text(topic: str = "") -> str:
    """Format `help_table` for a terminal; for `data.train` and `data.eval` with the operations."""
    lines: list[str] = []
    section = None
    rows = help_table(topic)
    for row in rows:
        if row["section"] != section:
            section = row["section"]
            purpose = (_model_of(Recipe.model_fields[section]).__doc__ or "").strip()
            lines += ["", f"{section}: {purpose}"] if lines else [f"{section}: {purpose}"]
        default = "required" if row["required"] else f"default {_shown(row['default'])}"
        lines.append(f"  {row['key']}  ({row['type']}; {default})")
        lines.append(f"      {row['description']}")
    if len(rows) == 1 and rows[0]["key"] in ("data.train", "data.eval"):
        from finetune.transforms import operations

        lines += ["", "Operations, joined by ' | ':", operations.help_text()]
    elif not topic:
        lines += [
            "",
            "Change a key for one run: finetune train RECIPE section.key=value",
            "Operations on images: finetune recipes help data.train",
        ]
    return "\n".join(lines)


def list_folder(folder: str | Path) -> list[dict[str, Any]]:
    """Summarise the recipes below a folder; `accelerate/` and plans are no recipes.

    Returns: one row for each file: path, valid, summary, and the recipe's model and source.
    Raises: RecipeError if there is no such folder.
    """
    root = Path(folder)
    if not root.is_dir():
        raise RecipeError(
            f"{folder}: no such folder; run where the recipes are, or: finetune recipes list "
            "FOLDER",
            code="recipe.not_found",
        )
    rows: list[dict[str, Any]] = []
    for path in sorted(root.rglob("*.yaml")):
        if "accelerate" in path.relative_to(root).parts[:-1] or path.name == "plan.yaml":
            continue
        row: dict[str, Any] = {"path": str(path), "valid": False, "model": None, "source": None}
        try:
            recipe = load_recipe(path)
        except RecipeError:
            row["summary"] = f"not valid; see: finetune recipes check {path}"
        else:
            row |= {"valid": True, "model": recipe.model.name, "source": recipe.data.source}
            row["summary"] = f"{recipe.model.name} on {recipe.data.source}"
        rows.append(row)
    return rows


def _keys_of(name: str, field: FieldInfo) -> Iterator[tuple[str, FieldInfo]]:
    """Names and fields of a section, and after each key that is a section itself those in it."""
    listed = "[]" if typing.get_origin(field.annotation) is tuple else ""
    for key, inner in _model_of(field).model_fields.items():
        yield f"{name}{listed}.{key}", inner
        model = _model_of(inner)
        if isinstance(model, type) and issubclass(model, BaseModel):
            yield from _keys_of(f"{name}{listed}.{key}", inner)


def _plain(key: str) -> str:
    return key.replace("[]", "")


def _model_of(field: FieldInfo) -> type[BaseModel]:
    kind: Any = field.annotation
    return typing.get_args(kind)[0] if typing.get_origin(kind) else kind


def _type_name(annotation: Any) -> str:
    """Describe a type in words."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        return _type_name(arguments[0])
    if origin is Literal:
        return " | ".join(arguments)
    if origin in (typing.Union, types.UnionType):
        return " | ".join(dict.fromkeys(_type_name(argument) for argument in arguments))
    if origin is tuple:
        many = arguments[-1] is Ellipsis
        inner = [_type_name(argument) for argument in arguments if argument is not Ellipsis]
        return f"list of {inner[0]}" if many else f"[{', '.join(inner)}]"
    if annotation is type(None):
        return "null"
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return "mapping"
    return _NAMES.get(origin or annotation, getattr(annotation, "__name__", str(annotation)))


def _shown(default: Any) -> str:
    if default is None:
        return "null"
    if isinstance(default, bool):
        return str(default).lower()
    if default in ((), {}):
        return "empty"
    return str(default)
