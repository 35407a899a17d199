"""Methods of training on the GPU against the CPU: several labels, rare classes, stages, adapters,
teachers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from gpu_runs import PAIRS, RARE, apart, strict_float32, trained

TESTED = ("run.test=true", "data.num_test=120")
METHODS: dict[str, tuple[str, ...]] = {
    "several labels": (*PAIRS, "data.train=resize | mixup(0.8)"),
    "several labels, asymmetric loss": (*PAIRS, "optim.asymmetric_loss={}"),
    "rare classes": RARE,
    "the head first": ("optim.stages=[{freeze: backbone, steps: 4, lr: 1e-2}]",),
    "LoRA": ("model.adapter={rank: 4, dropout: 0}",),
    "DoRA": ("model.adapter={kind: dora, rank: 4, targets: [attention, mlp]}",),
}


@pytest.mark.parametrize("kind", METHODS)
def test_methods_are_those_of_the_cpu(kind: str, tmp_path: Path, figure: Any) -> None:
    if "RA" in kind:
        pytest.importorskip("peft")
    strict_float32()
    expected = trained(tmp_path / "cpu", *TESTED, *METHODS[kind], on="cpu")
    found = trained(tmp_path / "run", *TESTED, *METHODS[kind])
    difference = apart(found["losses"], expected["losses"])
    lead = "map" if "map" in found["test"] else "top1"
    lists = [[one["index"] for one in run["test"]["mistakes"]] for run in (found, expected)]
    alike = len(set(lists[0]) & set(lists[1]))
    figure(
        "methods: losses in float32 against the CPU's, 16 steps, and what is measured then",
        "losses within 1e-4; test figures within 0.01; at most two of the worst mistakes others",
        f"{kind}: {difference:.1e}; {lead} {found['test'][lead]:.4f} and "
        f"{expected['test'][lead]:.4f}; {alike} of {len(lists[1])} mistakes",
    )
    assert difference < 1e-4
    assert found["test"][lead] == pytest.approx(expected["test"][lead], abs=0.01)
    assert lists[1]
    assert alike >= len(lists[1]) - 2
    if lead == "top1":
        assert found["temperature"] == pytest.approx(expected["temperature"], rel=1e-2)


TEACHERS: dict[str, tuple[str, ...]] = {
    "beside the step": (),
    "kept answers": ("data.train=resize",),
    "features": ("distill.kind=features",),
    "another size": ("model.image_size=48",),
}


@pytest.mark.parametrize("kind", TEACHERS)
def test_a_teacher_says_the_same(kind: str, teacher: Path, tmp_path: Path, figure: Any) -> None:
    strict_float32()
    overrides = (f"distill.teacher={teacher}", "optim.ema_decay=0.9", *TEACHERS[kind])
    expected = trained(tmp_path / "cpu", *overrides, on="cpu")
    found = trained(tmp_path / "run", *overrides)
    difference = apart(found["losses"], expected["losses"])
    figure(
        "a teacher in the loss: losses in float32 against the CPU's, 16 steps",
        "relative difference below 1e-4",
        f"{kind}: {difference:.1e}",
    )
    assert expected["losses"][-1] < expected["losses"][0]
    assert difference < 1e-4
