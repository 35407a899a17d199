"""How good is the choice of `finetune train FOLDER --minutes N`, compared with other searches?

    python benchmarks/tune_regret.py record TABLE FOLDER... [--random N] [--overrides KEY=VALUE...]
    python benchmarks/tune_regret.py replay TABLE [--budget RUNS] [--seeds N]

`record` trains the portfolio and N random configurations on each FOLDER, which has the splits train
and test. It appends a line per run to TABLE: its validation curve, its cost, its test accuracy, and
the sha256 of its weights. Runs that TABLE has are skipped.

`replay` lets each method choose on the recorded runs with a simulated clock, at the cost of RUNS
runs of the first recipe. The regret of a choice is the test accuracy that it loses, as a fraction
of the difference between the best and the worst configuration of the task. The order of the learned
portfolio is that which is best on the other tasks (leaving one task out).
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from finetune.commands import start
from finetune.commands.portfolio import PORTFOLIO, Member, build_trials
from finetune.commands.successive_halving import Point, Search, Trial
from finetune.commands.tune import Progress, run_search
from finetune.log import quiet
from finetune.recipe.load import MINIMAL_RECIPE, parse_recipe
from finetune.recipe.schema import Recipe
from finetune.run.directory import RunDir
from finetune.training.train import train

Row = dict[str, Any]
FINAL_SECONDS = 8.0


def main() -> None:
    """Record runs, or replay the searches on them."""
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    record_parser = commands.add_parser("record")
    record_parser.add_argument("table", type=Path)
    record_parser.add_argument("folders", nargs="+")
    record_parser.add_argument("--random", type=int, default=27, metavar="N")
    record_parser.add_argument("--overrides", nargs="*", default=[], metavar="KEY=VALUE")
    replay_parser = commands.add_parser("replay")
    replay_parser.add_argument("table", type=Path)
    replay_parser.add_argument("--budget", type=float, default=5.0)
    replay_parser.add_argument("--seeds", type=int, default=3)
    arguments = parser.parse_args()
    if arguments.command == "record":
        for folder in arguments.folders:
            record(arguments.table, folder, arguments.overrides, num_random=arguments.random)
    else:
        replay(read_table(arguments.table), budget=arguments.budget, num_seeds=arguments.seeds)


# Recording ----------------------------------------------------------------------------------------


def random_members(count: int) -> list[Member]:
    """Draw members of the portfolio, the same ones every time."""
    rng = np.random.default_rng(0)
    members = []
    for number in range(count):
        decay, augment = rng.choice([1.0, 0.85, 0.75, 0.65]), rng.choice(["", "trivial_augment"])
        members.append(
            Member(
                f"random-{number}",
                "random",
                weights=str(rng.choice(["best", "best", "second", "other size"])),
                lr=float(10 ** rng.uniform(-1.5, 0.7)),
                length=float(rng.choice([0.5, 1.0, 2.0])),
                changes=() if decay == 1 else (f"optim.layer_decay={decay:g}",),
                augment=str(augment),
            )
        )
    return members


def record(table: Path, folder: str, overrides: Sequence[str], *, num_random: int) -> None:
    """Train all configurations on a folder of images, and append their runs to the table."""
    members = (*PORTFOLIO, *random_members(num_random))
    done = {(row["task"], row["name"]) for row in read_table(table)}
    task = Path(folder).name
    for trial in build_trials(start.start(folder, overrides=overrides), members):
        if (task, trial.name) in done:
            continue
        recipe = parse_recipe(trial.recipe, name=trial.name)
        with tempfile.TemporaryDirectory(prefix="tune-regret-") as temporary:
            results = train(recipe, Path(temporary) / "run", keep_process_group=True)
            lines = RunDir(Path(temporary) / "run").read_metrics()
        evaluations = [line for line in lines if line["split"] == "val"]
        curve = [(line["step"], line["top1"], line["loss"]) for line in evaluations]
        num_steps, seconds = curve[-1][0], evaluations[-1]["seconds"]
        row = {
            **{"task": task, "name": trial.name, "kind": trial.kind, "estimate": trial.estimate},
            **{"curve": curve, "num_images": results["val"]["examples"]},
            "step_seconds": seconds / num_steps,
            "start_seconds": max(0.0, results["command_seconds"] - seconds - FINAL_SECONDS),
            **{"test": results["test"]["top1"], "model_sha256": results["model_sha256"]},
        }
        with table.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")


def read_table(table: Path) -> list[Row]:
    """Read the recorded runs; none if there is no table."""
    if not table.exists():
        return []
    return [json.loads(line) for line in table.read_text(encoding="utf-8").splitlines()]


# Replaying ----------------------------------------------------------------------------------------


class RecordedRuns:
    """Runs of one task that cost simulated time."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self._rows = {row["name"]: row for row in rows}
        self._steps: dict[str, int] = {}
        self.now = 0.0

    def clock(self) -> float:
        """Return the simulated time."""
        return self.now

    def train_until(
        self, recipe: Recipe, folder: Path, pause: Callable[[int, int], bool]
    ) -> Progress:
        """Continue a run as `tune.train_until` does."""
        row = self._rows[folder.name]
        done = self._steps.get(folder.name, 0)
        self.now += row["start_seconds"] if not done else min(row["start_seconds"], 5.0)
        num_steps = row["curve"][-1][0]
        for step, *_ in row["curve"]:
            if step <= done:
                continue
            self.now += (step - done) * row["step_seconds"]
            done = self._steps[folder.name] = step
            if pause(step, num_steps):
                break
        curve = [Point(*point) for point in row["curve"] if point[0] <= done]
        return Progress(num_steps, row["num_images"], curve, "")


