"""`finetune reproduce`: the function it calls, and what it prints."""

from __future__ import annotations

import pytest
from bad_input import BadInput, check_bad_input, parametrize_bad_inputs
from doubles import Double, replace_module

from finetune.cli.main import main

pytestmark = pytest.mark.usefixtures("workspace")


@pytest.fixture
def run_plan(monkeypatch: pytest.MonkeyPatch) -> Double:
    """A double of the function that runs a plan."""
    double = Double({"table": "t.md", "comparison": None, "page": "p.md"})
    doubles = {"run_plan": double, "format_plan_results": Double("# A")}
    replace_module(monkeypatch, "finetune.commands.reproduce", **doubles)
    return double


def test_reproduce(run_plan: Double, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["data.source=x", "--only", "a", "--only", "b", "--scale", "smoke"]
    arguments += ["--data", "hub:a/b=parquet:c=d", "--done", "--page", "p.md"]
    assert main(["reproduce", "grids", *arguments]) == 0
    options = {"only": ("a", "b"), "scale": "smoke", "overrides": ("data.source=x",)}
    options |= {"sources": {"hub:a/b": "parquet:c=d"}, "done": True, "page": "p.md", "out": None}
    assert run_plan.calls == [(("grids",), options)]
    assert capsys.readouterr().out == "# A\nt.md\np.md\n"


@parametrize_bad_inputs(
    {
        "--data without a copy": BadInput(
            "reproduce grids --data hub:a/b", "recipe.wrong_value", "--data"
        ),
        "--data without a source": BadInput(
            "reproduce grids --data =x", "recipe.wrong_value", "--data"
        ),
        "an empty --page": BadInput(
            ["reproduce", "grids", "--page", ""], "recipe.wrong_value", "--page"
        ),
    }
)
def test_a_wrong_option_is_refused(bad: BadInput, run_plan: Double) -> None:
    check_bad_input(bad)
    assert run_plan.calls == []
