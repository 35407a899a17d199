"""The estimate of a pass's memory is what a real one takes; the network does not change."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import timm
import torch
from refusals import refused
from torch import nn

from finetune.models.head import freeze_parameters
from finetune.models.profile import survey
from finetune.recipe.load import OptimSection
from finetune.training.memory import (
    LiveBytes,
    Need,
    need_of,
    num_bytes,
    pass_once,
    state_bytes,
    twin_of,
)

SIZE = (32, 32)


def network(name: str = "test_vit", **args: object) -> nn.Module:
    torch.manual_seed(0)
    size = {"img_size": 32} if "vit" in name else {}
    made: nn.Module = timm.create_model(name, num_classes=5, **size, **args)
    return made


def real_peak(model: nn.Module, images: int, dtype: torch.dtype = torch.float32) -> int:
    """Bytes of a pass of real tensors through a copy."""
    counted, twin = LiveBytes(), twin_of(model)
    with counted:
        pass_once(twin, images, SIZE, dtype, train=True)
    assert counted.live == 0  # it is all given back
    return counted.peak


class TestLiveBytes:
    def test_what_is_made_is_counted_while_it_is_there(self) -> None:
        given = torch.ones(256)
        with LiveBytes() as counted:
            assert counted.live == 0
            double = given * 2
            assert counted.live == 1024
            view = double[:10]
            double += 1
            assert counted.live == 1024
            del double
            assert counted.live == 1024  # a view holds it
            del view
            assert counted.live == 0
        assert counted.peak == 1024


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", ["test_vit", "test_resnet", "test_convnext"])
def test_a_rehearsal_without_content_shows_what_a_real_pass_takes(
    name: str, dtype: torch.dtype
) -> None:
    model = network(name)
    need = need_of(model, image_size=SIZE, dtype=dtype, images=6)
    assert need.per_image > 0
    for images in (6, 9, 12):
        assert need.at(images) == pytest.approx(real_peak(model, images, dtype), rel=0.01)


@pytest.fixture
def watched() -> Iterator[nn.Module]:
    """A network with all that a pass could change."""
    model = network("test_resnet", drop_rate=0.5)
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


def test_nothing_of_the_network_changes(watched: nn.Module) -> None:
    def change(twin: nn.Module) -> None:
        twin.set_grad_checkpointing(True)  # type: ignore[operator]
        freeze_parameters(twin, "backbone")

    need_of(watched, image_size=SIZE, dtype=torch.float32)
    need_of(watched, image_size=SIZE, dtype=torch.bfloat16, change=change)
    assert all(parameter.requires_grad for parameter in watched.parameters())


def test_a_copy_shares_what_is_frozen(watched: nn.Module) -> None:
    freeze_parameters(watched, "backbone")
    twin = twin_of(watched)
    own, others = dict(watched.named_parameters()), dict(twin.named_parameters())
    assert own.keys() == others.keys()
    same = {name for name in own if own[name] is others[name]}
    assert same == {name for name, parameter in own.items() if not parameter.requires_grad}
    assert 0 < len(same) < len(own)
    with torch.random.fork_rng([]):
        pass_once(twin, 4, SIZE, torch.float32, train=True)


def test_gradient_checkpointing_gives_equal_gradients_and_needs_less() -> None:
    images = torch.randn(4, 3, *SIZE)
    gradients, needs = [], []
    for checkpointing in (False, True):
        model = network("vit_tiny_patch16_224", depth=6)
        model.set_grad_checkpointing(checkpointing)  # type: ignore[operator]
        model.train()
        model(images).square().sum().backward()
        gradients.append({name: p.grad for name, p in model.named_parameters()})
        needs.append(need_of(model, image_size=SIZE, dtype=torch.float32, operations=True))
    assert gradients[0].keys() == gradients[1].keys()
    for name, gradient in gradients[0].items():
        assert gradient is not None
        assert torch.equal(gradient, gradients[1][name]), name
    assert needs[1].per_image < needs[0].per_image / 2
    # a forward pass more, but for what the last layers of a block need not compute again
    assert needs[0].operations is not None
    assert needs[1].operations is not None
    assert 1.15 < needs[1].operations / needs[0].operations < 4 / 3


def test_operations_are_three_times_the_forward_pass() -> None:
    model = network()
    need = need_of(model, image_size=SIZE, dtype=torch.float32, operations=True)
    assert need.operations is not None
    share = need.operations / (6 * survey(model.eval(), SIZE)["macs"])
    assert 0.9 < share <= 1.0  # the images need no gradient
    assert need_of(model, image_size=SIZE, dtype=torch.float32).operations is None


def test_an_evaluation_keeps_nothing_for_a_way_back() -> None:
    model = network()
    there = need_of(model, image_size=SIZE, dtype=torch.float32, train=False)
    back = need_of(model, image_size=SIZE, dtype=torch.float32)
    assert 0 < there.per_image < back.per_image / 3


def test_a_network_that_looks_at_values_is_sent_real_images() -> None:
    class Looks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inside = nn.Conv2d(3, 8, 3)

        def forward(self, images: torch.Tensor) -> torch.Tensor:
            maps = self.inside(images)
            return maps.mean((2, 3)) * (2.0 if maps.sum().item() > 0 else 1.0)

    model = Looks()
    need = need_of(model, image_size=SIZE, dtype=torch.float32)
    assert need.at(6) == pytest.approx(real_peak(model, 6), rel=0.01)
    assert model.inside.weight.grad is None


def test_a_line() -> None:
    assert Need(fixed=100, per_image=10).at(7) == 170


@pytest.mark.parametrize("name, moments", [("adamw", 2), ("sgd", 1), ("lion", 1)])
def test_what_an_optimiser_keeps(name: str, moments: int) -> None:
    model = network()
    freeze_parameters(model, 1)
    trained = num_bytes(p for p in model.parameters() if p.requires_grad)
    kept = state_bytes(model, OptimSection(name=name, lr=0.1, steps=1))
    counters = 4 * len(list(model.parameters()))
    assert moments * trained <= kept <= moments * trained + counters
    with refused("recipe.unknown_name", "'adamx'"):
        state_bytes(model, OptimSection(name="adamx", lr=0.1, steps=1))


def test_tensors_that_stand_there_twice_count_once() -> None:
    one, other = torch.zeros(10), torch.zeros(10, dtype=torch.bfloat16)
    assert num_bytes([one, other, one]) == 60
