"""Precision of a run: fp32, bf16 or fp16, and how `auto` chooses."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from finetune.errors import SetupError

if TYPE_CHECKING:
    from accelerate import Accelerator

__all__ = [
    "DTYPES",
    "accelerator_precision",
    "autocast_dtype",
    "float32_settings",
    "native_bf16_instructions",
    "resolve_precision",
]


DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def resolve_precision(requested: str, device: torch.device) -> str:
    """Resolve `run.precision` for a device.

    Args:
        requested: "auto", "fp32", "bf16" or "fp16".
        device: the device that the network runs on.
    Returns: for "auto", "bf16" if the device supports it natively, otherwise "fp32"; other values
        unchanged.
    Raises: SetupError for fp16 on a CPU.
    """
    if requested == "fp16" and device.type == "cpu":
        raise SetupError(
            "run.precision: fp16 needs a GPU, and this run is on the CPU; set bf16, fp32 or auto",
            code="setup.needs_gpu",
        )
    if requested != "auto":
        return requested
    if device.type == "cuda":
        return "bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "fp32"
    # Without native support a CPU emulates bf16 more slowly than it computes float32.
    return "bf16" if device.type == "cpu" and native_bf16_instructions() else "fp32"


def float32_settings(device_type: str) -> dict[str, Any]:
    """Return torch's settings that change float32 results, which a program may set for itself."""
    backends: Any = torch.backends
    matmul, conv, library = (
        (backends.cuda.matmul, backends.cudnn.conv, backends.cudnn)
        if device_type == "cuda"
        else (backends.mkldnn.matmul, backends.mkldnn.conv, backends.mkldnn)
    )
    return {
        "float32 matmul": matmul.fp32_precision.replace("none", "ieee"),
        "float32 convolution": conv.fp32_precision.replace("none", "ieee"),
        "cudnn" if device_type == "cuda" else "oneDNN": library.enabled,
    }


def native_bf16_instructions() -> list[str]:
    """Return the CPU's bf16 instruction sets, by torch's names."""
    capabilities: dict[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()
    return [name for name in ("avx512_bf16", "amx_bf16") if capabilities.get(name)]


def accelerator_precision(accelerator: Accelerator) -> str:
    """Return the precision of an Accelerator: "fp32", "bf16" or "fp16"."""
    return str(accelerator.mixed_precision).replace("no", "fp32")


def autocast_dtype(accelerator: Accelerator) -> torch.dtype:
    """Return the autocast dtype of the forward pass; float32 means no autocast."""
    return DTYPES[accelerator_precision(accelerator)]
