"""`finetune bench`: measure a recipe's training speed on this machine."""

from __future__ import annotations

import os
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from finetune.bench.timer import peak_device_bytes, peak_host_bytes, value_range
from finetune.bench.training_loop import TrainingLoop
from finetune.errors import RecipeError, SetupError, redact_secrets
from finetune.files import make_writable_folder
from finetune.formatting import MISSING, aligned_table, format_bytes, pluralize
from finetune.log import logger
from finetune.progress import step_bar
from finetune.ranks import is_main_process
from finetune.recipe.load import load_recipe
from finetune.recipe.schema import Recipe

__all__ = ["WARMUP_STEPS", "bench", "format_bench"]

WARMUP_STEPS = 3  # untimed steps at the start of each measurement


def bench(
    path: str,
    overrides: Sequence[str] = (),
    *,
    steps: int = 20,
    repeats: int = 3,
    decode: bool = False,
    profile: str | None = None,
) -> dict[str, Any]:
    """Measure the training speed of a recipe, in several turns.

    Each turn trains on real input, then without input (the batches of one step, repeated), then
    evaluates, then measures the matrix products of a step in isolation.

    Args:
        path: path of the recipe.
        overrides: overrides of the recipe, each `section.key=value`.
        steps: timed steps per turn.
        repeats: number of turns.
        decode: True to also compare the workers with the same number of processes that only decode.
        profile: folder for a profiler trace; None for no trace.
    Returns: a dict with the settings, the machine, and these keys:
        "train", "without_input", "evaluation": images per second, each a `value_range`.
        "input_share": share of a step that loading takes, a `value_range`.
        "matrix_rate": operations per second of the matrix products, a `value_range`; None for a
            network without linear layers.
        "operations_per_image": FLOPs of a training step per image.
        "fraction": share of the matrix rate that training reaches; None without a matrix rate.
        "seconds_to_first_step": time from the start of the process.
        "host_bytes", "device_bytes": peak memory in training; "device_bytes" is None on a CPU.
        "inputs": result of `input_rates`; None unless requested.
        "profile": result of `TrainingLoop.profile`; None unless requested.
        "load": load average before the measurement.
    Raises: FinetuneError; its class sets the exit code.
    """
    recipe = load_recipe(path, overrides)
    _check_arguments(recipe, decode=decode, profile=profile)
    load = os.getloadavg()[0]  # other work on this machine affects every result
    if profile is not None:
        make_writable_folder(Path(profile), option="--profile")
    bar = step_bar(total=repeats * 2 * (WARMUP_STEPS + steps), start=0, shown=is_main_process())

    def on_step() -> None:
        bar.total = max(bar.total, bar.n + 1)
        bar.update()

    with bar, TemporaryDirectory(prefix="finetune-bench-") as folder:
        loop = TrainingLoop(recipe, Path(folder), on_step=on_step)
        try:
            measured = _measure(loop, steps=steps, repeats=repeats)
            batch_size = recipe.data.batch_size
            inputs = (
                loop.input_rates(num_images=steps * batch_size, repeats=repeats) if decode else None
            )
            traced = None if profile is None else loop.profile(Path(profile))
        finally:
            loop.close()
    return {
        "recipe": path,
        "overrides": [redact_secrets(word) for word in overrides],
        "steps": steps,
        "repeats": repeats,
        "warmup_steps": WARMUP_STEPS,
        "load": round(load, 2),
        **loop.describe(),
        **measured,
        "inputs": inputs,
        "profile": traced,
    }


