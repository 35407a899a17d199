"""Average weights: WiSE-FT between the pretrained and the fine-tuned ones, and soups of runs.

The average is chosen on validation images; the test split is read once, by what was chosen. Batch
norm's statistics are averaged as weights are, and counters are those of the first run.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from finetune.commands.evaluate import launched
from finetune.console import say, say_nothing
from finetune.errors import DataError, RecipeError, SetupError, WeightsError
from finetune.evaluation.claims import main_figure
from finetune.evaluation.evaluate import NUM_MISTAKES, Examination, evaluate
from finetune.files import make_folder
from finetune.models.head import classifier_names
from finetune.models.saved import save_model
from finetune.models.weights.read import read_tensors
from finetune.models.weights.timm_config import read_config
from finetune.processes import local_processes
from finetune.publish.artifacts import write_averaged
from finetune.publish.contents import is_run
from finetune.recipe.identity import recipe_of
from finetune.recipe.load import Recipe
from finetune.run.directory import RunDir
from finetune.run.environment import dtype_of
from finetune.run.record import RunRecord, read_record
from finetune.text import counted
from finetune.training.compile import choose_kernels
from finetune.training.launch import on_main
from finetune.training.setup import TrainingSetup, open_setup

if TYPE_CHECKING:
    from accelerate import Accelerator

__all__ = ["average", "describe", "interpolated", "mean_of"]

State = Mapping[str, Tensor]
_PIXELS = ("input_size", "mean", "std", "interpolation")  # keys of a config.json


@dataclass(frozen=True)
class _Member:
    """A run, and the weights of its model/."""

    run: RunDir
    recipe: Recipe
    record: RunRecord
    state: dict[str, Tensor]


def average(
    runs: Sequence[str], *, out: str, alphas: Sequence[float] = (), greedy: bool = False
) -> dict[str, Any]:
    """Average weights, measure the average, and write it as a model folder.

    Args:
        runs: finished run directories: one for WiSE-FT, several for a soup.
        out: the folder, which must be new or empty.
        alphas: of WiSE-FT, each from 0 (pretrained) to 1 (fine-tuned); the best on validation is
            kept.
        greedy: of a soup: take the runs from the best down, each only if validation is no worse.
    Returns: "folder", "kind", "runs", "tried" (each with its validation figures), "chosen", and
        "val", "test" as `Examination.of` gives them.
    Raises: RecipeError for arguments that do not go together, WeightsError for runs of different
        networks or origins, DataError for other validation images or none.
    Source: Wortsman et al. 2022, "Robust fine-tuning of zero-shot models", and "Model soups",
        recipe 1.
    """
    _check_words(runs, alphas, greedy=greedy)
    members = [_read(run) for run in runs]
    for member in members[1:]:
        _check_alike(members[0], member)
    first, folder = members[0], Path(out)
    if os.path.lexists(folder) and (not folder.is_dir() or any(folder.iterdir())):
        raise SetupError(
            f"--out: '{out}' holds something already; choose another folder", code="setup.exists"
        )
    make_folder(folder.parent, option="--out")
    accelerator, setup = _open(first)
    network = setup.built.model
    start = {k: v.clone() for k, v in network.state_dict().items()}
    network.to(accelerator.device)
    choose_kernels(network, device=accelerator.device, dtype=dtype_of(accelerator))
    size = first.recipe.data.eval_batch_size
    val_loader = setup.loader(setup.source.splits["val"], train=False)

    def measured(state: State) -> dict[str, float]:
        network.load_state_dict(state)
        figures = evaluate(network, val_loader, accelerator, batch_size=size)
        return {key: figures[key] for key in (main_figure(figures), "loss")}

    if alphas:
        kind, tried, chosen, state = _wise(setup, start, first.state, alphas, measured)
    else:
        kind, tried, chosen, state = _soup(members, measured, greedy=greedy)
    network.load_state_dict(state)
    val = Examination(val_loader, accelerator, fit=True).of(network, batch_size=size)
    fitted = "thresholds" if setup.multilabel else "temperature"
    results: dict[str, Any] = {"val": val, fitted: val.pop(fitted)}
    if (test := setup.source.splits.get("test")) is not None:
        settings: dict[str, Any] = {fitted: results[fitted], "num_mistakes": NUM_MISTAKES}
        examination = Examination(setup.loader(test, train=False), accelerator, **settings)
        results["test"] = examination.of(network, batch_size=size)
    names = [member.run.path.resolve().name for member in members]
    results["average"] = {"kind": kind, "runs": names, "tried": tried, "chosen": chosen}
    on_main(accelerator, lambda: _write(folder, first, setup, state, results))
    return {"folder": out, **results["average"], **results}


def describe(result: Mapping[str, Any]) -> str:
    """List what was tried and chosen, and the figures of what was written, for people."""
    lead = main_figure(result["val"])
    lines = [f"{'validation':32}{lead:>8}{'loss':>10}"]
    lines += [f"{row['name']:32}{row[lead]:8.4f}{row['loss']:10.4f}" for row in result["tried"]]
    lines.append(f"{result['kind']}: {result['chosen']}")
    for split in ("val", "test"):
        if figures := result.get(split):
            images = counted(figures["examples"], "image")
            shown = [key for key in (lead, "loss", "ece") if key in figures]
            text = "  ".join(f"{key} {figures[key]:.4f}" for key in shown)
            lines.append(f"{split}: {text}  ({images})")
    return "\n".join([*lines, result["folder"]])


# --- averages -------------------------------------------------------------------------------------


def interpolated(start: State, end: State, alpha: float, *, head: Sequence[str]) -> State:
    """Return (1 - alpha) start + alpha end, but the classifiers named in `head` from the end."""
    heads = tuple(f"{name}." for name in head)
    return {
        key: value.clone()
        if key.startswith(heads) or not value.is_floating_point()
        else start[key].cpu().double().lerp(value.double(), alpha).to(value.dtype)
        for key, value in end.items()
    }


def mean_of(states: Sequence[State]) -> State:
    """Return the mean of weights, tensor by tensor, summed in float64; counters of the first."""
    means = {}
    for key, value in states[0].items():
        means[key] = value.clone()
        if value.is_floating_point():
            total = torch.zeros_like(value, dtype=torch.float64)
            for state in states:
                total += state[key]
            means[key] = (total / len(states)).to(value.dtype)
    return means


def _wise(
    setup: TrainingSetup,
    start: State,
    end: State,
    alphas: Sequence[float],
    measured: Callable[[State], dict[str, float]],
) -> tuple[str, list[dict[str, Any]], str, State]:
    """The best of several alphas.

    The paper's networks have a zero-shot head at both ends. So a head that was kept from the
    weights is averaged, too; a new one has nothing pretrained, and is the fine-tuned one.
    """
    kept = "kept_classes" in setup.built.provenance
    head = () if kept else classifier_names(setup.built.model)
    tried: list[dict[str, Any]] = []
    best, best_state = -1.0, end
    for alpha in sorted(set(alphas)):
        state = interpolated(start, end, alpha, head=head)
        tried.append({"name": f"alpha {alpha:g}", "alpha": alpha, **measured(state)})
        score = tried[-1][main_figure(tried[-1])]
        if score >= best:  # of equals the one nearer to the fine-tuned weights
            best, best_state, chosen = score, state, tried[-1]["name"]
    of = "the head, too" if kept else "the fine-tuned head"
    return "WiSE-FT", tried, f"{chosen}, {of}", best_state


def _soup(
    members: Sequence[_Member], measured: Callable[[State], dict[str, float]], *, greedy: bool
) -> tuple[str, list[dict[str, Any]], str, State]:
    """The mean of all runs, or of those that a greedy soup takes."""
    tried: list[dict[str, Any]]
    tried = [{"name": m.run.path.resolve().name, **measured(m.state)} for m in members]
    if not greedy:
        state = mean_of([member.state for member in members])
        tried.append({"name": "mean", **measured(state)})
        return "uniform soup", tried, f"all {len(members)} runs", state
    lead = main_figure(tried[0])
    order = sorted(range(len(members)), key=lambda index: -tried[index][lead])
    taken, best = order[:1], tried[order[0]][lead]
    for index in order[1:]:
        figures = measured(mean_of([members[i].state for i in [*taken, index]]))
        tried.append({"name": f"with {tried[index]['name']}", **figures})
        if figures[lead] >= best:
            taken, best = [*taken, index], figures[lead]
    names = ", ".join(tried[index]["name"] for index in taken)
    return "greedy soup", tried, names, mean_of([members[index].state for index in taken])


def _open(first: _Member) -> tuple[Accelerator, TrainingSetup]:
    """The processes, and the data and pretrained network that the first run began with.

    Without its adapter, which is merged in the weights of model/: DoRA computes from them and from
    norms of the pretrained ones.
    """
    plain = first.recipe.model.model_copy(update={"adapter": None})
    accelerator = launched(first.recipe)
    main = accelerator.is_main_process
    setup = open_setup(
        first.recipe.model_copy(update={"model": plain}),
        device=accelerator.device,
        local_processes=local_processes(accelerator.num_processes),
        notice=say if main else say_nothing,
        progress=main,
    )
    _check_validation(first, setup)
    return accelerator, setup


# --- checks ---------------------------------------------------------------------------------------


def _check_words(runs: Sequence[str], alphas: Sequence[float], *, greedy: bool) -> None:
    problem, code = "", "recipe.conflict"
    if wrong := [alpha for alpha in alphas if not 0 <= alpha <= 1]:
        problem, code = f"--alpha: {wrong[0]:g}; give a number from 0 to 1", "recipe.wrong_value"
    elif len(runs) == 1 and not alphas:
        problem = f"{runs[0]}: one run alone is no soup; give --alpha for WiSE-FT, or more runs"
        code = "recipe.missing_option"
    elif len(runs) == 1 and greedy:
        problem = "--greedy: only for a soup; remove it, or give more runs"
    elif len(runs) > 1 and alphas:
        problem = "--alpha: only for one run; remove it, or give one run"
    elif len({Path(run).resolve() for run in runs}) < len(runs):
        problem = "a run is given twice; give each once"
    if problem:
        raise RecipeError(problem, code=code)


def _read(name: str) -> _Member:
    """A finished run and the weights of its model/."""
    recipe = recipe_of(name) if is_run(Path(name)) else None
    if recipe is None:
        raise WeightsError(
            f"{name}: is a model folder, which does not tell its data; give a run directory",
            code="weights.unsupported",
        )
    if not recipe.model.pretrained:
        raise WeightsError(
            f"{name}: began with random weights; give runs that began with pretrained ones",
            code="weights.unsupported",
        )
    run = RunDir(name)
    return _Member(run, recipe, read_record(run), read_tensors(run.model / "model.safetensors"))


def _check_alike(first: _Member, other: _Member) -> None:
    """Refuse to average runs of different networks, weights, classes or validation images."""
    shapes = [{k: v.shape for k, v in member.state.items()} for member in (first, other)]
    records = [member.record for member in (first, other)]
    origins = [record.get("weights_sha256") for record in records]
    networks = [record.get("plan", {}).get("architecture") for record in records]
    paths = f"{other.run.path} and {first.run.path}"
    if shapes[0] != shapes[1] or networks[0] != networks[1]:
        raise WeightsError(
            f"{paths}: their networks differ ({networks[1]}, {networks[0]}), or their classes or "
            "sizes; give runs of one network",
            code="weights.wrong_shape",
        )
    if origins[0] != origins[1]:
        raise WeightsError(
            f"{paths}: began with different weights, so their mean means nothing; give runs "
            "that began with the same",
            code="weights.wrong_version",
        )
    prints = [record.get("split_fingerprints", {}) for record in records]
    models = [member.run.model for member in (first, other)]
    configs = [read_config(model / "config.json", str(model)).config for model in models]
    seen = [
        [record.get("plan", {}).get("eval_pipeline"), *map(config.get, _PIXELS)]
        for record, config in zip(records, configs, strict=True)
    ]
    if seen[0] != seen[1] or any(
        prints[0].get(name) != prints[1].get(name) for name in ("val", "classes")
    ):
        raise DataError(
            f"{paths}: were not validated on the same images, so one may have been trained on the "
            "other's; set data.split_seed, data.eval, data.mean and the like alike in all of their "
            "recipes",
            code="data.split_mismatch",
        )


def _check_validation(first: _Member, setup: TrainingSetup) -> None:
    """Refuse data and weights that are not those of the run any more, or have no validation."""
    if "val" not in setup.source.splits:
        raise DataError(
            f"{first.run.path}: has no validation images to choose by; train with "
            "data.val_fraction",
            code="data.no_split",
        )
    recorded = first.record.get("split_fingerprints", {}).get("val")
    if setup.source.splits["val"].fingerprint != recorded:
        raise DataError(
            f"{first.recipe.data.source}: the validation images are not those of {first.run.path} "
            "any more; restore them",
            code="data.changed",
        )
    if setup.built.provenance.get("sha256") != first.record.get("weights_sha256"):
        raise WeightsError(
            f"{first.recipe.model.name}: these weights are not those that {first.run.path} began "
            "with; get them again",
            code="weights.wrong_version",
        )


def _write(
    folder: Path, first: _Member, setup: TrainingSetup, state: State, results: dict[str, Any]
) -> None:
    """Write the model folder, whole or not at all."""
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".average.") as place:
        made = Path(place) / "model"
        made.mkdir()
        save_model(
            made,
            setup.built,
            state,
            class_names=setup.source.class_names,
            preprocessing=setup.preprocessing,
            temperature=results.get("temperature"),
            multilabel=setup.multilabel,
            thresholds=results.get("thresholds"),
        )
        shutil.copymode(made / "config.json", made / "model.safetensors")  # it is written as 0600
        write_averaged(made, first.run, results)
        if folder.is_dir():
            folder.rmdir()
        made.rename(folder)
