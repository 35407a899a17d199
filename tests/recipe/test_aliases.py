"""Aliases from other libraries: each resolves to an existing key and shadows no recipe key."""

from __future__ import annotations

import re

import pytest
from refusals import refused

from finetune.recipe.aliases import ALIASES, MUTUALLY_EXCLUSIVE_KEYS, alias_hint, resolve_alias
from finetune.recipe.help import format_keys_help, list_keys
from finetune.recipe.load import parse_recipe
from finetune.recipe.schema import Recipe

KEYS = {row["key"] for row in list_keys() if not row["key"].startswith("claims")}


def test_every_alias_resolves_to_a_key() -> None:
    assert len(ALIASES) > 100
    for name in ALIASES:
        keys = re.findall(r"'(\w+\.\w+)[^']*'", alias_hint(name))
        assert set(keys) <= KEYS, name
        assert keys or resolve_alias(name) is None, name


def test_no_alias_shadows_a_recipe_key() -> None:
    assert set(ALIASES).isdisjoint(key.partition(".")[2] for key in KEYS)
    assert set(ALIASES).isdisjoint(Recipe.model_fields)


def test_suggested_values_are_valid() -> None:
    base = {
        "model.name": "x",
        "data.source": "embedded:digits",
        "optim.lr": "1",
        "optim.steps": "1",
    }
    values = [meaning for meaning in ALIASES.values() if "=" in meaning and " " not in meaning]
    assert "run.precision=fp16" in values
    for value in values:
        section, _, key = value.partition("=")[0].partition(".")
        recipe = parse_recipe(
            "run: {}", overrides=[*(f"{key}={setting}" for key, setting in base.items()), value]
        )
        assert str(getattr(getattr(recipe, section), key)).find(value.partition("=")[2]) >= 0


def test_mutually_exclusive_keys_exist_and_are_symmetric() -> None:
    assert {".".join(key) for key in MUTUALLY_EXCLUSIVE_KEYS} <= KEYS
    assert all(
        MUTUALLY_EXCLUSIVE_KEYS[other] == key for key, other in MUTUALLY_EXCLUSIVE_KEYS.items()
    )


@pytest.mark.parametrize(
    "topic,key", [("learning_rate", "optim.lr"), ("data.bs", "data.batch_size")]
)
def test_keys_help_suggests_the_key_for_an_alias(topic: str, key: str) -> None:
    with refused("recipe.unknown_key", topic, f"'{key}'"):
        format_keys_help(topic)
