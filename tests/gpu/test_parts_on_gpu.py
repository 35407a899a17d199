"""Parts of a step on the GPU: the last block, counts, what it sends, what is sent to it."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from gpu_runs import DEVICE, needs_gpu, strict_float32


@pytest.mark.parametrize("precision, bound", [("fp32", 1e-4), ("bf16", 5e-2)])
def test_the_last_block_of_one_token(precision: str, bound: float, figure: Any) -> None:
    """The logits and gradients of timm's own block, in relation to the largest of each tensor."""
    import timm

    from finetune.models.fast_layers import limit_last_block_to_class_token

    strict_float32()
    torch.manual_seed(0)
    whole = timm.create_model("vit_tiny_patch16_224", num_classes=10, img_size=96, depth=4)
    with torch.no_grad():
        for parameter in whole.parameters():
            parameter.add_(0.02 * torch.randn_like(parameter))
    short = copy.deepcopy(whole)
    assert limit_last_block_to_class_token(short)
    images = torch.randn(16, 3, 96, 96)
    labels = torch.arange(16) % 10

    def computed(network: Any, on: torch.device, half: bool) -> tuple[Any, dict[str, Any]]:
        network = copy.deepcopy(network).to(on)
        with torch.autocast(on.type, torch.bfloat16, enabled=half):
            logits = network(images.to(on)).float()
        torch.nn.functional.cross_entropy(logits, labels.to(on)).backward()
        gradients = {name: p.grad.cpu() for name, p in network.named_parameters()}
        return logits.detach().cpu(), gradients

    def far(one: Any, other: Any) -> tuple[float, float]:
        logits = float((one[0] - other[0]).abs().max() / other[0].abs().max())
        # the gradient of the keys' bias is zero but for roundings: in relation to the whole
        top = max(float(gradient.abs().max()) for gradient in other[1].values())
        each = [
            float((one[1][name] - wanted).norm() / max(float(wanted.norm()), 1e-2 * top))
            for name, wanted in other[1].items()
        ]
        return logits, max(each)

    half = precision == "bf16"
    found = far(computed(short, DEVICE, half), computed(whole, DEVICE, half))
    against = far(computed(short, DEVICE, half), computed(whole, torch.device("cpu"), False))
    figure(
        "the last block that computes the class token alone, against timm's own block",
        "logits and gradients within 1e-4 in float32; 5e-2 in bf16, whose products keep 7 bits",
        f"{precision}: logits {found[0]:.1e}, gradients {found[1]:.1e}; against the CPU in "
        f"float32 {against[0]:.1e}, {against[1]:.1e}",
    )
    assert max(found) < bound
    assert max(against) < 2 * bound


def test_a_number_is_received_a_step_later(figure: Any) -> None:
    from finetune.training.trainer_state import DelayedScalars

    numbers, value = DelayedScalars(DEVICE, delayed=True), torch.zeros(1, device=DEVICE)
    for step in range(3):
        numbers.send(value.fill_(step))
    early, rest = numbers.receive(), numbers.receive(wait=True)
    figure("three numbers sent by the device", "[0, 1], then [2]", f"{early}, then {rest}")
    assert early == [0.0, 1.0]
    assert rest == [2.0]


@needs_gpu
def test_sending_waits_for_nothing(figure: Any) -> None:
    import time

    from finetune.training.trainer_state import DelayedScalars

    numbers, value = DelayedScalars(DEVICE), torch.ones(1, device=DEVICE)
    numbers.send(value)
    torch.cuda.synchronize()
    torch.cuda._sleep(300_000_000)
    torch.cuda.set_sync_debug_mode("error")
    began = time.perf_counter()
    numbers.send(value)
    sent = time.perf_counter() - began
    torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    whole = time.perf_counter() - began
    figure(
        "a number sent behind 0.2 s of work",
        "at once: less than a tenth of the work",
        f"{1000 * sent:.2f} ms, the work {1000 * whole:.0f} ms",
    )
    assert sent < whole / 10


def test_logits_arrive_in_order(figure: Any) -> None:
    """Each batch of an evaluation is read while the next one is computed, and is whole then."""
    from finetune.evaluation.evaluator import _copy_to_host

    computed: list[int] = []

    def batches() -> Iterator[tuple[torch.Tensor, torch.Tensor, np.ndarray]]:
        for number in range(6):
            logits = torch.zeros(512, 100, device=DEVICE)
            labels = torch.full((512,), number, device=DEVICE)
            if DEVICE.type == "cuda":
                torch.cuda._sleep(20_000_000)
            computed.append(number)
            yield logits + number, labels, np.full(512, number)

    early = 0
    for number, (logits, labels, places) in enumerate(_copy_to_host(batches())):
        early += len(computed) - number - 1
        assert logits.device.type == labels.device.type == "cpu"
        for values in (logits, labels, torch.from_numpy(places)):
            assert bool((values == number).all()), number
    figure(
        "logits on their way to the host",
        "each batch whole, and read while the next is computed",
        f"6 batches, {early} of them behind another",
    )
    assert early == (5 if DEVICE.type == "cuda" else 0)


