"""`finetune push`: the function it calls, and what it prints."""

from __future__ import annotations

import pytest
from bad_input import BadInput, check_bad_input, parametrize_bad_inputs
from doubles import Double, replace_module

from finetune.cli.main import main

pytestmark = pytest.mark.usefixtures("workspace")


def test_push(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    result = {"url": "http://hub/a/b", "commit": "abc", "changed": True}
    push = Double(result)
    replace_module(monkeypatch, "finetune.publish.push", push=push)
    arguments = ["--private", "--revision", "v2", "--message", "better"]
    assert main(["push", "runs/x", "a/b", *arguments]) == 0
    options = {"private": True, "revision": "v2", "message": "better", "adapter": False}
    assert push.calls == [(("runs/x", "a/b"), options)]
    assert capsys.readouterr().out == "http://hub/a/b\ncommit abc\n"
    result["changed"] = False
    assert main(["push", "runs/x", "a/b"]) == 0
    assert "no new commit" in capsys.readouterr().out


@parametrize_bad_inputs(
    {
        "a recipe": BadInput("push mine.yaml a/b", "recipe.conflict", "finetune train mine.yaml"),
        "no such run": BadInput("push runs/y a/b", "weights.not_found", "runs/y"),
    }
)
def test_a_wrong_argument_is_refused(bad: BadInput) -> None:
    check_bad_input(bad)
