"""Memory estimates match real training steps and leave the model unchanged."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import timm
import torch
from refusals import refused
from torch import nn

from finetune.models.freeze import freeze_parameters
from finetune.models.summary import summarize_model
from finetune.recipe.load import OptimSection
from finetune.training.memory import (
    MemoryEstimate,
    TensorMemoryTracker,
    estimate_memory,
    fake_copy,
    optimizer_state_bytes,
    run_step,
    tensor_bytes,
)

SIZE = (32, 32)


def make_model(name: str = "test_vit", **args: object) -> nn.Module:
    torch.manual_seed(0)
    size = {"img_size": 32} if "vit" in name else {}
    model: nn.Module = timm.create_model(name, num_classes=5, **size, **args)
    return model


def real_peak(model: nn.Module, images: int, dtype: torch.dtype = torch.float32) -> int:
    """Return the peak bytes of a training step with real tensors, on a copy of the model."""
    tracker, copy = TensorMemoryTracker(), fake_copy(model)
    with tracker:
        run_step(copy, images, SIZE, dtype, train=True)
    assert tracker.current_bytes == 0  # all memory is freed
    return tracker.peak_bytes


class TestTensorMemoryTracker:
    def test_tensors_are_counted_while_they_are_alive(self) -> None:
        inputs = torch.ones(256)
        with TensorMemoryTracker() as tracker:
            assert tracker.current_bytes == 0
            double = inputs * 2
            assert tracker.current_bytes == 1024
            view = double[:10]
            double += 1
            assert tracker.current_bytes == 1024
            del double
            assert tracker.current_bytes == 1024  # the view keeps it alive
            del view
            assert tracker.current_bytes == 0
        assert tracker.peak_bytes == 1024


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", ["test_vit", "test_resnet", "test_convnext"])
def test_fake_tensor_estimate_matches_a_real_step(name: str, dtype: torch.dtype) -> None:
    model = make_model(name)
    estimate = estimate_memory(model, image_size=SIZE, dtype=dtype, num_images=6)
    assert estimate.bytes_per_image > 0
    for images in (6, 9, 12):
        assert estimate.bytes_for(images) == pytest.approx(
            real_peak(model, images, dtype), rel=0.01
        )


@pytest.fixture
def checked_model() -> Iterator[nn.Module]:
    """A model with all the state that a step could change; checked for changes afterwards."""
    model = make_model("test_resnet", drop_rate=0.5)
    model.eval()
    tensors = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    torch.manual_seed(3)
    state = torch.get_rng_state()
    yield model
    assert any("running_mean" in name for name in tensors)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, tensors[name]), name
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not any(module.training for module in model.modules())
    assert torch.equal(torch.get_rng_state(), state)


def test_estimate_leaves_the_model_unchanged(checked_model: nn.Module) -> None:
    def change(copy: nn.Module) -> None:
        copy.set_grad_checkpointing(True)  # type: ignore[operator]
        freeze_parameters(copy, "backbone")

    estimate_memory(checked_model, image_size=SIZE, dtype=torch.float32)
    estimate_memory(checked_model, image_size=SIZE, dtype=torch.bfloat16, prepare=change)
    assert all(parameter.requires_grad for parameter in checked_model.parameters())


def test_fake_copy_shares_frozen_parameters(checked_model: nn.Module) -> None:
    freeze_parameters(checked_model, "backbone")
    copy = fake_copy(checked_model)
    original, copied = dict(checked_model.named_parameters()), dict(copy.named_parameters())
    assert original.keys() == copied.keys()
    shared = {name for name in original if original[name] is copied[name]}
    assert shared == {name for name, parameter in original.items() if not parameter.requires_grad}
    assert 0 < len(shared) < len(original)
    with torch.random.fork_rng([]):
        run_step(copy, 4, SIZE, torch.float32, train=True)


def test_grad_checkpointing_gives_equal_gradients_with_less_memory() -> None:
    images = torch.randn(4, 3, *SIZE)
    gradients, estimates = [], []
    for checkpointing in (False, True):
        model = make_model("vit_tiny_patch16_224", depth=6)
        model.set_grad_checkpointing(checkpointing)  # type: ignore[operator]
        model.train()
        model(images).square().sum().backward()
        gradients.append({name: p.grad for name, p in model.named_parameters()})
        estimates.append(
            estimate_memory(model, image_size=SIZE, dtype=torch.float32, with_flops=True)
        )
    assert gradients[0].keys() == gradients[1].keys()
    for name, gradient in gradients[0].items():
        assert gradient is not None
        assert torch.equal(gradient, gradients[1][name]), name
    assert estimates[1].bytes_per_image < estimates[0].bytes_per_image / 2
    # one more forward pass, except the last layers of each block, which need no recomputation
    assert estimates[0].flops_per_image is not None
    assert estimates[1].flops_per_image is not None
    assert 1.15 < estimates[1].flops_per_image / estimates[0].flops_per_image < 4 / 3


def test_flops_are_three_forward_passes() -> None:
    model = make_model()
    estimate = estimate_memory(model, image_size=SIZE, dtype=torch.float32, with_flops=True)
    assert estimate.flops_per_image is not None
    ratio = estimate.flops_per_image / (6 * summarize_model(model.eval(), SIZE)["macs"])
    assert 0.9 < ratio <= 1.0  # no gradient with respect to the images
    assert estimate_memory(model, image_size=SIZE, dtype=torch.float32).flops_per_image is None


def test_evaluation_keeps_no_activations_for_the_backward_pass() -> None:
    model = make_model()
    evaluation = estimate_memory(model, image_size=SIZE, dtype=torch.float32, train=False)
    training = estimate_memory(model, image_size=SIZE, dtype=torch.float32)
    assert 0 < evaluation.bytes_per_image < training.bytes_per_image / 3


def test_value_dependent_model_is_measured_with_real_images() -> None:
    class ValueDependent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inside = nn.Conv2d(3, 8, 3)

        def forward(self, images: torch.Tensor) -> torch.Tensor:
            maps = self.inside(images)
            return maps.mean((2, 3)) * (2.0 if maps.sum().item() > 0 else 1.0)

    model = ValueDependent()
    estimate = estimate_memory(model, image_size=SIZE, dtype=torch.float32)
    assert estimate.bytes_for(6) == pytest.approx(real_peak(model, 6), rel=0.01)
    assert model.inside.weight.grad is None


def test_bytes_for_is_linear_in_the_number_of_images() -> None:
    assert MemoryEstimate(fixed_bytes=100, bytes_per_image=10).bytes_for(7) == 170


@pytest.mark.parametrize("name, moments", [("adamw", 2), ("sgd", 1), ("lion", 1)])
def test_optimizer_state_bytes_by_optimizer(name: str, moments: int) -> None:
    model = make_model()
    freeze_parameters(model, 1)
    trainable_bytes = tensor_bytes(p for p in model.parameters() if p.requires_grad)
    state_bytes = optimizer_state_bytes(model, OptimSection(name=name, lr=0.1, steps=1))
    counters = 4 * len(list(model.parameters()))
    assert moments * trainable_bytes <= state_bytes <= moments * trainable_bytes + counters
    with refused("recipe.unknown_name", "'adamx'"):
        optimizer_state_bytes(model, OptimSection(name="adamx", lr=0.1, steps=1))


def test_tensor_bytes_counts_shared_tensors_once() -> None:
    one, other = torch.zeros(10), torch.zeros(10, dtype=torch.bfloat16)
    assert tensor_bytes([one, other, one]) == 60
