"""The sections: which keys there are, and which do not go together."""

from __future__ import annotations

import pytest

from finetune.errors import RecipeError
from finetune.recipe.load import parse_recipe
from finetune.recipe.schema import Claim, DataSection, OptimSection, RunSection

RECIPE = "model: {name: x}\ndata: {source: 'embedded:digits'}\noptim: {lr: 1, steps: 5}\n"


def test_every_key_says_what_it_means() -> None:
    for section in (DataSection, OptimSection, RunSection, Claim):
        for key, field in section.model_fields.items():
            assert field.description, f"{section.__name__}.{key}"


def test_the_keys_of_publishing_and_of_choosing() -> None:
    changes = ["run.push_to=alice/net", "run.test=false", "data.num_train=1000", "run.note=a try"]
    recipe = parse_recipe(RECIPE, overrides=changes)
    assert recipe.run.push_to == "alice/net"
    assert not recipe.run.test
    assert recipe.data.num_train == 1000
    assert parse_recipe(recipe.to_yaml()) == recipe


@pytest.mark.parametrize("name", ["net", "a/b/c", "a/", "/b", "a b/c", "https://x/a/b", "-a/b"])
def test_a_repository_is_owner_and_name(name: str) -> None:
    with pytest.raises(RecipeError, match=r"run.push_to: .*expected owner/name"):
        parse_recipe(RECIPE, overrides=[f"run.push_to={name}"])


def test_a_claim_says_exactly_one_thing() -> None:
    conflicts = Claim.conflicts({"metric": "val.top1", "value": 0.9, "trend": "rising"})
    assert len(conflicts) == 1
    assert not Claim.conflicts({"metric": "val.top1", "value": 0.9})
    assert "fractions" in Claim.conflicts({"metric": "val.top1", "value": 94.5})[0][2]


def test_warm_up_and_length_are_given_once() -> None:
    assert OptimSection.conflicts({"lr": 1, "steps": 5}) == []
    assert [key for key, _, _ in OptimSection.conflicts({"lr": 1})] == ["steps"]
    both = OptimSection.conflicts({"lr": 1, "steps": 5, "warmup_steps": 9})
    assert "longer than the run" in both[0][2]
