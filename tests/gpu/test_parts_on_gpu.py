"""Parts of a step on the GPU: the last block, metrics, and copies to and from the device."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from gpu_runs import DEVICE, disable_tf32, needs_gpu


@pytest.mark.parametrize("precision, bound", [("fp32", 1e-4), ("bf16", 5e-2)])
def test_the_last_block_limited_to_the_class_token(
    precision: str, bound: float, figure: Any
) -> None:
    """Compare logits and gradients with timm's block, relative to the maximum of each tensor."""
    import timm

    from finetune.models.fast_layers import limit_last_block_to_class_token

    disable_tf32()
    torch.manual_seed(0)
    reference = timm.create_model("vit_tiny_patch16_224", num_classes=10, img_size=96, depth=4)
    with torch.no_grad():
        for parameter in reference.parameters():
            parameter.add_(0.02 * torch.randn_like(parameter))
    limited = copy.deepcopy(reference)
    assert limit_last_block_to_class_token(limited)
    images = torch.randn(16, 3, 96, 96)
    labels = torch.arange(16) % 10

    def run_backward(
        network: Any, device: torch.device, autocast: bool
    ) -> tuple[Any, dict[str, Any]]:
        network = copy.deepcopy(network).to(device)
        with torch.autocast(device.type, torch.bfloat16, enabled=autocast):
            logits = network(images.to(device)).float()
        torch.nn.functional.cross_entropy(logits, labels.to(device)).backward()
        gradients = {name: p.grad.cpu() for name, p in network.named_parameters()}
        return logits.detach().cpu(), gradients

    def relative_differences(result: Any, expected: Any) -> tuple[float, float]:
        logits = float((result[0] - expected[0]).abs().max() / expected[0].abs().max())
        # the gradient of the key bias is zero except for rounding: compare it to the maximum
        max_gradient = max(float(gradient.abs().max()) for gradient in expected[1].values())
        gradient_differences = [
            float(
                (result[1][name] - expected_gradient).norm()
                / max(float(expected_gradient.norm()), 1e-2 * max_gradient)
            )
            for name, expected_gradient in expected[1].items()
        ]
        return logits, max(gradient_differences)

    autocast = precision == "bf16"
    differences = relative_differences(
        run_backward(limited, DEVICE, autocast), run_backward(reference, DEVICE, autocast)
    )
    differences_to_cpu = relative_differences(
        run_backward(limited, DEVICE, autocast), run_backward(reference, torch.device("cpu"), False)
    )
    figure(
        "the last block that computes only the class token, against timm's own block",
        "logits and gradients within 1e-4 in float32; 5e-2 in bf16, whose products keep 7 bits",
        f"{precision}: logits {differences[0]:.1e}, gradients {differences[1]:.1e}; against the "
        f"CPU in float32 {differences_to_cpu[0]:.1e}, {differences_to_cpu[1]:.1e}",
    )
    assert max(differences) < bound
    assert max(differences_to_cpu) < 2 * bound


def test_delayed_scalars_arrive_one_step_later(figure: Any) -> None:
    from finetune.training.delayed_scalars import DelayedScalars

    scalars, value = DelayedScalars(DEVICE, delayed=True), torch.zeros(1, device=DEVICE)
    for step in range(3):
        scalars.send(value.fill_(step))
    first, rest = scalars.receive(), scalars.receive(wait=True)
    figure("three scalars sent by the device", "[0, 1], then [2]", f"{first}, then {rest}")
    assert first == [0.0, 1.0]
    assert rest == [2.0]


@needs_gpu
def test_sending_a_scalar_does_not_synchronize(figure: Any) -> None:
    import time

    from finetune.training.delayed_scalars import DelayedScalars

    scalars, value = DelayedScalars(DEVICE), torch.ones(1, device=DEVICE)
    scalars.send(value)
    torch.cuda.synchronize()
    torch.cuda._sleep(300_000_000)
    torch.cuda.set_sync_debug_mode("error")
    started = time.perf_counter()
    scalars.send(value)
    send_seconds = time.perf_counter() - started
    torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    work_seconds = time.perf_counter() - started
    figure(
        "a scalar sent after 0.2 s of queued work",
        "returns immediately: less than a tenth of the work",
        f"{1000 * send_seconds:.2f} ms, the work {1000 * work_seconds:.0f} ms",
    )
    assert send_seconds < work_seconds / 10


