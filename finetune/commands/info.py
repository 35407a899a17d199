"""A model's layers, parameters, MACs, tokens, preprocessing, and the place of its weights."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import timm
import torch
from huggingface_hub import try_to_load_from_cache
from timm.models import split_model_name_tag
from torch import hub

from finetune.errors import FinetuneError
from finetune.files import sha256_of
from finetune.models.build import build
from finetune.models.head import classifier_names
from finetune.models.profile import count_parameters, depth, survey
from finetune.models.saved import Built
from finetune.models.weights.resolve import WEIGHT_FILES, locate
from finetune.recipe.identity import recipe_of
from finetune.run.directory import RunDir
from finetune.run.record import read_record
from finetune.text import aligned_table, counted, short_count
from finetune.transforms.evaluation import default_eval

__all__ = ["describe", "model_info"]

# The client's cache names a large file after its sha256.
_SHA256 = re.compile(r"[0-9a-f]{64}")


def model_info(
    model: str | Path, *, image_size: int | tuple[int, int] | None = None
) -> dict[str, Any]:
    """Look a model over without reading or downloading its weights.

    The network is built without memory for its tensors where it allows that. The one file that may
    be fetched is the config.json of a repository on the hub.

    Args:
        model: run directory, model folder, weights file, `hf-hub:owner/name@revision` or timm name.
        image_size: pixels, or (height, width); None takes the model's own.
    Returns: {"model", "architecture", "image_size", "num_classes", "parameters": {"total",
        "trainable", "head"}, "macs" of one image, "tokens" (None for a network without any),
        "depth" (blocks of each stage), "layers", "preprocessing", "weights", "adapter" (None
        without one)}. `trainable` is what a run's recipe leaves unfrozen, or its adapter and head.
    Raises: WeightsError if there is no such model; RecipeError for an impossible size.
    """
    name = str(model)
    recipe = recipe_of(name)
    freeze = recipe.model.freeze if recipe is not None else "none"
    built = _skeleton(name, image_size, freeze)
    network, size = built.model.eval(), built.preprocessing.image_size
    parameters = list(network.parameters())
    heads = [network.get_submodule(head) for head in classifier_names(network)]
    total = count_parameters(parameters)
    trainable = count_parameters(p for p in parameters if p.requires_grad)
    adapter = None if recipe is None or recipe.model.adapter is None else recipe.model.adapter.kind
    if adapter:  # it is merged in the model that is looked at
        plan = read_record(RunDir(name)).get("plan", {})
        trainable = int(plan.get("trainable_parameters") or trainable)
    layout = survey(network, size)
    own_size = recipe is not None and image_size is None
    sentence = recipe.data.eval if recipe is not None and own_size else None
    decode_size = recipe.data.decode_size if recipe is not None else None
    preprocessing = built.preprocessing
    return {
        "model": name,
        "architecture": built.architecture,
        "image_size": list(size),
        "num_classes": int(getattr(network, "num_classes", 0) or 0),
        "parameters": {
            "total": total,
            "trainable": trainable,
            "head": count_parameters(p for head in heads for p in head.parameters()),
        },
        "macs": layout["macs"],
        "tokens": layout["tokens"],
        "depth": depth(network),
        "layers": layout["layers"],
        "preprocessing": {
            "operations": sentence or default_eval(preprocessing),
            "mean": list(preprocessing.mean),
            "std": list(preprocessing.std),
            "interpolation": preprocessing.interpolation,
            "decode_size": decode_size,
        },
        "weights": _weights(name, built.provenance),
        "adapter": adapter,
    }


def _skeleton(name: str, image_size: int | tuple[int, int] | None, freeze: str | int) -> Built:
    """The network without memory for its tensors, except where it asks for their values."""
    try:
        with torch.device("meta"):
            return build(name, pretrained=False, image_size=image_size, freeze=freeze)
    except (FinetuneError, RuntimeError):
        # an error of the model itself is raised again here
        built = build(name, pretrained=False, image_size=image_size, freeze=freeze)
        built.model.to("meta")
        return built


# --- where the weights are -----------------------------------------------------------------------


def _weights(name: str, provenance: Mapping[str, Any]) -> dict[str, Any]:
    """The origin of the weights, and their sha256 if they are on this machine."""
    known = {key: provenance.get(key) for key in ("source", "repository", "revision", "license")}
    path, repository = _cached(name, known["repository"])
    if repository is not None:
        known["repository"] = repository
    file = path.name if path is not None else None
    return {**known, "file": file, "sha256": _sha256(path) if path is not None else None}


def _cached(name: str, repository: str | None) -> tuple[Path | None, str | None]:
    """The weights' file on this machine, and the repository or address that they come from."""
    architecture, _ = split_model_name_tag(name)
    if name.startswith(("hf-hub:", "hf_hub:")):
        owner, _, revision = name.split(":", 1)[1].partition("@")
        return _in_cache(owner, WEIGHT_FILES, revision or None), owner
    if timm.is_model(architecture) and not name.startswith((".", "/", "~")):
        return _of_registry(name)
    path = locate(name) if not name.startswith("transformers:") else None
    if path is None or path.is_file():
        return path, repository
    there = [path / file for file in WEIGHT_FILES] + sorted(path.glob("*.safetensors"))
    return next((file for file in there if file.is_file()), None), repository


