"""From the name of pretrained weights to their tensors in memory, verified on the way."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, replace
from importlib import resources
from pathlib import Path
from typing import Any

import timm
from timm.models import split_model_name_tag

from finetune.errors import WeightsError, nearest
from finetune.files import sha256_of
from finetune.hub.download import download, fetch, first_of
from finetune.models.architectures import transformers_adapter
from finetune.models.weights import google_npz, package, transformers_hub
from finetune.models.weights.read import read_tensors
from finetune.models.weights.rename import renamed
from finetune.models.weights.timm_config import Weights, clean, read_config, registered_config
from finetune.models.weights.timm_names import imagenet_names, suggest
from finetune.recipe.local import WEIGHTS_SUFFIXES, refuse_missing_model

__all__ = ["locate", "resolve"]

# Files of a folder or a repository in timm's format, best first.
WEIGHT_FILES = (
    "model.safetensors",
    "open_clip_model.safetensors",
    "pytorch_model.bin",
    "open_clip_pytorch_model.bin",
)
PICKLED = WEIGHTS_SUFFIXES[2:]


def resolve(
    name: str,
    *,
    pretrained: bool = True,
    args: Mapping[str, Any] | None = None,
    rename: Mapping[str, str] | None = None,
) -> Weights:
    """Find, verify and read the weights that a name stands for.

    Args:
        name: a timm name with or without a tag, `hf-hub:owner/name@revision`, `embedded:name`,
            `package:name`, a folder in timm's hub format, a run directory, or a .safetensors, .npz
            or pickled file.
        pretrained: False reads the configuration only.
        args: the recipe's model.args; `architecture` (for files without a config.json),
            `num_heads` and `pre_logits` (for Google's .npz) matter here.
        rename: regular expression to replacement, for tensors with names of another network.
    Raises: WeightsError with one message for each way this can go wrong.
    """
    weights = _find(name, pretrained, args or {})
    if not rename or weights.state is None:
        return weights
    state = renamed(weights.state, rename, source=name)
    return replace(weights, state=state, provenance=weights.provenance | {"rename": dict(rename)})


def _find(name: str, pretrained: bool, args: Mapping[str, Any]) -> Weights:
    if name.startswith(transformers_hub.PREFIX):
        return _from_transformers(name, pretrained)
    if name.startswith(package.PREFIX):
        return _from_package(name, pretrained)
    if name.startswith(("hf-hub:", "hf_hub:")):
        return _from_hub(name, pretrained)
    architecture, _ = split_model_name_tag(name)
    if timm.is_model(architecture) and not name.startswith((".", "/", "~")):
        return _from_registry(name, pretrained)
    path = locate(name)
    if path is None:
        raise WeightsError(
            f"model.name: unknown '{name}'{suggest(name)}", code="weights.unknown_name"
        )
    if path.is_dir():
        return _from_folder(path, pretrained, source=name)
    return _from_file(path, pretrained, args, source=name)


def locate(name: str) -> Path | None:
    """The local file or folder that a name stands for; None when the name is not a local one.

    Raises: WeightsError when the name is local and nothing usable is there, SetupError for a
        package that is not installed.
    """
    if name.startswith("embedded:"):
        return _embedded(name.removeprefix("embedded:"))
    if name.startswith(package.PREFIX):
        return package.find(name)
    if not name.strip() or "\0" in name:
        raise WeightsError(
            f"model.name: {name[:60]!r} is no name; give one, or a file or folder",
            code="weights.unknown_name",
        )
    path = Path(name.removeprefix("local-dir:")).expanduser()
    try:
        exists = path.exists()
    except OSError as error:
        cause = f"cannot be read ({error.strerror}); check the path"
        raise WeightsError(
            f"model.name: '{name[:200]}' {cause}", code="weights.unreadable"
        ) from error
    if not exists:
        refuse_missing_model(name, path)
        return None
    if path.is_file():
        return path
    if not path.is_dir():  # opening a pipe may wait for ever
        raise WeightsError(
            f"model.name: '{name}' is a pipe or a device; give a file or a folder",
            code="weights.wrong_format",
        )
    inner = path / "model"
    if not (path / "config.json").is_file() and inner.is_dir():
        return inner
    if (path / "run.json").is_file():
        raise WeightsError(
            f"{name}: this run has no model/ yet; let it finish, or continue it with --resume",
            code="weights.not_found",
        )
    return path


def _embedded(name: str) -> Path:
    root = Path(str(resources.files("finetune.models"))) / "embedded"
    names = sorted(p.name for p in root.iterdir() if p.is_dir()) if root.is_dir() else []
    if name not in names:
        known = f"; there is: {', '.join(names)}" if names else "; this installation has none"
        raise WeightsError(
            f"embedded:{name}: no such embedded weights{known}{nearest(name, names)}",
            code="weights.unknown_name",
        )
    return root / name


# --- from the registry and the hub -------------------------------------------------------------


def _from_registry(name: str, pretrained: bool) -> Weights:
    architecture, tag = split_model_name_tag(name)
    tags = timm.list_pretrained(f"{architecture}.*")
    try:
        config = timm.get_pretrained_cfg(name)
    except RuntimeError:
        config = None
    if config is None and tag:
        known = f"; there is: {', '.join(tags)}" if tags else "; it has no pretrained weights"
        raise WeightsError(
            f"model.name: {architecture} has no weights '{tag}'{known}", code="weights.unknown_name"
        )
    entry = asdict(config) if config is not None else {}
    if not pretrained:
        return Weights(architecture, {}, clean(entry), provenance={"source": name})
    repository, url = entry.get("hf_hub_id"), entry.get("url")
    if repository:
        filename = entry.get("hf_hub_filename")
        filenames = (filename,) if filename else WEIGHT_FILES
        file = first_of(repository, filenames, entry.get("hf_hub_revision"), source=name)
        path, revision, sha256 = file.path, file.commit, file.sha256
    elif url:
        path, revision, sha256 = download(url), None, None
    else:
        raise WeightsError(
            f"model.name: timm has no pretrained weights for {architecture}; choose another name, "
            f"or train from scratch with model.pretrained=false",
            code="weights.not_found",
        )
    provenance = {
        "source": name,
        "tag": entry.get("tag"),
        "repository": repository or url,
        "revision": revision,
        "license": entry.get("license"),
    }
    names = imagenet_names(entry.get("num_classes"))
    return _read(path, Weights(architecture, {}, clean(entry), None, names, provenance), sha256)


def _from_hub(name: str, pretrained: bool) -> Weights:
    repository, _, revision = name.split(":", 1)[1].partition("@")
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", repository):
        raise WeightsError(
            f"{name[:200]!r}: no repository; write hf-hub:owner/name@revision",
            code="weights.unknown_name",
        )
    file = fetch(repository, "config.json", revision or None, source=name)
    weights = read_config(file.path, name, repository=repository, revision=file.commit)
    if not pretrained:
        return weights
    if weights.class_names is None and repository.startswith("timm/"):
        names = imagenet_names(weights.config.get("num_classes"))
        weights = replace(weights, class_names=names)
    # Pinned to the configuration's commit: a push in between cannot mix two versions.
    file = first_of(repository, WEIGHT_FILES, file.commit or revision or None, source=name)
    return _read(file.path, weights, file.sha256)


def _from_transformers(name: str, pretrained: bool) -> Weights:
    weights, path, sha256 = transformers_hub.describe(name, pretrained=pretrained)
    if path is None:
        return weights
    weights = _read(path, weights, sha256)
    state = transformers_adapter.named(weights.state or {}, weights.model_args, source=name)
    return replace(weights, state=state)


def _from_package(name: str, pretrained: bool) -> Weights:
    known = package.known(name)
    config, names = known.pretrained_config(), imagenet_names(known.num_classes)
    weights = Weights(known.architecture, {}, config, None, names, known.provenance(name))
    if not pretrained:
        return weights
    weights = _read(package.find(name), weights, known.sha256)
    return replace(weights, state=renamed(weights.state or {}, known.rename, source=name))


# --- from local folders and files ----------------------------------------------------------------


def _from_folder(folder: Path, pretrained: bool, *, source: str) -> Weights:
    config_path = folder / "config.json"
    if not config_path.is_file():
        raise WeightsError(
            f"{source}: no config.json in this folder; give a folder in timm's hub format, a run "
            f"directory, or one .safetensors or .npz file",
            code="weights.no_config",
        )
    weights = read_config(config_path, source)
    if not pretrained:
        return weights
    paths = [folder / name for name in WEIGHT_FILES if (folder / name).is_file()]
    for suffix in (".safetensors", *PICKLED):
        paths += sorted(path for path in folder.glob(f"*{suffix}") if not path.is_fifo())
    if not paths:
        raise WeightsError(
            f"{source}: no weights beside config.json; expected model.safetensors",
            code="weights.not_found",
        )
    return _read(paths[0], weights)


def _from_file(path: Path, pretrained: bool, args: Mapping[str, Any], *, source: str) -> Weights:
    if path.suffix not in WEIGHTS_SUFFIXES:
        raise WeightsError(
            f"{source}: not a weights file; expected one of {', '.join(WEIGHTS_SUFFIXES)}",
            code="weights.wrong_format",
        )
    named = args.get("architecture")
    if named is not None and not (isinstance(named, str) and timm.is_model(named)):
        raise WeightsError(
            f"model.args.architecture: unknown '{named}'{suggest(str(named))}",
            code="weights.unknown_name",
        )
    provenance: dict[str, Any] = {"source": source, "license": None}
    if path.suffix == ".npz":
        tensors = read_tensors(path)
        architecture, model_args, state = google_npz.convert(tensors, source=source, args=args)
        config = google_npz.config_of(architecture, model_args, state)
        provenance |= {"file": path.name, "sha256": sha256_of(path)}
        weights = Weights(architecture, model_args, config, state, None, provenance)
        return weights if pretrained else replace(weights, state=None)
    beside = path.with_name("config.json")
    if named is not None:
        weights = Weights(named, {}, registered_config(named), provenance=provenance)
    elif beside.is_file():
        # its license is that of a folder, not of one file among others
        weights = replace(read_config(beside, source), provenance=provenance)
    else:
        read_tensors(path)  # an error of the file itself comes first
        raise WeightsError(
            f"{source}: tensors alone do not say which network they are; put its config.json "
            f"beside them, or set model.args.architecture, for instance vit_base_patch16_224",
            code="weights.no_config",
        )
    return _read(path, weights) if pretrained else weights


def _read(path: Path, weights: Weights, sha256: str | None = None) -> Weights:
    """Add the tensors of a file, and to the provenance its name and sha256, computed if None."""
    tensors = read_tensors(path)
    file = {"file": path.name, "sha256": sha256 or sha256_of(path)}
    model_args = weights.model_args
    if path.suffix == ".npz":
        _, npz_args, tensors = google_npz.convert(tensors, source=path.name, args={})
        model_args = {**npz_args, **model_args}
    provenance = {**weights.provenance, **file}
    return replace(weights, model_args=model_args, state=tensors, provenance=provenance)
