"""A sharded network (FSDP) on two CPU ranks: evaluated, saved, loaded.

Accelerate leaves FSDP out on a CPU, so the network is sharded by torch here; what a launch does
with it is for the tests of a GPU.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import timm
import torch
from accelerate import Accelerator
from ranks import two_ranks
from safetensors.torch import load_file
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from finetune.data.image_store import Store
from finetune.data.loader import Loader
from finetune.data.source import open_source
from finetune.evaluation.evaluate import evaluate
from finetune.run import checkpoint as state
from finetune.training.optim import build_optimizer, can_mask
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
