"""`data.micro_batch: auto`: halved until it fits, recorded once, with unchanged training."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from forked_runs import read_train_losses, tiny_recipe
from logs import logged, logging_nothing
from refusals import refused

from finetune.errors import Interrupted, RecipeError
from finetune.recipe.schema import Recipe
from finetune.run.directory import RunDir
from finetune.training import batch_size_finder as sizing
from finetune.training.accelerator import create_accelerator
from finetune.training.batch_size_finder import find_micro_batch_size, micro_batch_fits
from finetune.training.build_state import build_trainer_state
from finetune.training.setup import build_setup
from finetune.training.train import train
from finetune.training.trainer_state import TrainerState

pytestmark = pytest.mark.usefixtures("no_plots")

AUTO = ("data.micro_batch=auto", "optim.steps=4", "run.test=false", "data.num_train=300")


def make_trainer(recipe: Recipe, tmp_path: Path) -> TrainerState:
    """Build the trainer of a run before its first step."""
    accelerator = create_accelerator(recipe.run)
    setup = build_setup(recipe, device=accelerator.device, show_progress=False)
    return build_trainer_state(setup, accelerator, RunDir(tmp_path / "run"))


@pytest.fixture
def limit_images(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], list[int]]:
    """Make micro-batches of more images than a limit run out of memory."""

    def limit(images: int) -> list[int]:
        tried: list[int] = []

        def fits(trainer: TrainerState, num_images: int) -> bool:
            tried.append(num_images)
            return num_images <= images

        monkeypatch.setattr(sizing, "micro_batch_fits", fits)
        return tried

    return limit


class TestRecipeKey:
    def test_accepts_a_number_null_or_auto(self) -> None:
        for text, value in (("auto", "auto"), ("7", 7), ("1e1", 10), ("null", None)):
            recipe = tiny_recipe(f"data.micro_batch={text}")
            assert recipe.data.micro_batch == value
            assert f"micro_batch: {text if value != 10 else 10}" in recipe.to_yaml()

    @pytest.mark.parametrize("text", ["0", "-3", "1.5", "largest", "true", "[4]"])
    def test_other_values_are_refused_in_one_line(self, text: str) -> None:
        with pytest.raises(RecipeError) as caught:
            tiny_recipe(f"data.micro_batch={text}")
        assert "expected 'auto' or a whole number of at least 1" in str(caught.value)
        assert "\n" not in str(caught.value)


class TestFindMicroBatchSize:
    def test_whole_batch_is_used_silently_if_it_fits(self, tmp_path: Path) -> None:
        trainer = make_trainer(tiny_recipe(*AUTO), tmp_path)
        with logging_nothing():
            assert find_micro_batch_size(trainer) == 64

    @pytest.mark.parametrize("limit, expected", [(40, 32), (31, 16), (1, 1)])
    def test_halves_until_it_fits(
        self, tmp_path: Path, limit_images: Any, limit: int, expected: int
    ) -> None:
        trainer, tried = make_trainer(tiny_recipe(*AUTO), tmp_path), limit_images(limit)
        with logged() as messages:
            assert find_micro_batch_size(trainer) == expected
        assert messages == [
            f"data.micro_batch=auto: {expected} of 64 images per process fit into memory"
        ]
        assert tried == [size for size in (64, 32, 16, 8, 4, 2, 1) if size >= expected]

    def test_pairs_of_mixing_stay_together(self, tmp_path: Path, limit_images: Any) -> None:
        mixed = tiny_recipe(*AUTO, "data.train=resize | mixup(0.8)", "data.batch_size=12")
        trainer, tried = make_trainer(mixed, tmp_path), limit_images(3)
        assert find_micro_batch_size(trainer) == 2
        assert tried == [12, 6, 4, 2]

    def test_too_little_memory_for_one_image_raises_with_a_fix(
        self, tmp_path: Path, limit_images: Any
    ) -> None:
        trainer = make_trainer(tiny_recipe(*AUTO), tmp_path)
        limit_images(0)
        with refused("setup.memory", "data.micro_batch=auto", "model.grad_checkpointing=true"):
            find_micro_batch_size(trainer)

    def test_message_mentions_batch_norm(self, tmp_path: Path, limit_images: Any) -> None:
        names = ("model.name=test_resnet", "model.args={}", "model.image_size=32")
        trainer = make_trainer(tiny_recipe(*AUTO, *names), tmp_path)
        limit_images(20)
        with logged() as messages:
            assert find_micro_batch_size(trainer) == 16
        assert "batch norm" in messages[0]

    def test_all_ranks_halve_if_one_runs_out_of_memory(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit_images: Any
    ) -> None:
        trainer, tried = make_trainer(tiny_recipe(*AUTO), tmp_path), limit_images(64)
        other_rank = iter([0, 0, 1])  # fits from 16 images on
        gather = lambda own: torch.cat([own, torch.tensor([next(other_rank)])])  # noqa: E731
        monkeypatch.setattr(trainer.accelerator, "gather", gather)
        assert find_micro_batch_size(trainer) == 16
        assert tried == [64, 32, 16]

    def test_sharded_model_is_refused(self, tmp_path: Path) -> None:
        trainer = make_trainer(tiny_recipe(*AUTO), tmp_path)
        trainer.is_sharded = True
        with refused("recipe.conflict", "FSDP"):
            find_micro_batch_size(trainer)


class TestMicroBatchFits:
    def test_estimate_on_a_cpu_follows_the_free_memory(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        overrides = ("model.image_size=64", "run.precision=fp32", "model.args.depth=4")
        trainer = make_trainer(tiny_recipe(*AUTO, *overrides), tmp_path)
        if trainer.accelerator.device.type != "cpu":
            pytest.skip("needs a CPU")
        assert micro_batch_fits(trainer, 64)
        monkeypatch.setattr(sizing, "available_memory_bytes", lambda: 2**10)
        assert not micro_batch_fits(trainer, 1)
        monkeypatch.setattr(sizing, "available_memory_bytes", lambda: 2**30)
        assert not micro_batch_fits(trainer, 10**6)

    @pytest.mark.parametrize(
        "error",
        [
            torch.OutOfMemoryError("a device of five images"),
            pytest.param(
                RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate`"),
                marks=pytest.mark.faults,
            ),
        ],
    )
    def test_out_of_memory_means_the_step_does_not_fit(
        self, error: RuntimeError, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        names = ("model.name=test_resnet", "model.args={}", "model.image_size=32")
        trainer = make_trainer(tiny_recipe(*AUTO, *names), tmp_path)
        before = {name: t.clone() for name, t in trainer.model.state_dict().items()}
        forward = TrainerState.forward

        def limited_forward(self: TrainerState, batch: Any, **options: Any) -> Any:
            torch.rand(3)
            outputs = forward(self, batch, **options)
            if len(batch.images_BCHW) > 3:
                raise error
            return outputs

        monkeypatch.setattr(TrainerState, "forward", limited_forward)
        torch.manual_seed(1)
        state = torch.get_rng_state()
        assert [micro_batch_fits(trainer, images) for images in (2, 3, 4)] == [True, True, False]
        assert torch.equal(torch.get_rng_state(), state)
        for name, tensor in trainer.model.state_dict().items():
            assert torch.equal(tensor, before[name])
        assert all(parameter.grad is None for parameter in trainer.model.parameters())

    def test_other_errors_are_raised(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def fail(*_: Any, **__: Any) -> None:
            raise RuntimeError("channels")

        trainer = make_trainer(tiny_recipe(*AUTO), tmp_path)
        monkeypatch.setattr(TrainerState, "forward", fail)
        with pytest.raises(RuntimeError, match="channels"):
            micro_batch_fits(trainer, 2)

    @pytest.mark.parametrize(
        "overrides",
        [
            ("data.train=resize | mixup(0.8)",),
            ("model.freeze=1", "optim.label_smoothing=0.1"),
            ("model.grad_checkpointing=true", "optim.class_weights=balanced"),
            ("run.precision=bf16", "optim.ema_decay=0.9"),
        ],
    )
    def test_every_loss_and_precision_is_tried(
        self, overrides: tuple[str, ...], tmp_path: Path
    ) -> None:
        trainer = make_trainer(tiny_recipe(*AUTO, *overrides), tmp_path)
        assert micro_batch_fits(trainer, 4)


def test_auto_keeps_the_global_batch_and_resume_reuses_the_recorded_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit_images: Any
) -> None:
    without_micro_batches = tiny_recipe(*AUTO, "data.micro_batch=null")
    train(without_micro_batches, tmp_path / "whole")
    out = tmp_path / "auto"
    limit_images(20)
    save = TrainerState.save_checkpoint

    def interrupted(trainer: TrainerState, meter: Any) -> None:
        save(trainer, meter)
        raise Interrupted("stopped", 15)

    monkeypatch.setattr(TrainerState, "save_checkpoint", interrupted)
    recipe = tiny_recipe(*AUTO, "run.save_every=2")
    with pytest.raises(Interrupted):
        train(recipe, out)
    monkeypatch.setattr(TrainerState, "save_checkpoint", save)
    record = json.loads((out / "run.json").read_text())
    assert record["micro_batch"]["images"] == 16
    assert record["micro_batch"]["on"]["device"] == record["device"]["name"]
    # another machine may find another size
    assert "micro_batch: auto" in (out / "recipe.yaml").read_text()

    searches: list[int] = []
    monkeypatch.setattr(sizing, "find_micro_batch_size", lambda trainer: searches.append(1) or 64)
    used_sizes: list[int | None] = []
    step = TrainerState.train_step

    def recording_step(trainer: TrainerState, number: int, *rest: Any) -> None:
        used_sizes.append(trainer.micro_batch_size)
        assert number == 4
        step(trainer, number, *rest)

    monkeypatch.setattr(TrainerState, "train_step", recording_step)
    train(recipe, out, resume=True)
    assert searches == []
    assert used_sizes == [16, 16]
    assert read_train_losses(out) == pytest.approx(read_train_losses(tmp_path / "whole"), abs=1e-5)
    assert len(set(read_train_losses(out))) >= 3


def test_recorded_size_is_ignored_on_another_machine(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    machine = {"device": {"name": "a"}, "num_processes": 2}
    run.write_json("run.json", machine)
    assert sizing.read_micro_batch_size(run) is None
    sizing.record_micro_batch_size(run, 24)
    assert sizing.read_micro_batch_size(run) == 24
    record = run.read_json("run.json") or {}
    for change in ({"device": {"name": "b"}}, {"num_processes": 4}):
        run.write_json("run.json", {**record, **change})
        assert sizing.read_micro_batch_size(run) is None
    for invalid in ("16", -1, None, {"images": "many", "on": {"device": "a", "processes": 2}}):
        run.write_json("run.json", {**record, "micro_batch": invalid})
        assert sizing.read_micro_batch_size(run) is None


def test_cached_features_need_no_micro_batch_search(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(sizing, "find_micro_batch_size", lambda trainer: 1 / 0)
    frozen = tiny_recipe(*AUTO, "model.freeze=backbone", "data.train=resize")
    train(frozen, tmp_path / "run")
    assert "micro_batch" not in json.loads((tmp_path / "run" / "run.json").read_text())