def _of_registry(name: str) -> tuple[Path | None, str | None]:
    entry = timm.get_pretrained_cfg(name)
    if entry is None:
        return None, None
    if entry.hf_hub_id:
        revision = getattr(entry, "hf_hub_revision", None)  # not in every timm
        wanted = (entry.hf_hub_filename,) if entry.hf_hub_filename else WEIGHT_FILES
        return _in_cache(entry.hf_hub_id, wanted, revision), entry.hf_hub_id
    if isinstance(entry.url, str) and entry.url:
        path = Path(hub.get_dir()) / "checkpoints" / entry.url.rsplit("/", 1)[-1]
        return path if path.is_file() else None, entry.url
    return None, None


def _in_cache(repository: str, files: Sequence[str], revision: str | None) -> Path | None:
    cached = (try_to_load_from_cache(repository, file, revision=revision) for file in files)
    return next((Path(path) for path in cached if isinstance(path, str)), None)


def _sha256(path: Path) -> str:
    stored = path.resolve().name
    return stored if _SHA256.fullmatch(stored) else sha256_of(path)


# --- for people ----------------------------------------------------------------------------------


def describe(info: Mapping[str, Any]) -> str:
    """Describe a model as text.

    Args:
        info: from `model_info`.
    Returns: a line for each fact, then a table of its layers; equal neighbours share a row.
    """
    height, width = info["image_size"]
    parameters, prepared = info["parameters"], info["preprocessing"]
    frozen = parameters["total"] - parameters["trainable"]
    trained = "all trainable"
    if info["adapter"]:
        trained = f"{parameters['trainable']:,} were trained, in {info['adapter']} and the head"
    elif frozen:
        trained = f"{parameters['trainable']:,} trainable, {frozen:,} frozen"
    classes = f"{info['num_classes']:,} classes" if info["num_classes"] else "no classifier"
    size = prepared["decode_size"]
    decoded = f"; JPEGs decoded to no less than {size} pixels a side" if size else ""
    mean, std = (", ".join(f"{x:.4g}" for x in prepared[key]) for key in ("mean", "std"))
    facts = {
        "architecture": f"{info['architecture']}, {height} x {width} px, {classes}",
        "parameters": f"{parameters['total']:,} ({trained}; head {parameters['head']:,})",
        "MACs": f"{short_count(info['macs'])} an image ({info['macs']:,})",
        "tokens": _tokens(info["tokens"]),
        "depth": _blocks(info["depth"]),
        "preprocessing": f"{prepared['operations']}, {prepared['interpolation']}",
        "": f"mean {mean}; std {std}{decoded}",
        "weights": _place(info["weights"]),
    }
    lines = [f"{key:15}{value}" for key, value in facts.items() if value]
    return "\n".join([info["model"], *(f"  {line}" for line in lines), "", *_table(info["layers"])])


def _tokens(tokens: Mapping[str, Any] | None) -> str:
    if tokens is None:
        return "none (convolutions)"
    grid, prefix = tokens["grid"], tokens["prefix"]
    of = f" ({grid[0]} x {grid[1]}{f' + {prefix}' if prefix else ''})" if grid else ""
    return f"{tokens['total']:,}{of}"


def _blocks(depth: Sequence[int]) -> str:
    if len(depth) < 2:
        return counted(depth[0], "block") if depth else ""
    return f"{counted(sum(depth), 'block')} in {len(depth)} stages ({'-'.join(map(str, depth))})"


def _place(weights: Mapping[str, Any]) -> str:
    origin = weights["repository"] or weights["source"]
    if weights["sha256"]:
        return f"{origin}: {weights['file']}, sha256 {weights['sha256']}"
    if weights["repository"]:
        return f"{origin}: not on this machine and not needed here; nothing was downloaded"
    return "none: timm has no pretrained weights under this name; it starts at random"


def _table(layers: Sequence[Mapping[str, Any]]) -> list[str]:
    rows = [("layer", "kind", "output", "parameters", "MACs")]
    for group in _grouped(layers):
        first, many = group[0], len(group)
        last = group[-1]["name"].rsplit(".", 1)[-1]
        name, kind = first["name"], first["kind"]
        shape = " x ".join(map(str, first["output"]))
        each = (f"{first['parameters']:,}", short_count(first["macs"]))
        if many > 1:
            name, kind = f"{name}-{last}", f"{many} {kind}"
            each = (f"{many} x {each[0]}", f"{many} x {each[1]}")
        rows.append((name, kind, shape, *each))
    return aligned_table(rows, texts=3)


def _grouped(layers: Sequence[Mapping[str, Any]]) -> list[list[Mapping[str, Any]]]:
    """Neighbours of one sequence that are alike."""
    groups: list[list[Mapping[str, Any]]] = []
    keys = ("kind", "output", "parameters", "macs")
    for layer in layers:
        before = groups[-1][-1] if groups else {}
        parent = layer["name"].rpartition(".")[0]
        same = parent and parent == before.get("name", "").rpartition(".")[0]
        if same and all(layer[key] == before[key] for key in keys):
            groups[-1].append(layer)
        else:
            groups.append([layer])
    return groups
