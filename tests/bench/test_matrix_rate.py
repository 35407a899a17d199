"""FLOP counts against hand calculation, and the matmul rate: operations over time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest
import torch
from networks import build_network, random_images
from torch import nn

from finetune.bench import matrix_rate as matrix_rate_module
from finetune.bench.matrix_rate import MatMul, list_matmuls, matrix_rate
from finetune.models.summary import count_flops, summarize_model

BATCH, SIZE = 3, (32, 32)
TOKENS, WIDTH, DEPTH, MLP, PATCH, CLASSES = 17, 32, 2, 128, 8, 5
PATCHES = TOKENS - 1


def vit(*, fused: bool = True) -> nn.Module:
    """A small ViT; its attention uses torch's fused kernel or plain matmuls."""
    model = build_network("vit").model.train()
    for layer in model.modules():
        if hasattr(layer, "fused_attn"):
            layer.fused_attn = fused  # type: ignore[assignment]
    return model


def training_step(model: nn.Module) -> Callable[[], None]:
    return lambda: model(random_images(SIZE, BATCH)).square().sum().backward()


def test_step_costs_three_forward_passes_minus_the_input_gradient() -> None:
    model = vit()
    forward = 2 * BATCH * summarize_model(model, SIZE)["macs"]
    embedding = 2 * BATCH * PATCHES * WIDTH * 3 * PATCH**2
    assert count_flops(training_step(model)) == 3 * forward - embedding


def test_fused_and_plain_attention_count_the_same() -> None:
    fused, plain = (count_flops(training_step(vit(fused=fused))) for fused in (True, False))
    assert fused == plain


def test_frozen_backbone_has_no_gradient_operations() -> None:
    model = vit()
    forward = 2 * BATCH * summarize_model(model, SIZE)["macs"]
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.startswith("head."))
    head = MatMul(BATCH, WIDTH, CLASSES, has_input_grad=False, has_weight_grad=True)
    assert count_flops(training_step(model)) == forward + head.operations // 2
    found = list_matmuls(model, training_step(model))
    assert found[head] == 1
    assert sum(matmul.has_weight_grad for matmul in found) == 1


def test_matmuls_of_a_vit() -> None:
    model = vit()
    rows = BATCH * TOKENS
    both = {"has_input_grad": True, "has_weight_grad": True}
    expected = {
        MatMul(BATCH * PATCHES, 3 * PATCH**2, WIDTH, has_input_grad=False, has_weight_grad=True): 1,
        MatMul(rows, WIDTH, 3 * WIDTH, **both): DEPTH,
        MatMul(rows, WIDTH, WIDTH, **both): DEPTH,
        MatMul(rows, WIDTH, MLP, **both): DEPTH,
        MatMul(rows, MLP, WIDTH, **both): DEPTH,
        MatMul(BATCH, WIDTH, CLASSES, **both): 1,
    }
    found = list_matmuls(model, training_step(model))
    assert dict(found) == expected
    training_step(model)()  # is not counted
    assert dict(found) == expected
    # the rest: the two attention matmuls between activations
    attention = DEPTH * 2 * 2 * BATCH * TOKENS**2 * WIDTH
    counted = sum(times * matmul.operations for matmul, times in found.items())
    assert count_flops(training_step(model)) == counted + 3 * attention


def test_matmuls_of_a_convolution() -> None:
    model = nn.Sequential(nn.Conv2d(4, 6, 3, padding=1, groups=2), nn.Flatten())
    inputs = torch.randn(2, 4, 5, 5)
    found = list_matmuls(model, lambda: model(inputs).sum().backward())
    shape = {"rows": 2 * 25, "inner": 2 * 9, "columns": 3}
    assert dict(found) == {MatMul(**shape, has_input_grad=False, has_weight_grad=True): 2}
    counted = count_flops(lambda: model(inputs).sum().backward())
    assert counted == sum(times * matmul.operations for matmul, times in found.items())


@pytest.mark.slow  # torch's compiler takes seconds to import
def test_compiled_model_has_the_same_count() -> None:
    model = vit()
    expected = count_flops(training_step(model))
    model.compile()
    assert count_flops(training_step(model)) == expected


def test_rate_weighs_each_matmul_by_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    quick, slow = MatMul(2, 3, 4, True, True), MatMul(5, 6, 7, False, True)
    assert (quick.operations, slow.operations) == (3 * 48, 2 * 420)
    seconds = {quick: 1.0, slow: 3.0}
    monkeypatch.setattr(matrix_rate_module, "layer_seconds", lambda matmul, *_: seconds[matmul])
    found = matrix_rate(Counter({quick: 2, slow: 1}), dtype=torch.float32, device=CPU)
    assert found == (2 * 144 + 840) / (2 * 1.0 + 3.0)


CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_measures_a_rate(dtype: torch.dtype) -> None:
    matmul = MatMul(64, 32, 16, has_input_grad=True, has_weight_grad=True)
    found = matrix_rate(Counter({matmul: 1}), dtype=dtype, device=CPU)
    assert found is not None
    assert 1e6 < found < 1e15
    assert matrix_rate(Counter(), dtype=dtype, device=CPU) is None