def _measure(loop: TrainingLoop, *, steps: int, repeats: int) -> dict[str, Any]:
    """Measure the loop in several turns. Returns: the results, as documented in `bench`."""
    first_step = loop.one_step().seconds_to_first_step
    if loop.trainer.uses_cached_features:
        logger.info(
            "model.freeze: finetune train computes the features once; this benchmark runs the "
            "whole network in every step; to measure training on features, use finetune info --plan"
        )
    operations, products = loop.count_operations()
    batch_size = loop.recipe.data.batch_size
    rates: dict[str, list[float]] = {"train": [], "without_input": [], "evaluation": []}
    matrix_rates: list[float | None] = []
    memory: dict[str, int | None] = {}
    for _ in range(repeats):
        for name in ("train", "without_input"):
            clock = loop.train(warmup=WARMUP_STEPS, steps=steps, synthetic=name == "without_input")
            rates[name].append(batch_size * steps / clock.seconds)
        if not memory:  # before evaluation raises the peak
            memory = {
                "host_bytes": peak_host_bytes(),
                "device_bytes": peak_device_bytes(loop.device),
            }
        rates["evaluation"].append(loop.evaluate(images=max(steps * batch_size // 2, 1)))
        matrix_rates.append(loop.matrix_rate(products))
    matrix = None if None in matrix_rates else value_range(matrix_rates)  # type: ignore[arg-type]
    per_image = operations / batch_size
    pairs = zip(rates["train"], rates["without_input"], strict=True)
    return {
        **{name: value_range(values) for name, values in rates.items()},
        # max, because noise can make it negative
        "input_share": value_range([max(0.0, 1 - real / without) for real, without in pairs]),
        "matrix_rate": matrix,
        "operations_per_image": per_image,
        "fraction": None
        if matrix is None
        else statistics.median(rates["train"]) * per_image / matrix["median"],
        "seconds_to_first_step": first_step,
        **memory,
    }


def _check_arguments(recipe: Recipe, *, decode: bool, profile: str | None) -> None:
    started = int(os.environ.get("WORLD_SIZE", "1"))
    if started > 1 and (decode or profile is not None):
        raise SetupError(
            f"bench: --decode and --profile need one process, but {started} were started; omit "
            "them, or run without accelerate launch",
            code="setup.one_process",
        )
    if recipe.run.num_processes not in (None, started):
        raise RecipeError(
            f"run.num_processes: the recipe asks for {recipe.run.num_processes}, but {started} "
            f"started; add run.num_processes={started}",
            code="recipe.conflict",
        )
    if decode and (recipe.data.keep != "none" or not recipe.data.workers):
        raise RecipeError(
            "--decode: requires workers that decode images in every epoch; add data.keep=none "
            "data.workers=auto",
            code="recipe.conflict",
        )


# --- text ----------------------------------------------------------------------------------------


def format_bench(result: Mapping[str, Any]) -> str:
    """Format the result of `bench` for the terminal: the settings, then tables."""
    height, width = result["image_size"]
    compiled = ", compiled" if result["compiled"] else ""
    lines = [
        f"{result['architecture']} at {height}×{width}, {result['batch_size']} images a step, "
        f"{result['precision']}{compiled}, {result['optimizer']}, {result['augmentation']}",
        _format_machine(result["machine"]),
        f"median of {pluralize(result['repeats'], 'turn')} of {result['steps']} steps, each after "
        f"{result['warmup_steps']} warm-up steps; load average before {result['load']:.1f}",
        "",
        *(
            f"{name:22}{median:>12}  {spread:>17}  {note}".rstrip()
            for name, median, spread, note in [("", "median", "min–max", ""), *_result_rows(result)]
        ),
    ]
    if inputs := result["inputs"]:
        workers, decode = (statistics.median(inputs[name]) for name in ("workers", "decode"))
        lines += [
            "",
            f"without the network, workers deliver {_format_rate(workers)} images/s, "
            f"{inputs['share']:.0%} of the {_format_rate(decode)} images/s that the same number "
            "of processes reach when they only decode",
        ]
    if profile := result["profile"]:
        rows = [["operation", "calls a step", "ms a step", "share"]]
        for row in profile["operations"]:
            figures = [f"{row['calls']:g}", f"{row['milliseconds']:.2f}", f"{row['share']:.1%}"]
            rows.append([row["name"], *figures])
        lines += ["", *aligned_table(rows), profile["trace"]]
    return "\n".join(lines)


def _result_rows(result: Mapping[str, Any]) -> list[tuple[str, str, str, str]]:
    """Return the rows of the table: name, median, range, note."""
    share, matrix, device = result["input_share"], result["matrix_rate"], result["device_bytes"]
    fraction, first = result["fraction"], result["seconds_to_first_step"]
    rows = [
        ("training images/s", *_median_and_range(result["train"]), ""),
        ("without input", *_median_and_range(result["without_input"]), "the batches of one step"),
        ("evaluation images/s", *_median_and_range(result["evaluation"]), ""),
        (
            "input",
            f"{share['median']:.1%}",
            f"{share['min']:.1%}–{share['max']:.1%}",
            "of a step",
        ),
    ]
    if matrix is not None:
        gigaflops = {key: matrix[key] / 1e9 for key in ("median", "min", "max")}
        image = f"{result['operations_per_image'] / 1e9:,.3g} GFLOP an image"
        rows += [
            ("matrix rate, GFLOP/s", *_median_and_range(gigaflops), "at this network's shapes"),
            ("training reaches", f"{fraction:.1%}", "", f"of the matrix rate; {image}"),
        ]
    rows += [
        ("first step after", f"{first:.1f} s", "", "from the start of the process"),
        ("peak host memory", format_bytes(result["host_bytes"]), "", "in training"),
        ("peak device memory", MISSING if device is None else format_bytes(device), "", ""),
    ]
    return rows


def _format_machine(machine: Mapping[str, Any]) -> str:
    device = machine["device"]
    on = f"{device['threads']} threads" if device["type"] == "cpu" else device["type"]
    if sets := device.get("instructions"):
        on += f", {' '.join(sets)}" + ("" if len(sets) > 1 else " without native bf16")
    if machine["num_processes"] > 1:
        on = f"{machine['num_processes']} processes ({machine['distributed']}), {on} each"
    versions = " ".join(f"{name} {number}" for name, number in machine["versions"].items())
    return f"{device['name']}, {on}; commit {machine['commit'] or 'unknown'}; {versions}"


def _median_and_range(rates: Mapping[str, Any]) -> tuple[str, str]:
    """Format the median and the range."""
    low, high = (_format_rate(rates[key]) for key in ("min", "max"))
    return _format_rate(rates["median"]), f"{low}–{high}"


def _format_rate(value: float) -> str:
    """Format a rate with one decimal below 1000, else without decimals."""
    return f"{value:,.0f}" if value >= 1000 else f"{value:.1f}"
