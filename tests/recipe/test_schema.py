"""Recipe sections: keys for publishing and data selection, and the format of run.push_to."""

from __future__ import annotations

import pytest
from refusals import refused

from finetune.recipe.load import parse_recipe

RECIPE = "model: {name: x}\ndata: {source: 'embedded:digits'}\noptim: {lr: 1, steps: 5}\n"


def test_publishing_and_selection_keys_round_trip() -> None:
    overrides = ["run.push_to=alice/net", "run.test=false", "data.num_train=1000", "run.note=a try"]
    recipe = parse_recipe(RECIPE, overrides=overrides)
    assert recipe.run.push_to == "alice/net"
    assert not recipe.run.test
    assert recipe.data.num_train == 1000
    assert parse_recipe(recipe.to_yaml()) == recipe


@pytest.mark.parametrize("name", ["net", "a/b/c", "a/", "/b", "a b/c", "https://x/a/b", "-a/b"])
def test_push_to_requires_owner_and_name(name: str) -> None:
    with refused("recipe.wrong_value", "run.push_to"):
        parse_recipe(RECIPE, overrides=[f"run.push_to={name}"])
