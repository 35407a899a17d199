"""How good is the choice of `finetune train FOLDER --minutes N`, compared with other searches?

    python benchmarks/tune_regret.py plan PLAN FOLDER... [--max-seconds S]
        [--overrides KEY=VALUE...]
    python benchmarks/tune_regret.py record TABLE PLAN [--processes N]
    python benchmarks/tune_regret.py replay TABLE [--budget RUNS] [--seeds N]

`plan` writes the recipes of the portfolio for each FOLDER, which has the splits train and test,
with the cost that the search estimates for each on this machine. Their epochs are limited to S
seconds of training, those of the first recipe too.

`record` trains them, perhaps on another machine, in parallel processes. It appends a line per run
to TABLE: its validation curve, its estimated cost, its test accuracy, and the sha256 of its
weights. Runs that TABLE has are skipped.

`replay` lets each method choose on the recorded runs with a simulated clock, at the cost of RUNS
runs of the first recipe that trains all weights. A run costs its estimate times a random factor,
log-normal with a standard deviation of 20 %. The regret of a choice is the test accuracy that it
loses, as a fraction of the difference between the best and the worst configuration of the task. The
search knows the accuracies of the other tasks only (leaving one task out).
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import statistics
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from finetune.commands import start
from finetune.commands.portfolio import START_SECONDS, build_trials
from finetune.commands.run_search import Progress, run_search
from finetune.commands.successive_halving import Point, Search, Trial
from finetune.log import only_warnings, quiet
from finetune.recipe.load import MINIMAL_RECIPE, parse_recipe
from finetune.recipe.schema import Recipe
from finetune.run.directory import RunDir
from finetune.training.train import train

Row = dict[str, Any]
_COST_ERROR = 0.2  # standard deviation of the logarithm of a run's cost, relative to its estimate


def main() -> None:
    """Plan runs, record them, or replay the searches on them."""
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    plan_parser = commands.add_parser("plan")
    plan_parser.add_argument("plan", type=Path)
    plan_parser.add_argument("folders", nargs="+")
    plan_parser.add_argument("--max-seconds", type=float, default=math.inf, metavar="S")
    plan_parser.add_argument("--overrides", nargs="*", default=[], metavar="KEY=VALUE")
    record_parser = commands.add_parser("record")
    record_parser.add_argument("table", type=Path)
    record_parser.add_argument("plan", type=Path)
    record_parser.add_argument("--processes", type=int, default=1, metavar="N")
    replay_parser = commands.add_parser("replay")
    replay_parser.add_argument("table", type=Path)
    replay_parser.add_argument("--budget", type=float, default=5.0)
    replay_parser.add_argument("--seeds", type=int, default=3)
    arguments = parser.parse_args()
    if arguments.command == "plan":
        starts = [start.start(each, overrides=arguments.overrides) for each in arguments.folders]
        write_plan(arguments.plan, starts, max_seconds=arguments.max_seconds)
    elif arguments.command == "record":
        record(arguments.table, read_table(arguments.plan), num_processes=arguments.processes)
    else:
        replay(read_table(arguments.table), budget=arguments.budget, num_seeds=arguments.seeds)


# Recording ----------------------------------------------------------------------------------------


def write_plan(path: Path, starts: Sequence[start.StartResult], *, max_seconds: float) -> None:
    """Write all configurations of each folder: the first of each, then the second, and so on."""
    rows: list[list[Row]] = []
    for created in starts:
        task, choice = Path(created.builder.source.name).name, created.choice
        if not choice.frozen and choice.seconds is not None:
            epochs = max(1, round(min(1, max_seconds / choice.seconds) * choice.epochs))
            seconds = choice.seconds * epochs / choice.epochs
            choice = replace(choice, epochs=epochs, seconds=seconds)
        limited = replace(created, choice=choice)
        trials = build_trials(limited, max_seconds=max_seconds)
        rows.append([{"task": task, "number": i, **vars(t)} for i, t in enumerate(trials)])
    with path.open("w", encoding="utf-8") as file:
        for row in filter(None, itertools.chain.from_iterable(itertools.zip_longest(*rows))):
            kept = (
                "task",
                "number",
                "name",
                "kind",
                "recipe",
                "estimated_seconds",
                "final_seconds",
            )
            file.write(json.dumps({key: row[key] for key in kept}) + "\n")


def record(table: Path, planned: Sequence[Row], *, num_processes: int) -> None:
    """Train the configurations of a plan that the table lacks, and append their runs to it."""
    done = {(row["task"], row["name"]) for row in read_table(table)}
    left = [row for row in planned if (row["task"], row["name"]) not in done]
    with ProcessPoolExecutor(num_processes, mp_context=get_context("spawn")) as pool:
        for future in as_completed([pool.submit(train_row, row) for row in left]):
            row = future.result()
            with table.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
            print(f"{row['task']} {row['name']}: test {row['test']:.4f}", file=sys.stderr)


def train_row(row: Row) -> Row:
    """Train a configuration. Returns: the row with what was measured, without its recipe."""
    recipe = parse_recipe(row["recipe"], name=row["name"])
    with tempfile.TemporaryDirectory(prefix="tune-regret-") as temporary, only_warnings():
        results = train(recipe, Path(temporary) / "run", keep_process_group=True)
        lines = RunDir(Path(temporary) / "run").read_metrics()
    evaluations = [line for line in lines if line["split"] == "val"]
    return {
        **{key: value for key, value in row.items() if key != "recipe"},
        "curve": [(line["step"], line["top1"], line["loss"]) for line in evaluations],
        "num_images": results["val"]["examples"],
        "seconds": results["command_seconds"],
        **{"test": results["test"]["top1"], "model_sha256": results["model_sha256"]},
    }


def read_table(table: Path) -> list[Row]:
    """Read a plan or the recorded runs; none if there is no file."""
    if not table.exists():
        return []
    return [json.loads(line) for line in table.read_text(encoding="utf-8").splitlines()]


# Replaying ----------------------------------------------------------------------------------------


class RecordedRuns:
    """Runs of one task that cost simulated time."""

    def __init__(self, rows: Sequence[Row], seed: int) -> None:
        rng = np.random.default_rng(seed)
        self._rows = {row["name"]: row for row in rows}
        self.seconds = {
            row["name"]: row["estimated_seconds"] * rng.lognormal(sigma=_COST_ERROR) for row in rows
        }
        self._steps: dict[str, int] = {}
        self.now = 0.0

    def clock(self) -> float:
        """Return the simulated time."""
        return self.now

    def train_until(
        self, recipe: Recipe, folder: Path, pause: Callable[[int, int], bool]
    ) -> Progress:
        """Continue a run as `tune.train_until` does."""
        row, seconds = self._rows[folder.name], self.seconds[folder.name]
        done, num_steps = self._steps.get(folder.name, 0), row["curve"][-1][0]
        # A run that trains only the classifier spends its time on features, before the first step.
        start_seconds = seconds if row["kind"] == "head" else min(START_SECONDS, seconds)
        self.now += start_seconds if not done else START_SECONDS
        for step, *_ in row["curve"]:
            if step <= done:
                continue
            self.now += (step - done) * (seconds - start_seconds) / num_steps
            done = self._steps[folder.name] = step
            if pause(step, num_steps):
                break
        curve = [Point(*point) for point in row["curve"] if point[0] <= done]
        train_seconds = done * (seconds - start_seconds) / num_steps
        return Progress(num_steps, row["num_images"], curve, train_seconds, {})


def search(
    rows: Sequence[Row],
    order: Sequence[str],
    seconds: float,
    seed: int,
    recorded: Mapping[str, dict[str, float]] = MappingProxyType({}),
) -> float:
    """Search with the runs of a task. Returns: the test accuracy of the choice.

    Args:
        rows: the runs.
        order: the configurations; those without recorded accuracies are tried in this order.
        seconds: the cost of the search.
        seed: of the costs.
        recorded: accuracies of the configurations in other tasks.
    """
    by_name = {row["name"]: row for row in rows}
    recipe = MINIMAL_RECIPE.replace("epochs: 1", "steps: 1")  # it cannot be shortened
    keys = ("kind", "estimated_seconds", "final_seconds")
    trials = [
        Trial(
            name,
            name,
            recipe=recipe,
            recorded=recorded.get(name, {}),
            **{key: by_name[name][key] for key in keys},
        )
        for name in order
    ]
    runs = RecordedRuns(rows, seed)
    state = Search("table", [], seconds / 60, "top1", 10**6, False, trials)
    with tempfile.TemporaryDirectory(prefix="tune-regret-") as folder, quiet():
        chosen = run_search(
            state, Path(folder) / "run", clock=runs.clock, train_until=runs.train_until
        )
    return float(by_name[chosen.name]["test"])


def random_search(rows: Sequence[Row], order: Sequence[str], seconds: float, seed: int) -> float:
    """Train whole runs in an order. Returns: the test accuracy of the best on validation."""
    by_name, costs = {row["name"]: row for row in rows}, RecordedRuns(rows, seed).seconds
    done: list[Row] = []
    for name in order:
        seconds -= costs[name]
        if seconds < by_name[name]["final_seconds"] and done:
            break
        done.append(by_name[name])
    return float(max(done, key=lambda row: float(row["curve"][-1][1]))["test"])


def normalized_regret(rows: Sequence[Row], accuracy: float) -> float:
    """Return the lost accuracy as a fraction of the range of the task."""
    values = [row["test"] for row in rows]
    return (max(values) - accuracy) / max(max(values) - min(values), 1e-9)


def recorded_accuracies(table: Sequence[Row]) -> dict[str, dict[str, float]]:
    """Return the test accuracies of each configuration, by task."""
    accuracies: dict[str, dict[str, float]] = {}
    for row in table:
        accuracies.setdefault(row["name"], {})[row["task"]] = float(row["test"])
    return accuracies


def replay(table: Sequence[Row], *, budget: float, num_seeds: int) -> None:
    """Print the regret of each method: its median and its worst over all tasks and seeds."""
    tasks: dict[str, list[Row]] = {}
    for row in sorted(table, key=lambda row: int(row["number"])):
        tasks.setdefault(row["task"], []).append(row)
    regrets: dict[str, list[float]] = {}
    for task, rows in tasks.items():
        names = [row["name"] for row in rows]
        recorded = recorded_accuracies([row for row in table if row["task"] != task])
        whole = next(row for row in rows if row["kind"] == "full")
        seconds = budget * (whole["estimated_seconds"] + whole["final_seconds"])
        results = {"start": [float(rows[0]["test"])]}
        for seed in range(num_seeds):
            drawn = [str(name) for name in np.random.default_rng(seed).permutation(names)]
            found = {
                "portfolio": search(rows, names, seconds, seed, recorded),
                "random search": random_search(rows, drawn, seconds, seed),
                "ASHA": search(rows, drawn, seconds, seed),
            }
            for method, accuracy in found.items():
                results.setdefault(method, []).append(accuracy)
        for method, accuracies in results.items():
            lost = [normalized_regret(rows, accuracy) for accuracy in accuracies]
            regrets.setdefault(method, []).extend(lost)
    print("| method | choices | median regret | worst regret |")
    print("|---|---|---|---|")
    for method, values in regrets.items():
        median, worst = statistics.median(values), max(values)
        print(f"| {method} | {len(values)} | {median:.3f} | {worst:.3f} |")


if __name__ == "__main__":
    main()
