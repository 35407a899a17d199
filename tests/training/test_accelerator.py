"""Refusals of a process in which torch computes differently."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest
import torch
from recipe_texts import tiny_recipe_text
from refusals import refused

from finetune.recipe.load import RunSection, parse_recipe
from finetune.training.accelerator import create_accelerator
from finetune.training.train import train


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
        (double_by_default, "torch.set_default_dtype"),
    ],
)
def test_torch_settings_that_change_results_are_refused(
    context: Callable[[], AbstractContextManager[None]], name: str
) -> None:
    with context(), refused("setup.unsupported", name, "run.precision"):
        create_accelerator(RunSection(precision="fp32"))
    assert create_accelerator(RunSection(precision="fp32")).mixed_precision == "no"


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_training_without_gradients_is_refused(
    context: Callable[[], AbstractContextManager[None]], tmp_path: Path
) -> None:
    with context(), refused("setup.unsupported", "torch.no_grad", "inference_mode"):
        train(parse_recipe(tiny_recipe_text()), tmp_path / "run")
