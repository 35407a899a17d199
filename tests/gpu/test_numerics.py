"""Training on the GPU against training on the CPU, in every precision, and in parts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from gpu_runs import DEVICE, NANO, SGD, apart, needs_gpu, strict_float32, trained

# TF32 keeps 10 bits of a factor, fp16 10, bf16 7; sums are of float32. The losses of 16 steps are
# of weights that have moved by it, so the bounds are a few roundings wide.
PRECISIONS: dict[str, tuple[tuple[bool, bool], str, float]] = {
    # (convolutions in TF32, matrix products in TF32), run.precision, bound
    "float32": ((False, False), "fp32", 1e-4),
    "float32 as torch ships it (convolutions in TF32)": ((True, False), "fp32", 2e-3),
    "TF32": ((True, True), "fp32", 5e-3),
    "bf16": ((True, False), "bf16", 3e-2),
    "fp16": ((True, False), "fp16", 1e-2),
}


@pytest.fixture(scope="module")
def on_the_cpu(no_pictures: None, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Any]:
    """Runs of the CPU in float32, each computed once."""
    known: dict[tuple[str, ...], Any] = {}

    def of(*overrides: str) -> Any:
        if overrides not in known:
            out = tmp_path_factory.mktemp("cpu") / "run"
            known[overrides] = trained(out, *overrides, on="cpu")
        return known[overrides]

    return of


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
@pytest.mark.parametrize("kind", PRECISIONS)
def test_losses_are_those_of_the_cpu(
    kind: str, optimizer: str, on_the_cpu: Any, tmp_path: Path, figure: Any
) -> None:
    (convolutions, products), precision, bound = PRECISIONS[kind]
    if precision == "fp16" and DEVICE.type == "cpu":
        pytest.skip("fp16 needs a GPU")
    overrides = SGD if optimizer == "sgd" else ()
    expected = on_the_cpu(*overrides)
    torch.backends.cudnn.allow_tf32 = convolutions
    torch.backends.cuda.matmul.allow_tf32 = products
    found = trained(tmp_path / "run", *overrides, f"run.precision={precision}")
    difference = apart(found["losses"], expected["losses"])
    first, last = expected["losses"][0], expected["losses"][-1]
    figure(
        f"losses of {kind} against float32 on the CPU, {len(found['losses'])} steps",
        f"relative difference below {bound:g}",
        f"{optimizer}: {difference:.1e} (loss {first:.2f} to {last:.2f}; validation "
        f"{found['val']['top1']:.3f}, CPU {expected['val']['top1']:.3f}; "
        f"{found['skipped_steps']} steps left out)",
    )
    assert last < 0.8 * first, "nothing was learned, so nothing was compared"
    assert difference < bound


CONVOLVES = (
    *("model.name=resnet10t", "model.pretrained=false", "model.head_init=default"),
    *("model.image_size=64", "optim.lr=1e-3", "optim.steps=8"),
)


def test_a_network_that_convolves(on_the_cpu: Any, tmp_path: Path, figure: Any) -> None:
    """Channels last on the GPU, batch norm, and a resumed run."""
    strict_float32()
    expected = on_the_cpu(*CONVOLVES)
    found = trained(tmp_path / "run", *CONVOLVES)
    difference = apart(found["losses"], expected["losses"])
    figure(
        "losses of a ResNet (channels last) in float32 against the CPU, 8 steps",
        "relative difference below 1e-3: batch norm divides by what the images have in common",
        f"{difference:.1e}; validation loss {found['val']['loss']:.4f}, CPU "
        f"{expected['val']['loss']:.4f}",
    )
    assert difference < 1e-3
    assert found["val"]["loss"] == pytest.approx(expected["val"]["loss"], rel=1e-2)


@pytest.mark.parametrize("micro_batch", [32, 7])
def test_micro_batches_give_the_same_losses(micro_batch: int, tmp_path: Path, figure: Any) -> None:
    strict_float32()
    # plain SGD feels a gradient's scale, which AdamW and clipping would hide
    rule = (*SGD, "optim.clip_norm=null") if micro_batch == 32 else ()
    whole = trained(tmp_path / "whole", *rule)["losses"]
    parts = trained(tmp_path / "parts", *rule, f"data.micro_batch={micro_batch}")["losses"]
    difference = apart(parts, whole)
    figure(
        "losses with micro-batches against the whole batch of 64, float32",
        "relative difference below 1e-4",
        f"{micro_batch} at once ({'sgd' if rule else 'adamw'}): {difference:.1e}",
    )
    assert difference < 1e-4


@pytest.mark.parametrize("precision, bound", [("fp32", 1e-4), ("bf16", 3e-2)])
def test_compiled_gives_the_same_losses(
    precision: str, bound: float, tmp_path: Path, figure: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from finetune.training.compile import _missing_compile_dependency

    if (missing := _missing_compile_dependency(DEVICE)) is not None:
        pytest.skip(f"torch.compile needs {missing}")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    strict_float32()
    wish = f"run.precision={precision}"
    plain = trained(tmp_path / "plain", wish)["losses"]
    compiled = trained(tmp_path / "compiled", wish, "model.compile=true")["losses"]
    difference = apart(compiled, plain)
    figure(
        "losses compiled against not compiled",
        "relative difference below 1e-4 in float32; 3e-2 in bf16: fewer roundings between kernels",
        f"{precision}: {difference:.1e}",
    )
    assert difference < bound


@needs_gpu
def test_two_runs_of_the_same_recipe(tmp_path: Path, figure: Any) -> None:
    runs = {
        wish: [trained(tmp_path / f"{wish}-{n}", f"run.precision={wish}")["losses"] for n in (1, 2)]
        for wish in ("fp32", "bf16")
    }
    found = {wish: apart(*pair) for wish, pair in runs.items()}
    figure(
        "the same recipe twice, any kernels",
        "losses within 1e-4 in float32, 3e-2 in bf16",
        ", ".join(f"{wish} {value:.1e}" for wish, value in found.items()),
    )
    assert found["fp32"] < 1e-4
    assert found["bf16"] < 3e-2


@needs_gpu
def test_auto_is_bf16_on_a_gpu(tmp_path: Path, figure: Any) -> None:
    import json

    trained(tmp_path / "run", "run.precision=auto", "optim.steps=2", "optim.warmup_steps=0")
    record = json.loads((tmp_path / "run" / "run.json").read_text())
    figure(
        "run.json names the device and what `run.precision: auto` chose",
        "a GPU and bf16",
        f"{record['device']['name']}, {record['precision']}",
    )
    assert record["device"]["type"] == "cuda"
    assert record["precision"] == "bf16"


def test_the_recipe_learns(tmp_path: Path, figure: Any) -> None:
    """A longer run in the precision of the device: digits are told from one another."""
    found = trained(
        tmp_path / "run", "optim.steps=150", "run.precision=bf16", "run.test=true", text=NANO
    )
    figure(
        "150 steps of the embedded network on digits, bf16",
        "test accuracy above 0.9",
        f"{found['test']['top1']:.4f}",
    )
    assert found["test"]["top1"] > 0.9
