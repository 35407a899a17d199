"""Average weights: WiSE-FT between pretrained and fine-tuned weights, and model soups of runs.

The validation split chooses the average. Only the chosen average is measured on the test split.
Batch norm statistics are averaged like weights; integer buffers are taken from the first run.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from finetune.commands.evaluate import warn_of_training_images
from finetune.data.decisions import split_decisions
from finetune.data.source import Source
from finetune.errors import DataError, RecipeError, SetupError, WeightsError, weights_changed_error
from finetune.evaluation.claims import primary_metric
from finetune.evaluation.evaluator import NUM_MISTAKES, Evaluator, evaluate
from finetune.files import (
    explain_disk_errors,
    file_sha256,
    make_writable_folder,
    staging_folder,
)
from finetune.formatting import pluralize
from finetune.log import logger
from finetune.model_checksums import verify_model_folder
from finetune.models.head import classifier_names
from finetune.models.weights.read import read_tensors
from finetune.models.weights.timm_config import read_timm_config
from finetune.precision import autocast_dtype
from finetune.publish.artifacts import write_averaged_artifacts
from finetune.publish.push_checks import is_run_dir
from finetune.ranks import local_world_size
from finetune.recipe.schema import Recipe
from finetune.run.directory import RunDir, unique_run_names
from finetune.run.record import (
    describe_split_decisions,
    differing_inputs,
    have_other_shards,
    load_run_recipe,
    network_without_dropout,
    read_record,
    training_identity,
    warn_of_copied_shards,
)
from finetune.run.schema import RunRecord
from finetune.training.accelerator import (
    check_same_on_all_ranks,
    create_run_accelerator,
    run_on_main,
)
from finetune.training.compile import choose_kernels
from finetune.training.finalize import save_trained_model, use_full_split_indices
from finetune.training.resume import check_same_weights
from finetune.training.setup import TrainingSetup, build_setup

if TYPE_CHECKING:
    from accelerate import Accelerator

__all__ = ["average_runs", "format_average", "interpolate_weights", "mean_weights"]

StateDict = Mapping[str, Tensor]
_PREPROCESSING_KEYS = ("input_size", "mean", "std", "interpolation")  # keys of config.json


@dataclass(frozen=True)
class _LoadedRun:
    """A finished run and the weights in its model/ folder."""

    run: RunDir
    recipe: Recipe
    record: RunRecord
    state_dict: dict[str, Tensor]
    weights_sha256: str


def average_runs(
    runs: Sequence[str],
    *,
    out: str,
    alphas: Sequence[float] = (),
    greedy: bool = False,
    data: str | None = None,
) -> dict[str, Any]:
    """Average weights, evaluate the average, and write it as a model folder.

    Args:
        runs: finished run directories: one for WiSE-FT, several for a model soup.
        out: the output folder; it must be new or empty.
        alphas: WiSE-FT coefficients, each from 0 (pretrained) to 1 (fine-tuned); the best one on
            validation is kept.
        greedy: True to build a greedy soup: runs are added from best to worst, each only if the
            validation metric does not drop.
        data: source string of the runs' data where it is now; None uses the recorded one.
    Returns: a dict with keys "folder", "kind", "runs", "tried" (each average with its validation
        metrics), "chosen", "members" (name, seed and sha256 of the weights of each run, with the
        validation metrics if it is a soup), and "val" and "test" as returned by
        `Evaluator.results`.
    Raises: RecipeError for conflicting arguments; WeightsError if the runs have different networks
        or started from different pretrained weights; DataError if validation images are missing or
        differ between the runs.
    Source: Wortsman et al. 2022, "Robust fine-tuning of zero-shot models", and "Model soups",
        recipe 1.
    """
    _check_arguments(runs, alphas, greedy=greedy)
    members = [_load_run(run, data) for run in runs]
    for member in members[1:]:
        _check_compatible(members[0], member)
    ids = {member.record.get("id", member.run.path) for member in members}  # equal for copies
    if len(ids) < len(members):
        raise RecipeError(
            "RUN: the same run is given twice; give each run once", code="recipe.conflict"
        )
    first, folder = members[0], Path(out)
    if os.path.lexists(folder) and (not folder.is_dir() or any(folder.iterdir())):
        raise SetupError(
            f"--out: '{out}' already exists and is not an empty folder; choose another folder",
            code="setup.exists",
        )
    make_writable_folder(folder.parent, option="--out")
    accelerator, setup = _open_first_run(first)
    check_same_on_all_ranks(
        {"weights of the runs": [member.record.get("model_sha256") for member in members]}
    )
    names = unique_run_names([member.run.path for member in members])
    leaks = _find_leaks(members, names, setup.source) if accelerator.is_main_process else []
    network = setup.built.model
    pretrained_state = {k: v.clone() for k, v in network.state_dict().items()}
    network.to(accelerator.device)
    choose_kernels(network, device=accelerator.device, dtype=autocast_dtype(accelerator))
    batch_size = first.recipe.data.eval_batch_size
    val_loader = setup.build_loader(setup.source.splits["val"], train=False)

    def evaluate_weights(state: StateDict) -> dict[str, float]:
        network.load_state_dict(state)
        metrics = evaluate(network, val_loader, accelerator, batch_size=batch_size, progress=True)
        return {key: metrics[key] for key in (primary_metric(metrics), "loss")}

    if alphas:
        kind, tried, chosen, state = _run_wise_ft(
            setup, pretrained_state, first.state_dict, alphas, evaluate_weights
        )
    else:
        kind, tried, chosen, state = _build_soup(members, names, evaluate_weights, greedy=greedy)
    network.load_state_dict(state)
    evaluator = Evaluator(val_loader, accelerator, fit_calibration=True)
    evaluator.evaluate(network, batch_size=batch_size, progress=True)
    val = {**evaluator.results(), **split_decisions(setup.source, "val")}
    validation_scores = val.pop("validation_scores", None)
    fitted_key = "thresholds" if setup.is_multilabel else "temperature"
    results: dict[str, Any] = {"val": val, fitted_key: val.pop(fitted_key)}
    if (test := setup.source.splits.get("test")) is not None:
        settings: dict[str, Any] = {fitted_key: results[fitted_key], "num_mistakes": NUM_MISTAKES}
        test_loader = setup.build_loader(test, train=False)
        evaluator = Evaluator(test_loader, accelerator, **settings)
        evaluator.evaluate(network, batch_size=batch_size, progress=True)
        results["test"] = {**evaluator.results(), **split_decisions(setup.source, "test")}
        use_full_split_indices(test, test_loader.store.split, results["test"]["mistakes"])
    for member in members:
        _check_unchanged(member)
    results["average"] = {
        **{"kind": kind, "runs": names, "tried": tried, "chosen": chosen},
        "members": [
            {
                **{"name": name, "seed": member.recipe.run.seed},
                "sha256": member.weights_sha256,
                # validation metrics; WiSE-FT measures other weights than those of its only run
                **({} if alphas else tried[index]),
            }
            for index, (name, member) in enumerate(zip(names, members, strict=True))
        ],
    }
    run_on_main(
        accelerator,
        lambda: _write_model_folder(folder, first, setup, state, results, validation_scores, leaks),
    )
    return {"folder": out, **results["average"], **results}


def format_average(result: Mapping[str, Any]) -> str:
    """Format the result of `average_runs`: the averages tried, the chosen one, and its metrics."""
    metric = primary_metric(result["val"])
    lines = [f"{'validation':32}{metric:>8}{'loss':>10}"]
    lines += [f"{row['name']:32}{row[metric]:8.4f}{row['loss']:10.4f}" for row in result["tried"]]
    lines.append(f"{result['kind']}: {result['chosen']}")
    for split in ("val", "test"):
        if metrics := result.get(split):
            notes = [pluralize(metrics["examples"], "image"), describe_split_decisions(metrics)]
            keys = [key for key in (metric, "loss", "ece") if key in metrics]
            text = "  ".join(f"{key} {metrics[key]:.4f}" for key in keys)
            lines.append(f"{split}: {text}  ({', '.join(filter(None, notes))})")
    return "\n".join([*lines, result["folder"]])


# --- averages -------------------------------------------------------------------------------------


def interpolate_weights(
    pretrained: StateDict, finetuned: StateDict, alpha: float, *, head_names: Sequence[str]
) -> StateDict:
    """Return (1 - alpha) * pretrained + alpha * finetuned; the head stays as fine-tuned.

    Args:
        pretrained, finetuned: state dicts with the same keys.
        alpha: coefficient from 0 (pretrained) to 1 (fine-tuned).
        head_names: names of the head layers, which are not interpolated.
    """
    head_prefixes = tuple(f"{name}." for name in head_names)
    return {
        key: value.clone()
        if key.startswith(head_prefixes) or not value.is_floating_point()
        else pretrained[key].cpu().double().lerp(value.double(), alpha).to(value.dtype)
        for key, value in finetuned.items()
    }


def mean_weights(states: Sequence[StateDict]) -> StateDict:
    """Average state dicts in float64; integer buffers are copied from the first state dict."""
    means = {}
    for key, value in states[0].items():
        means[key] = value.clone()
        if value.is_floating_point():
            total = torch.zeros_like(value, dtype=torch.float64)
            for state in states:
                total += state[key]
            means[key] = (total / len(states)).to(value.dtype)
    return means


def _run_wise_ft(
    setup: TrainingSetup,
    pretrained: StateDict,
    finetuned: StateDict,
    alphas: Sequence[float],
    evaluate_weights: Callable[[StateDict], dict[str, float]],
) -> tuple[str, list[dict[str, Any]], str, StateDict]:
    """Evaluate every alpha and keep the best one on validation.

    In the paper, the pretrained network has a (zero-shot) head too. So a head that was kept from
    the pretrained weights is interpolated as well. A new head has no pretrained weights to
    interpolate with and stays as fine-tuned.

    Args:
        evaluate_weights: function from a state dict to its validation metrics.
    Returns: the kind of average, the validation metrics of each alpha, a text that describes the
        best alpha, and its state dict.
    """
    has_pretrained_head = "kept_classes" in setup.built.provenance
    head_names = () if has_pretrained_head else classifier_names(setup.built.model)
    tried: list[dict[str, Any]] = []
    best, best_state = -1.0, finetuned
    for alpha in sorted(set(alphas)):
        state = interpolate_weights(pretrained, finetuned, alpha, head_names=head_names)
        tried.append({"name": f"alpha {alpha:g}", "alpha": alpha, **evaluate_weights(state)})
        score = tried[-1][primary_metric(tried[-1])]
        if score >= best:  # a tie goes to the alpha closer to the fine-tuned weights
            best, best_state, chosen = score, state, tried[-1]["name"]
    head_note = "head also interpolated" if has_pretrained_head else "head as fine-tuned"
    return "WiSE-FT", tried, f"{chosen}, {head_note}", best_state


def _build_soup(
    members: Sequence[_LoadedRun],
    names: Sequence[str],
    evaluate_weights: Callable[[StateDict], dict[str, float]],
    *,
    greedy: bool,
) -> tuple[str, list[dict[str, Any]], str, StateDict]:
    """Average all runs, or the runs that a greedy soup selects. Returns: see `_run_wise_ft`."""
    tried: list[dict[str, Any]]
    tried = [
        {"name": name, **evaluate_weights(member.state_dict)}
        for name, member in zip(names, members, strict=True)
    ]
    if not greedy:
        state = mean_weights([member.state_dict for member in members])
        tried.append({"name": "mean", **evaluate_weights(state)})
        return "uniform soup", tried, f"all {len(members)} runs", state
    metric = primary_metric(tried[0])
    order = sorted(range(len(members)), key=lambda index: -tried[index][metric])
    selected, best = order[:1], tried[order[0]][metric]
    for index in order[1:]:
        metrics = evaluate_weights(
            mean_weights([members[i].state_dict for i in [*selected, index]])
        )
        tried.append({"name": f"with {tried[index]['name']}", **metrics})
        if metrics[metric] >= best:
            selected, best = [*selected, index], metrics[metric]
    names = ", ".join(tried[index]["name"] for index in selected)
    return (
        "greedy soup",
        tried,
        names,
        mean_weights([members[index].state_dict for index in selected]),
    )


def _open_first_run(first: _LoadedRun) -> tuple[Accelerator, TrainingSetup]:
    """Create the accelerator, and the first run's setup with its data and pretrained network.

    The setup is built without the run's adapter, which is already merged into the weights in
    model/. DoRA would also combine those weights with the norms of the pretrained weights.
    """
    plain = first.recipe.model.model_copy(update={"adapter": None})
    accelerator = create_run_accelerator(first.recipe)
    main = accelerator.is_main_process
    setup = build_setup(
        first.recipe.model_copy(update={"model": plain}),
        device=accelerator.device,
        local_world_size=local_world_size(accelerator.num_processes),
        show_progress=main,
    )
    _check_same_data_and_weights(first, setup)
    return accelerator, setup


# --- checks ---------------------------------------------------------------------------------------


def _check_arguments(runs: Sequence[str], alphas: Sequence[float], *, greedy: bool) -> None:
    problem, code = "", "recipe.conflict"
    if wrong := [alpha for alpha in alphas if not 0 <= alpha <= 1]:
        problem, code = f"--alpha: got {wrong[0]:g}; give numbers from 0 to 1", "recipe.wrong_value"
    elif len(runs) == 1 and not alphas:
        problem = (
            f"{runs[0]}: a model soup needs several runs; add runs, or add --alpha for WiSE-FT"
        )
        code = "recipe.missing_option"
    elif len(runs) == 1 and greedy:
        problem = "--greedy: applies only to a soup of several runs; remove it, or add runs"
    elif len(runs) > 1 and alphas:
        problem = "--alpha: applies only to one run; remove it, or give one run"
    if problem:
        raise RecipeError(problem, code=code)


def _load_run(name: str, data: str | None) -> _LoadedRun:
    """Load a finished run, whose data is now at `data` if given, and the weights in model/."""
    recipe = load_run_recipe(name, data=data) if is_run_dir(Path(name)) else None
    if recipe is None:
        raise WeightsError(
            f"{name}: this is a model folder, which does not record its data; give a run directory",
            code="weights.unsupported",
        )
    if not recipe.model.pretrained:
        raise WeightsError(
            f"{name}: this run started from random weights; give runs that started from pretrained "
            "weights",
            code="weights.unsupported",
        )
    run = RunDir(name)
    verify_model_folder(run.model_folder, source=name)
    weights = run.model_folder / "model.safetensors"
    return _LoadedRun(run, recipe, read_record(run), read_tensors(weights), file_sha256(weights))


def _check_unchanged(member: _LoadedRun) -> None:
    """Raise WeightsError if weights, which are mapped, or recipe have changed since they were read.

    A run that continues has no `model_sha256` until its end.
    """
    path = member.run.model_folder / "model.safetensors"
    records = [member.record, read_record(member.run)]
    of_run = [(each.get("model_sha256"), each.get("training_keys")) for each in records]
    if file_sha256(path) != member.weights_sha256 or of_run[0] != of_run[1]:
        raise weights_changed_error(member.run.path)


def _check_compatible(first: _LoadedRun, other: _LoadedRun) -> None:
    """Raise if two runs differ in network, pretrained weights, classes or evaluated images."""
    shapes = [{k: v.shape for k, v in member.state_dict.items()} for member in (first, other)]
    records = [member.record for member in (first, other)]
    origins = [record.get("weights_sha256") for record in records]
    networks = [record.get("plan", {}).get("architecture") for record in records]
    paths = f"{other.run.path} and {first.run.path}"
    args = [network_without_dropout(record) for record in records]
    fingerprints = [record.get("split_fingerprints", {}) for record in records]
    if fingerprints[0].get("classes") != fingerprints[1].get("classes"):
        counts = [record.get("plan", {}).get("classes") for record in records]
        raise DataError(
            f"{paths}: the runs have different classes, or another order of them ({counts[1]} and "
            f"{counts[0]} classes); give runs of the same classes",
            code="data.split_mismatch",
        )
    if shapes[0] != shapes[1] or networks[0] != networks[1] or args[0] != args[1]:
        raise WeightsError(
            f"{paths}: the runs differ in architecture ({networks[1]}, {networks[0]}), its "
            "arguments or tensor shapes; give runs of the same architecture",
            code="weights.wrong_shape",
        )
    if origins[0] != origins[1]:
        raise WeightsError(
            f"{paths}: the runs started from different pretrained weights, so their average is not "
            "meaningful; give runs that started from the same weights",
            code="weights.wrong_version",
        )
    models = [member.run.model_folder for member in (first, other)]
    configs = [read_timm_config(model / "config.json", str(model)).config for model in models]
    validation_settings = [
        [record.get("plan", {}).get("eval_pipeline"), *map(config.get, _PREPROCESSING_KEYS)]
        for record, config in zip(records, configs, strict=True)
    ]
    both_tested = all("test" in each for each in fingerprints)
    if validation_settings[0] != validation_settings[1] or any(
        fingerprints[0].get(name) != fingerprints[1].get(name)
        for name in ("val", *(["test"] if both_tested else []))
    ):
        raise DataError(
            f"{paths}: the runs used different validation or test images or preprocessing, so one "
            "may have trained on the other's validation or test images; use the same data, "
            "data.split_seed, data.eval, data.mean and so on in all recipes",
            code="data.split_mismatch",
        )
    identities = [training_identity(each.recipe, each.record) for each in (first, other)]
    if "data" in differing_inputs(identities):
        logger.warning(
            f"{paths}: the runs were trained on different images or labels; the model card "
            f"describes the training of {first.run.path} alone"
        )
    elif have_other_shards(records):
        logger.warning(
            f"{paths}: shards were written or copied between the runs, so their images may differ"
        )


def _find_leaks(members: Sequence[_LoadedRun], names: Sequence[str], source: Source) -> list[str]:
    """Warn of evaluated images that a run was trained on. Returns: the leaks, for the card."""
    return [
        f"{name}: {leak}" if len(members) > 1 else leak
        for name, member in zip(names, members, strict=True)
        for split in ("val", "test")
        if split in source.splits
        for leak in warn_of_training_images(str(member.run.path), member.recipe, source, split)
    ]


def _check_same_data_and_weights(first: _LoadedRun, setup: TrainingSetup) -> None:
    """Raise if the data or weights have changed since the run, or the run has no val split."""
    if "val" not in setup.source.splits:
        raise DataError(
            f"{first.run.path}: the run has no validation images to choose the average; train with "
            "data.val_fraction",
            code="data.no_split",
        )
    recorded = first.record.get("split_fingerprints", {})
    current = setup.fingerprints()
    for name in (recorded.keys() | current.keys()) - {"train"}:  # the average is not trained
        if current.get(name) != recorded.get(name):
            raise DataError(
                f"{setup.source.name}: images, labels or classes of '{name}' have changed "
                f"since the run {first.run.path}; restore them",
                code="data.changed",
            )
    warn_of_copied_shards(first.record, setup.source)
    check_same_weights(first.run, setup, first.record)


def _write_model_folder(
    folder: Path,
    first: _LoadedRun,
    setup: TrainingSetup,
    state: StateDict,
    results: dict[str, Any],
    validation_scores: dict[str, Any] | None,
    leaks: list[str],
) -> None:
    """Write the model folder atomically. Raises: SetupError if the disk is full."""
    num_bytes = sum(tensor.nbytes for tensor in state.values())
    with (
        explain_disk_errors(folder, needed_bytes=num_bytes),
        staging_folder(folder) as model_folder,
    ):
        save_trained_model(model_folder, setup, state, results, validation_scores)
        # safetensors writes its file with mode 0600
        shutil.copymode(model_folder / "config.json", model_folder / "model.safetensors")
        write_averaged_artifacts(model_folder, first.run, results, leaks=leaks)
        _check_unchanged(first)  # its recipe and record were read again for the card
        if folder.is_dir():
            folder.rmdir()
        model_folder.rename(folder)
