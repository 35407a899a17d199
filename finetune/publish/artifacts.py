"""Write the files next to the weights in model/: card, recipe, results and plots.

A push copies model/ to the Hugging Face Hub byte for byte, so these files contain no local paths.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from textwrap import shorten
from typing import Any

from finetune.errors import CheckpointError, FinetuneError, WeightsError
from finetune.files import file_sha256, read_untrusted_json
from finetune.log import logger, quiet
from finetune.model_checksums import DESCRIPTION_FILES, add_description_checksums
from finetune.models.exported import CERTIFICATE, read_export_record
from finetune.models.lora import ADAPTER_FILES
from finetune.models.weights.timm_config import HubConfig, validate_config
from finetune.publish.model_card import CardContent, render_adapter_card, render_card
from finetune.recipe.paths import drop_folders
from finetune.recipe.schema import Recipe
from finetune.run.directory import RunDir, format_json, resume_command
from finetune.run.integrity import SPLIT_METRICS
from finetune.run.record import (
    have_other_shards,
    have_other_test_images,
    read_recipe,
    read_record,
    read_trained_recipe,
    training_identity,
)
from finetune.transforms.eval_transforms import default_eval_spec, spec_to_preprocessing
from finetune.transforms.preprocessing import resolve_preprocessing

__all__ = [
    "EXPORT_FILES",
    "PUBLISHED_ADAPTER_FILES",
    "PUBLISHED_FILES",
    "base_model",
    "keep_other_files",
    "publishable_recipe",
    "read_certificate",
    "rewrite_artifacts",
    "write_artifacts",
    "write_averaged_artifacts",
]

MODEL_FILES = ("config.json", "model.safetensors")
# The files of model/ that a push sends, besides those of an adapter.
PUBLISHED_FILES = (*MODEL_FILES, "README.md", *DESCRIPTION_FILES)
# What `finetune export RUN --out RUN/model` writes; a push sends these too.
EXPORT_FILES = ("model.onnx", CERTIFICATE)
# The files of model/adapter that a push of the adapter sends.
PUBLISHED_ADAPTER_FILES = (*ADAPTER_FILES, "README.md")
# The files of model/ that `write_artifacts` writes.
_ARTIFACTS = ("README.md", *DESCRIPTION_FILES, "adapter/README.md")


def write_artifacts(
    folder: Path,
    run: RunDir,
    results: Mapping[str, Any],
    *,
    repository: str | None = None,
    adapter_repository: str | None = None,
    with_plots: bool = True,
) -> None:
    """Write card, recipe, results and plots next to the weights.

    Args:
        folder: the folder of config.json and model.safetensors.
        run: the run that trained the weights.
        results: the content of results.json so far.
        repository, adapter_repository: Hub ids (owner/name) in the code examples of the model's
            card and of the adapter's card; None if unknown.
        with_plots: False to leave out the plots and the results of other seeds, which saves a
            second.
    """
    recipe = read_trained_recipe(run)
    content = _write_data_and_collect_card(folder, run, recipe, results)
    record = content.record.copy()
    record["metrics_changed"] = run.has_changed_metrics()
    content = replace(content, record=record, repository=repository)
    if with_plots:
        by_seed = _results_by_seed(run, recipe, results)
        content = replace(
            content, seed_results=by_seed, plots=_draw_plots(folder, run, results, content.config)
        )
    (folder / "README.md").write_text(render_card(content), encoding="utf-8")
    if (folder / "adapter").is_dir():
        content = replace(content, repository=adapter_repository)
        text = render_adapter_card(content)
        (folder / "adapter" / "README.md").write_text(text, encoding="utf-8")
    add_description_checksums(folder)


def write_averaged_artifacts(
    folder: Path, run: RunDir, results: Mapping[str, Any], *, leaks: Sequence[str]
) -> None:
    """Write card, recipe and results next to averaged weights.

    Args:
        folder: the folder of config.json and model.safetensors.
        run: the first of the averaged runs.
        results: metrics of the averaged weights, with the key "average", see `average_runs`.
        leaks: leaks of all averaged runs, for the card.
    """
    content = _write_data_and_collect_card(folder, run, read_trained_recipe(run), results)
    card = render_card(replace(content, record={**content.record, "leakage": [*leaks]}))
    (folder / "README.md").write_text(card, encoding="utf-8")
    add_description_checksums(folder)


def _write_data_and_collect_card(
    folder: Path, run: RunDir, recipe: Recipe, results: Mapping[str, Any]
) -> CardContent:
    """Write recipe.yaml and results.json into a folder. Returns: the content of its card."""
    recipe, record = publishable_recipe(recipe), read_record(run)
    (folder / "recipe.yaml").write_text(recipe.to_yaml(), encoding="utf-8")
    text = format_json(_publishable_results(results))
    (folder / "results.json").write_text(text, encoding="utf-8")
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    plan = record.get("plan", {})
    weights = dict(plan.get("weights", {}))
    weights["source"] = drop_folders(str(weights.get("source") or ""))
    return CardContent(
        recipe=recipe,
        record=record,
        results=results,
        config=config,
        # the recorded sha256, because the file may have been damaged since
        sha256=config.get("checksums", {}).get(MODEL_FILES[1])
        or file_sha256(folder / MODEL_FILES[1]),
        weights=weights,
        certificate=read_certificate(folder, eval_spec=plan.get("eval_pipeline")),
    )


def read_certificate(folder: Path, *, eval_spec: str | None = None) -> dict[str, Any] | None:
    """Return the certificate of the exported model in a model folder; None if there is none.

    Args:
        folder: the folder of config.json and model.safetensors.
        eval_spec: evaluation transforms of the run; None for those of config.json.
    Raises: WeightsError if it is damaged, or describes another exported model, other weights, or
        classes, preprocessing, temperature or thresholds that the model does not have.
    """
    if not all((folder / name).is_file() for name in EXPORT_FILES):
        return None
    model, path = (folder / name for name in EXPORT_FILES)
    content = read_export_record(path, model)
    if content["source"]["sha256"] != file_sha256(folder / MODEL_FILES[1]):
        raise WeightsError(
            f"{path}: does not describe {model.name} and {MODEL_FILES[1]} next to it; export "
            "again, or remove both",
            code="weights.damaged",
        )
    preprocessing = content["preprocessing"]
    exported = {key: preprocessing[key] for key in ("input_size", "mean", "std", "evaluation")}
    exported |= {"classes": content["classes"], **content["calibration"]}
    expected = _describe_exportable(folder, exported, eval_spec)
    for key, value in exported.items():
        if expected.get(key) != value:
            raise WeightsError(
                f"{model}: was exported with {key} {shorten(str(value), 80)}, but the model now "
                f"has {shorten(str(expected.get(key)), 80)}; export again, or remove "
                f"{' and '.join(EXPORT_FILES)}",
                code="weights.damaged",
            )
    return content


def _describe_exportable(
    folder: Path, exported: Mapping[str, Any], eval_spec: str | None
) -> dict[str, Any]:
    """Return the values of `exported` that an export of a model folder has today.

    Another spelling of the same evaluation transforms is returned as in `exported`.
    """
    path = folder / MODEL_FILES[0]
    content = read_untrusted_json(path, str(path))
    config = validate_config(HubConfig, content, str(path))
    cfg = config.pretrained_cfg or {}
    _, height, width = cfg.get("input_size") or exported["input_size"]
    preprocessing = resolve_preprocessing(cfg, (height, width))
    evaluation = eval_spec or default_eval_spec(preprocessing)
    published = spec_to_preprocessing(preprocessing, evaluation)
    if published and published == spec_to_preprocessing(preprocessing, exported["evaluation"]):
        evaluation = exported["evaluation"]
    return {
        "input_size": [3, height, width],
        "mean": list(preprocessing.mean),
        "std": list(preprocessing.std),
        "evaluation": evaluation,
        "classes": content.get("label_names", exported["classes"]),
        **(config.calibration or {}),
    }


def base_model(run: RunDir) -> tuple[str, str | None]:
    """Return the repository and commit of a run's pretrained weights.

    If they are not from the Hub, it returns `model.name` of the recipe, and None.
    """
    weights = read_record(run).get("plan", {}).get("weights", {})
    if repository := weights.get("repository"):
        return str(repository), weights.get("revision")
    return drop_folders(read_recipe(run).model.name), None


def rewrite_artifacts(
    run: RunDir, *, repository: str | None = None, adapter_repository: str | None = None
) -> None:
    """Rewrite the artifacts in a finished run's model/ folder, and keep its other files.

    Call it before a push, or after the recipe was run with other seeds.

    Raises: CheckpointError if the run has no model or no results yet.
    """
    results = run.read_json("results.json")
    if results is None or not all((run.model_folder / name).is_file() for name in MODEL_FILES):
        raise CheckpointError(
            f"{run.path}: the run has no finished model; continue it: {resume_command(run.path)}",
            code="checkpoint.not_finished",
        )

    artifacts = {run.model_folder / name for name in _ARTIFACTS}

    def find_artifacts(parent: str, names: list[str]) -> list[str]:
        return [name for name in names if Path(parent, name) in artifacts]

    def write(folder: Path) -> None:
        _copy_except(run.model_folder, folder, ignore=find_artifacts)
        write_artifacts(
            folder, run, results, repository=repository, adapter_repository=adapter_repository
        )

    run.publish_model(write, num_bytes=1 << 20)


def keep_other_files(run: RunDir, folder: Path) -> None:
    """Copy what others have put into a run's model/, such as examples, into the new folder.

    An exported model is left out, after a message, because it may have other weights.
    """
    exported = run.model_folder / EXPORT_FILES[0]
    if exported.exists():
        logger.info(f"{exported}: removed, because model/ is rewritten; export again")
    own_names = {*PUBLISHED_FILES, *EXPORT_FILES, "adapter"}

    def find_own(parent: str, names: list[str]) -> set[str]:
        return own_names if Path(parent) == run.model_folder else set()

    if run.model_folder.is_dir():
        _copy_except(run.model_folder, folder, ignore=find_own)


def _copy_except(
    source: Path, target: Path, *, ignore: Callable[[str, list[str]], Iterable[str]]
) -> None:
    """Copy or link the files of a folder into another one; `ignore` is that of `copytree`."""
    shutil.copytree(
        source,
        target,
        symlinks=True,
        ignore=ignore,
        copy_function=_link_or_copy,
        dirs_exist_ok=True,
    )


def publishable_recipe(recipe: Recipe) -> Recipe:
    """Return a copy of a recipe without trackers, push settings and the folders of local paths."""
    decisions = recipe.data.decisions and os.path.basename(recipe.data.decisions)
    data = recipe.data.model_copy(
        update={"source": drop_folders(recipe.data.source), "decisions": decisions}
    )
    model = recipe.model.model_copy(update={"name": drop_folders(recipe.model.name)})
    run = recipe.run.model_copy(update={"push_to": None, "push_private": False, "trackers": ()})
    distill = recipe.distill
    if distill is not None:
        distill = distill.model_copy(update={"teacher": drop_folders(distill.teacher)})
    sections = {"data": data, "model": model, "run": run, "distill": distill}
    return recipe.model_copy(update=sections)


def _publishable_results(results: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of results without the folders of images.

    An image name that is an absolute path is shortened to the file name.
    """
    published = dict(results)
    for split in ("val", "test"):
        metrics = results.get(split)
        if metrics and "mistakes" in metrics:
            mistakes = [
                {**one, "name": _publishable_image_name(one["name"])} for one in metrics["mistakes"]
            ]
            published[split] = {**metrics, "mistakes": mistakes}
    return published


