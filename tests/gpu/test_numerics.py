"""Training on the GPU matches the CPU in every precision, with micro-batches, and compiled."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from gpu_runs import (
    DEVICE,
    NANO_RECIPE,
    SGD_OVERRIDES,
    disable_tf32,
    max_relative_difference,
    needs_gpu,
    train_here,
)

# Factors have 10 bits in TF32 and fp16, 7 in bf16; sums are float32. In 16 steps the rounding also
# changes the weights, so the bounds are several roundings wide.
PRECISIONS: dict[str, tuple[tuple[bool, bool], str, float]] = {
    # (convolutions in TF32, matrix products in TF32), run.precision, bound
    "float32": ((False, False), "fp32", 1e-4),
    "float32 with torch's defaults (convolutions in TF32)": ((True, False), "fp32", 2e-3),
    "TF32": ((True, True), "fp32", 5e-3),
    "bf16": ((True, False), "bf16", 3e-2),
    "fp16": ((True, False), "fp16", 1e-2),
}


@pytest.fixture(scope="module")
def train_on_cpu(no_plots: None, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Any]:
    """Return a function that trains on the CPU in float32, once for each set of overrides."""
    results: dict[tuple[str, ...], Any] = {}

    def train_once(*overrides: str) -> Any:
        if overrides not in results:
            out = tmp_path_factory.mktemp("cpu") / "run"
            results[overrides] = train_here(out, *overrides, device_type="cpu")
        return results[overrides]

    return train_once


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
@pytest.mark.parametrize("case", PRECISIONS)
def test_losses_match_the_cpu(
    case: str, optimizer: str, train_on_cpu: Any, tmp_path: Path, figure: Any
) -> None:
    (convolutions, products), precision, bound = PRECISIONS[case]
    if precision == "fp16" and DEVICE.type == "cpu":
        pytest.skip("fp16 needs a GPU")
    overrides = SGD_OVERRIDES if optimizer == "sgd" else ()
    expected = train_on_cpu(*overrides)
    torch.backends.cudnn.allow_tf32 = convolutions
    torch.backends.cuda.matmul.allow_tf32 = products
    result = train_here(tmp_path / "run", *overrides, f"run.precision={precision}")
    difference = max_relative_difference(result["losses"], expected["losses"])
    first, last = expected["losses"][0], expected["losses"][-1]
    figure(
        f"losses of {case} against float32 on the CPU, {len(result['losses'])} steps",
        f"relative difference below {bound:g}",
        f"{optimizer}: {difference:.1e} (loss {first:.2f} to {last:.2f}; validation "
        f"{result['val']['top1']:.3f}, CPU {expected['val']['top1']:.3f}; "
        f"{result['skipped_steps']} steps skipped)",
    )
    assert last < 0.8 * first, "the run learned nothing, so the comparison means nothing"
    assert difference < bound


RESNET_OVERRIDES = (
    *("model.name=resnet10t", "model.pretrained=false", "model.head_init=default"),
    *("model.image_size=64", "optim.lr=1e-3", "optim.steps=8"),
)


def test_a_resnet_matches_the_cpu(train_on_cpu: Any, tmp_path: Path, figure: Any) -> None:
    """Channels last on the GPU, and batch norm."""
    disable_tf32()
    expected = train_on_cpu(*RESNET_OVERRIDES)
    result = train_here(tmp_path / "run", *RESNET_OVERRIDES)
    first, difference = (
        max_relative_difference(result["losses"][:steps], expected["losses"][:steps])
        for steps in (2, 8)
    )
    figure(
        "losses of a ResNet (channels last) in float32 against the CPU, 8 steps",
        "relative difference below 1e-4 in 2 steps and 5e-3 in 8: batch norm divides by batch "
        "statistics, which enlarges differences",
        f"{first:.1e}, {difference:.1e}; validation loss {result['val']['loss']:.4f}, CPU "
        f"{expected['val']['loss']:.4f}",
    )
    assert first < 1e-4
    assert difference < 5e-3
    assert result["val"]["loss"] == pytest.approx(expected["val"]["loss"], rel=1e-2)


@pytest.mark.parametrize("micro_batch_size", [32, 7])
def test_micro_batches_give_the_same_losses(
    micro_batch_size: int, tmp_path: Path, figure: Any
) -> None:
    disable_tf32()
    # plain SGD depends on the scale of the gradient; AdamW and clipping would hide it
    overrides = (*SGD_OVERRIDES, "optim.clip_norm=null") if micro_batch_size == 32 else ()
    whole_batch_losses = train_here(tmp_path / "whole", *overrides)["losses"]
    micro_batch_losses = train_here(
        tmp_path / "parts", *overrides, f"data.micro_batch={micro_batch_size}"
    )["losses"]
    difference = max_relative_difference(micro_batch_losses, whole_batch_losses)
    figure(
        "losses with micro-batches against the whole batch of 64, float32",
        "relative difference below 1e-4",
        f"micro-batch {micro_batch_size} ({'sgd' if overrides else 'adamw'}): {difference:.1e}",
    )
    assert difference < 1e-4


@pytest.mark.parametrize("precision, bound", [("fp32", 1e-4), ("bf16", 3e-2)])
def test_compiled_training_gives_the_same_losses(
    precision: str, bound: float, tmp_path: Path, figure: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from finetune.training.compile import missing_compile_dependency

    if (missing := missing_compile_dependency(DEVICE)) is not None:
        pytest.skip(f"torch.compile needs {missing}")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    disable_tf32()
    precision_override = f"run.precision={precision}"
    plain = train_here(tmp_path / "plain", precision_override)["losses"]
    compiled = train_here(tmp_path / "compiled", precision_override, "model.compile=true")["losses"]
    difference = max_relative_difference(compiled, plain)
    figure(
        "losses compiled against not compiled",
        "relative difference below 1e-4 in float32; 3e-2 in bf16: fewer roundings between kernels",
        f"{precision}: {difference:.1e}",
    )
    assert difference < bound


@needs_gpu
def test_two_runs_of_the_same_recipe(tmp_path: Path, figure: Any) -> None:
    runs = {
        precision: [
            train_here(tmp_path / f"{precision}-{n}", f"run.precision={precision}")["losses"]
            for n in (1, 2)
        ]
        for precision in ("fp32", "bf16")
    }
    differences = {precision: max_relative_difference(*pair) for precision, pair in runs.items()}
    figure(
        "the same recipe twice, any kernels",
        "losses within 1e-4 in float32, 3e-2 in bf16",
        ", ".join(f"{precision} {value:.1e}" for precision, value in differences.items()),
    )
    assert differences["fp32"] < 1e-4
    assert differences["bf16"] < 3e-2


@needs_gpu
def test_auto_precision_is_bf16_on_a_gpu(tmp_path: Path, figure: Any) -> None:
    import json

    train_here(tmp_path / "run", "run.precision=auto", "optim.steps=2", "optim.warmup_steps=0")
    record = json.loads((tmp_path / "run" / "run.json").read_text())
    figure(
        "run.json names the device and what `run.precision: auto` chose",
        "a GPU and bf16",
        f"{record['device']['name']}, {record['precision']}",
    )
    assert record["device"]["type"] == "cuda"
    assert record["precision"] == "bf16"


def test_digits_are_learned_in_bf16(tmp_path: Path, figure: Any) -> None:
    """A longer run in bf16 learns the digits."""
    result = train_here(
        tmp_path / "run", "optim.steps=150", "run.precision=bf16", "run.test=true", text=NANO_RECIPE
    )
    figure(
        "150 steps of the embedded network on digits, bf16",
        "test accuracy above 0.9",
        f"{result['test']['top1']:.4f}",
    )
    assert result["test"]["top1"] > 0.9
