"""`finetune info`: summarize a model's layers, parameters, MACs, tokens, preprocessing, weights."""

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

from finetune.errors import FinetuneError, HubError
from finetune.files import file_sha256
from finetune.formatting import aligned_table, format_short_count, pluralize
from finetune.model_checksums import read_checksums, verify_checksum
from finetune.models.build import build_model
from finetune.models.head import classifier_names
from finetune.models.save import BuiltModel
from finetune.models.summary import blocks_per_stage, count_parameters, summarize_model
from finetune.models.weights.resolve import WEIGHT_FILES, locate_weights
from finetune.run.directory import RunDir
from finetune.run.record import load_run_recipe, read_record
from finetune.transforms.eval_transforms import default_eval_spec

__all__ = ["format_model_info", "model_info"]

# In its cache, huggingface_hub uses the sha256 of a large file as the file name.
_SHA256_PATTERN = re.compile(r"[0-9a-f]{64}")


def model_info(
    model: str | Path, *, image_size: int | tuple[int, int] | None = None
) -> dict[str, Any]:
    """Summarize a model without reading or downloading its weights.

    The network is built on the meta device if possible. For a Hub model, only config.json is
    downloaded.

    Args:
        model: run directory, model folder, weights file, `hf-hub:owner/name@revision` or timm name.
        image_size: pixels, or (height, width); None uses the model's own.
    Returns: a dict with keys "model", "architecture", "image_size", "num_classes", "parameters"
        {"total", "trainable", "head"}, "macs" (for one image), "tokens" (None for a network without
        tokens), "depth" (blocks per stage), "layers", "preprocessing", "weights" and "adapter"
        (None without an adapter). For a run directory, "trainable" counts the parameters that the
        run trained.
    Raises: WeightsError if the model does not exist or is damaged; RecipeError for an invalid size.
    """
    name = str(model)
    recipe = load_run_recipe(name)
    freeze = recipe.model.freeze if recipe is not None else "none"
    built = _build_on_meta(name, image_size, freeze)
    network, size = built.model.eval(), built.preprocessing.image_size
    parameters = list(network.parameters())
    heads = [network.get_submodule(head) for head in classifier_names(network)]
    total = count_parameters(parameters)
    trainable = count_parameters(p for p in parameters if p.requires_grad)
    adapter = None if recipe is None or recipe.model.adapter is None else recipe.model.adapter.kind
    if adapter:  # the adapter is merged into these weights; its parameter count is in run.json
        plan = read_record(RunDir(name)).get("plan", {})
        trainable = int(plan.get("trainable_parameters") or trainable)
    summary = summarize_model(network, size)
    uses_recipe = recipe is not None and image_size is None
    eval_spec = recipe.data.eval if recipe is not None and uses_recipe else None
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
        "macs": summary["macs"],
        "tokens": summary["tokens"],
        "depth": blocks_per_stage(network),
        "layers": summary["layers"],
        "preprocessing": {
            "operations": eval_spec or default_eval_spec(preprocessing),
            "mean": list(preprocessing.mean),
            "std": list(preprocessing.std),
            "interpolation": preprocessing.interpolation,
            "decode_size": decode_size,
        },
        "weights": _describe_weights(name, built.provenance),
        "adapter": adapter,
    }


def _build_on_meta(
    name: str, image_size: int | tuple[int, int] | None, freeze: str | int
) -> BuiltModel:
    """Build the network on the meta device; if its code needs tensor values, first on the CPU."""
    try:
        with torch.device("meta"):
            return build_model(name, pretrained=False, image_size=image_size, freeze=freeze)
    except HubError:
        raise
    except (FinetuneError, RuntimeError):
        # if the error is not about the meta device, this call raises it again
        built = build_model(name, pretrained=False, image_size=image_size, freeze=freeze)
        built.model.to("meta")
        return built


# --- weights -------------------------------------------------------------------------------------


def _describe_weights(name: str, provenance: Mapping[str, Any]) -> dict[str, Any]:
    """Return the source of the weights, and their sha256 if they are on this machine."""
    known = {key: provenance.get(key) for key in ("source", "repository", "revision", "license")}
    path, repository = _find_cached_weights(name, known["repository"])
    if repository is not None:
        known["repository"] = repository
    if path is None:
        return {**known, "file": None, "sha256": None}
    sha256 = _weights_sha256(path)
    if path.with_name("config.json").is_file():
        checksums = read_checksums(path.parent, source=name)
        verify_checksum(path.name, sha256, checksums, source=name)
    return {**known, "file": path.name, "sha256": sha256}


def _find_cached_weights(name: str, repository: str | None) -> tuple[Path | None, str | None]:
    """Return the local weights file (None if not cached), and its repository or URL."""
    architecture, _ = split_model_name_tag(name)
    if name.startswith(("hf-hub:", "hf_hub:")):
        repository, _, revision = name.split(":", 1)[1].partition("@")
        return _find_in_hub_cache(repository, WEIGHT_FILES, revision or None), repository
    if timm.is_model(architecture) and not name.startswith((".", "/", "~")):
        return _find_timm_weights(name)
    path = locate_weights(name) if not name.startswith("transformers:") else None
    if path is None or path.is_file():
        return path, repository
    candidates = [path / file for file in WEIGHT_FILES] + sorted(path.glob("*.safetensors"))
    return next((file for file in candidates if file.is_file()), None), repository


