"""A plan and its run directories as training writes them, without checkpoints and model/."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from finetune.commands.probe import read_probe
from finetune.commands.probe import write_probe as write_probe_file
from finetune.commands.reproduce_page import EntryResult
from finetune.commands.reproduce_plan import Plan, PlanEntry, load_entry_recipe, load_plan

SMALL = """
# accelerate launch -m finetune train recipes/tables/small.yaml
# Source: a table, number 4; and more.
model: {name: "embedded:vit_nano", image_size: 32}
data: {source: "hub:owner/images", val_fraction: 0.1}
optim: {lr: 1e-3, epochs: 4}
claims:
  - {metric: test.top1, value: 0.5, tolerance: 0.05, source: a table}
  - {metric: val.loss, when: after epoch 2, trend: rising, source: a table}
"""
TABLES = """
title: Two runs and a probe
runs:
  - {name: whole, recipe: small.yaml, seeds: [0, 1]}
  - name: less
    recipe: small.yaml
    overrides: [data.num_train=20]
    seeds: [0, 1]
    claims:
      - {metric: test.top1, between: [0.3, 0.45], source: expected before the run}
  - name: few
    recipe: small.yaml
    probe: {shots: [1, 5], draws: 2, expected: [[0.1, 0.2], [0.3, 0.4]]}
directions:
  - question: Does it rise?
    source: a table
    run: less
    metric: val.loss
    when: after epoch 2
    trend: rising
  - question: Is less worse?
    source: a table
    run: less
    metric: test.top1
    below: whole
    expected: "yes"
"""
MACHINE = {
    "device": {"type": "cuda", "name": "A GPU", "threads": 8},
    "versions": {"python": "3.11.7", "torch": "2.14.1"},
    "commit": "0123456789abcdef+changes",
}


def write_plan(top: Path) -> Path:
    """Write the plan and its recipe below `top`/recipes. Returns: the plan's path."""
    folder = top / "recipes" / "tables"
    folder.mkdir(parents=True)
    (folder / "small.yaml").write_text(SMALL)
    (folder / "plan.yaml").write_text(TABLES)
    return folder / "plan.yaml"


def write_run(
    path: Path,
    plan: Path,
    entry: PlanEntry,
    seed: int,
    *,
    top1: float,
    losses: Sequence[float] = (0.9, 0.8, 0.7, 0.75),
    overrides: Sequence[str] = ("data.source=parquet:copies/images",),
) -> Path:
    """Write a run directory with one validation for each epoch of 10 steps.

    Args:
        path: the run directory.
        plan: the file of the plan.
        entry: the entry of the plan.
        seed: the seed of the run.
        top1: accuracy on the test split.
        losses: validation losses, one an epoch.
        overrides: the recipe overrides of the command.
    """
    path.mkdir(parents=True)
    recipe = load_entry_recipe(entry, plan, [*overrides, f"run.seed={seed}"])
    (path / "recipe.yaml").write_text(recipe.to_yaml())
    record = {**MACHINE, "status": "done", "data_fingerprint": "", "plan": {"steps_per_epoch": 10}}
    (path / "run.json").write_text(json.dumps(record))
    lines = [
        {"step": 10 * epoch, "split": "val", "loss": loss, "top1": 0.5}
        for epoch, loss in enumerate(losses, 1)
    ]
    (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    test_results = {"top1": top1, "top5": 0.9, "loss": 1.0, "ece": 0.1, "examples": 100}
    results = {"test": test_results, "train": {"seconds": 12.5 + seed}, "claims": []}
    (path / "results.json").write_text(json.dumps(results))
    return path


def write_probe(folder: Path, **changes: Any) -> Path:
    """Write a probe.json, with some entries changed. Returns: its folder."""
    folder.mkdir(parents=True, exist_ok=True)
    shots = {"1": {"seeds": [0.1, 0.2]}, "5": {"seeds": [0.3, 0.5]}}
    for row in shots.values():
        row |= {"accuracy": sum(row["seeds"]) / 2, "std": 0.05}  # type: ignore[dict-item]
    probe: dict[str, Any] = {"model": "embedded:vit_nano", "data": "parquet:copies/images"}
    probe |= {"split": "test", "features": {}, "linear": None, "knn": None}
    probe |= {"shots": shots, "protocol": {"test_images": 1000, "width": 8}, "machine": MACHINE}
    probe["protocol"]["weights"], probe["split_fingerprints"] = "60d8", {"train": "0"}
    write_probe_file({**probe, **changes}, folder)
    return folder


def write_plan_runs(top: Path, plan: Path) -> Path:
    """Write all runs of the plan below `top`/runs. Returns: that folder."""
    whole_entry, less_entry, _ = load_plan(plan).runs
    rising_losses = (0.9, 0.8, 0.9, 1.0)
    write_run(top / "runs" / "whole-s0", plan, whole_entry, 0, top1=0.5)
    write_run(top / "runs" / "whole-s1", plan, whole_entry, 1, top1=0.6)
    write_run(top / "runs" / "less-s0", plan, less_entry, 0, top1=0.4, losses=rising_losses)
    write_run(top / "runs" / "less-s1", plan, less_entry, 1, top1=0.55)
    write_probe(top / "runs" / "few")
    return top / "runs"


def load_entry_results(plan: Plan, path: Path, folder: Path) -> list[EntryResult]:
    """Return the results that `write_plan_runs` wrote, one for each entry."""
    *training_entries, probe_entry = plan.runs
    runs = [
        EntryResult(
            entry,
            load_entry_recipe(entry, path),
            [folder / f"{entry.name}-s{seed}" for seed in entry.seeds],
        )
        for entry in training_entries
    ]
    return [
        *runs,
        EntryResult(
            probe_entry,
            load_entry_recipe(probe_entry, path),
            [folder / probe_entry.name],
            probe=read_probe(folder / probe_entry.name),
        ),
    ]
