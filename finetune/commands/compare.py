"""`finetune compare`: evaluate two models on the same images, and test what has changed."""

# N images, C channels, H W pixels

from __future__ import annotations

import dataclasses
import functools
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from finetune.bench.timer import synchronize
from finetune.commands.evaluate import (
    SPLITS,
    TASKS,
    check_same_models_on_all_ranks,
    check_split_name,
    open_evaluation_data,
    prepare_evaluation,
    warn_of_training_images,
)
from finetune.data.decisions import split_decisions
from finetune.data.from_recipe import resolve_data_section
from finetune.data.source import Source, Split
from finetune.data.thread_pool import thread_map
from finetune.errors import DataError, RecipeError, RegressionError, redact_urls
from finetune.evaluation.evaluator import evaluate
from finetune.evaluation.metrics import ImageResults
from finetune.evaluation.paired import (
    MIN_SLICE_IMAGES,
    FailCondition,
    compare_correct,
    compare_loss,
    describe_difference,
    format_p_value,
    quartile_slices,
    rank_slices,
)
from finetune.files import make_writable_folder, write_atomically
from finetune.formatting import (
    aligned_table,
    escape_to_one_line,
    format_bytes,
    format_percent,
    format_short_count,
    pluralize,
)
from finetune.host_resources import num_cores
from finetune.inference import get_num_classes
from finetune.log import logger
from finetune.models.exported import ExportedPipeline
from finetune.models.save import BuiltModel
from finetune.progress import item_bar
from finetune.recipe.load import DataSection
from finetune.recipe.schema import Recipe
from finetune.report.model_comparison import render_model_comparison
from finetune.run.directory import format_json
from finetune.run.model import load_run_model
from finetune.run.record import describe_split_decisions
from finetune.training.accelerator import create_run_accelerator

if TYPE_CHECKING:
    from accelerate import Accelerator

__all__ = ["compare_models", "format_comparison"]

JSON_FILE, PAGE_FILE = "compare.json", "compare.html"
_LATENCY_ROUNDS = 30
_MAX_LISTED_SLICES = 10