def _publishable_image_name(name: str) -> str:
    return os.path.basename(name) if os.path.isabs(name) else name


def _results_by_seed(
    run: RunDir, recipe: Recipe, results: Mapping[str, Any]
) -> list[tuple[int, Mapping[str, Any]]]:
    """Collect (seed, results) of this run and of sibling runs that differ only in the seed.

    Runs with other images (or other readable ones, or shards that were written or copied between
    the runs) or other pretrained weights are no siblings.
    """
    own_record = read_record(run)
    own_identity = training_identity(recipe, own_record)
    by_seed = {recipe.run.seed: results}
    try:
        siblings = sorted(run.path.resolve().parent.iterdir())
    except OSError:  # no permission to list the folder
        siblings = []
    for folder in siblings:
        sibling = RunDir(folder)
        try:
            if folder == run.path.resolve() or not (folder / "recipe.yaml").is_file():
                continue
            with quiet():  # warnings about another run
                recipe_of_sibling = read_recipe(sibling)
            record = read_record(sibling)
            if (
                training_identity(recipe_of_sibling, record) != own_identity
                or have_other_shards([own_record, record])
                or record.get("status") != "done"
            ):
                continue
        except (FinetuneError, OSError):
            continue  # skip runs that cannot be read
        try:
            sibling_results = sibling.read_json("results.json")
        except (FinetuneError, OSError) as error:
            logger.warning(f"{folder}: left out of the mean over seeds ({error})")
            continue
        if have_other_test_images([results, sibling_results]):
            continue
        if sibling_results and sibling_results.get("model_sha256") != record.get("model_sha256"):
            continue  # it was trained further meanwhile
        if sibling_results and _has_all_metrics(sibling_results.get("test"), recipe.data.task):
            by_seed.setdefault(recipe_of_sibling.run.seed, sibling_results)
    return sorted(by_seed.items())


def _has_all_metrics(test: Mapping[str, Any] | None, task: str) -> bool:
    """Return True if the test metrics have every metric that the card averages over seeds.

    Also True for a run without test metrics.
    """
    return not test or all(name in test for name in SPLIT_METRICS[task])


def _draw_plots(
    folder: Path, run: RunDir, results: Mapping[str, Any], config: Mapping[str, Any]
) -> list[str]:
    """Draw every plot for which the run has data. Returns: the file names."""
    from finetune.report import figure_style, plots

    metrics = results.get("test") or results.get("val") or {}
    names = [str(name) for name in config.get("label_names") or []]
    figures = {
        "curves.png": plots.plot_curves(run.read_metrics(), results),
        **plots.plot_metrics(metrics, names),
    }
    for name, figure in figures.items():
        figure_style.save_png(figure, folder / name)
    return list(figures)


def _link_or_copy(source: str | Path, target: str | Path) -> None:
    """Hard-link a file, or copy it if the file system has no hard links."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)
