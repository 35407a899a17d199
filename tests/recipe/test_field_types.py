"""Types of recipe values: lenient about number formats, strict about everything else."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, ClassVar

import pytest
from recipe_texts import BASE_RECIPE, recipe_error, recipe_errors

from finetune.recipe import strict_yaml as recipe_yaml
from finetune.recipe.load import parse_recipe

# {section.key: [(value, part of the expectation, start of the value as shown), …]}
WRONG_VALUES: dict[str, list[tuple[str, str, str]]] = {
    "model.name": [
        ("123", "text", "123; quote it to mean text: '123'"),
        ("[a]", "text", "['a']"),
        ("''", "text", "''"),
        ("", "text", "nothing"),
    ],
    "model.pretrained": [("1", "true or false", "1"), ("'false'", "true or false", "'false'")],
    "model.image_size": [
        ("0", "[height, width]", "0"),
        ("[32]", "[height, width]", "[32]"),
        ("[1, 2, 3]", "[height, width]", "[1, 2, 3]"),
        ("true", "[height, width]", "true, which YAML reads as a boolean"),
        ("1000000", "at most 8192 pixels", "1000000"),
    ],
    "model.compile": [("maybe", "'auto'", "'maybe'")],
    "model.sync_bn": [("2", "true or false", "2")],
    "model.freeze": [
        ("no", "'none', 'backbone'", "no, which YAML reads as a boolean; quote"),
        ("-1", "'none', 'backbone'", "-1"),
    ],
    "model.posemb": [("papre", "'paper', 'timm' or 'dinov2'", "'papre'; did you mean 'paper'?")],
    "model.head_init": [("kept", "'keep'", "'kept'; did you mean 'keep'?")],
    "model.dropout": [("1", "below 1", "1")],
    "model.args": [("[3]", "a mapping", "[3]"), ("{a: [.nan]}", "finite numbers", "a mapping")],
    "model.adapter.kind": [("lore", "'lora' or 'dora'", "'lore'; did you mean 'lora'?")],
    "model.adapter.rank": [("0", "at least 1", "0")],
    "model.adapter.targets": [("[]", "at least one", "[]"), ("['(']", "'(' is invalid", "['(']")],
    "model.rename": [
        ("{'(': a}", "'(' with 'a'", "a mapping"),
        (r"{'a': '\1'}", "group reference 1", "a mapping"),
        (r"{'a': '\g<x>'}", "group name 'x'", "a mapping"),
        ("{a: 1}", "a mapping of regular expressions", "a mapping"),
        ("3", "a mapping of regular expressions", "3"),
    ],
    "data.batch_size": [
        ("0", "at least 1", "0"),
        ("yes", "whole number", "yes, which YAML reads as a boolean"),
        ("2.5", "whole number", "2.5"),
        ("010", "whole number", "'010'"),
        ("many", "whole number", "'many'"),
        ("1" + "0" * 30, "at most 9007199254740992", "1000"),
        ("1" + "0" * 5000, "whole number", "'1000"),
        ("", "whole number", "nothing"),
    ],
    "data.mean": [("[0.5, 0.5]", "list of 3", "[0.5, 0.5]"), ("[1, 128, 1]", "at most 1", "128")],
    "data.std": [("[0, 1, 1]", "above 0", "0")],
    "data.crop_pct": [("1.5", "at most 1", "1.5"), ("0", "above 0", "0")],
    "data.val_fraction": [("1", "below 1", "1")],
    "data.keep": [("disk", "'auto', 'device', 'memory' or 'none'", "'disk'")],
    "data.classes": [
        ("['1']", "at least two different", "['1']"),
        ("['1', '1']", "at least two different", "['1', '1']"),
        ("[cat, 7]", "text", "7; quote it to mean text: '7'"),
    ],
    "data.label_column": [("[a]", "at least two", "['a']")],
    "data.sampling": [("sqrt", "'square_root'", "'sqrt'")],
    "data.long_tail": [("0.5", "at least 1", "0.5")],
    "data.train": [("''", "text", "''")],
    "optim.lr": [
        ("-1e-3", "above 0", "-0.001"),
        (".nan", "finite number", "nan"),
        ("-.inf", "finite number", "-inf"),
        ("1e999", "finite number", "inf"),
        ("fast", "number", "'fast'"),
        ("nan", "number", "'nan'"),
        ("0x10", "number", "'0x10'"),
        ("{a: 1}", "number", "a mapping"),
        ("[1]", "number", "[1]"),
        ("true", "number", "true"),
    ],
    "optim.betas": [
        ("0.9", "list of 2", "0.9"),
        ("[0.9, 0.9, 0.9]", "list of 2", "[0.9, 0.9, 0.9]"),
        ("[0.9, 1]", "below 1", "1"),
    ],
    "optim.schedule": [("cosin", "'cosine'", "'cosin'; did you mean 'cosine'?")],
    "optim.class_weights": [
        ("{}", "balanced", "a mapping"),
        ("balance", "balanced", "'balance'"),
    ],
    "optim.asymmetric_loss.clip": [("1", "below 1", "1")],
    "distill.kind": [("logit", "'logits' or 'features'", "'logit'; did you mean 'logits'?")],
    "run.seed": [("-1", "at least 0", "-1"), ("4294967296", "below 4294967296", "4294967296")],
    "run.threads": [("1000000", "at most 1024", "1000000")],
    "run.timeout_seconds": [("0", "above 0", "0")],
    "run.trackers": [("3", "list", "3"), ("[on]", "text", "true, which YAML reads")],
    "run.best": [("test.top1", "'val.micro_f1' or 'last'", "'test.top1'")],
}


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
        args = "{eps: 1e-8, note: '1e-8', amsgrad: no}"
        recipe = parse_recipe(f"{BASE_RECIPE}  args: {args}\n")
        assert recipe.optim.args == {"eps": 1e-8, "note": "1e-8", "amsgrad": False}

    @pytest.mark.parametrize("text", ["2024-01-01", "1:30", "0o17", "hf-hub:a/b@c", "a#b"])
    def test_yaml_1_1_special_values_stay_text(self, text: str) -> None:
        assert parse_recipe(BASE_RECIPE.replace("vit_tiny", text)).model.name == text

    @pytest.mark.parametrize(
        "key,value,expected",
        [
            ("image_size", "48", 48),
            ("image_size", "[32, 48]", (32, 48)),
            ("image_size", "null", None),
            ("image_size", "'48'", 48),
            ("image_size", "4.8e1", 48),
            ("freeze", "none", "none"),
            ("freeze", "backbone", "backbone"),
            ("freeze", "'3'", 3),
            ("compile", "auto", "auto"),
            ("compile", "true", True),
            ("pretrained", "no", False),
            ("pretrained", "yes", True),
        ],
    )
    def test_values_of_the_model_section(self, key: str, value: str, expected: Any) -> None:
        recipe = parse_recipe(BASE_RECIPE.replace("vit_tiny", f"vit_tiny, {key}: {value}"))
        assert getattr(recipe.model, key) == expected


class TestWrongValues:
    @pytest.mark.parametrize("word", ["no", "yes", "on", "Off", "true"])
    def test_boolean_word_for_a_text_key_is_an_error(self, word: str) -> None:
        line = recipe_error("wrong_value", BASE_RECIPE.replace("vit_tiny", word))
        assert line.startswith("r.yaml:1: model.name: expected text, ")
        assert line.endswith(f"'{word}'")
        assert parse_recipe(BASE_RECIPE.replace("vit_tiny", f"'{word}'")).model.name == word

    @pytest.mark.parametrize(
        "key,value,expected,got",
        [(key, *row) for key, rows in WRONG_VALUES.items() for row in rows],
        ids=str,
    )
    def test_error_states_key_expectation_and_value(
        self, key: str, value: str, expected: str, got: str
    ) -> None:
        teacher = ["distill.teacher=x"] * key.startswith("distill")
        message = recipe_error("wrong_value", BASE_RECIPE, *teacher, f"{key}={value}")
        location, _, rest = message.partition(": expected ")
        assert re.fullmatch(re.escape(f"override '{key}={value}': {key}") + r"(\[\d\])?", location)
        expectation, _, shown = rest.rpartition(", got ")
        assert expected in expectation
        assert shown.startswith(got)

    @pytest.mark.parametrize("value", ["-2", ".nan", "many"])
    def test_a_class_weight_is_named_by_its_class(self, value: str) -> None:
        override = f"optim.class_weights={{'1': {value}}}"
        assert " class '1'" in recipe_error("wrong_value", BASE_RECIPE, override)

    @pytest.mark.parametrize("name", ["net", "a/b/c", "a/", "/b", "a b/c", "https://x/a/b", "-a/b"])
    def test_push_to_requires_owner_and_name(self, name: str) -> None:
        assert "owner/name" in recipe_error("wrong_value", BASE_RECIPE, f"run.push_to={name}")


class TestTransformSpecs:
    def test_reports_each_error_of_a_spec(self) -> None:
        text = BASE_RECIPE.replace('digits"', 'digits", train: resise | flip(q=1)')
        lines = recipe_errors("unknown_name", text)
        assert len(lines) == 2
        assert all(line.startswith("r.yaml:2: data.train: ") for line in lines)
        assert "'resize'" in lines[0]

    @pytest.mark.parametrize(
        "override,code",
        [
            ("data.eval=resize | flip", "conflict"),  # evaluation transforms are deterministic
            ("data.train=resize | corrupt('noise', 3)", "conflict"),
            ("data.eval=resize | corrupt('noise', 3)", "conflict"),
            ("data.train=rotate", "missing_key"),
            ("data.train=__import__('os').system('id')", "syntax"),
            (f"data.train=resize({'(' * 900}1{')' * 900})", "syntax"),
            (f"data.train={'flip | ' * 999}flip", "wrong_value"),
        ],
    )
    def test_invalid_specs(self, override: str, code: str) -> None:
        line = recipe_error(code, BASE_RECIPE, override).removeprefix(f"override '{override}'")
        assert line.startswith(f": {override.partition('=')[0]}: ")


class TestRenameFiles:
    RENAME: ClassVar = {r"^net\.": "", "[ab]{2}": r"\g<0>x", "_bn(\\d)": r"bn\1"}

    @pytest.fixture(autouse=True)
    def in_tmp_path(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)

    def test_rename_file_equals_inline_mapping(self) -> None:
        Path("names.yaml").write_text(recipe_yaml.dump_yaml(self.RENAME))
        from_file = parse_recipe(BASE_RECIPE, overrides=["model.rename=names.yaml"])
        assert from_file.model.rename == self.RENAME
        assert list(from_file.model.rename) == list(self.RENAME)
        # a run's recipe contains the patterns and no longer needs the file
        Path("names.yaml").unlink()
        reloaded = parse_recipe(from_file.to_yaml())
        assert reloaded == from_file
        assert list(reloaded.model.rename) == list(self.RENAME)

    @pytest.mark.parametrize(
        "content,code,expected",
        [
            (None, "not_found", "names.yaml"),
            (b"", "not_a_recipe", "names.yaml"),
            (b"[a, b]", "not_a_recipe", "names.yaml"),
            (b"a: b\na: c", "duplicate_key", "names.yaml:2"),
            (b"\xff\x00", "syntax", "names.yaml:1"),
        ],
    )
    def test_invalid_rename_files(self, content: bytes | None, code: str, expected: str) -> None:
        if content is not None:
            Path("names.yaml").write_bytes(content)
        line = recipe_error(code, BASE_RECIPE, "model.rename=names.yaml")
        assert "model.rename: " in line
        assert expected in line.partition("model.rename: ")[2]