def search(rows: Sequence[Row], order: Sequence[str], seconds: float) -> float:
    """Search with the runs of a task in an order. Returns: the test accuracy of the choice."""
    by_name = {row["name"]: row for row in rows}
    recipe = MINIMAL_RECIPE.replace("epochs: 1", "steps: 1")  # it cannot be shortened
    trials = [
        Trial(name, name, by_name[name]["kind"], recipe, by_name[name]["estimate"], FINAL_SECONDS)
        for name in order
    ]
    runs = RecordedRuns(rows)
    state = Search("table", [], seconds / 60, "top1", 10**6, False, trials)
    with tempfile.TemporaryDirectory(prefix="tune-regret-") as folder, quiet():
        chosen = run_search(
            state, Path(folder) / "run", clock=runs.clock, train_until=runs.train_until
        )
    return float(by_name[chosen.name]["test"])


def random_search(rows: Sequence[Row], order: Sequence[str], seconds: float) -> float:
    """Train whole runs in an order. Returns: the test accuracy of the best on validation."""
    by_name = {row["name"]: row for row in rows}
    done: list[Row] = []
    for name in order:
        row = by_name[name]
        seconds -= whole_seconds(row)
        if seconds < 0 and done:
            break
        done.append(row)
    return float(max(done, key=lambda row: float(row["curve"][-1][1]))["test"])


def whole_seconds(row: Row) -> float:
    """Return the cost of a whole run."""
    return float(row["start_seconds"] + row["curve"][-1][0] * row["step_seconds"])


def normalized_regret(rows: Sequence[Row], accuracy: float) -> float:
    """Return the lost accuracy as a fraction of the range of the task."""
    values = [row["test"] for row in rows]
    return (max(values) - accuracy) / max(max(values) - min(values), 1e-9)


def learned_order(others: dict[str, list[Row]], names: Sequence[str]) -> list[str]:
    """Order configurations greedily: each adds the most to the best of those before it.

    Args:
        others: the runs of the other tasks.
        names: the configurations of this task, the first one first.
    """
    order, remaining = [names[0]], list(names[1:])
    while remaining:

        def regret(name: str, chosen: Sequence[str] = tuple(order)) -> float:
            total = 0.0
            for rows in others.values():
                tests = [row["test"] for row in rows if row["name"] in (*chosen, name)]
                total += normalized_regret(rows, max(tests, default=min(r["test"] for r in rows)))
            return total

        order.append(min(remaining, key=regret))
        remaining.remove(order[-1])
    return order


def replay(table: Sequence[Row], *, budget: float, num_seeds: int) -> None:
    """Print the regret of each method: its median and its worst over all tasks and seeds."""
    tasks: dict[str, list[Row]] = {}
    for row in table:
        tasks.setdefault(row["task"], []).append(row)
    regrets: dict[str, list[float]] = {}
    for task, rows in tasks.items():
        names = [row["name"] for row in rows]  # as recorded: the recipe of `start` comes first
        others = {other: tasks[other] for other in tasks if other != task}
        seconds = budget * (whole_seconds(rows[0]) + FINAL_SECONDS)
        results = {
            "start": [float(rows[0]["test"])],
            "portfolio": [search(rows, names, seconds)],
            "learned portfolio": [search(rows, learned_order(others, names), seconds)],
            "random search": [],
            "ASHA": [],
        }
        for seed in range(num_seeds):
            order = [str(name) for name in np.random.default_rng(seed).permutation(names)]
            results["random search"].append(random_search(rows, order, seconds))
            results["ASHA"].append(search(rows, order, seconds))
        for method, accuracies in results.items():
            found = [normalized_regret(rows, accuracy) for accuracy in accuracies]
            regrets.setdefault(method, []).extend(found)
    print("| method | choices | median regret | worst regret |")
    print("|---|---|---|---|")
    for method, values in regrets.items():
        median, worst = statistics.median(values), max(values)
        print(f"| {method} | {len(values)} | {median:.3f} | {worst:.3f} |")


if __name__ == "__main__":
    main()
