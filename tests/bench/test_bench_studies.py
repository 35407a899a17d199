"""Studies beside the figures, in real processes; tests/bench/test_run.py has them with doubles."""

from __future__ import annotations

import pytest
from ranks import forked

from finetune.bench.studies import LOSSES_EVERY, PLAINLY, study_losses, study_sizes
from finetune.recipe.load import parse_recipe


@pytest.fixture(autouse=True)
def quick_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Begin the processes of bench where everything has been imported."""
    monkeypatch.setattr("finetune.bench.subprocess._START", forked.get_start_method())


RECIPE = """
model: {name: vit_tiny_patch16_224, pretrained: false, image_size: 16,
        args: {patch_size: 4, embed_dim: 32, depth: 1, num_heads: 2}}
data: {source: "embedded:digits", num_train: 40, val_fraction: 0, batch_size: 8}
optim: {name: adamw, lr: 1e-3, steps: 100, schedule: constant}
run: {precision: bf16, threads: 1, test: false}
"""


@pytest.mark.slow
def test_the_same_steps_in_two_ways() -> None:
    recipe, plain = parse_recipe(RECIPE), parse_recipe(RECIPE, overrides=PLAINLY)
    found = study_losses(recipe, plain, steps=2 * LOSSES_EVERY)
    assert [row["step"] for row in found["rows"]] == [LOSSES_EVERY, 2 * LOSSES_EVERY]
    assert 0 < found["largest"] < 0.05
    assert (found["precision"], found["compiled"]) == ("bf16", False)


@pytest.mark.slow
def test_sets_of_two_sizes() -> None:
    found = study_sizes(parse_recipe(RECIPE), [2000, 20], warmup=1, steps=2, repeats=2)
    assert [row["images"] for row in found["rows"]] == [20, 2000]
    for row in found["rows"]:
        assert 0 < row["train"]["min"] <= row["train"]["median"] <= row["train"]["max"]
    assert 24 <= found["per_image"] < 40
