"""Types of recipe values: lenient about number formats, strict about everything else."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, ClassVar

import pytest
import yaml
from recipe_texts import BASE_RECIPE, add_line, recipe_error, recipe_errors

from finetune.recipe import strict_yaml as recipe_yaml
from finetune.recipe.load import parse_recipe


class TestValidValues:
    @pytest.mark.parametrize("text", ["1e-3", "1E-3", "0.001", ".001", "'1e-3'", "1.0e-3", "+1e-3"])
    def test_float_formats(self, text: str) -> None:
        recipe = parse_recipe(BASE_RECIPE.replace("1e-3", text))
        assert recipe.optim.lr == 0.001
        assert isinstance(recipe.optim.lr, float)

    @pytest.mark.parametrize("text", ["10000", "1e4", "10_000", "'10000'", "10000.0"])
    def test_integer_formats(self, text: str) -> None:
        steps = parse_recipe(BASE_RECIPE.replace("100\n", f"{text}\n")).optim.steps
        assert steps == 10000
        assert isinstance(steps, int)

    def test_free_args_keep_their_types(self) -> None:
        args = "{eps: 1e-8, note: '1e-8', on: no}".replace("on:", "amsgrad:")
        recipe = parse_recipe(add_line(f"args: {args}", section="optim"))
        assert recipe.optim.args == {"eps": 1e-8, "note": "1e-8", "amsgrad": False}

    @pytest.mark.parametrize("value", ["auto", True, False])
    def test_compile_accepts_auto_and_booleans(self, value: Any) -> None:
        line = f"compile: {json.dumps(value)}"
        assert parse_recipe(add_line(line, section="model")).model.compile == value
        wrong = recipe_error("wrong_value", add_line("compile: maybe", section="model"))
        assert "'auto'" in wrong
        assert "'maybe'" in wrong

    @pytest.mark.parametrize("text", ["2024-01-01", "1:30", "0o17", "hf-hub:a/b@c", "a#b"])
    def test_yaml_1_1_special_values_stay_text(self, text: str) -> None:
        assert parse_recipe(BASE_RECIPE.replace("vit_tiny", text)).model.name == text

    @pytest.mark.parametrize(
        "value,expected",
        [("48", 48), ("[32, 48]", (32, 48)), ("null", None), ("'48'", 48), ("4.8e1", 48)],
    )
    def test_image_sizes(self, value: str, expected: Any) -> None:
        recipe = parse_recipe(add_line(f"image_size: {value}", section="model"))
        assert recipe.model.image_size == expected

    @pytest.mark.parametrize(
        "value,expected", [("none", "none"), ("backbone", "backbone"), ("3", 3), ("'3'", 3)]
    )
    def test_freeze(self, value: str, expected: Any) -> None:
        recipe = parse_recipe(add_line(f"freeze: {value}", section="model"))
        assert recipe.model.freeze == expected


class TestBooleansAndWrongValues:
    @pytest.mark.parametrize("word", ["no", "yes", "on", "Off", "true"])
    def test_boolean_word_for_a_text_key_is_an_error(self, word: str) -> None:
        line = recipe_error("wrong_value", BASE_RECIPE.replace("vit_tiny", word))
        assert line.startswith("r.yaml:1: model.name: expected text, ")
        assert line.endswith(f"'{word}'")
        assert parse_recipe(BASE_RECIPE.replace("vit_tiny", f"'{word}'")).model.name == word

    @pytest.mark.parametrize("word,expected", [("no", False), ("yes", True), ("true", True)])
    def test_boolean_words_for_a_boolean_key(self, word: str, expected: bool) -> None:
        recipe = parse_recipe(add_line(f"pretrained: {word}", section="model"))
        assert recipe.model.pretrained is expected

    @pytest.mark.parametrize(
        "line,expected,got",
        [
            # (section.key: value, part of the expectation, the value as shown)
            ("model.name: 123", "text", "123; quote it to mean text: '123'"),
            ("model.name: [a]", "text", "['a']"),
            ("model.name: ''", "text", "''"),
            ("model.name:", "text", "nothing"),
            ("model.pretrained: 1", "true or false", "1"),
            ("model.pretrained: 'false'", "true or false", "'false'"),
            ("model.image_size: 0", "[height, width]", "0"),
            ("model.image_size: [32]", "[height, width]", "[32]"),
            ("model.image_size: true", "[height, width]", "true, which YAML reads as a boolean"),
            ("model.freeze: no", "'none', 'backbone'", "no, which YAML reads as a boolean; quote"),
            ("model.freeze: -1", "'none', 'backbone'", "-1"),
            ("model.posemb: papre", "'paper' or 'timm'", "'papre'; did you mean 'paper'?"),
            ("model.dropout: 1", "below 1", "1"),
            ("model.args: [3]", "a mapping", "[3]"),
            ("model.args: {a: [.nan]}", "finite numbers", "a mapping"),
            ("data.batch_size: 0", "at least 1", "0"),
            ("data.batch_size: yes", "whole number", "yes, which YAML reads as a boolean"),
            ("data.batch_size: 2.5", "whole number", "2.5"),
            ("data.batch_size: 010", "whole number", "'010'"),
            ("data.batch_size: many", "whole number", "'many'"),
            ("data.batch_size: 1" + "0" * 30, "at most 9007199254740992", "1000"),
            ("data.batch_size: 1" + "0" * 5000, "whole number", "'1000"),
            ("data.batch_size:", "whole number", "nothing"),
            ("data.mean: [0.5, 0.5]", "list of 3", "[0.5, 0.5]"),
            ("data.mean: [1, 128, 1]", "at most 1", "128"),
            ("data.std: [0, 1, 1]", "above 0", "0"),
            ("data.crop_pct: 1.5", "at most 1", "1.5"),
            ("data.keep: disk", "'auto', 'device', 'memory' or 'none'", "'disk'"),
            ("optim.lr: -1e-3", "above 0", "-0.001"),
            ("optim.lr: .nan", "finite number", "nan"),
            ("optim.lr: -.inf", "finite number", "-inf"),
            ("optim.lr: 1e999", "finite number", "inf"),
            ("optim.lr: fast", "number", "'fast'"),
            ("optim.lr: nan", "number", "'nan'"),
            ("optim.lr: {a: 1}", "number", "a mapping"),
            ("optim.lr: true", "number", "true"),
            ("optim.steps: 0", "at least 1", "0"),
            ("optim.betas: 0.9", "list of 2", "0.9"),
            ("optim.betas: [0.9, 1]", "below 1", "1"),
            ("optim.clip_norm: 0", "above 0", "0"),
            ("run.seed: -1", "at least 0", "-1"),
            ("run.seed: 4294967296", "below 4294967296", "4294967296"),
            ("run.trackers: 3", "list", "3"),
            ("run.trackers: [on]", "text", "on"),
            ("run.best: test.top1", "'val.micro_f1' or 'last'", "'test.top1'"),
        ],
    )
    def test_error_states_key_expectation_and_value(
        self, line: str, expected: str, got: str
    ) -> None:
        section, rest = line.split(".", 1)
        key, _, value = rest.partition(":")
        document = yaml.safe_load(BASE_RECIPE)
        for name in document:
            document[name].pop(key, None) if name == section else None
        head = "".join(
            f"{name}: {json.dumps(values)}\n"
            for name, values in document.items()
            if name != section
        )
        other_keys = "".join(
            f"  {name}: {json.dumps(item)}\n" for name, item in document.get(section, {}).items()
        )
        message = recipe_error("wrong_value", f"{head}{section}:\n{other_keys}  {key}:{value}\n")
        number = (head + other_keys).count("\n") + 2
        location, _, rest = message.partition(": expected ")
        assert re.fullmatch(rf"r.yaml:{number}: {section}\.{key}(\[\d\])?", location)
        assert expected in rest.partition(", got ")[0]
        assert rest.partition(", got ")[2].startswith(got)


class TestTransformSpecs:
    def test_transform_errors_are_recipe_errors(self) -> None:
        text = add_line("train: resise | flip(q=1)", section="data")
        lines = recipe_errors("unknown_name", text)
        assert len(lines) == 2
        assert all(re.match(r"r\.yaml:\d: data\.train: ", line) for line in lines)
        assert "'resize'" in lines[0]

    def test_eval_transforms_must_be_deterministic(self) -> None:
        line = recipe_error("conflict", add_line("eval: resize | flip", section="data"))
        assert " data.eval: flip " in line
        parse_recipe(add_line("train: resize | flip", section="data"))


class TestRenames:
    RENAME: ClassVar = {r"^net\.": "", "[ab]{2}": r"\g<0>x", "_bn(\\d)": r"bn\1"}

    def test_rename_file_equals_inline_mapping(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(tmp_path)
        (tmp_path / "names.yaml").write_text(recipe_yaml.dump_yaml(self.RENAME))
        from_file = parse_recipe(BASE_RECIPE, overrides=["model.rename=names.yaml"])
        assert from_file.model.rename == self.RENAME
        assert list(from_file.model.rename) == list(self.RENAME)
        # a run's recipe contains the patterns and no longer needs the file
        (tmp_path / "names.yaml").unlink()
        reloaded = parse_recipe(from_file.to_yaml())
        assert reloaded == from_file
        assert list(reloaded.model.rename) == list(self.RENAME)

    @pytest.mark.parametrize(
        "value, code, expected_text",
        [
            ("names.yaml", "not_found", "names.yaml"),
            ("{'(': a}", "wrong_value", "'(' with 'a'"),
            (r"{'a': '\1'}", "wrong_value", "group reference 1"),
            (r"{'a': '\g<x>'}", "wrong_value", "group name 'x'"),
            ("{a: 1}", "wrong_value", "a mapping of regular expressions"),
            ("3", "wrong_value", "a mapping of regular expressions"),
        ],
    )
    def test_invalid_renames(
        self,
        value: str,
        code: str,
        expected_text: str,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        monkeypatch.chdir(tmp_path)
        text = recipe_error(code, BASE_RECIPE, f"model.rename={value}")
        assert expected_text in text
        assert "model.rename: " in text
