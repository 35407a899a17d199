"""Names of other libraries: each leads to a key that there is, and none hides a key of ours."""

from __future__ import annotations

import re

import pytest
from refusals import refused

from finetune.recipe.help import help_table, help_text
from finetune.recipe.load import Recipe, parse_recipe
from finetune.recipe.names import _OTHER_NAMES, REPLACES, hint_of, key_of

KEYS = {row["key"] for row in help_table() if not row["key"].startswith("claims")}


def test_every_name_leads_to_a_key() -> None:
    assert len(_OTHER_NAMES) > 100
    for name in _OTHER_NAMES:
        keys = re.findall(r"'(\w+\.\w+)[^']*'", hint_of(name))
        assert set(keys) <= KEYS, name
        assert keys or key_of(name) is None, name


def test_no_name_is_a_key_of_ours() -> None:
    assert set(_OTHER_NAMES).isdisjoint(key.partition(".")[2] for key in KEYS)
    assert set(_OTHER_NAMES).isdisjoint(Recipe.model_fields)


def test_values_that_are_named_are_valid() -> None:
    base = {
        "model.name": "x",
        "data.source": "embedded:digits",
        "optim.lr": "1",
        "optim.steps": "1",
    }
    values = [meaning for meaning in _OTHER_NAMES.values() if "=" in meaning and " " not in meaning]
    assert "run.precision=fp16" in values
    for value in values:
        section, _, key = value.partition("=")[0].partition(".")
        recipe = parse_recipe(
            "run: {}", overrides=[*(f"{key}={given}" for key, given in base.items()), value]
        )
        assert str(getattr(getattr(recipe, section), key)).find(value.partition("=")[2]) >= 0


def test_keys_that_replace_one_another() -> None:
    assert {".".join(key) for key in REPLACES} <= KEYS
    assert all(REPLACES[other] == key for key, other in REPLACES.items())


@pytest.mark.parametrize(
    "topic,key", [("learning_rate", "optim.lr"), ("data.bs", "data.batch_size")]
)
def test_help_knows_them(topic: str, key: str) -> None:
    with refused("recipe.unknown_key", topic, f"'{key}'"):
        help_text(topic)
