"""Training on sets of other sizes: the set's images over and over, each of them in the file."""

from __future__ import annotations

import pytest
import torch

from finetune.bench.studies import Grown, per_image
from finetune.errors import RecipeError
from finetune.recipe.load import parse_recipe

RECIPE = """
model: {name: vit_tiny_patch16_224, pretrained: false, image_size: 16,
        args: {patch_size: 4, embed_dim: 32, depth: 1, num_heads: 2}}
data: {source: "embedded:digits", num_train: 40, val_fraction: 0, batch_size: 8}
optim: {name: adamw, lr: 1e-3, steps: 100, schedule: constant}
run: {precision: fp32, test: false}
"""


class Silent:
    def tick(self) -> None:
        """Nobody looks."""

    def notice(self, message: str) -> None:
        """Nobody listens."""


@pytest.fixture(scope="module")
def grown(tmp_path_factory: pytest.TempPathFactory) -> Grown:
    folder = str(tmp_path_factory.mktemp("grown"))
    made = Grown(Silent(), recipe=parse_recipe(RECIPE), folder=folder)
    made.prepare()
    return made


@pytest.mark.parametrize("images", [10, 40, 1003])
def test_all_images_of_the_larger_set_are_there(grown: Grown, images: int) -> None:
    own = grown.loader.store.images
    assert isinstance(own, torch.Tensor)
    mapped = grown._mapped(own, images)
    assert mapped.shape == (images, *own.shape[1:])
    for place in {0, images // 2, images - 1}:
        assert torch.equal(mapped[place], own[place % len(own)])
    before, steps = grown.setup.num_samples, grown.trainer.counters.step
    found = grown.grow(images=images, warmup=1, steps=2)
    assert (found["images"], grown.setup.num_samples) == (images, before)
    assert found["rate"] > 0
    # labels, rows and order, each of 8 bytes
    assert 24 * images <= found["own_bytes"] < 24 * images + 50_000
    assert grown.trainer.counters.step == steps + 4
    assert grown.loader.store.images is own


def test_images_of_several_sizes_cannot_be_one_file(
    grown: Grown, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grown.loader.store, "images", [torch.zeros(3, 8, 8, dtype=torch.uint8)])
    with pytest.raises(RecipeError, match="several sizes"):
        grown.grow(images=10, warmup=1, steps=1)


def test_bytes_of_an_image() -> None:
    rows = [{"images": n, "own_bytes": 500 + 16 * n} for n in (1000, 10, 100)]
    assert per_image(rows) == 16
    assert per_image(rows[:1]) is None
