"""Test doubles for functions of the package, for tests of the command line."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest


class Double:
    """Replaces a function: records the calls, and returns `result` or raises it."""

    def __init__(self, result: Any) -> None:
        self.result = result
        self.calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.calls.append((args, kwargs))
        if isinstance(self.result, BaseException):
            raise self.result
        return self.result


def replace_module(monkeypatch: pytest.MonkeyPatch, module: str, **doubles: Any) -> None:
    """Replace a module that would import torch by one that holds these doubles."""
    module_double = ModuleType(module)
    for name, value in doubles.items():
        setattr(module_double, name, value)
    monkeypatch.setitem(sys.modules, module, module_double)


class StepCounter:
    """Counts the steps that a benchmark process reports."""

    def __init__(self) -> None:
        self.steps = 0

    def tick(self) -> None:
        self.steps += 1
