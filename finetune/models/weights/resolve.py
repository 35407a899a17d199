"""Resolve a weights name (timm, Hub, package, folder or file): find, verify and read tensors."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import asdict, replace
from importlib import resources
from pathlib import Path
from typing import Any

import timm
import torch
from timm.models import split_model_name_tag
from torch import Tensor

from finetune.errors import WeightsError, did_you_mean
from finetune.files import file_sha256
from finetune.hub.download import download_first, download_hub_file, download_url
from finetune.model_checksums import (
    read_checkpoint_checksums,
    read_checksums,
    verify_checksum,
)
from finetune.models.architectures import transformers_classifier
from finetune.models.weights import google_npz, python_package, transformers_config
from finetune.models.weights.read import WeightsFile, read_tensors
from finetune.models.weights.rename import rename_tensors
from finetune.models.weights.timm_config import (
    Weights,
    check_memory,
    drop_source_keys,
    read_timm_config,
    registered_config,
)
from finetune.models.weights.timm_names import imagenet_class_names, suggest_model_name
from finetune.recipe.paths import WEIGHTS_SUFFIXES, raise_if_model_missing

__all__ = ["find_weights_file", "locate_weights", "resolve_weights"]

# Names of the weights file in a folder or repository in timm's format, in order of preference.
WEIGHT_FILES = (
    "model.safetensors",
    "open_clip_model.safetensors",
    "pytorch_model.bin",
    "open_clip_pytorch_model.bin",
)
PICKLE_SUFFIXES = WEIGHTS_SUFFIXES[2:]


def resolve_weights(
    name: str,
    *,
    pretrained: bool = True,
    args: Mapping[str, Any] | None = None,
    rename: Mapping[str, str] | None = None,
) -> Weights:
    """Find, verify and read pretrained weights by name.

    Args:
        name: a timm name with or without a tag, `hf-hub:owner/name@revision`,
            `transformers:owner/name@revision`, `embedded:name`, `package:name`, a folder in timm's
            hub format, a run directory, or a .safetensors, .npz or pickled file.
        pretrained: False reads only the configuration, no tensors.
        args: the recipe's model.args; only `architecture` (for files without a config.json) and
            `pre_logits` (for Google's .npz) are used.
        rename: {regular expression: replacement}, for weights with other tensor names than timm's.
    Raises: WeightsError, with a separate code for each cause; HubError or SetupError if a download
        fails or a package is not installed.
    """
    weights = _resolve_source(name, pretrained, args or {})
    if not rename or weights.state is None:
        return weights
    state = rename_tensors(weights.state, rename, source=name)
    return replace(weights, state=state, provenance=weights.provenance | {"rename": dict(rename)})


def _resolve_source(name: str, pretrained: bool, args: Mapping[str, Any]) -> Weights:
    if name.startswith(transformers_config.TRANSFORMERS_PREFIX):
        return _from_transformers(name, pretrained)
    if name.startswith(python_package.PACKAGE_PREFIX):
        return _from_package(name, pretrained)
    if name.startswith(("hf-hub:", "hf_hub:")):
        return _from_hub(name, pretrained)
    architecture, _ = split_model_name_tag(name)
    if timm.is_model(architecture) and not name.startswith((".", "/", "~")):
        if any((Path(name) / file).exists() for file in ("run.json", "config.json", "model")):
            raise WeightsError(
                f"model '{name}': both a network of timm and a folder with a model; write "
                f"./{name} for the folder, or rename it",
                code="weights.ambiguous",
            )
        return _from_registry(name, pretrained)
    path = locate_weights(name)
    if path is None:
        raise WeightsError(
            f"model '{name}': no such file, folder or timm model{suggest_model_name(name)}",
            code="weights.unknown_name",
        )
    if path.is_dir():
        return _from_folder(path, pretrained, source=name)
    return _from_file(path, pretrained, args, source=name)


def locate_weights(name: str) -> Path | None:
    """Return the local file or folder of a weights name; None if the name may be a timm name.

    Raises: WeightsError if the file or folder is missing or unusable; SetupError for a package that
        is not installed.
    """
    if name.startswith("embedded:"):
        return _embedded_folder(name.removeprefix("embedded:"))
    if name.startswith(python_package.PACKAGE_PREFIX):
        return python_package.find_weights_file(name)
    if not name.strip() or "\0" in name:
        raise WeightsError(
            f"model {name[:60]!r}: not a valid name; give a model name, a file or a folder",
            code="weights.unknown_name",
        )
    path = Path(os.path.expanduser(name.removeprefix("local-dir:")))
    try:
        exists = path.exists()
    except OSError as error:
        cause = f"not readable ({error.strerror}); check the path"
        raise WeightsError(f"model '{name[:200]}': {cause}", code="weights.unreadable") from error
    if not exists:
        raise_if_model_missing(name, path)
        return None
    if path.is_file():
        return path
    if not path.is_dir():  # opening a pipe may block forever
        raise WeightsError(
            f"model '{name}': this is a pipe or a device; give a file or a folder",
            code="weights.wrong_format",
        )
    inner = path / "model"
    if not (path / "config.json").is_file() and inner.is_dir():
        return inner
    if (path / "run.json").is_file():
        raise WeightsError(
            f"{name}: this run has no model/ yet; wait until it finishes, or resume it with "
            f"--resume",
            code="weights.not_found",
        )
    return path


def _embedded_folder(name: str) -> Path:
    root = Path(str(resources.files("finetune.models"))) / "embedded"
    names = sorted(path.name for path in root.iterdir() if path.is_dir())
    if name not in names:
        raise WeightsError(
            f"embedded:{name}: no such embedded weights; available: {', '.join(names)}"
            f"{did_you_mean(name, names)}",
            code="weights.unknown_name",
        )
    return root / name


# --- from timm's registry and the Hub ----------------------------------------------------------


def _from_registry(name: str, pretrained: bool) -> Weights:
    architecture, tag = split_model_name_tag(name)
    tags = timm.list_pretrained(f"{architecture}.*")
    try:
        config = timm.get_pretrained_cfg(name)
    except RuntimeError:
        config = None
    if config is None and tag:
        hint = f"; available: {', '.join(tags)}" if tags else "; it has no pretrained weights"
        raise WeightsError(
            f"model '{name}': {architecture} has no weights '{tag}'{hint}",
            code="weights.unknown_name",
        )
    entry = asdict(config) if config is not None else {}
    if not pretrained:
        return Weights(architecture, {}, drop_source_keys(entry), provenance={"source": name})
    repository, url = entry.get("hf_hub_id"), entry.get("url")
    if repository:
        filename = entry.get("hf_hub_filename")
        filenames = (filename,) if filename else WEIGHT_FILES
        file = download_first(
            repository, filenames, entry.get("hf_hub_revision"), display_name=name
        )
        path, revision, sha256 = file.path, file.commit, file.sha256
    elif url:
        path, revision, sha256 = download_url(url), None, None
    else:
        raise WeightsError(
            f"model '{name}': timm has no pretrained weights for {architecture}; choose another "
            "name, or train from scratch with model.pretrained=false",
            code="weights.not_found",
        )
    provenance = {
        "source": name,
        "tag": entry.get("tag"),
        "repository": repository or url,
        "revision": revision,
        "license": entry.get("license"),
    }
    names = imagenet_class_names(entry.get("num_classes"))
    return _add_tensors(
        path, Weights(architecture, {}, drop_source_keys(entry), None, names, provenance), sha256
    )


def _from_hub(name: str, pretrained: bool) -> Weights:
    repository, _, revision = name.split(":", 1)[1].partition("@")
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", repository):
        raise WeightsError(
            f"{name[:200]!r}: not a repository name; write hf-hub:owner/name@revision",
            code="weights.unknown_name",
        )
    file = download_hub_file(repository, "config.json", revision or None, display_name=name)
    weights = read_timm_config(file.path, name, repository=repository, revision=file.commit)
    checksums = read_checksums(file.path.parent, source=name)
    if not pretrained:
        return weights
    if weights.class_names is None and repository.startswith("timm/"):
        names = imagenet_class_names(weights.config.get("num_classes"))
        weights = replace(weights, class_names=names)
    # pin the commit of config.json, so that a push in between cannot mix two revisions
    file = download_first(
        repository, WEIGHT_FILES, file.commit or revision or None, display_name=name
    )
    path = _require_own_weights(file.path, checksums, source=name)
    return _add_tensors(path, weights, file.sha256, checksums)


def _from_transformers(name: str, pretrained: bool) -> Weights:
    weights, path, sha256 = transformers_config.resolve_classifier(name, pretrained=pretrained)
    return weights if path is None else _add_tensors(path, weights, sha256)


def _from_package(name: str, pretrained: bool) -> Weights:
    entry = python_package.get_package(name)
    config, names = entry.pretrained_config(), imagenet_class_names(entry.num_classes)
    weights = Weights(entry.architecture, {}, config, None, names, entry.provenance(name))
    if not pretrained:
        return weights
    weights = _add_tensors(python_package.find_weights_file(name), weights, entry.sha256)
    return replace(weights, state=rename_tensors(weights.state or {}, entry.rename, source=name))


# --- from local folders and files ----------------------------------------------------------------


def _from_folder(folder: Path, pretrained: bool, *, source: str) -> Weights:
    config_path = folder / "config.json"
    if not config_path.is_file():
        raise WeightsError(
            f"{source}: no config.json in this folder; give a folder in timm's hub format, a run "
            f"directory, or one .safetensors or .npz file",
            code="weights.no_config",
        )
    weights = read_timm_config(config_path, source)
    checksums = read_checksums(folder, source=source)
    if not pretrained:
        return weights
    path = _require_own_weights(find_weights_file(folder), checksums, source=source)
    return _add_tensors(path, weights, checksums=checksums)


def _require_own_weights(path: Path | None, checksums: Mapping[str, str], *, source: str) -> Path:
    """Return the weights file of a config.json.

    Raises: WeightsError if there is none, or if config.json has checksums of another one.
    """
    if path is None or (checksums and path.name not in checksums):
        problem = "no weights next to config.json"
        if path is not None:
            problem = f"config.json has checksums, but none of {path.name}"
        raise WeightsError(
            f"{source}: {problem}; add the weights that belong to it, model.safetensors",
            code="weights.not_found",
        )
    return path


def find_weights_file(folder: Path) -> Path | None:
    """Return the weights file of a model folder; None if it has none."""
    paths = [folder / name for name in WEIGHT_FILES if (folder / name).is_file()]
    for suffix in (".safetensors", *PICKLE_SUFFIXES):
        paths += sorted(path for path in folder.glob(f"*{suffix}") if not path.is_fifo())
    return paths[0] if paths else None


def _from_file(path: Path, pretrained: bool, args: Mapping[str, Any], *, source: str) -> Weights:
    if path.suffix in (".onnx", ".pt2"):
        raise WeightsError(
            f"{source}: an exported file, which only predict, eval and compare read (.onnx); give "
            "the run or the model folder that it was exported from",
            code="weights.wrong_format",
        )
    if path.suffix not in WEIGHTS_SUFFIXES:
        raise WeightsError(
            f"{source}: not a weights file; expected one of {', '.join(WEIGHTS_SUFFIXES)}",
            code="weights.wrong_format",
        )
    given = args.get("architecture")
    if given is not None and not (isinstance(given, str) and timm.is_model(given)):
        raise WeightsError(
            f"model.args.architecture: unknown '{given}'{suggest_model_name(str(given))}",
            code="weights.unknown_name",
        )
    provenance: dict[str, Any] = {"source": source, "license": None}
    if path.suffix == ".npz":
        file, tensors = WeightsFile.snapshot(path), read_tensors(path)
        architecture, model_args, state = google_npz.convert_checkpoint(
            tensors, source=source, args=args
        )
        config = google_npz.google_pretrained_config(architecture, model_args, state)
        provenance |= {"file": path.name, "sha256": file_sha256(path)}
        weights = Weights(
            architecture,
            model_args,
            config,
            state,
            provenance=provenance,
            posemb="paper",
            file=file,
        )
        return weights if pretrained else replace(weights, state=None)
    config_path, checksums = path.with_name("config.json"), None
    if given is not None:
        weights = Weights(given, {}, registered_config(given), provenance=provenance)
        checksums = read_checkpoint_checksums(path.parent)
        if config_path.is_file():
            checksums |= read_checksums(path.parent, source=source)
    elif config_path.is_file():
        # the license in config.json applies to its folder's weights, not to any file next to it
        weights = replace(read_timm_config(config_path, source), provenance=provenance)
        checksums = read_checksums(path.parent, source=source)
    else:
        read_tensors(path)  # if the file itself is damaged, report that first
        raise WeightsError(
            f"{source}: the file does not name its architecture; put its config.json next to it, "
            f"or set model.args.architecture, for example vit_base_patch16_224",
            code="weights.no_config",
        )
    if given is None and checksums and path.name not in checksums:
        raise WeightsError(
            f"{source}: the config.json next to it is of other weights (it has no sha256 of "
            f"{path.name}); move the file to a folder of its own, with its own config.json, or set "
            "model.args.architecture",
            code="weights.wrong_config",
        )
    return _add_tensors(path, weights, checksums=checksums) if pretrained else weights


def _add_tensors(
    path: Path,
    weights: Weights,
    sha256: str | None = None,
    checksums: Mapping[str, str] | None = None,
) -> Weights:
    """Add a file's tensors to the weights, and the file's name and sha256 to the provenance.

    Args:
        path: the weights file.
        weights: the weights without tensors.
        sha256: sha256 of the file; computed if None.
        checksums: result of `read_checksums`; None without a config.json.
    Raises: WeightsError if the file cannot be read, or does not match its checksum.
    """
    file, tensors = WeightsFile.snapshot(path), read_tensors(path)
    origin = {"file": path.name, "sha256": sha256 or file_sha256(path)}
    source = weights.provenance["source"]
    verify_checksum(path.name, origin["sha256"], checksums or {}, source=source)
    model_args = weights.model_args
    if path.suffix == ".npz":
        _, npz_args, tensors = google_npz.convert_checkpoint(tensors, source=path.name, args={})
        model_args = {**npz_args, **model_args}
    elif weights.architecture == transformers_classifier.ARCHITECTURE:
        tensors = _convert_transformers_tensors(tensors, weights)
    # transformers' TimmWrapper saves networks of timm under this name
    if all(name.startswith("timm_model.") for name in tensors):
        tensors = {name.removeprefix("timm_model."): value for name, value in tensors.items()}
    provenance = {**weights.provenance, **origin}
    return replace(weights, model_args=model_args, state=tensors, provenance=provenance, file=file)


def _convert_transformers_tensors(
    tensors: Mapping[str, Tensor], weights: Weights
) -> dict[str, Tensor]:
    """Check that the network fits into memory, then let transformers load the tensors."""
    source, num_classes = weights.provenance["source"], weights.config.get("num_classes")
    with torch.device("meta"):
        network = transformers_classifier.TransformersClassifier(
            **weights.model_args, num_classes=num_classes or 0
        )
    check_memory(network, source)
    return network.convert_state_dict(tensors, source=source)
