"""The values of a recipe: lax about how a number is written, strict about the rest."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, ClassVar

import pytest
import yaml
from recipe_texts import BASE, problem, problems, with_line

from finetune.recipe import yaml as recipe_yaml
from finetune.recipe.load import parse_recipe


class TestGoodValues:
    @pytest.mark.parametrize("text", ["1e-3", "1E-3", "0.001", ".001", "'1e-3'", "1.0e-3", "+1e-3"])
    def test_a_number_is_a_number_however_written(self, text: str) -> None:
        recipe = parse_recipe(BASE.replace("1e-3", text))
        assert recipe.optim.lr == 0.001
        assert isinstance(recipe.optim.lr, float)

    @pytest.mark.parametrize("text", ["10000", "1e4", "10_000", "'10000'", "10000.0"])
    def test_a_whole_number_is_an_int(self, text: str) -> None:
        steps = parse_recipe(BASE.replace("100\n", f"{text}\n")).optim.steps
        assert steps == 10000
        assert isinstance(steps, int)

    def test_free_arguments_keep_their_kinds(self) -> None:
        args = "{eps: 1e-8, note: '1e-8', on: no}".replace("on:", "amsgrad:")
        recipe = parse_recipe(with_line(f"args: {args}", section="optim"))
        assert recipe.optim.args == {"eps": 1e-8, "note": "1e-8", "amsgrad": False}

    @pytest.mark.parametrize("value", ["auto", True, False])
    def test_compilation_can_be_left_to_the_run(self, value: Any) -> None:
        line = f"compile: {json.dumps(value)}"
        assert parse_recipe(with_line(line, section="model")).model.compile == value
        wrong = problems(with_line("compile: maybe", section="model"))
        assert len(wrong) == 1
        assert "expected 'auto', true or false, got 'maybe'" in wrong[0]

    @pytest.mark.parametrize("text", ["2024-01-01", "1:30", "0o17", "hf-hub:a/b@c", "a#b"])
    def test_what_yaml_1_1_would_change_stays_text(self, text: str) -> None:
        assert parse_recipe(BASE.replace("vit_tiny", text)).model.name == text

    @pytest.mark.parametrize(
        "value,expected",
        [("48", 48), ("[32, 48]", (32, 48)), ("null", None), ("'48'", 48), ("4.8e1", 48)],
    )
    def test_image_sizes(self, value: str, expected: Any) -> None:
        recipe = parse_recipe(with_line(f"image_size: {value}", section="model"))
        assert recipe.model.image_size == expected

    @pytest.mark.parametrize(
        "value,expected", [("none", "none"), ("backbone", "backbone"), ("3", 3), ("'3'", 3)]
    )
    def test_freezing(self, value: str, expected: Any) -> None:
        recipe = parse_recipe(with_line(f"freeze: {value}", section="model"))
        assert recipe.model.freeze == expected


class TestValues:
    @pytest.mark.parametrize("word", ["no", "yes", "on", "Off", "true"])
    def test_booleans_where_text_is_expected(self, word: str) -> None:
        line = problem(BASE.replace("vit_tiny", word))
        assert line == (
            f"r.yaml:1: model.name: expected text, got {word}, which YAML reads as a boolean; "
            f"quote it to mean text: '{word}'"
        )
        assert parse_recipe(BASE.replace("vit_tiny", f"'{word}'")).model.name == word

    @pytest.mark.parametrize("word,expected", [("no", False), ("yes", True), ("true", True)])
    def test_booleans_where_they_are_expected(self, word: str, expected: bool) -> None:
        recipe = parse_recipe(with_line(f"pretrained: {word}", section="model"))
        assert recipe.model.pretrained is expected

    @pytest.mark.parametrize(
        "line,said",
        [
            # (section.key: value, what the message says)
            ("model.name: 123", "expected text, got 123; quote it to mean text: '123'"),
            ("model.name: [a]", "expected text, got ['a']"),
            ("model.name: ''", "expected text, got ''"),
            ("model.name:", "expected text, got nothing"),
            ("model.pretrained: 1", "expected true or false, got 1"),
            ("model.pretrained: 'false'", "expected true or false, got 'false'"),
            ("model.image_size: 0", "expected pixels: a whole number above 0, or a list"),
            ("model.image_size: [32]", "[height, width], got [32]"),
            ("model.image_size: true", "got true, which YAML reads as a boolean"),
            ("model.freeze: no", "expected 'none', 'backbone' or a number of blocks, got no"),
            ("model.freeze: -1", "number of blocks, got -1"),
            (
                "model.posemb: papre",
                "expected 'paper' or 'timm', got 'papre'; did you mean 'paper'?",
            ),
            ("model.dropout: 1", "expected a number below 1, got 1"),
            ("model.args: [3]", "expected a mapping of keyword arguments, got [3]"),
            ("model.args: {a: [.nan]}", "expected arguments that are finite numbers"),
            ("data.batch_size: 0", "expected a number of at least 1, got 0"),
            (
                "data.batch_size: yes",
                "expected a whole number, got yes, which YAML reads as a boolean",
            ),
            ("data.batch_size: 2.5", "expected a whole number, got 2.5"),
            ("data.batch_size: 010", "expected a whole number, got '010'"),
            ("data.batch_size: many", "expected a whole number, got 'many'"),
            ("data.batch_size: 1" + "0" * 30, "of at most 9007199254740992"),
            ("data.batch_size: 1" + "0" * 5000, "expected a whole number"),
            ("data.batch_size:", "expected a whole number, got nothing"),
            ("data.mean: [0.5, 0.5]", "expected a list of 3 numbers, each between 0 and 1"),
            ("data.mean: [1, 128, 1]", "mean[1]: expected a number of at most 1, got 128"),
            ("data.std: [0, 1, 1]", "std[0]: expected a number above 0, got 0"),
            ("data.crop_pct: 1.5", "expected a number of at most 1, got 1.5"),
            ("data.keep: disk", "expected 'auto', 'device', 'memory' or 'none', got 'disk'"),
            ("optim.lr: -1e-3", "expected a number above 0, got -0.001"),
            ("optim.lr: .nan", "expected a finite number, got nan"),
            ("optim.lr: -.inf", "expected a finite number, got -inf"),
            ("optim.lr: 1e999", "expected a finite number, got inf"),
            ("optim.lr: fast", "expected a number, got 'fast'"),
            ("optim.lr: nan", "expected a number, got 'nan'"),
            ("optim.lr: {a: 1}", "expected a number, got a mapping"),
            ("optim.lr: true", "expected a number, got true"),
            ("optim.steps: 0", "expected a number of at least 1, got 0"),
            ("optim.betas: 0.9", "expected a list of 2 numbers, got 0.9"),
            ("optim.betas: [0.9, 1]", "betas[1]: expected a number below 1, got 1"),
            ("optim.clip_norm: 0", "expected a number above 0, got 0"),
            ("run.seed: -1", "expected a number of at least 0, got -1"),
            ("run.seed: 4294967296", "expected a number below 4294967296"),
            ("run.trackers: tensorboard", "expected a list, got 'tensorboard'"),
            ("run.trackers: [on]", "trackers[0]: expected text, got on"),
            ("run.best: test.top1", "expected 'val.top1', 'val.top5' or 'val.loss'"),
        ],
    )
    def test_wrong_values_name_key_expectation_and_value(self, line: str, said: str) -> None:
        section, rest = line.split(".", 1)
        key, _, value = rest.partition(":")
        document = yaml.safe_load(BASE)
        for name in document:
            document[name].pop(key, None) if name == section else None
        head = "".join(
            f"{name}: {json.dumps(values)}\n"
            for name, values in document.items()
            if name != section
        )
        kept = "".join(
            f"  {name}: {json.dumps(item)}\n" for name, item in document.get(section, {}).items()
        )
        found = problem(f"{head}{section}:\n{kept}  {key}:{value}\n")
        number = (head + kept).count("\n") + 2
        assert found.startswith(f"r.yaml:{number}: {section}.{key}")
        assert said in found


class TestPipelines:
    def test_problems_of_a_sentence_are_problems_of_the_recipe(self) -> None:
        lines = problems(with_line("train: resise | flip(q=1)", section="data"))
        assert len(lines) == 2
        assert all(re.match(r"r\.yaml:\d: data\.train: ", line) for line in lines)
        assert "'resize'" in lines[0]

    def test_evaluation_is_not_random(self) -> None:
        assert "flip is random" in problem(with_line("eval: resize | flip", section="data"))
        parse_recipe(with_line("train: resize | flip", section="data"))


class TestRenames:
    RENAME: ClassVar = {r"^net\.": "", "[ab]{2}": r"\g<0>x", "_bn(\\d)": r"bn\1"}

    def test_a_mapping_in_the_recipe_and_its_file_are_the_same(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(tmp_path)
        (tmp_path / "names.yaml").write_text(recipe_yaml.dump(self.RENAME))
        by_file = parse_recipe(BASE, overrides=["model.rename=names.yaml"])
        assert by_file.model.rename == self.RENAME
        assert list(by_file.model.rename) == list(self.RENAME)
        # a run's recipe holds the patterns and needs the file no more
        (tmp_path / "names.yaml").unlink()
        again = parse_recipe(by_file.to_yaml())
        assert again == by_file
        assert list(again.model.rename) == list(self.RENAME)

    @pytest.mark.parametrize(
        "value, said",
        [
            ("names.yaml", "names.yaml: no such file"),
            ("{'(': a}", "'(' with 'a' is none: missing ), unterminated subpattern"),
            (r"{'a': '\1'}", "invalid group reference 1"),
            (r"{'a': '\g<x>'}", "unknown group name 'x'"),
            ("{a: 1}", "expected a mapping of regular expressions"),
            ("3", "expected a mapping of regular expressions"),
        ],
    )
    def test_what_is_none(
        self, value: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(tmp_path)
        text = problem(BASE, f"model.rename={value}")
        assert said in text
        assert "model.rename: " in text
