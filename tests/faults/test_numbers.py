"""Losses and gradients that are not finite: left out on all ranks together, counted, and ended."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from forked_runs import run_command_in_child
from launches import launch_training
from PIL import Image
from recipe_texts import tiny_recipe_text
from refusals import refused
from safetensors.torch import load_file, save_file

from finetune.recipe.load import parse_recipe
from finetune.run.directory import RunDir
from finetune.training.losses import ClassificationLoss
from finetune.training.train import train

pytestmark = pytest.mark.usefixtures("no_pictures")

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


def with_bad_gradient(loss: torch.Tensor) -> torch.Tensor:
    loss.register_hook(lambda gradient: gradient * float("nan"))
    return loss


# What goes wrong in a step, put over its loss. The third has the gradient of a healthy step.
FAULTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "NaN": lambda loss: loss * float("nan"),
    "infinite": lambda loss: loss * float("inf"),
    "infinite with a finite gradient": lambda loss: loss + float("inf"),
    "finite with a gradient that is not": with_bad_gradient,
}

SCRIPT = """
import os, sys
import torch
from finetune.training.losses import Loss
from finetune.cli.main import main
calls, honest = [], Loss.__call__
def wrong(*args):
    calls.append(1)
    loss = honest(*args)
    hit = int(os.environ["RANK"]) == 1 and str(len(calls) - 1) in os.environ["BAD"].split(",")
    return loss + float("inf") if hit else loss
Loss.__call__ = wrong
torch.set_num_threads(1)
sys.exit(main(sys.argv[1:]))
"""


@pytest.fixture
def poison(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Make the losses of some steps wrong, in this process."""
    honest = ClassificationLoss.__call__

    def arrange(kind: str, steps: set[int]) -> None:
        calls: list[int] = []

        def wrong(*args: object) -> torch.Tensor:
            calls.append(1)
            loss = honest(*args)  # type: ignore[arg-type]
            return FAULTS[kind](loss) if len(calls) - 1 in steps else loss

        monkeypatch.setattr(ClassificationLoss, "__call__", wrong)

    return arrange


@pytest.mark.parametrize("kind", FAULTS)
def test_a_wrong_loss_is_skipped_and_counted(
    poison: Callable[..., None], tmp_path: Path, kind: str, fault
) -> None:
    poison(kind, {1, 5})
    results = train(parse_recipe(RECIPE), tmp_path / "run")
    assert results["skipped_steps"] == 2
    weights = load_file(tmp_path / "run/model/model.safetensors")
    assert all(tensor.isfinite().all() for tensor in weights.values())
    lines = (tmp_path / "run/metrics.jsonl").read_text().splitlines()
    losses = [json.loads(line)["loss"] for line in lines if '"train"' in line]
    assert all(loss is None or loss < 10 for loss in losses)
    assert losses.count(None) == 2
    fault(
        "a loss or gradient that is not finite, now and then",
        "the step is left out and counted, the run goes on",
    )


@pytest.mark.parametrize("kind", FAULTS)
def test_too_many_in_a_row_end_the_run(
    poison: Callable[..., None], tmp_path: Path, kind: str, fault
) -> None:
    poison(kind, {5, 6, 7})
    with refused("diverged.gradients", "3 steps", "step 8", "step 4") as caught:
        train(parse_recipe(RECIPE), tmp_path / "run")
    assert caught.value.exit_code == 6
    best = load_file(RunDir(tmp_path / "run").checkpoint_folder(4) / "model.safetensors")
    assert all(tensor.isfinite().all() for tensor in best.values())
    fault(
        "run.max_skipped such steps in a row",
        "6, the best checkpoint is named and finite",
    )


def test_a_step_that_is_left_out_leaves_no_trace_in_batch_norm(tmp_path: Path, fault) -> None:
    recipe = parse_recipe(RESNET)
    passes: list[int] = []

    def damaged(module: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> object:
        if (
            not isinstance(module, torch.nn.Conv2d)
            or inputs[0].shape[1] != 3
            or not module.training
        ):
            return None
        passes.append(1)
        return (inputs[0] * float("nan"),) if len(passes) == 2 else None

    hook = torch.nn.modules.module.register_module_forward_pre_hook(damaged)
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
        "the step leaves no trace in its running statistics",
    )


@pytest.mark.faults
def test_one_rank_of_two(tmp_path: Path, fault) -> None:
    script = tmp_path / "wrong.py"
    script.write_text(SCRIPT)
    how = {"kind": "torchrun", "recipe": RECIPE, "program": (str(script),)}

    with launch_training(tmp_path, name="some", extra_environment={"BAD": "1,5"}, **how) as some:
        some.wait_for_end()
    assert some.process.returncode == 0, some.text[-3000:]
    results = json.loads((some.out / "results.json").read_text())
    assert results["skipped_steps"] == 2
    weights = load_file(some.out / "model/model.safetensors")
    assert all(tensor.isfinite().all() for tensor in weights.values())
    with launch_training(tmp_path, name="many", extra_environment={"BAD": "4,5,6"}, **how) as many:
        many.wait_for_end()
    assert many.process.returncode != 0
    assert many.text.count("was not finite in 3 steps in a row, up to step 7") == 1
    assert many.read_record()["status"] == "failed (6)"
    fault(
        "an infinite loss with a finite gradient on one rank of two",
        "both ranks leave the step out; K in a row end both with 6, said once",
    )


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 3e38])
def test_outputs_that_are_not_finite_are_never_a_figure(
    tmp_path: Path, value: float, fault
) -> None:
    """Weights of 3e38 are finite themselves; the sums that they take part in are not."""
    run = tmp_path / "run"
    train(parse_recipe(RECIPE), run)
    weights = load_file(run / "model/model.safetensors")
    weights["head.weight"][3] = value
    save_file(weights, run / "model/model.safetensors", metadata={"format": "pt"})
    Image.new("RGB", (16, 16)).save(tmp_path / "black.png")
    measured = run_command_in_child("eval", run)
    assert measured.exit_code == (6 if value == 3e38 else 4), measured.output
    answered = run_command_in_child(
        "predict", run, tmp_path / "black.png", "--out", tmp_path / "rows.csv"
    )
    assert answered.exit_code == 4, answered.output
    for message in (measured.output, answered.output):
        assert "not finite" in message or "NaN or infinite" in message
    assert not (tmp_path / "rows.csv").exists()
    fault(
        "weights that are NaN, infinite, or so large that outputs are, in eval and predict",
        "4 or 6; no figure and no row is written",
    )
