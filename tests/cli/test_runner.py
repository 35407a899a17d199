"""Errors of the command line: one message, an exit code, and a traceback only with --debug."""

from __future__ import annotations

import json

import pytest
from program import failing_program

from finetune.errors import (
    CheckpointError,
    DataError,
    DivergedError,
    FinetuneError,
    HubError,
    Interrupted,
    RecipeError,
    SetupError,
    WeightsError,
)

Captured = pytest.CaptureFixture[str]


@pytest.mark.parametrize(
    "error,exit_code",
    [
        (FinetuneError("x: y; z"), 1),
        (RecipeError("x: y; z"), 2),
        (DataError("x: y; z"), 3),
        (WeightsError("x: y; z"), 4),
        (CheckpointError("x: y; z"), 4),
        (SetupError("x: y; z"), 5),
        (DivergedError("x: y; z"), 6),
        (HubError("x: y; z"), 7),
        (Interrupted("x: y; z", 15), 143),
    ],
)
def test_each_error_class_has_its_exit_code_and_prints_one_message(
    error: Exception, exit_code: int, capsys: Captured
) -> None:
    assert failing_program(error)("go") == exit_code
    assert capsys.readouterr() == ("", "x: y; z\n")


def test_json_contains_the_error(capsys: Captured) -> None:
    assert failing_program(DataError("images: gone"))("go", "--json") == 3
    captured = capsys.readouterr()
    assert json.loads(captured.out) == {"error": "images: gone", "exit_code": 3, "code": "data"}
    assert captured.err == "images: gone\n"


def test_an_unexpected_error_is_one_line(capsys: Captured) -> None:
    assert failing_program(ValueError("broken\nin two lines"))("go") == 1
    message = "internal error: ValueError: broken; run again with --debug\n"
    assert capsys.readouterr() == ("", message)


def test_a_lost_connection_to_another_process_is_no_internal_error(
    monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    monkeypatch.setenv("RANK", "0")
    lost = RuntimeError("[../gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]")
    assert failing_program(lost)("go") == 5
    assert capsys.readouterr().err.startswith("another process of this launch has ended")


@pytest.mark.parametrize("arguments", [["--debug", "go"], ["go", "--debug"]])
@pytest.mark.parametrize("error", [ValueError("cause"), DataError("cause")])
def test_a_traceback_only_with_debug(
    arguments: list[str], error: Exception, capsys: Captured
) -> None:
    run = failing_program(error)
    run("go")
    assert "Traceback" not in capsys.readouterr().err
    run(*arguments)
    assert "Traceback (most recent call last)" in capsys.readouterr().err


def test_ctrl_c(capsys: Captured) -> None:
    assert failing_program(KeyboardInterrupt())("go") == 130
    assert capsys.readouterr() == ("", "interrupted\n")


def test_end_of_file_is_not_ctrl_c(capsys: Captured) -> None:
    assert failing_program(EOFError("truncated"))("go") == 1
    assert "internal error: EOFError: truncated" in capsys.readouterr().err


def test_out_of_memory_names_the_keys_that_help(capsys: Captured) -> None:
    import torch

    host = RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 1 T")
    for error in (MemoryError(), torch.OutOfMemoryError("CUDA out of memory"), host):
        assert failing_program(error)("go", "--json") == 5
        captured = capsys.readouterr()
        assert "data.micro_batch" in captured.err
        assert json.loads(captured.out)["code"] == "setup.memory"
