"""Package versions, machine, commit and command line of a run."""

from __future__ import annotations

import contextlib
import platform
import subprocess
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from finetune import __version__
from finetune.errors import redact_secrets
from finetune.precision import native_bf16_instructions
from finetune.run.schema import RunRecord

__all__ = ["collect_environment", "package_versions"]


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


def collect_environment(device: torch.device, num_processes: int) -> RunRecord:
    """Collect versions, device, commit and command line for run.json."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else _cpu_name()
    device_info = {"type": device.type, "name": name, "threads": torch.get_num_threads()}
    if device.type == "cpu":
        device_info["instructions"] = [
            torch.backends.cpu.get_cpu_capability(),
            *native_bf16_instructions(),
        ]
    return {
        "versions": {"python": platform.python_version(), **package_versions(_PACKAGES)},
        "device": device_info,
        "num_processes": num_processes,
        "commit": _source_commit(),
        "argv": [redact_secrets(word) for word in (Path(sys.argv[0]).name, *sys.argv[1:])],
    }


def package_versions(packages: Sequence[str]) -> dict[str, str]:
    """Return name and version of those packages that are installed."""
    versions = {}
    for package in packages:
        with contextlib.suppress(PackageNotFoundError):  # not installed
            versions[package] = __version__ if package == "finetune" else version(package)
    return versions


def _cpu_name() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text(encoding="utf-8").splitlines() if cpuinfo.exists() else []
    names = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())


def _source_commit() -> str | None:
    """Return the commit of this checkout, or the one that the installed package was built from.

    Returns: the commit hash, with "+changes" if the checkout has uncommitted changes; None if the
        package was built without a checkout, for example from a source archive.
    """
    here = Path(__file__).resolve()
    root = here.parents[2]
    if not (root / ".git").exists():
        commit_file = here.with_name("COMMIT")  # written by setup.py
        return commit_file.read_text(encoding="utf-8") if commit_file.is_file() else None
    try:
        commit = _run_git(root, "rev-parse", "HEAD")
        return commit + ("+changes" if _run_git(root, "status", "--porcelain", "-uno") else "")
    except (OSError, subprocess.SubprocessError):
        return None


def _run_git(root: Path, *arguments: str) -> str:
    result = subprocess.run(
        ["git", *arguments], cwd=root, capture_output=True, text=True, timeout=10, check=True
    )
    return result.stdout.strip()
