"""Where pretrained weights come from: one verified road from a name to tensors in memory."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from importlib import resources
from pathlib import Path
from typing import Any

import timm
from timm.models import split_model_name_tag
from torch import Tensor

from finetune.errors import WeightsError, nearest
from finetune.files import sha256_of
from finetune.hub.download import download, fetch, first_of
from finetune.models.architectures import transformers_adapter
from finetune.models.weights import google_npz as google
from finetune.models.weights import package as packaged
from finetune.models.weights import transformers_hub as transformers_files
from finetune.models.weights.read import read_tensors
from finetune.models.weights.rename import renamed
from finetune.models.weights.timm_config import ModelConfig, clean, read_config
from finetune.models.weights.timm_names import imagenet_names, suggest

__all__ = ["Weights", "locate", "resolve"]

# What a folder or a repository in timm's format may hold, best first.
WEIGHT_FILES = (
    "model.safetensors",
    "open_clip_model.safetensors",
    "pytorch_model.bin",
    "open_clip_pytorch_model.bin",
)
PICKLED = (".bin", ".pth", ".pt", ".tar")
FILES = (".safetensors", ".npz", *PICKLED)


@dataclass(frozen=True)
class Weights:
    """An architecture with its arguments and, unless it starts from scratch, its tensors.

    Attributes:
        architecture: timm's name, without a tag.
        model_args: keyword arguments of timm that the tensors need.
        config: timm's pretrained configuration (mean, std, input_size, classifier, …).
        state: name to tensor on the CPU, all finite; None when training starts from scratch.
        class_names: in the order of the classifier's outputs, when the weights carry them.
        provenance: source, revision, file, sha256, license.
        temperature: divides the logits before the softmax; None when it was never fitted.
        from_config: model_args and config come from a config.json, not from timm or the user.
    """

    architecture: str
    model_args: dict[str, Any]
    config: dict[str, Any]
    state: dict[str, Tensor] | None = None
    class_names: list[str] | None = None
    provenance: dict[str, Any] = field(default_factory=dict)
    temperature: float | None = None
    from_config: bool = False


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
    if name.startswith(transformers_files.PREFIX):
        return _from_transformers(name, pretrained)
    if name.startswith(packaged.PREFIX):
        return _from_package(name, pretrained)
    if name.startswith(("hf-hub:", "hf_hub:")):
        return _from_hub(name, pretrained)
    architecture, _ = split_model_name_tag(name)
    if timm.is_model(architecture) and not name.startswith((".", "/", "~")):
        return _from_registry(name, pretrained)
    path = locate(name)
    if path is None:
        raise WeightsError(f"model.name: unknown '{name}'{suggest(name)}")
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
    if name.startswith(packaged.PREFIX):
        return packaged.find(name)
    if not name.strip() or "\0" in name:
        raise WeightsError(f"model.name: {name[:60]!r} is no name; give one, or a file or folder")
    path = Path(name.removeprefix("local-dir:")).expanduser()
    try:
        there = path.exists()
    except OSError as error:
        cause = f"cannot be read ({error.strerror}); check the path"
        raise WeightsError(f"model.name: '{name[:200]}' {cause}") from error
    if not there:
        if "://" in name:
            raise WeightsError(
                f"model.name: '{name}' is an address, and addresses are not read; download it "
                f"first and give the file or folder"
            )
        if repository := re.fullmatch(r"(?:hub|hf|huggingface):/*([^/]+/.+)", name):
            raise WeightsError(
                f"model.name: unknown '{name}'; did you mean 'hf-hub:{repository[1]}'?"
            )
        looks_local = name.startswith((".", "/", "~", "local-dir:")) or path.suffix in FILES
        if looks_local:
            raise WeightsError(f"model.name: no such file or folder '{name}'; check the path")
        if "/" in name or "\\" in name:
            raise WeightsError(
                f"model.name: no such file or folder '{name}'; for a repository on the hub write "
                f"'hf-hub:{name}'"
            )
        return None
    if path.is_file():
        return path
    if not path.is_dir():  # opening a pipe may wait for ever
        raise WeightsError(f"model.name: '{name}' is a pipe or a device; give a file or a folder")
    inner = path / "model"
    if not (path / "config.json").is_file() and inner.is_dir():
        return inner
    if (path / "run.json").is_file():
        raise WeightsError(
            f"{name}: this run has no model/ yet; let it finish, or continue it with --resume"
        )
    return path


def _embedded(name: str) -> Path:
    root = Path(str(resources.files("finetune.models"))) / "embedded"
    there = sorted(p.name for p in root.iterdir() if p.is_dir()) if root.is_dir() else []
    if name not in there:
        known = f"; there is: {', '.join(there)}" if there else "; this installation has none"
        raise WeightsError(
            f"embedded:{name}: no such embedded weights{known}{nearest(name, there)}"
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
        raise WeightsError(f"model.name: {architecture} has no weights '{tag}'{known}")
    entry = asdict(config) if config is not None else {}
    if not pretrained:
        return Weights(architecture, {}, clean(entry), provenance={"source": name})
    repository, url = entry.get("hf_hub_id"), entry.get("url")
    if repository:
        wanted = (entry["hf_hub_filename"],) if entry.get("hf_hub_filename") else WEIGHT_FILES
        found = first_of(repository, wanted, entry.get("hf_hub_revision"), source=name)
        path, revision, sha256 = found.path, found.commit, found.sha256
    elif url:
        path, revision, sha256 = download(url), None, None
    else:
        raise WeightsError(
            f"model.name: timm has no pretrained weights for {architecture}; choose another name, "
            f"or train from scratch with model.pretrained=false"
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
    repository, _, wanted = name.split(":", 1)[1].partition("@")
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", repository):
        raise WeightsError(f"{name[:200]!r}: no repository; write hf-hub:owner/name@revision")
    described = fetch(repository, "config.json", wanted or None, source=name)
    revision = described.commit
    content = read_config(described.path, name)
    provenance = {"source": name, "repository": repository, "revision": revision}
    weights = _described(content, provenance)
    if not pretrained:
        return weights
    if weights.class_names is None and repository.startswith("timm/"):
        names = imagenet_names(content.config.get("num_classes"))
        weights = replace(weights, class_names=names)
    # Pinned to the configuration's commit: a push in between cannot mix two versions.
    found = first_of(repository, WEIGHT_FILES, revision or wanted or None, source=name)
    return _read(found.path, weights, found.sha256)


def _described(content: ModelConfig, provenance: dict[str, Any]) -> Weights:
    """What a config.json says, without tensors yet."""
    return Weights(
        architecture=content.architecture,
        model_args=content.model_args,
        config=content.config,
        class_names=content.class_names,
        provenance={**provenance, "license": content.config.get("license")},
        temperature=content.temperature,
        from_config=True,
    )


def _from_transformers(name: str, pretrained: bool) -> Weights:
    found = transformers_files.describe(name, pretrained=pretrained)
    architecture, provenance, state = transformers_adapter.ARCHITECTURE, found.provenance, None
    if found.weights is not None:
        tensors = read_tensors(found.weights)
        state = transformers_adapter.named(tensors, found.model_args, source=name)
        sha256 = found.sha256 or sha256_of(found.weights)
        provenance = {**provenance, "file": found.weights.name, "sha256": sha256}
    names = found.class_names
    return Weights(architecture, found.model_args, found.config, state, names, provenance)


def _from_package(name: str, pretrained: bool) -> Weights:
    package = packaged.known(name)
    config, names = package.pretrained_config(), imagenet_names(package.num_classes)
    weights = Weights(package.architecture, {}, config, None, names, package.provenance(name))
    if not pretrained:
        return weights
    weights = _read(packaged.find(name), weights, package.sha256)
    return replace(weights, state=renamed(weights.state or {}, package.rename, source=name))


# --- from local folders and files ----------------------------------------------------------------


def _from_folder(folder: Path, pretrained: bool, *, source: str) -> Weights:
    config_path = folder / "config.json"
    if not config_path.is_file():
        raise WeightsError(
            f"{source}: no config.json in this folder; give a folder in timm's hub format, a run "
            f"directory, or one .safetensors or .npz file"
        )
    weights = _described(read_config(config_path, source), {"source": source})
    if not pretrained:
        return weights
    found = [folder / name for name in WEIGHT_FILES if (folder / name).is_file()]
    for suffix in (".safetensors", *PICKLED):
        found += sorted(path for path in folder.glob(f"*{suffix}") if not path.is_fifo())
    if not found:
        raise WeightsError(f"{source}: no weights beside config.json; expected model.safetensors")
    return _read(found[0], weights)


def _from_file(path: Path, pretrained: bool, args: Mapping[str, Any], *, source: str) -> Weights:
    if path.suffix not in FILES:
        raise WeightsError(f"{source}: not a weights file; expected one of {', '.join(FILES)}")
    named = args.get("architecture")
    if named is not None and not (isinstance(named, str) and timm.is_model(named)):
        raise WeightsError(f"model.args.architecture: unknown '{named}'{suggest(str(named))}")
    provenance: dict[str, Any] = {"source": source, "license": None}
    if path.suffix == ".npz":
        tensors = read_tensors(path)
        architecture, model_args, state = google.convert(tensors, source=source, args=args)
        config = google.config_of(architecture, model_args, state)
        provenance |= {"file": path.name, "sha256": sha256_of(path)}
        kept = state if pretrained else None
        return Weights(architecture, model_args, config, kept, None, provenance)
    beside = path.with_name("config.json")
    if named is not None:
        entry = timm.get_pretrained_cfg(named)
        config = clean(asdict(entry)) if entry is not None else {}
        weights = Weights(named, {}, config, provenance=provenance)
    elif beside.is_file():
        # its license is said of a folder, not of one file among others
        weights = replace(_described(read_config(beside, source), {}), provenance=provenance)
    else:
        read_tensors(path)  # what is wrong with the file itself comes first
        raise WeightsError(
            f"{source}: tensors alone do not say which network they are; put its config.json "
            f"beside them, or set model.args.architecture, for instance vit_base_patch16_224"
        )
    return _read(path, weights) if pretrained else weights


def _read(path: Path, weights: Weights, sha256: str | None = None) -> Weights:
    """Add the tensors of a file to what is known of them; `sha256` where it was computed."""
    tensors = read_tensors(path)
    read = {"file": path.name, "sha256": sha256 or sha256_of(path)}
    model_args = weights.model_args
    if path.suffix == ".npz":
        _, npz_args, tensors = google.convert(tensors, source=path.name, args={})
        model_args = {**npz_args, **model_args}
    provenance = {**weights.provenance, **read}
    return replace(weights, model_args=model_args, state=tensors, provenance=provenance)
