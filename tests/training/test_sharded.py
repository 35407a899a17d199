"""A sharded model (FSDP) on two CPU ranks: evaluated, saved, loaded.

Accelerate does not enable FSDP on a CPU. So these tests shard the model with torch, or make
Accelerate believe that the ranks are GPUs. The tests in tests/gpu/ cover its launcher.
"""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import timm
import torch
from accelerate import Accelerator
from accelerate.state import PartialState
from accelerate.utils import DistributedType
from forked_runs import read_train_losses
from ranks import run_rank_command, run_two_ranks
from recipe_texts import tiny_recipe_text
from safetensors.torch import load_file
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from finetune.data.loader import ImageLoader
from finetune.data.open_source import open_source
from finetune.data.pixel_store import PixelStore
from finetune.evaluation.evaluator import evaluate
from finetune.recipe.load import parse_recipe
from finetune.run import checkpoint as state
from finetune.training.optim import build_optimizer, supports_found_inf
from finetune.training.train import train
from finetune.training.trainer_state import TrainerState
from finetune.transforms.pipeline import Pipeline


def make_model() -> torch.nn.Module:
    torch.manual_seed(0)
    return timm.create_model("test_vit", num_classes=10, img_size=32)


def digits_loader() -> ImageLoader:
    split = open_source("embedded:digits").splits["test"].subset(range(12))
    pipeline = Pipeline("resize", image_size=(32, 32), mean=(0.5,) * 3, std=(0.5,) * 3)
    return ImageLoader(
        PixelStore(split, None), pipeline, num_classes=10, device=torch.device("cpu")
    )


def train_step(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    torch.manual_seed(1)
    model(torch.randn(4, 3, 32, 32)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def evaluate_and_save(folder: Path) -> None:
    accelerator = Accelerator(cpu=True)
    model = make_model()
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    train_step(model, optimizer)
    evaluate(model, digits_loader(), accelerator, batch_size=4)
    snapshot = state.capture_snapshot(model, optimizer, None, {"step": 1})
    if accelerator.is_main_process:
        folder.mkdir()
        snapshot.write(folder)
    accelerator.wait_for_everyone()
    weights = state.read_eval_weights(folder)
    state.load_full_state_dict(model, weights)
    assert {type(tensor) for tensor in weights.values()} == {torch.Tensor}
    train_step(model, optimizer)
    accelerator.wait_for_everyone()


def step_each_optimizer(folder: Path) -> None:
    """Step each optimizer; fused AdamW skips a step on the device if `found_inf` is set."""
    accelerator = Accelerator(cpu=True)
    for name, supports_skipping in (("adamw", True), ("sgd", False)):
        model = make_model()
        fully_shard(model)
        optimizer = build_optimizer(model, name=name, lr=0.1, sharded=True)
        assert supports_found_inf(optimizer) == supports_skipping
        for skip in (False, True, False):
            before = [p.full_tensor().clone() for p in model.parameters()]
            model(torch.randn(4, 3, 32, 32)).square().mean().backward()
            if supports_skipping and optimizer.state:
                optimizer.grad_scale, optimizer.found_inf = None, torch.tensor(float(skip))
            optimizer.step()
            after = [p.full_tensor() for p in model.parameters()]
            unchanged = all(map(torch.equal, before, after))
            assert unchanged == (skip and supports_skipping)
            check_gradient_norm(model)
            optimizer.zero_grad()
    accelerator.end_training()


def check_gradient_norm(model: torch.nn.Module) -> None:
    """Check that without clipping the global gradient norm is exact and gradients are untouched."""
    trainer = object.__new__(TrainerState)
    trainer.model, trainer.is_sharded = model, True
    trainer.accelerator = SimpleNamespace(is_fsdp2=True, unscale_gradients=lambda: None)
    gradients = [p.grad for p in model.parameters()]
    expected = torch.stack([gradient.full_tensor().norm() for gradient in gradients]).norm()
    versions = [gradient._version for gradient in gradients]
    actual = trainer.clip_grad_norm(None)
    assert not isinstance(actual, DTensor)
    torch.testing.assert_close(actual, expected)
    assert versions == [gradient._version for gradient in gradients]


def test_sharded_optimizers_step_and_skip_without_a_host_sync(tmp_path: Path) -> None:
    run_two_ranks(step_each_optimizer, tmp_path)


def test_sharded_model_is_saved_unsharded_after_an_evaluation(tmp_path: Path) -> None:
    run_two_ranks(evaluate_and_save, tmp_path / "saved")
    alone = make_model()
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.1, momentum=0.9)
    train_step(alone, optimizer)
    weights = load_file(tmp_path / "saved" / "model.safetensors")
    assert weights.keys() == alone.state_dict().keys()
    for name, tensor in alone.state_dict().items():
        assert torch.allclose(weights[name], tensor, atol=1e-6), name
    moments = load_file(tmp_path / "saved" / "optimizer.safetensors")
    assert moments["head.weight/momentum_buffer"].shape == alone.head.weight.shape
    assert moments["head.weight/momentum_buffer"].abs().sum() > 0


RECIPE = tiny_recipe_text(
    "train: resize | random_crop(padding=2), eval: resize, batch_size: 16, num_train: 96",
    optim="lr: 3e-3, steps: 4, clip_norm: 1.0",
    run="precision: fp32, log_every: 1, eval_every: 2, save_every: 2, test: false",
    depth=2,
)
LAUNCHER_ENVIRONMENT = {  # what the launcher exports for recipes/accelerate/fsdp.yaml
    "ACCELERATE_USE_FSDP": "true",
    "FSDP_VERSION": "2",
    "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
    "FSDP_TRANSFORMER_CLS_TO_WRAP": "Block",
    "FSDP_RESHARD_AFTER_FORWARD": "true",
    "FSDP_CPU_RAM_EFFICIENT_LOADING": "false",
    "FSDP_STATE_DICT_TYPE": "SHARDED_STATE_DICT",
}


def train_as_if_on_gpus(*args: str) -> int:
    init = PartialState.__init__

    def init_as_multi_gpu(self: PartialState, *arguments: object, **kwargs: object) -> None:
        init(self, *arguments, **kwargs)
        if self.distributed_type == DistributedType.MULTI_CPU:
            self._shared_state["distributed_type"] = DistributedType.MULTI_GPU

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PartialState, "__init__", init_as_multi_gpu)
        return run_rank_command("train", *args)


def test_sharded_run_matches_a_single_process(tmp_path: Path, no_plots: None) -> None:
    recipe, out = tmp_path / "recipe.yaml", tmp_path / "run"
    recipe.write_text(RECIPE)
    run_two_ranks(
        train_as_if_on_gpus, str(recipe), "--out", str(out), environment=LAUNCHER_ENVIRONMENT
    )
    alone = train(parse_recipe(RECIPE), tmp_path / "alone")
    assert read_train_losses(out) == pytest.approx(read_train_losses(tmp_path / "alone"), rel=1e-5)
    assert json.loads((out / "results.json").read_text())["val"]["loss"] == pytest.approx(
        alone["val"]["loss"], rel=1e-5
    )
    weights = [load_file(run / "model" / "model.safetensors") for run in (out, tmp_path / "alone")]
    assert all(torch.allclose(weights[0][name], weights[1][name], atol=1e-4) for name in weights[1])
