"""Stand-ins for the package's functions, for tests of the command line."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest


class Double:
    """Stands for a function of the package: remembers its calls, answers or raises."""

    def __init__(self, answer: Any) -> None:
        self.answer = answer
        self.calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.calls.append((args, kwargs))
        if isinstance(self.answer, BaseException):
            raise self.answer
        return self.answer


def replace(monkeypatch: pytest.MonkeyPatch, module: str, **doubles: Any) -> None:
    """Put a module of doubles in the place of one that would import torch."""
    stand_in = ModuleType(module)
    for name, value in doubles.items():
        setattr(stand_in, name, value)
    monkeypatch.setitem(sys.modules, module, stand_in)


class Recorder:
    """Stands for the line from a measured process to the one that asks."""

    def __init__(self) -> None:
        self.steps = 0
        self.notices: list[str] = []

    def tick(self) -> None:
        self.steps += 1

    def notice(self, message: str) -> None:
        self.notices.append(message)
