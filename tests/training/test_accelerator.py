"""Refusals of a process in which torch computes differently."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, contextmanager

import pytest
import torch
from refusals import refused

from finetune.recipe.load import RunSection
from finetune.training.accelerator import create_accelerator


@contextmanager
def double_by_default():
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize(
    "context, name",
    [
        (lambda: torch.autocast("cpu", torch.bfloat16), "torch.autocast"),
        (torch.inference_mode, "torch.inference_mode"),
        (double_by_default, "torch.set_default_dtype"),
    ],
)
def test_torch_settings_that_change_results_are_refused(
    context: Callable[[], AbstractContextManager[None]], name: str
) -> None:
    with context(), refused("setup.unsupported", name, "run.precision"):
        create_accelerator(RunSection(precision="fp32"))
    assert create_accelerator(RunSection(precision="fp32")).mixed_precision == "no"
