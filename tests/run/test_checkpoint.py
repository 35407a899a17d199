"""The content of a checkpoint comes back to the last bit; counters remember the best."""

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


def network() -> torch.nn.Module:
    torch.manual_seed(0)
    return timm.create_model("test_vit", num_classes=3, img_size=32)


def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> None:
    torch.manual_seed(seed)
    model(torch.randn(2, 3, 32, 32)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("name", ["adamw", "sgd", "lamb", "lion", "madgrad", "adabelief"])
def test_training_goes_on_as_if_it_had_not_stopped(tmp_path: Path, name: str) -> None:
    model = network()
    for parameter in model.patch_embed.parameters():  # some are frozen
        parameter.requires_grad_(False)
    fresh = copy.deepcopy(model)
    optimizer = build_optimizer(model, name=name, lr=1e-3, weight_decay=0.1)
    ema = ModelEmaV3(model, decay=0.5)
    for seed in range(2):
        step(model, optimizer, seed)
        ema.update(model)
    snapshot = checkpoint.capture_snapshot(model, optimizer, ema.module, {"step": 2})
    snapshot.write(tmp_path)
    assert snapshot.num_bytes() <= sum(file.stat().st_size for file in tmp_path.iterdir())
    step(model, optimizer, 5)

    other = build_optimizer(fresh, name=name, lr=1e-3, weight_decay=0.1)
    other_ema = ModelEmaV3(fresh, decay=0.5)
    assert checkpoint.load_checkpoint(tmp_path, fresh, other, other_ema.module) == {"step": 2}
    step(fresh, other, 5)
    for key, value in model.state_dict().items():
        assert torch.equal(value, fresh.state_dict()[key]), key
    for key, value in ema.module.state_dict().items():
        assert torch.equal(value, other_ema.module.state_dict()[key]), key


@pytest.mark.parametrize("name", ["adamw", "sgd", "lamb"])  # torch's fused kernels, and timm's
def test_channels_last_changes_no_file_and_no_step(tmp_path: Path, name: str) -> None:
    def made() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = timm.create_model("test_resnet", num_classes=3)
        model.to(memory_format=torch.channels_last)
        return model, build_optimizer(model, name=name, lr=1e-3)

    model, optimizer = made()
    checkpoint.capture_snapshot(model, optimizer, None, {}).write(tmp_path)
    first = copy.deepcopy(model).to(memory_format=torch.contiguous_format)
    folder = tmp_path / "first"
    folder.mkdir()
    checkpoint.capture_snapshot(first, build_optimizer(first, name=name, lr=1e-3), None, {}).write(
        folder
    )
    file = "model.safetensors"
    assert (tmp_path / file).read_bytes() == (folder / file).read_bytes()
    step(model, optimizer, 0)
    checkpoint.capture_snapshot(model, optimizer, None, {}).write(tmp_path)
    other, continued = made()
    checkpoint.load_checkpoint(tmp_path, other, continued, None)
    for each in ((model, optimizer), (other, continued)):
        step(*each, 1)
    for key, value in model.state_dict().items():
        assert torch.equal(value, other.state_dict()[key]), key


def test_every_optimiser_that_a_run_takes_is_kept(tmp_path: Path) -> None:
    """By its own name; those that need a package or a GPU are taken where there are such."""

    def made(name: str) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.LayerNorm(3))
        return model, build_optimizer(model, name=name, lr=0.01)

    def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> None:
        torch.manual_seed(seed)
        model(torch.randn(5, 4)).pow(4).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    kept = 0
    for name in list_optimizers():
        try:
            model, optimizer = made(name)
        except (RecipeError, SetupError):
            continue
        step(model, optimizer, 1)
        checkpoint.capture_snapshot(model, optimizer, None, {}).write(tmp_path)
        other = made(name)
        checkpoint.load_checkpoint(tmp_path, *other, None)
        for trained in ((model, optimizer), other):
            step(*trained, 2)
        for one, two in zip(model.parameters(), other[0].parameters(), strict=True):
            assert torch.equal(one, two), name
        kept += 1
    assert kept > 60


def test_a_snapshot_shares_nothing_with_the_live_network(tmp_path: Path) -> None:
    model = network()
    optimizer = build_optimizer(model, name="adamw", lr=1e-3)
    snapshot = checkpoint.capture_snapshot(model, optimizer, None, {})
    before = snapshot.weights["head.weight"].clone()
    step(model, optimizer, 0)
    assert torch.equal(snapshot.weights["head.weight"], before)
    assert not torch.equal(model.head.weight, before)


def test_saving_before_the_first_step_makes_no_moments_up(tmp_path: Path) -> None:
    model = network()
    optimizer = build_optimizer(model, name="adamw", lr=1e-3)
    checkpoint.capture_snapshot(model, optimizer, None, {"step": 0}).write(tmp_path)
    assert not optimizer.state
    checkpoint.load_checkpoint(tmp_path, model, optimizer, None)
    assert not optimizer.state


def test_evaluation_reads_the_average_where_there_is_one(tmp_path: Path) -> None:
    model = network()
    optimizer = build_optimizer(model, name="adamw", lr=1e-1)
    ema = ModelEmaV3(model, decay=0.9)
    step(model, optimizer, 0)
    checkpoint.capture_snapshot(model, optimizer, None, {}).write(tmp_path)
    assert torch.equal(checkpoint.read_eval_weights(tmp_path)["head.weight"], model.head.weight)
    checkpoint.capture_snapshot(model, optimizer, ema.module, {}).write(tmp_path)
    assert torch.equal(
        checkpoint.read_eval_weights(tmp_path)["head.weight"], ema.module.head.weight
    )


def test_no_file_of_a_checkpoint_is_a_pickle(tmp_path: Path) -> None:
    model = network()
    optimizer = build_optimizer(model, name="adamw", lr=1e-3)
    step(model, optimizer, 0)
    checkpoint.capture_snapshot(model, optimizer, None, {"step": 1}).write(tmp_path)
    assert {file.suffix for file in tmp_path.iterdir()} == {".safetensors", ".json"}
    assert json.loads((tmp_path / "state.json").read_text()) == {"step": 1}


@pytest.mark.parametrize("metric, better", [("val.top1", [0.2, 0.3]), ("val.loss", [0.3, 0.2])])
def test_the_best_in_the_metrics_own_direction_and_of_equal_ones_the_last(metric, better) -> None:
    counters = Counters()
    noted = [(1, better[0], True), (2, better[1], True), (3, better[0], False)]
    for counters.step, value, is_best in [*noted, (4, better[1], True), (5, better[0], False)]:
        assert counters.update_best(metric, value) == is_best
    assert (counters.best, counters.best_step) == (better[1], 4)
    assert counters.stale == 3  # an equal one does not prolong a training
    counters.step = 6
    assert counters.update_best("last", counters.step)
    assert counters.best_step == 6
