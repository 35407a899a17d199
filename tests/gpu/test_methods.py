"""Training methods on the GPU match the CPU: multilabel, rare classes, stages, adapters,
distillation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from gpu_runs import (
    MULTILABEL_OVERRIDES,
    RARE_CLASS_OVERRIDES,
    disable_tf32,
    max_relative_difference,
    train_here,
)

TEST_SPLIT = ("run.test=true", "data.num_test=120")
METHODS: dict[str, tuple[str, ...]] = {
    "multilabel": (*MULTILABEL_OVERRIDES, "data.train=resize | mixup(0.8)"),
    "multilabel, asymmetric loss": (*MULTILABEL_OVERRIDES, "optim.asymmetric_loss={}"),
    "rare classes": RARE_CLASS_OVERRIDES,
    "the head first": ("optim.stages=[{freeze: backbone, steps: 4, lr: 1e-2}]",),
    "LoRA": ("model.adapter={rank: 4, dropout: 0}",),
    "DoRA": ("model.adapter={kind: dora, rank: 4, targets: [attention, mlp]}",),
}


@pytest.mark.parametrize("method", METHODS)
def test_methods_match_the_cpu(method: str, tmp_path: Path, figure: Any) -> None:
    if "RA" in method:
        pytest.importorskip("peft")
    disable_tf32()
    expected = train_here(tmp_path / "cpu", *TEST_SPLIT, *METHODS[method], device_type="cpu")
    result = train_here(tmp_path / "run", *TEST_SPLIT, *METHODS[method])
    difference = max_relative_difference(result["losses"], expected["losses"])
    metric = "map" if "map" in result["test"] else "top1"
    top_losses = [[row["index"] for row in run["test"]["mistakes"]] for run in (result, expected)]
    num_common = len(set(top_losses[0]) & set(top_losses[1]))
    figure(
        "methods: losses of 16 steps in float32, and test results, against the CPU",
        "losses within 1e-4; test metrics within 0.01; at most two different top losses",
        f"{method}: {difference:.1e}; {metric} {result['test'][metric]:.4f} and "
        f"{expected['test'][metric]:.4f}; {num_common} of {len(top_losses[1])} top losses",
    )
    assert difference < 1e-4
    assert result["test"][metric] == pytest.approx(expected["test"][metric], abs=0.01)
    assert top_losses[1]
    assert num_common >= len(top_losses[1]) - 2
    if metric == "top1":
        assert result["temperature"] == pytest.approx(expected["temperature"], rel=1e-2)


TEACHERS: dict[str, tuple[str, ...]] = {
    "computed in each step": (),
    "cached outputs": ("data.train=resize",),
    "features": ("distill.kind=features",),
    "another size": ("model.image_size=48",),
}


@pytest.mark.parametrize("case", TEACHERS)
def test_distillation_matches_the_cpu(
    case: str, teacher: Path, tmp_path: Path, figure: Any
) -> None:
    disable_tf32()
    overrides = (f"distill.teacher={teacher}", "optim.ema_decay=0.9", *TEACHERS[case])
    expected = train_here(tmp_path / "cpu", *overrides, device_type="cpu")
    result = train_here(tmp_path / "run", *overrides)
    difference = max_relative_difference(result["losses"], expected["losses"])
    figure(
        "distillation: losses of 16 steps in float32 against the CPU",
        "relative difference below 1e-4",
        f"{case}: {difference:.1e}",
    )
    assert expected["losses"][-1] < expected["losses"][0]
    assert difference < 1e-4