def _find_timm_weights(name: str) -> tuple[Path | None, str | None]:
    entry = timm.get_pretrained_cfg(name)
    if entry is None:
        return None, None
    if entry.hf_hub_id:
        revision = getattr(entry, "hf_hub_revision", None)  # missing in some versions of timm
        wanted = (entry.hf_hub_filename,) if entry.hf_hub_filename else WEIGHT_FILES
        return _find_in_hub_cache(entry.hf_hub_id, wanted, revision), entry.hf_hub_id
    if isinstance(entry.url, str) and entry.url:
        path = Path(hub.get_dir()) / "checkpoints" / entry.url.rsplit("/", 1)[-1]
        return path if path.is_file() else None, entry.url
    return None, None


def _find_in_hub_cache(repository: str, files: Sequence[str], revision: str | None) -> Path | None:
    cached = (try_to_load_from_cache(repository, file, revision=revision) for file in files)
    return next((Path(path) for path in cached if isinstance(path, str)), None)


def _weights_sha256(path: Path) -> str:
    stored = path.resolve().name
    return stored if _SHA256_PATTERN.fullmatch(stored) else file_sha256(path)


# --- text ----------------------------------------------------------------------------------------


def format_model_info(info: Mapping[str, Any]) -> str:
    """Format a model's summary for the terminal.

    Args:
        info: the result of `model_info`.
    Returns: one line per fact, then a table of layers; identical consecutive layers share a row.
    """
    height, width = info["image_size"]
    parameters, preprocessing = info["parameters"], info["preprocessing"]
    frozen = parameters["total"] - parameters["trainable"]
    trained = "all trainable"
    if info["adapter"]:
        trained = f"{parameters['trainable']:,} trained: {info['adapter']} and head"
    elif frozen:
        trained = f"{parameters['trainable']:,} trainable, {frozen:,} frozen"
    classes = f"{info['num_classes']:,} classes" if info["num_classes"] else "no classifier"
    size = preprocessing["decode_size"]
    decoded = f"; JPEGs decoded to no less than {size} pixels a side" if size else ""
    mean, std = (", ".join(f"{x:.4g}" for x in preprocessing[key]) for key in ("mean", "std"))
    rows = {
        "architecture": f"{info['architecture']}, {height} x {width} px, {classes}",
        "parameters": f"{parameters['total']:,} ({trained}; head {parameters['head']:,})",
        "MACs": f"{format_short_count(info['macs'])} per image ({info['macs']:,})",
        "tokens": _format_tokens(info["tokens"]),
        "depth": _format_depth(info["depth"]),
        "preprocessing": f"{preprocessing['operations']}, {preprocessing['interpolation']}",
        "": f"mean {mean}; std {std}{decoded}",
        "weights": _format_weights(info["weights"]),
    }
    lines = [f"{key:15}{value}" for key, value in rows.items() if value]
    return "\n".join(
        [info["model"], *(f"  {line}" for line in lines), "", *_format_layer_table(info["layers"])]
    )


def _format_tokens(tokens: Mapping[str, Any] | None) -> str:
    if tokens is None:
        return "none (convolutions)"
    grid, prefix = tokens["grid"], tokens["prefix"]
    sizes = f" ({grid[0]} x {grid[1]}{f' + {prefix}' if prefix else ''})" if grid else ""
    return f"{tokens['total']:,}{sizes}"


def _format_depth(depth: Sequence[int]) -> str:
    if len(depth) < 2:
        return pluralize(depth[0], "block") if depth else ""
    return f"{pluralize(sum(depth), 'block')} in {len(depth)} stages ({'-'.join(map(str, depth))})"


def _format_weights(weights: Mapping[str, Any]) -> str:
    origin = weights["repository"] or weights["source"]
    if weights["sha256"]:
        return f"{origin}: {weights['file']}, sha256 {weights['sha256']}"
    if weights["repository"]:
        return f"{origin}: not on this machine, and not downloaded, because info does not need them"
    return "none: timm has no pretrained weights for this name; training starts from random weights"


def _format_layer_table(layers: Sequence[Mapping[str, Any]]) -> list[str]:
    rows = [("layer", "kind", "output", "parameters", "MACs")]
    for group in _group_equal_layers(layers):
        first, many = group[0], len(group)
        last = group[-1]["name"].rsplit(".", 1)[-1]
        name, kind = first["name"], first["kind"]
        shape = " x ".join(map(str, first["output"]))
        each = (f"{first['parameters']:,}", format_short_count(first["macs"]))
        if many > 1:
            name, kind = f"{name}-{last}", f"{many} {kind}"
            each = (f"{many} x {each[0]}", f"{many} x {each[1]}")
        rows.append((name, kind, shape, *each))
    return aligned_table(rows, num_text_columns=3)


def _group_equal_layers(layers: Sequence[Mapping[str, Any]]) -> list[list[Mapping[str, Any]]]:
    """Group consecutive identical layers of the same parent."""
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