def compare_models(
    first: str,
    second: str,
    *,
    data: str | None = None,
    split: str | None = None,
    out: str | None = None,
    fail_if: FailCondition | None = None,
) -> tuple[dict[str, Any], RegressionError | None]:
    """Evaluate two models on the same images, and compare them image by image.

    Both models are evaluated now, with the precision and threads of the first one.

    Args:
        first, second: run directory, model folder, Hub or timm name, or exported file NAME.onnx.
        data: a source string; None uses the data that the first model was trained on.
        split: see `evaluate_model`.
        out: a folder for compare.json and compare.html.
        fail_if: limit on the change of a metric.
    Returns: the content of compare.json, and the error if the limit is exceeded. The content has
        the keys "a", "b" ({"model", "parameters", "size_bytes", "image_size", "latency_ms",
        "leakage"}, the last as `warn_of_training_images` returns it), "data", "split",
        "data_changed", "images", "decisions" (see `split_decisions`, only if they have changed the
        split), "class_names", "top1", "top5" (the result of `compare_correct`), "loss" (that of
        `compare_loss`), "negative_flip_rate", "both_wrong" (images with two different wrong
        answers), "flips" (the images that only one model has right, the surest answers of the
        second model first), "slices" (see `rank_slices`), "small_slices" and "fail_if"
        ({"condition", "failed", "message"}, or None). On ranks other than 0, "slices" and "leakage"
        are empty.
    Raises: RecipeError if both are the same model, their classes differ, or one is multi-label;
        DataError for unsuitable data or an unreadable image; SetupError if `out` cannot be written.
    """
    check_split_name(split, SPLITS)
    if os.path.realpath(first) == os.path.realpath(second):
        raise RecipeError(
            f"{second}: this is the same model as {first}; give two different models",
            code="recipe.conflict",
        )
    if out is not None:
        make_writable_folder(Path(out), option="--out")
    names = (first, second)
    recipes, built = zip(*(load_run_model(name) for name in names), strict=True)
    section, seed = resolve_data_section(first, recipes[0], data)
    _check_same_classes(names, built)
    if fail_if is not None and fail_if.metric == "top5" and get_num_classes(first, built[0]) <= 5:
        raise RecipeError(
            f"--fail-if: '{fail_if.text}': with five classes or fewer, every answer is among the "
            "best five; use top1 or loss",
            code="recipe.wrong_value",
        )
    if recipes[0] is not None:
        section = section.model_copy(update={"unreadable": recipes[0].data.unreadable})
    section = section.model_copy(update={"task": TASKS[False]})
    accelerator = create_run_accelerator(recipes[0])
    source, split, data_changed = open_evaluation_data(
        first, recipes[0], section, seed=seed, split=split, accelerator=accelerator
    )
    check_same_models_on_all_ranks(built)
    leakage: list[list[str]] = [[], []]
    if accelerator.is_main_process:
        leakage = [
            warn_of_training_images(name, recipe, source, split)
            for name, recipe in zip(names, recipes, strict=True)
        ]
    networks, stores, evaluated, class_names = [], [], [], []
    for name, recipe, each in zip(names, recipes, built, strict=True):
        network, loader, classes = prepare_evaluation(
            name,
            each,
            *_as_decoded_for(recipe, source, split, section),
            accelerator,
            use_cached_features=recipe is not None and recipe.model.freeze == "backbone",
        )
        results = ImageResults()
        evaluate(
            network,
            loader,
            accelerator,
            batch_size=section.eval_batch_size,
            extra_metrics=[results],
            progress=True,
        )
        networks.append(network)
        stores.append(loader.store.split)
        evaluated.append(results.compute(accelerator))
        class_names.append(classes)
    if not np.array_equal(stores[0].image_rows, stores[1].image_rows):
        raise DataError(
            f"{redact_urls(section.source)}: the two models could not read the same images; "
            "repair the unreadable ones, which finetune data scan lists",
            code="data.unreadable",
        )
    _check_class_sets(names, class_names)
    a, b = evaluated
    if np.array_equal(a["loss"], b["loss"]) and accelerator.is_main_process:
        logger.warning(
            f"{first} and {second} give the same answers on every image; are they copies of one "
            "model?"
        )
    compared_split, num_images = stores[0], len(a["top1"])
    costs = _describe_costs(names, built, networks, accelerator)
    result: dict[str, Any] = {
        **{
            key: {**costs[key], "leakage": leaks}
            for key, leaks in zip(("a", "b"), leakage, strict=True)
        },
        "data": redact_urls(section.source),
        "split": split,
        "data_changed": data_changed,
        "images": num_images,
        **split_decisions(source, split),
        "class_names": class_names[0],
        "top1": compare_correct(a["top1"], b["top1"]),
        "top5": compare_correct(a["top5"], b["top5"]),
        "loss": compare_loss(a["loss"], b["loss"]),
    }
    result |= _find_flips(compared_split, a, b, class_names)
    slices: list[dict[str, Any]] = []
    num_small = 0
    if accelerator.is_main_process:
        by_kind = _build_slices(compared_split, class_names[0])
        slices, num_small = rank_slices(by_kind, a["top1"], b["top1"])
    result |= {"slices": slices, "small_slices": num_small}
    error = _check_condition(fail_if, result, second, out)
    result["fail_if"] = fail_if and {
        "condition": fail_if.text,
        "failed": error is not None,
        "message": str(error or ""),
    }
    if out is not None and accelerator.is_main_process:
        page = render_model_comparison(result, compared_split)
        write_atomically(Path(out) / JSON_FILE, format_json(result))
        write_atomically(Path(out) / PAGE_FILE, page)
    return result, error


def _check_same_classes(names: Sequence[str], built: Sequence[BuiltModel]) -> None:
    """Refuse multi-label models and models of other classes, before the data is opened."""
    for name, each in zip(names, built, strict=True):
        if each.multilabel:
            raise RecipeError(
                f"{name}: a multi-label model, but compare needs one answer per image; run "
                "finetune eval on each model instead",
                code="recipe.conflict",
            )
    known = [each.class_names for each in built]
    if known[0] is not None and known[1] is not None:
        _check_class_sets(names, [known[0], known[1]])


def _check_class_sets(names: Sequence[str], class_names: Sequence[Sequence[str]]) -> None:
    """Raise RecipeError unless both models have the same classes, in any order."""
    sets = [set(each) for each in class_names]
    if sets[0] == sets[1]:
        return
    parts = []
    for index, other in ((0, 1), (1, 0)):
        if missing := [name for name in class_names[index] if name not in sets[other]]:
            shown = ", ".join(missing[:5]) + ("…" if len(missing) > 5 else "")
            parts.append(f"only {names[index]} has {shown} ({len(missing)})")
    raise RecipeError(
        f"{names[1]}: its classes are not those of {names[0]}: {'; '.join(parts)}; compare models "
        "of the same classes",
        code="recipe.conflict",
    )


