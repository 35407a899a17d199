"""What came of a plan, as Markdown."""

from __future__ import annotations

from typing import Any

from finetune.commands.reproduce_table import SMOKE, describe

RUN: dict[str, Any] = {
    "name": "a",
    "seeds": 2,
    "reported": None,
    "examples": 10000,
    "top1": {"mean": 0.5, "std": 0.01},
    "top5": {"mean": 0.9, "std": None},
    "loss": {"mean": 1.5, "std": 0.25},
}
TOLD: dict[str, Any] = {
    "title": "A title",
    "scale": "full",
    "runs": [RUN],
    "choices": {},
    "claims": [],
    "probes": {},
}
CLAIM = {"metric": "test.top1", "value": 0.5, "tolerance": 0.1, "source": "a table", "run": "a-s0"}


def test_figures_have_their_spread() -> None:
    lines = describe(TOLD).splitlines()
    assert lines[0] == "# A title"
    assert lines[-1] == "| a | 2 | 10,000 | 50.00 ± 1.00 | 90.00 | 1.5000 ± 0.2500 | – |"


def test_a_smoke_test_gives_no_verdict() -> None:
    claims = [{**CLAIM, "measured": 0.9, "verdict": "not met"}]
    assert "0 of 1 met" in describe({**TOLD, "claims": claims})
    text = describe({**TOLD, "claims": claims, "scale": "smoke"})
    assert SMOKE in text
    assert "not met" not in text


def test_the_choice_is_marked() -> None:
    rows = [
        {"overrides": ["optim.lr=0.1"], "val.top1": 0.25, "chosen": False},
        {"overrides": ["optim.lr=0.2"], "val.top1": 0.5, "chosen": True},
    ]
    text = describe({**TOLD, "choices": {"a": rows}})
    assert "| optim.lr=0.1 | 0.2500 |  |\n| optim.lr=0.2 | 0.5000 | chosen |" in text
