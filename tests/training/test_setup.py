"""A recipe made concrete: steps, evaluations, checkpoints, preprocessing."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from recipe_texts import tiny_text
from refusals import refused

from finetune.recipe.load import parse_recipe
from finetune.training.setup import TrainingSetup, open_setup

RECIPE = tiny_text("batch_size: 100", optim="lr: 1e-3, epochs: 2")


def setup_of(*overrides: str, notices: list[str] | None = None) -> TrainingSetup:
    return open_setup(
        parse_recipe(RECIPE, overrides=overrides),
        device=torch.device("cpu"),
        notice=pytest.fail if notices is None else notices.append,
        progress=False,
    )


def test_epochs_become_steps_once_rounded_up() -> None:
    setup = setup_of("optim.warmup_epochs=0.5")
    images = len(setup.source.splits["train"])
    assert setup.steps == -(-2 * images // 100)
    assert setup.warmup_steps == round(0.5 * images / 100)
    assert setup.steps_per_epoch == images / 100


def test_evaluation_and_checkpoints_are_due_at_epochs_and_at_the_end() -> None:
    setup = setup_of()
    due = [step for step in range(1, setup.steps + 1) if setup.evaluates_after(step)]
    assert due == [-(-setup.num_samples // 100), setup.steps]
    assert [step for step in range(1, setup.steps + 1) if setup.saves_after(step)] == due
    setup = setup_of("run.eval_every=10", "run.save_every=7")
    steps = range(1, setup.steps + 1)
    assert [step for step in steps if setup.evaluates_after(step)] == [10, 20, setup.steps]
    assert [step for step in steps if setup.saves_after(step)] == [7, 14, 21, setup.steps]


def test_overriding_the_weights_preprocessing_gives_one_notice() -> None:
    notices: list[str] = []
    pretrained = ["model.pretrained=true", "model.name=embedded:vit_nano", "model.args={}"]
    setup = setup_of(*pretrained, notices=notices)
    assert notices == []
    own = setup.preprocessing.mean
    setup = setup_of(*pretrained, "data.mean=[0.1, 0.2, 0.3]", notices=notices)
    assert setup.preprocessing.mean == (0.1, 0.2, 0.3) != own
    assert len(notices) == 1
    assert "data.mean=(0.1, 0.2, 0.3) instead of" in notices[0]


def test_jpegs_are_never_decoded_too_small() -> None:
    notices: list[str] = []
    setup = setup_of("data.decode_size=16", "data.eval=resize", notices=notices)
    assert {split.decode_size for split in setup.source.splits.values()} == {16}
    assert len(notices) == 1
    for crop, needed in ((1.0, 16), (0.5, 32)):
        with refused("recipe.conflict", "data.decode_size", needed - 1, needed):
            setup_of(f"data.decode_size={needed - 1}", f"data.crop_pct={crop}", notices=notices)


def test_one_more_image_is_another_fingerprint(image_folder) -> None:
    before = setup_of(f"data.source=folder:{image_folder}", "data.batch_size=6").fingerprints()
    assert (
        setup_of(f"data.source=folder:{image_folder}", "data.batch_size=6").fingerprints() == before
    )
    next((image_folder / "test" / "red").iterdir()).unlink()
    after = setup_of(f"data.source=folder:{image_folder}", "data.batch_size=6").fingerprints()
    assert {name for name in before if before[name] != after[name]} == {"test"}


@pytest.mark.parametrize(
    "override, named",
    [
        ("data.eval=center_crop(6) | resize", "center_crop(6) | resize"),  # unknown to timm
        ("data.decode_size=17", "data.decode_size"),  # as well
        ("data.batch_size=5000", "5000"),  # more than there are
    ],
)
def test_a_setting_with_a_side_effect_gives_one_notice(override: str, named: str) -> None:
    notices: list[str] = []
    setup_of(override, notices=notices)
    assert len(notices) == 1
    assert named in notices[0]


def test_quarantine_shortens_the_stream(image_folder) -> None:
    next((image_folder / "train" / "red").iterdir()).write_bytes(b"no image")
    setup = setup_of(
        f"data.source=folder:{image_folder}", "data.batch_size=6", "data.unreadable=quarantine"
    )
    before = setup.num_samples
    loader = setup.loader(setup.source.splits["train"], train=True)
    left = len(loader.labels) + len(setup.source.splits["val"])
    assert len(loader.labels) in (before, before - 1)
    assert setup.num_samples == before  # nothing changes it
    assert left in (23, 24)


def test_another_number_of_samples_makes_another_setup() -> None:
    setup = setup_of("data.batch_size=10", "optim.epochs=2", "optim.warmup_epochs=1")
    fewer = setup.with_num_samples(setup.num_samples - 20)
    assert (fewer.steps, fewer.warmup_steps) == (setup.steps - 4, setup.warmup_steps - 2)
    assert fewer.sampler.num_samples == setup.num_samples - 20
    assert fewer.plan()["images_read"] == setup.plan()["images_read"] - 20
    with pytest.raises(dataclasses.FrozenInstanceError):
        setup.num_samples = 1  # type: ignore[misc]


def test_patience_needs_something_to_wait_on() -> None:
    with refused("recipe.conflict", "run.patience", "data.val_fraction"):
        setup_of("run.patience=3", "data.val_fraction=0")
    setup_of("run.patience=3")


def test_the_plan_has_the_sizes_of_the_run() -> None:
    plan = setup_of().plan()
    assert plan["classes"] == 10
    assert plan["parameters"] == plan["trainable_parameters"] > 0
    assert plan["train_pipeline"].endswith("| flip")


def test_workers_are_recorded_as_what_auto_became(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("finetune.data.image_store.num_cores", lambda: 6)
    setup = setup_of("data.workers=auto")
    assert setup.plan()["workers"] == 6
    assert dataclasses.replace(setup, local_processes=3).plan()["workers"] == 2
    assert setup_of("data.workers=0").plan()["workers"] == 0
