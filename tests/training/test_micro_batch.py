"""`data.micro_batch: auto`: the largest that fits, found once, and the same training as ever."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from faults_runs import losses, tiny
from torch import nn

from finetune.data.loader import Sampler
from finetune.errors import Interrupted, RecipeError, SetupError
from finetune.recipe.load import Recipe
from finetune.run.directory import RunDir
from finetune.training import micro_batch as sizing
from finetune.training.build_state import build_trainer_state
from finetune.training.launch import launch
from finetune.training.micro_batch import (
    available_bytes,
    find_micro_batch,
    largest,
    passes,
    still_to_come,
)
from finetune.training.setup import open_setup
from finetune.training.train import train
from finetune.training.trainer_state import TrainerState

pytestmark = pytest.mark.usefixtures("no_pictures")

AUTO = ("data.micro_batch=auto", "optim.steps=4", "run.test=false", "data.num_train=300")


def trainer_of(recipe: Recipe, tmp_path: Path) -> TrainerState:
    """A run before its first step; what it notices stands in `trainer.told`."""
    told: list[str] = []
    accelerator = launch(recipe.run)
    device = accelerator.device
    setup = open_setup(recipe, device=device, notice=told.append, progress=False)
    trainer = build_trainer_state(setup, accelerator, RunDir(tmp_path / "run"))
    trainer.told = told  # type: ignore[attr-defined]
    return trainer


def allow(monkeypatch: pytest.MonkeyPatch, trainer: TrainerState, images: int) -> None:
    """Leave exactly as much memory as so many images need at once."""
    network = trainer.accelerator.unwrap_model(trainer.model)
    size = trainer.setup.preprocessing.image_size
    need = sizing.need_of(network, image_size=size, dtype=torch.float32, images=32)
    free = (need.at(images) + still_to_come(trainer)) / sizing.SHARE + 1
    monkeypatch.setattr(sizing, "available_bytes", lambda *_: int(free) + 1)


class TestTheKey:
    def test_a_number_nothing_or_auto(self) -> None:
        for text, value in (("auto", "auto"), ("7", 7), ("1e1", 10), ("null", None)):
            recipe = tiny(f"data.micro_batch={text}")
            assert recipe.data.micro_batch == value
            assert f"micro_batch: {text if value != 10 else 10}" in recipe.to_yaml()

    @pytest.mark.parametrize("text", ["0", "-3", "1.5", "largest", "true", "[4]"])
    def test_anything_else_is_refused_in_one_line(self, text: str) -> None:
        with pytest.raises(RecipeError) as caught:
            tiny(f"data.micro_batch={text}")
        assert "expected 'auto' or a whole number of at least 1" in str(caught.value)
        assert "\n" not in str(caught.value)


class TestLargest:
    @pytest.mark.parametrize("limit", [0, 1, 2, 5, 31, 32, 63, 64, 100])
    def test_it_is_the_largest(self, limit: int) -> None:
        choices, asked = [64, 32, 22, 16, 8, 2, 1], []

        def fits(images: int) -> bool:
            asked.append(images)
            return images <= limit

        expected = max((n for n in choices if n <= limit), default=0)
        assert largest(choices, fits) == expected
        assert len(asked) <= 3

    @pytest.mark.parametrize("unit", [1, 2])
    @pytest.mark.parametrize("batch_size, world", [(64, 1), (64, 3), (37, 2), (10, 5)])
    def test_the_parts_are_those_it_takes(self, batch_size: int, world: int, unit: int) -> None:
        stream = Sampler(100, batch_size=batch_size, seed=0, unit=unit)
        for rank in range(world):
            parts = sizing._parts(stream, rank=rank, world=world)
            assert min(parts) == unit
            assert max(parts) == -(-(batch_size // unit) // world) * unit
            assert list(parts) == sorted(parts, reverse=True)
            for size, real in parts.items():
                cut = stream.micro_batches(3, rank=rank, world=world, micro_batch=size)
                assert max(len(indices) for _, indices in cut) == real


class TestFinding:
    def test_where_all_fits_it_is_the_share_and_nothing_is_said(self, tmp_path: Path) -> None:
        trainer = trainer_of(tiny(*AUTO), tmp_path)
        assert find_micro_batch(trainer) == 64
        assert trainer.told == []  # type: ignore[attr-defined]

    @pytest.mark.parametrize("limit, expected", [(40, 32), (31, 22), (1, 1)])
    def test_less_memory_means_smaller_parts(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: int, expected: int
    ) -> None:
        trainer = trainer_of(tiny(*AUTO), tmp_path)
        allow(monkeypatch, trainer, limit)
        assert find_micro_batch(trainer) == expected
        (told,) = trainer.told  # type: ignore[attr-defined]
        assert told == f"data.micro_batch: auto: {expected} of a process's 64 images fit at once"

    def test_too_little_for_one_is_said_with_what_to_do(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        trainer = trainer_of(tiny(*AUTO), tmp_path)
        allow(monkeypatch, trainer, 0)
        with pytest.raises(SetupError, match=r"not even 1 at once fits.*grad_checkpointing"):
            find_micro_batch(trainer)

    def test_batch_norms_are_named(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        names = ("model.name=test_resnet", "model.args={}", "model.image_size=32")
        trainer = trainer_of(tiny(*AUTO, *names), tmp_path)
        allow(monkeypatch, trainer, 20)
        assert find_micro_batch(trainer) == 16
        (told,) = trainer.told  # type: ignore[attr-defined]
        assert "batch norms" in told

    def test_a_gpu_tries_downwards_what_was_rehearsed(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        trainer, tried = trainer_of(tiny(*AUTO), tmp_path), []
        allow(monkeypatch, trainer, 40)

        def tries(images: int) -> bool:
            tried.append(images)
            return images <= 17

        assert find_micro_batch(trainer, succeeds=tries) == 16
        assert tried == [32, 22, 16]
        with pytest.raises(SetupError, match="not even 1 at once"):
            find_micro_batch(trainer, succeeds=lambda _: False)

    def test_all_ranks_take_the_smallest(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        trainer = trainer_of(tiny(*AUTO), tmp_path)
        gather: Callable[[Any], Any] = lambda found: torch.cat([found, found // 4])  # noqa: E731
        monkeypatch.setattr(trainer.accelerator, "gather", gather)
        assert find_micro_batch(trainer) == 16
        assert trainer.told  # type: ignore[attr-defined]
        monkeypatch.setattr(trainer.accelerator, "gather", lambda found: found * 0)
        with pytest.raises(SetupError):  # on every rank, not on one alone
            find_micro_batch(trainer)

    def test_a_sharded_network_is_refused(self, tmp_path: Path) -> None:
        trainer = trainer_of(tiny(*AUTO), tmp_path)
        trainer.sharded = True
        with pytest.raises(RecipeError, match="FSDP"):
            find_micro_batch(trainer)


class TestARealPass:
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
    def test_a_device_that_is_full_is_an_answer(
        self, error: RuntimeError, network: nn.Module, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        network(torch.zeros(2, 3, *self.SIZE))
        before = {name: tensor.clone() for name, tensor in network.state_dict().items()}
        real, ballasts = sizing.pass_once, []

        def limited(twin: nn.Module, images: int, *given: Any, **named: Any) -> None:
            torch.rand(3)
            real(twin, images, *given, **named)
            if images > 5:
                raise error

        class Torch:
            """Stands for torch, and notes what is taken."""

            def __getattr__(self, name: str) -> Any:
                return getattr(torch, name)

            def empty(self, size: int, **given: Any) -> torch.Tensor:
                ballasts.append(size)
                return torch.empty(size, **given)

        monkeypatch.setattr(sizing, "pass_once", limited)
        monkeypatch.setattr(sizing, "torch", Torch())
        torch.manual_seed(1)
        state = torch.get_rng_state()
        found = [passes(network, self.SIZE, torch.float32, 1000, images) for images in (4, 5, 6)]
        assert found == [True, True, False]
        assert ballasts == [1000] * 3
        assert torch.equal(torch.get_rng_state(), state)
        for name, tensor in network.state_dict().items():
            assert torch.equal(tensor, before[name])
        assert all(parameter.grad is None for parameter in network.parameters())

    def test_other_errors_are_errors(self, monkeypatch: pytest.MonkeyPatch) -> None:
        with pytest.raises(RuntimeError, match="channels"):
            passes(nn.Conv2d(5, 4, 3), self.SIZE, torch.float32, 0, 1)


class TestMemory:
    def test_what_is_free_is_shared_by_the_processes_of_a_host(self, tmp_path: Path) -> None:
        alone, of_four = (available_bytes(torch.device("cpu"), n) for n in (1, 4))
        assert alone > 2**20
        assert of_four == pytest.approx(alone / 4, rel=0.2)

    def test_what_a_step_keeps(self, tmp_path: Path) -> None:
        trainer = trainer_of(tiny(*AUTO, "optim.ema_decay=0.9"), tmp_path)
        one = sum(4 * p.numel() for p in trainer.model.parameters())
        # gradients, two moments, and a snapshot of the weights, their average and the moments
        on_host = 1 + 1 + 2 if trainer.accelerator.device.type == "cpu" else 0
        assert still_to_come(trainer) == pytest.approx((1 + 2 + on_host) * one, rel=0.01)
        trainer.optimizer.optimizer.state[next(trainer.model.parameters())] = {"restored": True}
        assert still_to_come(trainer) == pytest.approx((1 + on_host) * one, rel=0.01)


def test_a_run_keeps_the_global_batch_and_a_resumed_one_does_not_look_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = tiny(*AUTO, "data.micro_batch=null")
    train(whole, tmp_path / "whole")
    out = tmp_path / "auto"
    allow(monkeypatch, trainer_of(tiny(*AUTO), tmp_path), 20)
    save = TrainerState.save

    def interrupted(trainer: TrainerState, meter: Any) -> None:
        save(trainer, meter)
        raise Interrupted("stopped", 15)

    monkeypatch.setattr(TrainerState, "save", interrupted)
    recipe = tiny(*AUTO, "run.save_every=2")
    with pytest.raises(Interrupted):
        train(recipe, out)
    monkeypatch.setattr(TrainerState, "save", save)
    record = json.loads((out / "run.json").read_text())
    assert record["micro_batch"]["images"] == 16
    assert record["micro_batch"]["on"]["device"] == record["device"]["name"]
    assert "micro_batch: auto" in (out / "recipe.yaml").read_text()  # elsewhere it is another

    asked: list[int] = []
    monkeypatch.setattr(sizing, "find_micro_batch", lambda trainer: asked.append(1) or 64)
    used: list[int | None] = []
    step = TrainerState.step

    def spy(trainer: TrainerState, number: int, *rest: Any) -> None:
        used.append(trainer.micro_batch)
        assert number == 4
        step(trainer, number, *rest)

    monkeypatch.setattr(TrainerState, "step", spy)
    train(recipe, out, resume=True)
    assert asked == []
    assert used == [16, 16]
    assert losses(out) == pytest.approx(losses(tmp_path / "whole"), abs=1e-5)
    assert len(set(losses(out))) >= 3


def test_on_another_machine_it_is_looked_for_again(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    place = {"device": {"name": "a"}, "num_processes": 2}
    run.write_json("run.json", place)
    assert sizing._recorded(run) is None
    sizing._record(run, 24)
    assert sizing._recorded(run) == 24
    record = run.read_json("run.json") or {}
    for change in ({"device": {"name": "b"}}, {"num_processes": 4}):
        run.write_json("run.json", {**record, **change})
        assert sizing._recorded(run) is None
    for broken in ("16", -1, None, {"images": "many", "on": {"device": "a", "processes": 2}}):
        run.write_json("run.json", {**record, "micro_batch": broken})
        assert sizing._recorded(run) is None


def test_features_need_no_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(sizing, "find_micro_batch", lambda trainer: 1 / 0)
    frozen = tiny(*AUTO, "model.freeze=backbone", "data.train=resize")
    train(frozen, tmp_path / "run")
    assert "micro_batch" not in json.loads((tmp_path / "run" / "run.json").read_text())
