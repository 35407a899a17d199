"""What steps say is heard in order, at once or one step later, and never lost."""

from __future__ import annotations

import torch

from finetune.training.trainer_state import DelayedScalars

CPU = torch.device("cpu")


def test_at_once_where_nobody_waits() -> None:
    echo = DelayedScalars(CPU)
    assert echo.heard() == []
    echo.say(torch.tensor(True))
    echo.say(torch.tensor([2.5]))
    assert echo.heard() == [1.0, 2.5]
    assert echo.heard(all_of_it=True) == []


def test_one_step_later() -> None:
    echo, heard = DelayedScalars(CPU, late=True), []
    value = torch.tensor(0.0)
    for step in range(4):
        value.fill_(step)  # what was said stays said
        echo.say(value)
        heard.append(echo.heard())
    assert heard == [[], [0.0], [1.0], [2.0]]
    assert echo.heard(all_of_it=True) == [3.0]
