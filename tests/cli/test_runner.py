"""How the command line talks: streams, exit codes, JSON, and errors in one message."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import pytest

from finetune.cli.runner import (
    Answer,
    Verbs,
    answers,
    debug_option,
    figures,
    flat,
    next_steps,
    run,
    to_json,
)
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


def program(body: Callable[[], Any]) -> Callable[..., int]:
    """A program with one verb, `go`, whose answer is what `body` returns or raises."""

    @click.group(cls=Verbs)
    @debug_option
    def group() -> None:
        """Stand in for the verbs."""

    @group.command("go")
    @answers
    def go() -> Answer:
        found = body()
        return found if isinstance(found, Answer) else Answer(found, str(found))

    return lambda *words: run(group, words)


def failing(error: BaseException) -> Callable[..., int]:
    def body() -> None:
        raise error

    return program(body)


Captured = pytest.CaptureFixture[str]


class TestAnswers:
    def test_text_and_json(self, capsys: Captured) -> None:
        tool = program(lambda: Answer({"a": float("nan")}, "for people"))
        assert tool("go") == 0
        assert capsys.readouterr().out == "for people\n"
        assert tool("go", "--json") == 0
        assert json.loads(capsys.readouterr().out) == {"a": None}

    def test_prints_of_libraries_stay_off_standard_output(self, capsys: Captured) -> None:
        def body() -> Answer:
            print("downloading")
            return Answer([], "")

        assert program(body)("go", "--json") == 0
        captured = capsys.readouterr()
        assert (captured.out, captured.err) == ("[]\n", "downloading\n")

    def test_an_answer_with_a_problem_gives_both(self, capsys: Captured) -> None:
        tool = program(lambda: Answer([1], "one", DataError("two: bad")))
        assert tool("go") == 3
        captured = capsys.readouterr()
        assert (captured.out, captured.err) == ("one\n", "two: bad\n")
        assert tool("go", "--json") == 3
        assert json.loads(capsys.readouterr().out) == [1]  # one document, not two

    def test_no_text_is_no_line(self, capsys: Captured) -> None:
        assert program(lambda: Answer([], ""))("go") == 0
        assert capsys.readouterr().out == ""

    def test_only_the_first_process_prints(
        self, monkeypatch: pytest.MonkeyPatch, capsys: Captured
    ) -> None:
        monkeypatch.setenv("RANK", "1")
        assert program(lambda: "found")("go", "--json") == 0
        assert failing(RecipeError("lr: bad"))("go") == 2  # the first process says it too
        assert capsys.readouterr() == ("", "")
        assert failing(DataError("disk: gone"))("go") == 3  # perhaps on this machine alone
        assert capsys.readouterr() == ("", "rank 1: disk: gone\n")


class TestErrors:
    @pytest.mark.parametrize(
        "error,code",
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
    def test_each_kind_has_its_exit_code_and_one_message(
        self, error: Exception, code: int, capsys: Captured
    ) -> None:
        assert failing(error)("go") == code
        assert capsys.readouterr() == ("", "x: y; z\n")

    def test_json_reports_errors_too(self, capsys: Captured) -> None:
        assert failing(DataError("images: gone"))("go", "--json") == 3
        captured = capsys.readouterr()
        assert json.loads(captured.out) == {"error": "images: gone", "exit_code": 3, "code": "data"}
        assert captured.err == "images: gone\n"

    def test_what_nobody_foresaw_is_one_line(self, capsys: Captured) -> None:
        assert failing(ValueError("broken\nin two lines"))("go") == 1
        message = "internal error: ValueError: broken; run again with --debug\n"
        assert capsys.readouterr() == ("", message)

    @pytest.mark.parametrize("words", [["--debug", "go"], ["go", "--debug"]])
    @pytest.mark.parametrize("error", [ValueError("cause"), DataError("cause")])
    def test_a_traceback_only_with_debug(
        self, words: list[str], error: Exception, capsys: Captured
    ) -> None:
        tool = failing(error)
        tool("go")
        assert "Traceback" not in capsys.readouterr().err
        tool(*words)
        assert "Traceback (most recent call last)" in capsys.readouterr().err

    def test_ctrl_c(self, capsys: Captured) -> None:
        assert failing(KeyboardInterrupt())("go") == 130
        assert capsys.readouterr() == ("", "interrupted\n")

    def test_end_of_file_is_not_ctrl_c(self, capsys: Captured) -> None:
        assert failing(EOFError("truncated"))("go") == 1
        assert "internal error: EOFError: truncated" in capsys.readouterr().err

    def test_out_of_memory_says_what_to_do(self, capsys: Captured) -> None:
        import torch

        host = RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 1 T")
        for error in (MemoryError(), torch.OutOfMemoryError("CUDA out of memory"), host):
            assert failing(error)("go") == 5
            assert "data.micro_batch" in capsys.readouterr().err


class TestText:
    def test_json_of_what_is_not_json(self) -> None:
        import numpy as np

        data = {1: np.array([1.5, np.nan]), "path": Path("a"), "t": (np.int64(3), float("inf"))}
        assert json.loads(to_json(data)) == {"1": [1.5, None], "path": "a", "t": [3, None]}
        assert to_json("\udcff")  # a file name that is not text does not stop the answer

    def test_flat(self) -> None:
        assert flat({"a": {"b": 1, "c": [1, 2]}, "d": None}) == "a.b: 1\na.c: 1, 2\nd: None"

    def test_figures_of_nothing(self) -> None:
        assert figures({}) == ""
        assert figures({"val": None, "claims": None}) == ""

    @pytest.mark.parametrize("classes", [5, 6])
    def test_top5_stands_for_more_than_five_classes_only(self, classes: int) -> None:
        metrics = {"top1": 0.5, "top5": 1.0, "loss": 1.0, "per_class": [{}] * classes}
        assert ("top-5" in figures({"test": metrics})) == (classes == 6)

    def test_an_interval_stands_beside_an_accuracy_on_few_images_only(self) -> None:
        few, many = ({"top1": 0.9, "loss": 1.0, "examples": n} for n in (999, 1000))
        lines = figures({"test": few, "val": many, "train": {"top1": 1.0}}).splitlines()
        assert [line.partition(":")[0] for line in lines] == ["test", "val"]
        assert ["interval 88.0–91.7 %" in line for line in lines] == [True, False]
        assert "on 1000 images" in lines[1]

    def test_claims_and_warnings(self) -> None:
        claim = {"metric": "test.top1", "value": 0.9, "tolerance": 0.01}
        missing = {**claim, "measured": None, "verdict": "not measured", "how": "no test split"}
        met = {**claim, "measured": 0.905, "verdict": "met"}
        assert figures({"claims": [missing, met], "warnings": ["far off"]}).splitlines() == [
            "claim test.top1: not measured: no test split",
            "claim test.top1: met: measured 90.50 %, reported 90.00 % ± 1.00 %",
            "warning: far off",
        ]

    def test_the_next_commands_can_be_copied(self, tmp_path: Path) -> None:
        folder = tmp_path / "my run"
        folder.mkdir()
        assert "report:" not in next_steps(folder)
        (folder / "report.html").write_text("page")
        lines = next_steps(folder).splitlines()
        assert lines[0] == f"report: {folder / 'report.html'}"
        assert f"next: finetune predict '{folder}' IMAGE" in lines
