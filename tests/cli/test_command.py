"""The `command` decorator and command groups: streams, ranks, JSON, help and names."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest
from program import failing_program, program

from finetune.cli.command import CommandResult
from finetune.cli.main import SECTIONS, cli, main
from finetune.errors import DataError, RecipeError

Captured = pytest.CaptureFixture[str]

REPOSITORY = Path(__file__).resolve().parents[2]


def leaf_commands() -> Iterator[tuple[str, click.Command]]:
    """Every command that does something, with its full name."""
    for name, command in cli.commands.items():
        if isinstance(command, click.Group):
            yield from ((f"{name} {below}", each) for below, each in command.commands.items())
        else:
            yield name, command


def help_text(name: str, capsys: Captured) -> str:
    assert main([*name.split(), "--help"]) == 0
    return capsys.readouterr().out


class TestResults:
    def test_text_and_json(self, capsys: Captured) -> None:
        run = program(lambda: CommandResult({"a": float("nan")}, "a table"))
        assert run("go") == 0
        assert capsys.readouterr().out == "a table\n"
        assert run("go", "--json") == 0
        assert json.loads(capsys.readouterr().out) == {"a": None}

    @pytest.mark.parametrize("endpoint", ["http://[::1", "http://host:99999", "http://host:x"])
    def test_a_hub_endpoint_that_is_no_url(
        self, endpoint: str, monkeypatch: pytest.MonkeyPatch, capsys: Captured
    ) -> None:
        monkeypatch.setenv("HF_ENDPOINT", endpoint)
        assert program(lambda: CommandResult(1, "one"))("go", "--json") == 7
        captured = capsys.readouterr()
        assert json.loads(captured.out)["code"] == "hub.wrong_endpoint"
        assert captured.err.startswith(f"HF_ENDPOINT={endpoint}: ")

    def test_output_of_libraries_goes_to_standard_error(self, capsys: Captured) -> None:
        def body() -> CommandResult:
            print("downloading")
            return CommandResult([], "")

        assert program(body)("go", "--json") == 0
        captured = capsys.readouterr()
        assert (captured.out, captured.err) == ("[]\n", "downloading\n")

    def test_a_result_with_an_error_prints_both(self, capsys: Captured) -> None:
        run = program(lambda: CommandResult([1], "one", DataError("two: bad")))
        assert run("go") == 3
        captured = capsys.readouterr()
        assert (captured.out, captured.err) == ("one\n", "two: bad\n")
        assert run("go", "--json") == 3
        assert json.loads(capsys.readouterr().out) == [1]  # one document, not two

    def test_an_empty_text_prints_no_line(self, capsys: Captured) -> None:
        assert program(lambda: CommandResult([], ""))("go") == 0
        assert capsys.readouterr().out == ""

    def test_only_rank_0_prints(self, monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
        monkeypatch.setenv("RANK", "1")
        assert program(lambda: "found")("go", "--json") == 0
        assert failing_program(RecipeError("lr: bad"))("go") == 2  # rank 0 prints the same
        assert capsys.readouterr() == ("", "")
        assert failing_program(DataError("disk: gone"))("go") == 3  # perhaps only on this rank
        assert capsys.readouterr() == ("", "rank 1: disk: gone\n")


class TestHelp:
    @pytest.mark.parametrize("arguments", [["-h"], ["train", "--help"], ["recipes", "-h"]])
    def test_help_starts_with_the_usage(self, arguments: list[str], capsys: Captured) -> None:
        assert main(arguments) == 0
        assert capsys.readouterr().out.startswith("Usage: finetune")

    def test_every_command_takes_json_and_debug(self) -> None:
        commands: dict[str, Any] = {**cli.commands, **dict(leaf_commands())}
        assert len(commands) == 25
        for name, command in commands.items():
            options = {text for parameter in command.params for text in parameter.opts}
            assert "--debug" in options, name
            assert "--json" in options or isinstance(command, click.Group), name
            assert command.help, name

    @pytest.mark.parametrize("group", ["", "recipes", "data"])
    def test_each_command_has_one_line_that_is_not_cut(self, group: str, capsys: Captured) -> None:
        lines = help_text(group, capsys).splitlines()
        assert max(map(len, lines)) <= 80
        commands = cli.commands[group].commands if group else cli.commands  # type: ignore[attr-defined]
        for name, command in commands.items():
            sentence = command.help.partition("\n")[0]
            assert sentence.endswith("."), name
            (line,) = [line for line in lines if line.startswith(f"  {name} ")]
            assert line.split(maxsplit=1) == [name, sentence]

    def test_commands_are_listed_in_sections(self, capsys: Captured) -> None:
        lines = help_text("", capsys).splitlines()
        titles = ["Train", "Use a model", "Inspect", "Publish", "Reproduce"]
        assert [line for line in lines if line[:-1] in titles] == [f"{title}:" for title in titles]
        listed = [command.name for commands in SECTIONS.values() for command in commands]
        assert len(listed) == len(set(listed))
        assert set(listed) == set(cli.commands)
        names = [line.split()[0] for line in lines[lines.index("Train:") :] if line[:2] == "  "]
        assert names == listed

    @pytest.mark.parametrize("name", dict(leaf_commands()))
    def test_each_command_has_one_valid_example(self, name: str, capsys: Captured) -> None:
        text = help_text(name, capsys)
        _, _, example = text.partition("Example:\n")
        (line,) = example.splitlines()
        words = shlex.split(line.partition(" > ")[0])
        start = ["finetune", *name.split()]
        assert words[: len(start)] == start
        command = dict(leaf_commands())[name]
        parser = command.make_parser(click.Context(command))
        values, rest, _ = parser.parse_args(words[len(start) :])  # raises for an unknown option
        assert rest == []
        required = [each.name for each in command.params if each.required]
        assert all(values.get(each) for each in required)
        for word in words:
            if word.endswith(".yaml") and word.startswith("recipes/"):
                assert (REPOSITORY / word).is_file()


class TestUsage:
    @pytest.mark.parametrize(
        "arguments, named",
        [
            (["trian"], "'train'"),
            (["recipes", "chek"], "'check'"),
            (["data", "inf"], "'info'"),
            (["qqq"], "'qqq'"),
            (["train"], "'RECIPE|SOURCE'"),
            (["train", "x.yaml", "--resum"], "--resume"),
            (["--nonsense"], "--nonsense"),
            (["predict", "model"], "'PATH...'"),
            (["predict", "model", "x.png", "--top-k", "0"], "--top-k"),
        ],
    )
    def test_usage_errors_exit_with_2(
        self, arguments: list[str], named: str, workspace: Path, capsys: Captured
    ) -> None:
        Path("model").mkdir()
        assert main(arguments) == 2
        captured = capsys.readouterr()
        assert captured.out == ""
        assert named in captured.err
        assert main([*arguments, "--json"]) == 2
        assert json.loads(capsys.readouterr().out)["code"] == "usage"

    def test_no_command_prints_the_help_and_exits_with_2(self, capsys: Captured) -> None:
        assert main([]) == 2
        captured = capsys.readouterr()
        assert captured.out == ""
        assert "Usage: finetune" in captured.err

    def test_options_may_be_anywhere(self, workspace: Path, capsys: Captured) -> None:
        assert main(["recipes", "--debug", "check", "--json", "mine.yaml"]) == 0
        assert json.loads(capsys.readouterr().out)[0]["valid"] is True

    @pytest.mark.parametrize("out", ["", " "])
    def test_an_empty_output_path_is_refused(
        self, out: str, workspace: Path, capsys: Captured
    ) -> None:
        assert main(["train", "mine.yaml", "--out", out, "--json"]) == 2
        error = json.loads(capsys.readouterr().out)
        assert error["code"] == "recipe.wrong_value"
        assert "--out" in error["error"]
