"""Versions, machine, commit and launch line of a run."""

from __future__ import annotations

import contextlib
import os
import platform
import subprocess
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import yaml

from finetune.errors import SetupError, masked
from finetune.run.record import RunRecord

if TYPE_CHECKING:
    from accelerate import Accelerator

__all__ = [
    "DTYPES",
    "describe_machine",
    "dtype_of",
    "pick_precision",
    "precision_of",
    "requested_processes",
    "versions_of",
]

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

_PACKAGES = (
    "finetune",
    "torch",
    "torchvision",
    "timm",
    "accelerate",
    "datasets",
    "huggingface_hub",
    "safetensors",
    "numpy",
    "pillow",
    "simplejpeg",
)


def describe_machine(device: torch.device, num_processes: int) -> RunRecord:
    """Collect the facts about the run's surroundings for run.json."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else _cpu_name()
    described = {"type": device.type, "name": name, "threads": torch.get_num_threads()}
    if device.type == "cpu":
        described["instructions"] = [torch.backends.cpu.get_cpu_capability(), *_native_bf16()]
    return {
        "versions": {"python": platform.python_version(), **versions_of(_PACKAGES)},
        "device": described,
        "num_processes": num_processes,
        "commit": _commit(),
        "argv": [masked(word) for word in (Path(sys.argv[0]).name, *sys.argv[1:])],
    }


def versions_of(packages: Sequence[str]) -> dict[str, str]:
    """The versions of those packages that are installed, by name."""
    versions = {}
    for package in packages:
        with contextlib.suppress(PackageNotFoundError):  # a checkout that is not installed
            versions[package] = version(package)
    return versions


def _cpu_name() -> str:
    table = Path("/proc/cpuinfo")
    lines = table.read_text(encoding="utf-8").splitlines() if table.exists() else []
    names = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())


def _commit() -> str | None:
    """The commit of the checkout that runs, or that the installed package was built from.

    Returns: with "+changes" where the code differs; None where the package was built from no
        checkout, as from an archive of the sources.
    """
    here = Path(__file__).resolve()
    root = here.parents[2]
    if not (root / ".git").exists():
        built_from = here.with_name("COMMIT")  # setup.py puts it there
        return built_from.read_text(encoding="utf-8") if built_from.is_file() else None
    try:
        commit = _git(root, "rev-parse", "HEAD")
        return commit + ("+changes" if _git(root, "status", "--porcelain", "-uno") else "")
    except (OSError, subprocess.SubprocessError):
        return None


def _git(root: Path, *arguments: str) -> str:
    answer = subprocess.run(
        ["git", *arguments], cwd=root, capture_output=True, text=True, timeout=10, check=True
    )
    return answer.stdout.strip()


def pick_precision(wanted: str, device: torch.device) -> str:
    """Choose the numbers that the network computes with.

    Args:
        wanted: "auto", "fp32", "bf16" or "fp16".
        device: where training runs.
    Returns: "bf16" for "auto" where the processor multiplies bf16 natively, else "fp32"; any other
        wish as it is.
    Raises: SetupError for fp16 on a CPU.
    """
    if wanted == "fp16" and device.type == "cpu":
        raise SetupError(
            "run.precision: fp16 needs a GPU, and this run is on the CPU; set bf16, fp32 or auto",
            code="setup.needs_gpu",
        )
    if wanted != "auto":
        return wanted
    if device.type == "cuda":
        return "bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "fp32"
    # Without native support a CPU emulates bf16 more slowly than it computes float32.
    return "bf16" if device.type == "cpu" and _native_bf16() else "fp32"


def _native_bf16() -> list[str]:
    """The instruction sets by which this processor multiplies bf16, as torch names them."""
    capabilities: dict[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()
    return [name for name in ("avx512_bf16", "amx_bf16") if capabilities.get(name)]


def precision_of(accelerator: Accelerator) -> str:
    """The numbers that an accelerator computes with: "fp32", "bf16" or "fp16"."""
    return str(accelerator.mixed_precision).replace("no", "fp32")


def dtype_of(accelerator: Accelerator) -> torch.dtype:
    """The dtype of the forward pass's products."""
    return DTYPES[precision_of(accelerator)]


def requested_processes() -> int | None:
    """Read how many processes the launcher was asked for, from its command line.

    `accelerate launch --cpu --num_processes 2` starts one process and says nothing.

    Returns: the number, or None if the parent is no launcher or does not say.
    """
    try:
        words = Path(f"/proc/{os.getppid()}/cmdline").read_bytes().decode(errors="replace")
    except OSError:
        return None
    arguments = words.split("\0")
    launches = {"launch", "accelerate.commands.launch"} & set(arguments)
    if not any("accelerate" in word for word in arguments[:4]) or not launches:
        return None
    options: dict[str, str] = {}
    for flag, value in zip(arguments, [*arguments[1:], ""], strict=True):
        name, _, attached = flag.partition("=")
        options.setdefault(name.replace("-", "_"), attached or value)
    number = options.get("__num_processes") or _number_in(options.get("__config_file"))
    return int(number) if number and number.isdigit() else None


def _number_in(config_file: str | None) -> str | None:
    """The number of processes in an Accelerate configuration file."""
    if config_file is None:
        return None
    try:
        config = yaml.safe_load(Path(config_file).read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError):
        return None  # the launcher has already refused it
    return str(config.get("num_processes")) if isinstance(config, dict) else None