def test_logits_are_copied_to_the_host_in_order(figure: Any) -> None:
    """Each evaluation batch is complete when read, while the next one is computed."""
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

    num_ahead = 0
    for number, (logits, labels, indices) in enumerate(_copy_to_host(batches())):
        num_ahead += len(computed) - number - 1
        assert logits.device.type == labels.device.type == "cpu"
        for values in (logits, labels, torch.from_numpy(indices)):
            assert bool((values == number).all()), number
    figure(
        "logits copied to the host",
        "each batch complete, and read while the next is computed",
        f"6 batches, {num_ahead} of them read during the next",
    )
    assert num_ahead == (5 if DEVICE.type == "cuda" else 0)


def test_metrics_match_the_cpu_without_synchronizing(figure: Any) -> None:
    from finetune.evaluation.metrics import ClassificationMetrics

    generator = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(300, 9, generator=generator)
    labels = torch.randint(9, (300,), generator=generator)
    cpu_metrics = ClassificationMetrics(9)
    cpu_metrics.update(logits, labels)
    gpu_metrics = ClassificationMetrics(9, device=DEVICE)
    on_device = logits.to(DEVICE), labels.to(DEVICE)
    if DEVICE.type == "cuda":
        torch.cuda.set_sync_debug_mode("error")
    try:
        gpu_metrics.update(*on_device)
    finally:
        if DEVICE.type == "cuda":
            torch.cuda.set_sync_debug_mode("default")
    results, expected = gpu_metrics.compute(), cpu_metrics.compute()
    differences = {key: abs(results.pop(key) - expected.pop(key)) for key in ("loss", "ece")}
    # the mean confidence of each bin
    confidences = [row.pop("confidence") for row in results["calibration"]]
    expected_confidences = [row.pop("confidence") for row in expected["calibration"]]
    figure(
        "exact counts of an evaluation against the CPU, without synchronization",
        "all equal; loss, calibration and confidences within 1e-11: exp and log differ by an ulp",
        ", ".join(f"{key} {value:.1e}" for key, value in differences.items()),
    )
    assert max(differences.values()) < 1e-11
    assert confidences == pytest.approx(expected_confidences, abs=1e-11)
    assert results == expected


def test_batches_are_prefetched_in_order(figure: Any) -> None:
    from finetune.data.device_prefetch import PixelBatch, collate_ragged, prefetch_to_device

    def batch(number: int) -> list[np.ndarray]:
        generator = np.random.default_rng(number)
        shapes = [(200 + number, 300 + image, 3) for image in range(4)]
        return [generator.integers(0, 256, shape, dtype=np.uint8) for shape in shapes]

    requested: list[int] = []

    def batches() -> Iterator[PixelBatch]:
        for number in range(6):
            requested.append(number)
            images = collate_ragged(batch(number), torch.device("cpu"))
            yield images
            images.pixels.zero_()  # like a reused shared-memory slot

    num_compared = 0
    num_prefetch = None if DEVICE.type == "cuda" else 2
    for number, images_on_device in enumerate(
        prefetch_to_device(batches(), DEVICE, num_prefetch=num_prefetch)
    ):
        assert requested == list(range(min(number + 3, 6)))
        for index, expected in enumerate(batch(number)):
            received = images_on_device[index]
            assert received.device.type == DEVICE.type
            np.testing.assert_array_equal(received.permute(1, 2, 0).cpu().numpy(), expected)
            num_compared += 1
    figure(
        "worker batches copied to the device", "every byte equal", f"{num_compared} images equal"
    )
    assert num_compared == 24


@pytest.mark.parametrize("name", ["adamw", "sgd", "lamb", "lion", "rmsprop"])
def test_a_gradient_that_is_not_finite_changes_no_weight(name: str, figure: Any) -> None:
    """As in `TrainerState`: skipped on the device if the optimizer supports found_inf."""
    from finetune.training.optim import build_optimizer, supports_found_inf

    parameters = torch.nn.ParameterList([torch.ones(4, 3, device=DEVICE)])
    optimizer: Any = build_optimizer(parameters, name=name, lr=0.1, weight_decay=0.1)
    parameters[0].grad = torch.ones(4, 3, device=DEVICE)
    optimizer.step()
    weights = parameters[0].detach().clone()
    has_found_inf = supports_found_inf(optimizer)
    if has_found_inf:
        parameters[0].grad = torch.full((4, 3), float("nan"), device=DEVICE)
        optimizer.grad_scale, optimizer.found_inf = None, torch.ones((), device=DEVICE)
        optimizer.step()
    figure(
        "a gradient that is not finite, skipped on the device",
        "adamw and sgd support it; no bit of the weights changes",
        f"{name}: {'on the device' if has_found_inf else 'on the host'}",
    )
    assert torch.equal(parameters[0], weights)
    assert not torch.equal(weights, torch.ones_like(weights))
    if name in ("adamw", "sgd"):
        assert has_found_inf
