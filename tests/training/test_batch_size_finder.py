"""`data.micro_batch: auto`: the largest size that fits, recorded once, with unchanged training."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from forked_runs import read_train_losses, tiny_recipe
from logs import logged, logging_nothing
from torch import nn

from finetune.data.sampler import DistributedBatchSampler
from finetune.errors import Interrupted, RecipeError, SetupError
from finetune.recipe.schema import Recipe
from finetune.run.directory import RunDir
from finetune.training import batch_size_finder as sizing
from finetune.training.accelerator import create_accelerator
from finetune.training.batch_size_finder import (
    available_bytes,
    find_largest_fitting,
    find_micro_batch_size,
    real_step_fits,
    unallocated_state_bytes,
)
from finetune.training.build_state import build_trainer_state
from finetune.training.setup import build_setup
from finetune.training.train import train
from finetune.training.trainer_state import TrainerState

pytestmark = pytest.mark.usefixtures("no_pictures")

AUTO = ("data.micro_batch=auto", "optim.steps=4", "run.test=false", "data.num_train=300")


def make_trainer(recipe: Recipe, tmp_path: Path) -> TrainerState:
    """Build the trainer of a run before its first step."""
    accelerator = create_accelerator(recipe.run)
    setup = build_setup(recipe, device=accelerator.device, show_progress=False)
    return build_trainer_state(setup, accelerator, RunDir(tmp_path / "run"))


def limit_memory(monkeypatch: pytest.MonkeyPatch, trainer: TrainerState, images: int) -> None:
    """Report exactly as much free memory as a micro-batch of `images` needs."""
    network = trainer.accelerator.unwrap_model(trainer.model)
    size = trainer.setup.preprocessing.image_size
    estimate = sizing.estimate_memory(network, image_size=size, dtype=torch.float32, num_images=32)
    free_bytes = (
        estimate.bytes_for(images) + unallocated_state_bytes(trainer)
    ) / sizing.USABLE_SHARE + 1
    monkeypatch.setattr(sizing, "available_bytes", lambda *_: int(free_bytes) + 1)


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


class TestCandidateSizes:
    @pytest.mark.parametrize("limit", [0, 1, 2, 5, 31, 32, 63, 64, 100])
    def test_find_largest_fitting_needs_at_most_three_trials(self, limit: int) -> None:
        choices, tried = [64, 32, 22, 16, 8, 2, 1], []

        def fits(images: int) -> bool:
            tried.append(images)
            return images <= limit

        expected = max((n for n in choices if n <= limit), default=0)
        assert find_largest_fitting(choices, fits) == expected
        assert len(tried) <= 3

    @pytest.mark.parametrize("group_size", [1, 2])
    @pytest.mark.parametrize("batch_size, world_size", [(64, 1), (64, 3), (37, 2), (10, 5)])
    def test_candidate_sizes_match_the_samplers_micro_batches(
        self, batch_size: int, world_size: int, group_size: int
    ) -> None:
        sampler = DistributedBatchSampler(100, batch_size=batch_size, seed=0, group_size=group_size)
        for rank in range(world_size):
            sizes = sizing._candidate_sizes(sampler, rank=rank, world_size=world_size)
            assert min(sizes) == group_size
            assert max(sizes) == -(-(batch_size // group_size) // world_size) * group_size
            assert list(sizes) == sorted(sizes, reverse=True)
            for size, largest in sizes.items():
                micro_batches = sampler.micro_batches(
                    3, rank=rank, world_size=world_size, micro_batch_size=size
                )
                assert max(len(indices) for _, indices in micro_batches) == largest


class TestFindMicroBatchSize:
    def test_whole_batch_is_used_silently_if_it_fits(self, tmp_path: Path) -> None:
        trainer = make_trainer(tiny_recipe(*AUTO), tmp_path)
        with logging_nothing():
            assert find_micro_batch_size(trainer) == 64

    @pytest.mark.parametrize("limit, expected", [(40, 32), (31, 22), (1, 1)])
    def test_less_memory_gives_a_smaller_micro_batch(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: int, expected: int
    ) -> None:
        trainer = make_trainer(tiny_recipe(*AUTO), tmp_path)
        limit_memory(monkeypatch, trainer, limit)
        with logged() as messages:
            assert find_micro_batch_size(trainer) == expected
        (message,) = messages
        assert message == f"data.micro_batch=auto: {expected} of 64 images per process fit"

    def test_too_little_memory_for_one_image_raises_with_a_fix(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        trainer = make_trainer(tiny_recipe(*AUTO), tmp_path)
        limit_memory(monkeypatch, trainer, 0)
        with pytest.raises(
            SetupError, match=r"not even a micro-batch of 1 fits.*grad_checkpointing"
        ):
            find_micro_batch_size(trainer)

    def test_message_mentions_batch_norm(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        names = ("model.name=test_resnet", "model.args={}", "model.image_size=32")
        trainer = make_trainer(tiny_recipe(*AUTO, *names), tmp_path)
        limit_memory(monkeypatch, trainer, 20)
        with logged() as messages:
            assert find_micro_batch_size(trainer) == 16
        (message,) = messages
        assert "batch norm" in message

    def test_gpu_trials_start_at_the_estimate_and_go_down(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        trainer, tried = make_trainer(tiny_recipe(*AUTO), tmp_path), []
        limit_memory(monkeypatch, trainer, 40)

        def step_fits(images: int) -> bool:
            tried.append(images)
            return images <= 17

        assert find_micro_batch_size(trainer, step_fits=step_fits) == 16
        assert tried == [32, 22, 16]
        with pytest.raises(SetupError, match="not even a micro-batch of 1 fits"):
            find_micro_batch_size(trainer, step_fits=lambda _: False)

    def test_all_ranks_use_the_smallest_size(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        trainer = make_trainer(tiny_recipe(*AUTO), tmp_path)
        gather: Callable[[Any], Any] = lambda found: torch.cat([found, found // 4])  # noqa: E731
        monkeypatch.setattr(trainer.accelerator, "gather", gather)
        with logged() as messages:
            assert find_micro_batch_size(trainer) == 16
        assert messages
        monkeypatch.setattr(trainer.accelerator, "gather", lambda found: found * 0)
        with pytest.raises(SetupError):  # on every rank, not only on one
            find_micro_batch_size(trainer)

    def test_sharded_model_is_refused(self, tmp_path: Path) -> None:
        trainer = make_trainer(tiny_recipe(*AUTO), tmp_path)
        trainer.is_sharded = True
        with pytest.raises(RecipeError, match="FSDP"):
            find_micro_batch_size(trainer)


class TestRealStepFits:
    SIZE = (16, 16)

    @pytest.fixture
    def network(self) -> nn.Module:
        return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.LazyLinear(2))

    @pytest.mark.parametrize(
        "error",
        [
            torch.OutOfMemoryError("a device of five images"),
            RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate`"),
        ],
    )
    def test_out_of_memory_means_the_step_does_not_fit(
        self, error: RuntimeError, network: nn.Module, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        network(torch.zeros(2, 3, *self.SIZE))
        before = {name: tensor.clone() for name, tensor in network.state_dict().items()}
        run_step, reserved_bytes = sizing.run_step, []

        def run_limited_step(copy: nn.Module, images: int, *args: Any, **kwargs: Any) -> None:
            torch.rand(3)
            run_step(copy, images, *args, **kwargs)
            if images > 5:
                raise error

        class Torch:
            """Wraps the torch module and records the sizes passed to `torch.empty`."""

            def __getattr__(self, name: str) -> Any:
                return getattr(torch, name)

            def empty(self, size: int, **args: Any) -> torch.Tensor:
                reserved_bytes.append(size)
                return torch.empty(size, **args)

        monkeypatch.setattr(sizing, "run_step", run_limited_step)
        monkeypatch.setattr(sizing, "torch", Torch())
        torch.manual_seed(1)
        state = torch.get_rng_state()
        fits = [
            real_step_fits(network, self.SIZE, torch.float32, 1000, images) for images in (4, 5, 6)
        ]
        assert fits == [True, True, False]
        assert reserved_bytes == [1000] * 3
        assert torch.equal(torch.get_rng_state(), state)
        for name, tensor in network.state_dict().items():
            assert torch.equal(tensor, before[name])
        assert all(parameter.grad is None for parameter in network.parameters())

    def test_other_errors_are_raised(self, monkeypatch: pytest.MonkeyPatch) -> None:
        with pytest.raises(RuntimeError, match="channels"):
            real_step_fits(nn.Conv2d(5, 4, 3), self.SIZE, torch.float32, 0, 1)


class TestMemory:
    def test_free_memory_is_divided_by_the_processes_on_a_host(self, tmp_path: Path) -> None:
        alone, quarter = (available_bytes(torch.device("cpu"), n) for n in (1, 4))
        assert alone > 2**20
        assert quarter == pytest.approx(alone / 4, rel=0.2)

    def test_unallocated_state_bytes_counts_gradients_moments_and_snapshots(
        self, tmp_path: Path
    ) -> None:
        trainer = make_trainer(tiny_recipe(*AUTO, "optim.ema_decay=0.9"), tmp_path)
        weights_bytes = sum(4 * p.numel() for p in trainer.model.parameters())
        # gradients and two moments; on the host a snapshot of weights, EMA and moments
        snapshots = 1 + 1 + 2 if trainer.accelerator.device.type == "cpu" else 0
        assert unallocated_state_bytes(trainer) == pytest.approx(
            (1 + 2 + snapshots) * weights_bytes, rel=0.01
        )
        trainer.optimizer.optimizer.state[next(trainer.model.parameters())] = {"restored": True}
        assert unallocated_state_bytes(trainer) == pytest.approx(
            (1 + snapshots) * weights_bytes, rel=0.01
        )


def test_auto_keeps_the_global_batch_and_resume_reuses_the_recorded_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_micro_batches = tiny_recipe(*AUTO, "data.micro_batch=null")
    train(without_micro_batches, tmp_path / "whole")
    out = tmp_path / "auto"
    limit_memory(monkeypatch, make_trainer(tiny_recipe(*AUTO), tmp_path), 20)
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
    assert sizing._read_recorded_size(run) is None
    sizing._record_size(run, 24)
    assert sizing._read_recorded_size(run) == 24
    record = run.read_json("run.json") or {}
    for change in ({"device": {"name": "b"}}, {"num_processes": 4}):
        run.write_json("run.json", {**record, **change})
        assert sizing._read_recorded_size(run) is None
    for invalid in ("16", -1, None, {"images": "many", "on": {"device": "a", "processes": 2}}):
        run.write_json("run.json", {**record, "micro_batch": invalid})
        assert sizing._read_recorded_size(run) is None


def test_cached_features_need_no_micro_batch_search(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(sizing, "find_micro_batch_size", lambda trainer: 1 / 0)
    frozen = tiny_recipe(*AUTO, "model.freeze=backbone", "data.train=resize")
    train(frozen, tmp_path / "run")
    assert "micro_batch" not in json.loads((tmp_path / "run" / "run.json").read_text())
