"""Building a TrainingSetup: steps, evaluations, checkpoints, preprocessing."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from logs import logged, logging_nothing
from recipe_texts import tiny_recipe_text
from refusals import refused

from finetune.recipe.load import parse_recipe
from finetune.training.setup import TrainingSetup, build_setup

RECIPE = tiny_recipe_text("batch_size: 100", optim="lr: 1e-3, epochs: 2")


def make_setup(*overrides: str, messages: list[str] | None = None) -> TrainingSetup:
    with logging_nothing() if messages is None else logged(messages):
        return build_setup(
            parse_recipe(RECIPE, overrides=overrides),
            device=torch.device("cpu"),
            show_progress=False,
        )


def test_epochs_are_converted_to_steps_and_rounded_up() -> None:
    setup = make_setup("optim.warmup_epochs=0.5")
    images = len(setup.source.splits["train"])
    assert setup.num_steps == -(-2 * images // 100)
    assert setup.warmup_steps == round(0.5 * images / 100)
    assert setup.steps_per_epoch == images / 100


def test_evaluates_and_saves_at_epoch_ends_and_the_last_step() -> None:
    setup = make_setup()
    due = [step for step in range(1, setup.num_steps + 1) if setup.is_eval_step(step)]
    assert due == [-(-setup.num_samples // 100), setup.num_steps]
    assert [step for step in range(1, setup.num_steps + 1) if setup.is_save_step(step)] == due
    setup = make_setup("run.eval_every=10", "run.save_every=7")
    steps = range(1, setup.num_steps + 1)
    assert [step for step in steps if setup.is_eval_step(step)] == [10, 20, setup.num_steps]
    assert [step for step in steps if setup.is_save_step(step)] == [7, 14, 21, setup.num_steps]


def test_overriding_pretrained_preprocessing_logs_one_warning() -> None:
    messages: list[str] = []
    pretrained = ["model.pretrained=true", "model.name=embedded:vit_nano", "model.args={}"]
    setup = make_setup(*pretrained, messages=messages)
    assert messages == []
    pretrained_mean = setup.preprocessing.mean
    setup = make_setup(*pretrained, "data.mean=[0.1, 0.2, 0.3]", messages=messages)
    assert setup.preprocessing.mean == (0.1, 0.2, 0.3) != pretrained_mean
    assert len(messages) == 1
    assert "data.mean=(0.1, 0.2, 0.3) instead of" in messages[0]


def test_decode_size_below_the_needed_size_is_refused() -> None:
    messages: list[str] = []
    setup = make_setup("data.decode_size=16", "data.eval=resize", messages=messages)
    assert {split.decode_size for split in setup.source.splits.values()} == {16}
    assert len(messages) == 1
    for crop, needed in ((1.0, 16), (0.5, 32)):
        with refused("recipe.conflict", "data.decode_size", needed - 1, needed):
            make_setup(f"data.decode_size={needed - 1}", f"data.crop_pct={crop}", messages=messages)


def test_removed_image_changes_the_fingerprint_of_its_split(image_folder) -> None:
    before = make_setup(f"data.source=folder:{image_folder}", "data.batch_size=6").fingerprints()
    assert (
        make_setup(f"data.source=folder:{image_folder}", "data.batch_size=6").fingerprints()
        == before
    )
    next((image_folder / "test" / "red").iterdir()).unlink()
    after = make_setup(f"data.source=folder:{image_folder}", "data.batch_size=6").fingerprints()
    assert {name for name in before if before[name] != after[name]} == {"test"}


@pytest.mark.parametrize(
    "override, name",
    [
        ("data.eval=center_crop(6) | resize", "center_crop(6) | resize"),  # timm cannot express it
        ("data.decode_size=17", "data.decode_size"),  # timm cannot express it, either
        ("data.batch_size=5000", "5000"),  # more than the training images
    ],
)
def test_setting_with_a_side_effect_logs_one_warning(override: str, name: str) -> None:
    messages: list[str] = []
    make_setup(override, messages=messages)
    assert len(messages) == 1
    assert name in messages[0]


def test_quarantine_leaves_unreadable_images_out(image_folder) -> None:
    next((image_folder / "train" / "red").iterdir()).write_bytes(b"no image")
    setup = make_setup(
        f"data.source=folder:{image_folder}", "data.batch_size=6", "data.unreadable=quarantine"
    )
    before = setup.num_samples
    loader = setup.build_loader(setup.source.splits["train"], train=True)
    readable = len(loader.labels) + len(setup.source.splits["val"])
    assert len(loader.labels) in (before, before - 1)
    assert setup.num_samples == before  # a setup is immutable
    assert readable in (23, 24)


def test_with_num_samples_returns_a_new_setup() -> None:
    setup = make_setup("data.batch_size=10", "optim.epochs=2", "optim.warmup_epochs=1")
    fewer = setup.with_num_samples(setup.num_samples - 20)
    assert (fewer.num_steps, fewer.warmup_steps) == (setup.num_steps - 4, setup.warmup_steps - 2)
    assert fewer.sampler.num_samples == setup.num_samples - 20
    assert fewer.plan()["images_read"] == setup.plan()["images_read"] - 20
    with pytest.raises(dataclasses.FrozenInstanceError):
        setup.num_samples = 1  # type: ignore[misc]


def test_patience_needs_a_validation_split() -> None:
    with refused("recipe.conflict", "run.patience", "data.val_fraction"):
        make_setup("run.patience=3", "data.val_fraction=0")
    make_setup("run.patience=3")


def test_plan_contains_classes_parameters_and_transforms() -> None:
    plan = make_setup().plan()
    assert plan["classes"] == 10
    assert plan["parameters"] == plan["trainable_parameters"] > 0
    assert plan["train_pipeline"].endswith("| flip")


def test_plan_records_the_resolved_number_of_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("finetune.data.pixel_store.num_cores", lambda: 6)
    setup = make_setup("data.workers=auto")
    assert setup.plan()["workers"] == 6
    assert dataclasses.replace(setup, local_world_size=3).plan()["workers"] == 2
    assert make_setup("data.workers=0").plan()["workers"] == 0