def _as_decoded_for(
    recipe: Recipe | None, source: Source, split: str, section: DataSection
) -> tuple[Source, str, DataSection]:
    """Return the same images with the evaluation transforms and decoder settings of a model."""
    default = DataSection(source=section.source)
    own = (recipe.data if recipe else default).model_dump(include={"eval", "decode_size"})
    images = dataclasses.replace(source.splits[split], decode_size=own["decode_size"])
    source = dataclasses.replace(source, splits={split: images})
    return source, split, section.model_copy(update=own)


def _find_flips(
    split: Split,
    a: Mapping[str, NDArray[Any]],
    b: Mapping[str, NDArray[Any]],
    class_names: Sequence[Sequence[str]],
) -> dict[str, Any]:
    """List the images that only one of the models classifies correctly."""
    names_a, names_b = (np.array(names, dtype=object) for names in class_names)
    answers_a_N, answers_b_N = names_a[a["predicted"]], names_b[b["predicted"]]
    is_flip_N = a["top1"] != b["top1"]
    rows = np.flatnonzero(is_flip_N)
    rows = rows[np.argsort(-b["confidence"][rows], kind="stable")]
    both_wrong_N = ~a["top1"] & ~b["top1"]
    return {
        "negative_flip_rate": float((a["top1"] & ~b["top1"]).mean()),
        "both_wrong": int((both_wrong_N & (answers_a_N != answers_b_N)).sum()),
        "flips": [
            {
                "index": row,
                "name": split.name_of(row),
                "label": class_names[0][int(split.labels[row])],
                "a": answers_a_N[row],
                "b": answers_b_N[row],
                "confidence_a": float(a["confidence"][row]),
                "confidence_b": float(b["confidence"][row]),
                "fixed": bool(b["top1"][row]),
            }
            for row in rows.tolist()
        ],
    }


def _build_slices(
    split: Split, class_names: Sequence[str]
) -> dict[str, dict[str, NDArray[np.bool_]]]:
    """Slice the images by class, source folder, size and brightness.

    Streamed images have no slices by size and brightness, which need a second pass over the shards.
    """
    labels_N = split.labels
    slices = {
        "class": {class_names[label]: labels_N == label for label in np.unique(labels_N).tolist()},
        "folder": _folder_slices(split),
    }
    if not split.is_streamed:
        sides_N, brightness_N = _measure_images(split)
        slices["size"] = quartile_slices(sides_N, "shorter side {low}–{high} px")
        slices["brightness"] = quartile_slices(brightness_N, "mean {low}–{high} of 255")
    return slices


def _folder_slices(split: Split) -> dict[str, NDArray[np.bool_]]:
    """Slice by folder; empty if the images are not files, or the folders are the classes."""
    if not split.images.has_file_per_image:
        return {}
    names = (split.name_of(index) for index in range(len(split)))
    folders_N = np.array([os.path.dirname(name) or "." for name in names], dtype=object)
    folders = dict.fromkeys(folders_N)
    if len({*zip(folders_N, split.labels.tolist(), strict=True)}) == len({*split.labels.tolist()}):
        return {}
    return {folder: folders_N == folder for folder in folders} if len(folders) > 1 else {}


