"""Losses and gradients that are not finite: skipped on all ranks, counted, limited."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from forked_runs import run_command_in_child
from launches import launch_training
from networks import forget_checksums
from PIL import Image
from recipe_texts import tiny_recipe_text
from safetensors.torch import load_file, save_file

from finetune.recipe.load import parse_recipe
from finetune.training.losses import ClassificationLoss
from finetune.training.train import train

pytestmark = pytest.mark.usefixtures("no_plots")

RECIPE = tiny_recipe_text(
    "train: resize, eval: resize, batch_size: 16",
    optim="name: adamw, lr: 3e-3, schedule: constant, steps: 8, ema_decay: 0.9",
    run="precision: fp32, log_every: 1, eval_every: 4, max_skipped: 3",
    depth=2,
)


RESNET = """
model: {name: test_resnet, pretrained: false, image_size: 32}
data: {source: "embedded:digits", train: resize, eval: resize, batch_size: 16}
optim: {name: adamw, lr: 3e-3, schedule: constant, steps: 4}
run: {precision: fp32, threads: 1, log_every: 1, eval_every: 4, max_skipped: 3}
"""


def add_bad_gradient(loss: torch.Tensor) -> torch.Tensor:
    loss.register_hook(lambda gradient: gradient * float("nan"))
    return loss


# Faults, applied to the loss of a step. The third keeps the gradient of a valid step.
LOSS_FAULTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "NaN": lambda loss: loss * float("nan"),
    "infinite": lambda loss: loss * float("inf"),
    "infinite with a finite gradient": lambda loss: loss + float("inf"),
    "finite with a NaN gradient": add_bad_gradient,
}

PROGRAM = """
import os, sys
import torch
from finetune.training.losses import ClassificationLoss
from finetune.cli.main import main
calls, compute_loss = [], ClassificationLoss.__call__
def faulty_loss(*args):
    calls.append(1)
    loss = compute_loss(*args)
    hit = int(os.environ["RANK"]) == 1 and str(len(calls) - 1) in os.environ["BAD"].split(",")
    return loss + float("inf") if hit else loss
ClassificationLoss.__call__ = faulty_loss
torch.set_num_threads(1)
sys.exit(main(sys.argv[1:]))
"""


@pytest.fixture
def inject_fault(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Apply a fault to the losses of some steps, in this process."""
    compute_loss = ClassificationLoss.__call__

    def patch_loss(kind: str, steps: set[int]) -> None:
        calls: list[int] = []

        def faulty_loss(*args: object) -> torch.Tensor:
            calls.append(1)
            loss = compute_loss(*args)  # type: ignore[arg-type]
            return LOSS_FAULTS[kind](loss) if len(calls) - 1 in steps else loss

        monkeypatch.setattr(ClassificationLoss, "__call__", faulty_loss)

    return patch_loss


@pytest.mark.parametrize("kind", LOSS_FAULTS)
def test_a_step_with_a_bad_loss_is_skipped_and_counted(
    inject_fault: Callable[..., None], tmp_path: Path, kind: str, fault
) -> None:
    inject_fault(kind, {1, 5})
    results = train(parse_recipe(RECIPE), tmp_path / "run")
    assert results["skipped_steps"] == 2
    weights = load_file(tmp_path / "run/model/model.safetensors")
    assert all(tensor.isfinite().all() for tensor in weights.values())
    lines = (tmp_path / "run/metrics.jsonl").read_text().splitlines()
    losses = [json.loads(line)["loss"] for line in lines if '"train"' in line]
    assert all(loss is None or loss < 10 for loss in losses)
    assert losses.count(None) == 2
    fault(
        "a loss or gradient that is not finite, in single steps",
        "the step is skipped and counted, the run continues",
    )


def test_a_skipped_step_does_not_change_batch_norm_statistics(tmp_path: Path, fault) -> None:
    recipe = parse_recipe(RESNET)
    forward_passes: list[int] = []

    def damage_second_pass(module: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> object:
        if (
            not isinstance(module, torch.nn.Conv2d)
            or inputs[0].shape[1] != 3
            or not module.training
        ):
            return None
        forward_passes.append(1)
        return (inputs[0] * float("nan"),) if len(forward_passes) == 2 else None

    hook = torch.nn.modules.module.register_module_forward_pre_hook(damage_second_pass)
    try:
        results = train(recipe, tmp_path / "run")
    finally:
        hook.remove()
    assert results["skipped_steps"] == 1
    saved = load_file(tmp_path / "run/model/model.safetensors")
    statistics = [tensor for name, tensor in saved.items() if "running_" in name]
    assert statistics
    assert all(tensor.isfinite().all() for tensor in statistics)
    fault(
        "a loss or gradient that is not finite, in a network with batch norm",
        "the step does not change the running statistics",
    )


def test_a_bad_loss_on_one_rank_of_two(tmp_path: Path, fault) -> None:
    script = tmp_path / "wrong.py"
    script.write_text(PROGRAM)
    options = {"launcher": "torchrun", "recipe": RECIPE, "program": (str(script),)}

    with launch_training(
        tmp_path, name="some", extra_environment={"BAD": "1,5"}, **options
    ) as isolated:
        isolated.wait_for_end()
    assert isolated.process.returncode == 0, isolated.text[-3000:]
    results = json.loads((isolated.out / "results.json").read_text())
    assert results["skipped_steps"] == 2
    weights = load_file(isolated.out / "model/model.safetensors")
    assert all(tensor.isfinite().all() for tensor in weights.values())
    with launch_training(
        tmp_path, name="many", extra_environment={"BAD": "4,5,6"}, **options
    ) as consecutive:
        consecutive.wait_for_end()
    assert consecutive.process.returncode != 0
    assert consecutive.text.count("was not finite in 3 steps in a row, up to step 7") == 1
    assert consecutive.read_record()["status"] == "failed (6)"
    fault(
        "an infinite loss with a finite gradient on one rank of two",
        "both ranks skip the step; K in a row end both with 6, reported once",
    )


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 3e38])
def test_outputs_that_are_not_finite_give_no_result(tmp_path: Path, value: float, fault) -> None:
    """Weights of 3e38 are finite, but sums with them are not."""
    run = tmp_path / "run"
    train(parse_recipe(RECIPE), run)
    weights = load_file(run / "model/model.safetensors")
    weights["head.weight"][3] = value
    folder = forget_checksums(run / "model")
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    Image.new("RGB", (16, 16)).save(tmp_path / "black.png")
    evaluated = run_command_in_child("eval", run)
    assert evaluated.exit_code == (6 if value == 3e38 else 4), evaluated.output
    predicted = run_command_in_child(
        "predict", run, tmp_path / "black.png", "--out", tmp_path / "rows.csv"
    )
    assert predicted.exit_code == 4, predicted.output
    for message in (evaluated.output, predicted.output):
        assert "not finite" in message or "NaN or infinite" in message
    assert not (tmp_path / "rows.csv").exists()
    fault(
        "weights that are NaN, infinite, or make outputs infinite, in eval and predict",
        "4 or 6; no result and no row is written",
    )
