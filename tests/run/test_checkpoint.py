"""Checkpoints restore bit-exactly; counters track the best step."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest
import timm
import torch
from timm.optim import list_optimizers
from timm.utils import ModelEmaV3

from finetune.errors import RecipeError, SetupError
from finetune.run import checkpoint
from finetune.training.early_stopping import Counters
from finetune.training.optim import build_optimizer


def make_model() -> torch.nn.Module:
    torch.manual_seed(0)
    return timm.create_model("test_vit", num_classes=3, img_size=32)


def train_step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> None:
    torch.manual_seed(seed)
    model(torch.randn(2, 3, 32, 32)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("name", ["adamw", "sgd", "lamb"])  # the others: below
def test_restored_training_continues_bit_exactly(tmp_path: Path, name: str) -> None:
    model = make_model()
    for parameter in model.patch_embed.parameters():  # freeze some
        parameter.requires_grad_(False)
    restored = copy.deepcopy(model)
    optimizer = build_optimizer(model, name=name, lr=1e-3, weight_decay=0.1)
    ema = ModelEmaV3(model, decay=0.5)
    for seed in range(2):
        train_step(model, optimizer, seed)
        ema.update(model)
    snapshot = checkpoint.capture_snapshot(model, optimizer, ema.module, {"step": 2})
    snapshot.write(tmp_path)
    assert snapshot.num_bytes() <= sum(file.stat().st_size for file in tmp_path.iterdir())
    train_step(model, optimizer, 5)

    restored_optimizer = build_optimizer(restored, name=name, lr=1e-3, weight_decay=0.1)
    restored_ema = ModelEmaV3(restored, decay=0.5)
    assert checkpoint.load_checkpoint(
        tmp_path, restored, restored_optimizer, restored_ema.module
    ) == {"step": 2}
    train_step(restored, restored_optimizer, 5)
    for key, value in model.state_dict().items():
        assert torch.equal(value, restored.state_dict()[key]), key
    for key, value in ema.module.state_dict().items():
        assert torch.equal(value, restored_ema.module.state_dict()[key]), key


@pytest.mark.parametrize("name", ["adamw", "lamb"])  # a fused optimizer of torch, and one of timm
def test_channels_last_models_save_the_same_file_and_resume_exactly(
    tmp_path: Path, name: str
) -> None:
    def make_channels_last() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = timm.create_model("test_resnet", num_classes=3)
        model.to(memory_format=torch.channels_last)
        return model, build_optimizer(model, name=name, lr=1e-3)

    model, optimizer = make_channels_last()
    checkpoint.capture_snapshot(model, optimizer, None, {}).write(tmp_path)
    contiguous = copy.deepcopy(model).to(memory_format=torch.contiguous_format)
    folder = tmp_path / "first"
    folder.mkdir()
    checkpoint.capture_snapshot(
        contiguous, build_optimizer(contiguous, name=name, lr=1e-3), None, {}
    ).write(folder)
    file = "model.safetensors"
    assert (tmp_path / file).read_bytes() == (folder / file).read_bytes()
    train_step(model, optimizer, 0)
    checkpoint.capture_snapshot(model, optimizer, None, {}).write(tmp_path)
    restored, restored_optimizer = make_channels_last()
    checkpoint.load_checkpoint(tmp_path, restored, restored_optimizer, None)
    for pair in ((model, optimizer), (restored, restored_optimizer)):
        train_step(*pair, 1)
    for key, value in model.state_dict().items():
        assert torch.equal(value, restored.state_dict()[key]), key


def test_every_supported_optimizer_resumes_bit_exactly(tmp_path: Path) -> None:
    """Tries every timm optimizer; skips those that need a missing package or a GPU."""

    def make_trainable(name: str) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.LayerNorm(3))
        return model, build_optimizer(model, name=name, lr=0.01)

    def train_step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> None:
        torch.manual_seed(seed)
        model(torch.randn(5, 4)).pow(4).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    num_tested = 0
    for name in list_optimizers():
        try:
            model, optimizer = make_trainable(name)
        except (RecipeError, SetupError):
            continue
        train_step(model, optimizer, 1)
        checkpoint.capture_snapshot(model, optimizer, None, {}).write(tmp_path)
        restored = make_trainable(name)
        checkpoint.load_checkpoint(tmp_path, *restored, None)
        for pair in ((model, optimizer), restored):
            train_step(*pair, 2)
        for parameter, restored_parameter in zip(
            model.parameters(), restored[0].parameters(), strict=True
        ):
            assert torch.equal(parameter, restored_parameter), name
        num_tested += 1
    assert num_tested > 60


def test_snapshot_shares_no_memory_with_the_model(tmp_path: Path) -> None:
    model = make_model()
    optimizer = build_optimizer(model, name="adamw", lr=1e-3)
    snapshot = checkpoint.capture_snapshot(model, optimizer, None, {})
    before = snapshot.weights["head.weight"].clone()
    train_step(model, optimizer, 0)
    assert torch.equal(snapshot.weights["head.weight"], before)
    assert not torch.equal(model.head.weight, before)


def test_saving_before_the_first_step_creates_no_optimizer_state(tmp_path: Path) -> None:
    model = make_model()
    optimizer = build_optimizer(model, name="adamw", lr=1e-3)
    checkpoint.capture_snapshot(model, optimizer, None, {"step": 0}).write(tmp_path)
    assert not optimizer.state
    checkpoint.load_checkpoint(tmp_path, model, optimizer, None)
    assert not optimizer.state


def test_eval_weights_are_the_ema_if_present(tmp_path: Path) -> None:
    model = make_model()
    optimizer = build_optimizer(model, name="adamw", lr=1e-1)
    ema = ModelEmaV3(model, decay=0.9)
    train_step(model, optimizer, 0)
    checkpoint.capture_snapshot(model, optimizer, None, {}).write(tmp_path)
    assert torch.equal(checkpoint.read_eval_weights(tmp_path)["head.weight"], model.head.weight)
    checkpoint.capture_snapshot(model, optimizer, ema.module, {}).write(tmp_path)
    assert torch.equal(
        checkpoint.read_eval_weights(tmp_path)["head.weight"], ema.module.head.weight
    )


def test_checkpoints_contain_no_pickles(tmp_path: Path) -> None:
    model = make_model()
    optimizer = build_optimizer(model, name="adamw", lr=1e-3)
    train_step(model, optimizer, 0)
    checkpoint.capture_snapshot(model, optimizer, None, {"step": 1}).write(tmp_path)
    assert {file.suffix for file in tmp_path.iterdir()} == {".safetensors", ".json"}
    assert json.loads((tmp_path / "state.json").read_text()) == {"step": 1}


@pytest.mark.parametrize("metric, better", [("val.top1", [0.2, 0.3]), ("val.loss", [0.3, 0.2])])
def test_update_best_follows_the_metrics_direction_and_keeps_the_last_tie(metric, better) -> None:
    counters = Counters()
    updates = [(1, better[0], True), (2, better[1], True), (3, better[0], False)]
    for counters.step, value, is_best in [*updates, (4, better[1], True), (5, better[0], False)]:
        assert counters.update_best(metric, value) == is_best
    assert (counters.best, counters.best_step) == (better[1], 4)
    assert counters.stale == 3  # an equal value does not reset the patience
    counters.step = 6
    assert counters.update_best("last", counters.step)
    assert counters.best_step == 6