def test_counts_are_those_of_the_cpu(figure: Any) -> None:
    from finetune.evaluation.metrics import ClassificationMetrics

    generator = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(300, 9, generator=generator)
    labels = torch.randint(9, (300,), generator=generator)
    expected_counts = ClassificationMetrics(9)
    expected_counts.update(logits, labels)
    counts = ClassificationMetrics(9, device=DEVICE)
    on_device = logits.to(DEVICE), labels.to(DEVICE)
    if DEVICE.type == "cuda":
        torch.cuda.set_sync_debug_mode("error")
    try:
        counts.update(*on_device)
    finally:
        if DEVICE.type == "cuda":
            torch.cuda.set_sync_debug_mode("default")
    found, expected = counts.compute(), expected_counts.compute()
    differences = {key: abs(found.pop(key) - expected.pop(key)) for key in ("loss", "ece")}
    # the mean confidence of a bin
    bins = [row.pop("confidence") for row in found["calibration"]]
    others = [row.pop("confidence") for row in expected["calibration"]]
    figure(
        "exact counts of an evaluation against the CPU's, without a wait",
        "all equal; loss, calibration and confidences within 1e-11: exp and log differ by an ulp",
        ", ".join(f"{key} {value:.1e}" for key, value in differences.items()),
    )
    assert max(differences.values()) < 1e-11
    assert bins == pytest.approx(others, abs=1e-11)
    assert found == expected


def test_batches_come_in_order_two_ahead(figure: Any) -> None:
    from finetune.data.device_prefetch import PixelBatch, collate_ragged, prefetch_to_device

    def batch(number: int) -> list[np.ndarray]:
        generator = np.random.default_rng(number)
        shapes = [(200 + number, 300 + image, 3) for image in range(4)]
        return [generator.integers(0, 256, shape, dtype=np.uint8) for shape in shapes]

    asked: list[int] = []

    def batches() -> Iterator[PixelBatch]:
        for number in range(6):
            asked.append(number)
            images = collate_ragged(batch(number), torch.device("cpu"))
            yield images
            images.pixels.zero_()  # as a slot that is used again

    compared = 0
    ahead = None if DEVICE.type == "cuda" else 2
    for number, found in enumerate(prefetch_to_device(batches(), DEVICE, num_prefetch=ahead)):
        assert asked == list(range(min(number + 3, 6)))
        for mine, other in zip(found, batch(number), strict=True):
            assert mine.device.type == DEVICE.type
            np.testing.assert_array_equal(mine.permute(1, 2, 0).cpu().numpy(), other)
            compared += 1
    figure(
        "batches of workers on their way to the device", "every byte", f"{compared} images equal"
    )
    assert compared == 24


@pytest.mark.parametrize("name", ["adamw", "sgd", "lamb", "lion", "rmsprop"])
def test_a_step_without_a_finite_gradient_moves_nothing(name: str, figure: Any) -> None:
    """As `TrainerState._update` does it: on the device where the optimiser can."""
    from finetune.training.optim import build_optimizer, supports_found_inf

    alone = torch.nn.ParameterList([torch.ones(4, 3, device=DEVICE)])
    optimizer: Any = build_optimizer(alone, name=name, lr=0.1, weight_decay=0.1)
    alone[0].grad = torch.ones(4, 3, device=DEVICE)
    optimizer.step()
    moved = alone[0].detach().clone()
    masks = supports_found_inf(optimizer)
    if masks:
        alone[0].grad = torch.full((4, 3), float("nan"), device=DEVICE)
        optimizer.grad_scale, optimizer.found_inf = None, torch.ones((), device=DEVICE)
        optimizer.step()
    figure(
        "a gradient that is not finite, left out on the device",
        "adamw and sgd can; not a bit of the weights moves",
        f"{name}: {'on the device' if masks else 'on the host'}",
    )
    assert torch.equal(alone[0], moved)
    assert not torch.equal(moved, torch.ones_like(moved))
    if name in ("adamw", "sgd"):
        assert masks
