"""A sharded network (FSDP) on two CPU ranks: evaluated, saved, loaded.

Accelerate leaves FSDP out on a CPU, so the network is sharded by torch here, or Accelerate is told
that the ranks are GPUs; what its launcher makes of them is for the tests of a GPU.
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
from faults_runs import losses
from ranks import command, two_ranks
from recipe_texts import tiny_text
from safetensors.torch import load_file
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from finetune.data.image_store import Store
from finetune.data.loader import Loader
from finetune.data.source import open_source
from finetune.evaluation.evaluate import evaluate
from finetune.recipe.load import parse_recipe
from finetune.run import checkpoint as state
from finetune.training.optim import build_optimizer, can_mask
from finetune.training.train import train
from finetune.training.trainer_state import TrainerState
from finetune.transforms.pipeline import Pipeline


def network() -> torch.nn.Module:
    torch.manual_seed(0)
    return timm.create_model("test_vit", num_classes=10, img_size=32)


def digits() -> Loader:
    split = open_source("embedded:digits").splits["test"].subset(range(12))
    keep = Pipeline("resize", image_size=(32, 32), mean=(0.5,) * 3, std=(0.5,) * 3)
    return Loader(Store(split, None), keep, num_classes=10, device=torch.device("cpu"))


def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    torch.manual_seed(1)
    model(torch.randn(4, 3, 32, 32)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def saved_after_an_evaluation(folder: Path) -> None:
    accelerator = Accelerator(cpu=True)
    model = network()
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    step(model, optimizer)
    evaluate(model, digits(), accelerator, batch_size=4)
    snapshot = state.capture(model, optimizer, None, {"step": 1})
    if accelerator.is_main_process:
        folder.mkdir()
        snapshot.write(folder)
    accelerator.wait_for_everyone()
    weights = state.read_weights(folder)
    state.set_weights(model, weights)
    assert {type(tensor) for tensor in weights.values()} == {torch.Tensor}
    step(model, optimizer)
    accelerator.wait_for_everyone()


def steps_without_waiting(folder: Path) -> None:
    """Each optimiser steps; the fused one leaves a step out on its device, as a mask says."""
    accelerator = Accelerator(cpu=True)
    for name, masks in (("adamw", True), ("sgd", False)):
        model = network()
        fully_shard(model)
        optimizer = build_optimizer(model, name=name, lr=0.1, sharded=True)
        assert can_mask(optimizer) == masks
        for left_out in (False, True, False):
            before = [p.full_tensor().clone() for p in model.parameters()]
            model(torch.randn(4, 3, 32, 32)).square().mean().backward()
            if masks and optimizer.state:
                optimizer.grad_scale, optimizer.found_inf = None, torch.tensor(float(left_out))
            optimizer.step()
            after = [p.full_tensor() for p in model.parameters()]
            same = all(map(torch.equal, before, after))
            assert same == (left_out and masks)
            norm(model)
            optimizer.zero_grad()
    accelerator.end_training()


def norm(model: torch.nn.Module) -> None:
    """Without a limit, the gradient's norm over all ranks is found and no gradient written."""
    trainer = object.__new__(TrainerState)
    trainer.model, trainer.sharded = model, True
    trainer.accelerator = SimpleNamespace(is_fsdp2=True, unscale_gradients=lambda: None)
    gradients = [p.grad for p in model.parameters()]
    whole = torch.stack([gradient.full_tensor().norm() for gradient in gradients]).norm()
    versions = [gradient._version for gradient in gradients]
    found = trainer._clip(None)
    assert not isinstance(found, DTensor)
    torch.testing.assert_close(found, whole)
    assert versions == [gradient._version for gradient in gradients]


def test_a_sharded_network_steps_without_a_look_at_its_gradient(tmp_path: Path) -> None:
    two_ranks(steps_without_waiting, tmp_path)


def test_a_sharded_network_is_saved_after_an_evaluation(tmp_path: Path) -> None:
    two_ranks(saved_after_an_evaluation, tmp_path / "saved")
    alone = network()
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.1, momentum=0.9)
    step(alone, optimizer)
    weights = load_file(tmp_path / "saved" / "model.safetensors")
    assert weights.keys() == alone.state_dict().keys()
    for name, tensor in alone.state_dict().items():
        assert torch.allclose(weights[name], tensor, atol=1e-6), name
    moments = load_file(tmp_path / "saved" / "optimizer.safetensors")
    assert moments["head.weight/momentum_buffer"].shape == alone.head.weight.shape
    assert moments["head.weight/momentum_buffer"].abs().sum() > 0


RUN = tiny_text(
    "train: resize | random_crop(padding=2), eval: resize, batch_size: 16, num_train: 96",
    optim="lr: 3e-3, steps: 4, clip_norm: 1.0",
    run="precision: fp32, log_every: 1, eval_every: 2, save_every: 2, test: false",
    depth=2,
)
LAUNCHED = {  # as the launcher tells the ranks what recipes/accelerate/fsdp.yaml says
    "ACCELERATE_USE_FSDP": "true",
    "FSDP_VERSION": "2",
    "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
    "FSDP_TRANSFORMER_CLS_TO_WRAP": "Block",
    "FSDP_RESHARD_AFTER_FORWARD": "true",
    "FSDP_CPU_RAM_EFFICIENT_LOADING": "false",
    "FSDP_STATE_DICT_TYPE": "SHARDED_STATE_DICT",
}


def trained_as_on_gpus(*words: str) -> int:
    join = PartialState.__init__

    def joined(self: PartialState, *arguments: object, **named: object) -> None:
        join(self, *arguments, **named)
        if self.distributed_type == DistributedType.MULTI_CPU:
            self._shared_state["distributed_type"] = DistributedType.MULTI_GPU

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PartialState, "__init__", joined)
        return command("train", *words)


def test_a_run_evaluates_saves_and_publishes(tmp_path: Path, no_pictures: None) -> None:
    recipe, out = tmp_path / "recipe.yaml", tmp_path / "run"
    recipe.write_text(RUN)
    two_ranks(trained_as_on_gpus, str(recipe), "--out", str(out), environment=LAUNCHED)
    alone = train(parse_recipe(RUN), tmp_path / "alone")
    assert losses(out) == pytest.approx(losses(tmp_path / "alone"), rel=1e-5)
    assert json.loads((out / "results.json").read_text())["val"]["loss"] == pytest.approx(
        alone["val"]["loss"], rel=1e-5
    )
    weights = [load_file(run / "model" / "model.safetensors") for run in (out, tmp_path / "alone")]
    assert all(torch.allclose(weights[0][name], weights[1][name], atol=1e-4) for name in weights[1])
