"""The losses of the first 6 steps of five recipes, compared with recorded losses of 20 steps.

On the kind of machine that recorded them (same CPU model, same torch), they must be equal to the
bit; elsewhere within 1e-4. A change that is meant to alter numbers records them again:

    python tests/training/test_golden_losses.py
"""

from __future__ import annotations

import contextlib
import json
import platform
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from forked_runs import read_train_losses

from finetune.errors import Paused
from finetune.recipe.load import load_recipe
from finetune.training.train import train

FOLDER = Path(__file__).with_name("losses")
RECIPES = Path(__file__).resolve().parents[2] / "recipes"
SETTINGS = (
    *("optim.epochs=null", "optim.steps=20", "optim.warmup_steps=5", "model.compile=false"),
    *("run.log_every=1", "run.eval_every=6", "run.precision=fp32", "run.threads=1"),
    *("run.test=false", "data.num_val=32"),
)
# Everything else that draws random numbers or keeps a state between steps.
AUGMENTED = (
    "data.train=resize | rand_augment(num_ops=2, magnitude=9) | random_crop(padding=4) | "
    "random_erasing(0.25) | mixup(0.8) | cutmix(1.0)",
    *("model.drop_path=0.1", "model.dropout=0.1", "optim.label_smoothing=0.1"),
    *("optim.ema_decay=0.9", "optim.layer_decay=0.75", "optim.clip_norm=1.0"),
    "data.micro_batch=16",
)
CASES = {
    "quickstart": ("quickstart.yaml", ()),
    "augmented": ("quickstart.yaml", AUGMENTED),
    "lora": ("methods/lora.yaml", ()),
    "multilabel": ("methods/multilabel.yaml", ()),
    "scratch_vit": ("scratch_vit/smoke.yaml", ()),
}

pytestmark = pytest.mark.usefixtures("no_plots")


def describe_machine() -> dict[str, str]:
    """Return what decides the last bit of a float32 sum: CPU model, instruction set and torch."""
    cpu = platform.processor() or platform.machine()
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            cpu = line.partition(":")[2].strip()
    return {
        "cpu": cpu,
        "capability": torch.backends.cpu.get_cpu_capability(),
        "torch": torch.__version__,
    }


def train_losses(case: str, out: Path, num_steps: int = 20) -> list[float]:
    """Train some steps of a recipe and return the loss of each."""
    name, overrides = CASES[case]
    recipe = load_recipe(RECIPES / name, [*SETTINGS, *overrides])
    with contextlib.suppress(Paused):
        train(recipe, out, pause=lambda step, _: step >= num_steps)
    return read_train_losses(out)


@pytest.mark.parametrize(
    "case",  # the augmented one is the quickstart, too
    [
        pytest.param(case, marks=pytest.mark.faults if case == "quickstart" else ())
        for case in CASES
    ],
)
def test_losses_of_the_first_steps_have_not_changed(case: str, tmp_path: Path) -> None:
    golden: dict[str, Any] = json.loads((FOLDER / f"{case}.json").read_text())
    losses, expected = train_losses(case, tmp_path / "run", num_steps=6), golden["losses"][:6]
    if describe_machine() == golden["machine"]:
        assert losses == expected
    else:
        assert losses == pytest.approx(expected, abs=1e-4)


def record_losses() -> None:
    """Write the losses of every case, with the machine they were computed on."""
    torch.set_num_threads(1)
    FOLDER.mkdir(exist_ok=True)
    for case in CASES:
        with tempfile.TemporaryDirectory() as folder:
            losses = train_losses(case, Path(folder) / "run")
        record = {"machine": describe_machine(), "losses": losses}
        (FOLDER / f"{case}.json").write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    record_losses()