def _measure_images(split: Split) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Decode each image in full size; return the shorter sides in pixels, and the mean values."""
    original = dataclasses.replace(split, decode_size=None)

    def measure(index: int) -> tuple[float, float]:
        pixels_HWC = original.decode(index)
        return float(min(pixels_HWC.shape[:2])), float(pixels_HWC.mean())

    rows = []
    with item_bar(len(split), label="size and brightness") as bar:
        for row in thread_map(measure, range(len(split)), num_cores()):
            rows.append(row)
            bar.update()
    sides_N, brightness_N = np.array(rows, dtype=np.float64).T
    return sides_N, brightness_N


def _describe_costs(
    names: Sequence[str],
    built: Sequence[BuiltModel],
    networks: Sequence[nn.Module],
    accelerator: Accelerator,
) -> dict[str, Any]:
    """Count the parameters of both networks, and measure the time of one image.

    The networks run in turn, so that a busy machine slows both down. The time is that of the
    network alone, without decoding and transforms; of an exported file with preprocessing, that of
    the whole file. Its median is reported. An exported file has no "parameters".
    """
    sizes = [each.preprocessing.image_size for each in built]
    passes: list[Callable[[], object]] = []
    for each, network, size in zip(built, networks, sizes, strict=True):
        inputs = torch.zeros(1, 3, *size, device=accelerator.device)
        if isinstance(each.pipeline, ExportedPipeline):
            passes.append(functools.partial(each.pipeline, inputs.to(torch.uint8)))
        else:
            passes.append(functools.partial(network, inputs))
    times: tuple[list[float], list[float]] = ([], [])
    with torch.no_grad(), accelerator.autocast():
        for _ in range(_LATENCY_ROUNDS + 3):  # the first three are a warm-up
            for run_once, seconds in zip(passes, times, strict=True):
                synchronize(accelerator.device)
                started = time.perf_counter()
                run_once()
                synchronize(accelerator.device)
                seconds.append(time.perf_counter() - started)
    return {
        key: {
            "model": name,
            "parameters": sum(tensor.numel() for tensor in network.parameters()) or None,
            "size_bytes": each.provenance["bytes"]
            if each.pipeline is not None
            else sum(tensor.nbytes for tensor in network.state_dict().values()),
            "image_size": list(size),
            "latency_ms": round(1000 * statistics.median(seconds[3:]), 3),
        }
        for key, name, each, network, size, seconds in zip(
            ("a", "b"), names, built, networks, sizes, times, strict=True
        )
    }


def _check_condition(
    condition: FailCondition | None, result: Mapping[str, Any], model: str, out: str | None
) -> RegressionError | None:
    """Return the error of an exceeded limit, or None."""
    if condition is None:
        return None
    violation = condition.violation(result[condition.metric], result["images"])
    if violation is None:
        return None
    where = f"see {Path(out) / PAGE_FILE}" if out else "add --out DIR to see the images"
    return RegressionError(
        f"{model}: {violation}; --fail-if accepts {condition.limit:g}; {where}",
        code="regression.limit",
    )


def format_comparison(result: Mapping[str, Any], *, out: str | None) -> str:
    """Format a comparison for the terminal."""
    num_images = result["images"]
    lines = [f"{key.upper()}  {escape_to_one_line(result[key]['model'])}" for key in ("a", "b")]
    facts = [f"'{result['split']}' of {result['data']}", pluralize(num_images, "image")]
    facts += filter(None, [describe_split_decisions(result)])
    lines += ["", ", ".join(facts)]
    metrics = ("top1", "top5", "loss") if len(result["class_names"]) > 5 else ("top1", "loss")
    lines += [
        f"{metric}  {describe_difference(metric, result[metric], num_images)}" for metric in metrics
    ]
    top1 = result["top1"]
    lines += [
        f"flips  {top1['fixed']} fixed by B, {top1['broken']} broken by B (negative flip rate "
        f"{format_percent(result['negative_flip_rate'])}); exact McNemar test: p "
        f"{format_p_value(top1['p_value_exact'])}",
        "",
        *aligned_table(
            [["", "parameters", "size", "input", "network, ms per image"], *_cost_rows(result)]
        ),
        "",
        *_format_slices(result),
    ]
    files = [str(Path(out) / name) for name in (JSON_FILE, PAGE_FILE)] if out else []
    return "\n".join([*lines, *files])


def _cost_rows(result: Mapping[str, Any]) -> list[list[str]]:
    return [
        [
            key.upper(),
            format_short_count(result[key]["parameters"]),
            format_bytes(result[key]["size_bytes"]),
            " × ".join(map(str, result[key]["image_size"])),
            f"{result[key]['latency_ms']:.2f}",
        ]
        for key in ("a", "b")
    ]


def _format_slices(result: Mapping[str, Any]) -> list[str]:
    """Format the first slices, with their difference in points."""
    rows = result["slices"]
    small = result["small_slices"]
    note = f"{pluralize(small, 'slice')} of fewer than {MIN_SLICE_IMAGES} images left out"
    if not rows:
        return [note] if small else []
    table = [["slice", "images", "A, %", "B, %", "points", "95 % interval", "adjusted p"]]
    for row in rows[:_MAX_LISTED_SLICES]:
        low, high = (f"{100 * bound:+.1f}" for bound in row["interval"])
        table.append(
            [
                escape_to_one_line(f"{row['kind']} {row['name']}"),
                str(row["images"]),
                *(f"{100 * row[key]:.1f}" for key in ("a", "b")),
                f"{100 * row['difference']:+.1f}",
                f"{low} to {high}",
                f"{row['p_adjusted']:.3f}",
            ]
        )
    notes = [f"the first {_MAX_LISTED_SLICES} of {len(rows)} slices"] * (len(table) <= len(rows))
    notes += [note] * (small > 0)
    return [*aligned_table(table), *([f"({'; '.join(notes)})"] if notes else [])]
