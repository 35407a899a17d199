"""YAML of recipes: files, error locations and rejected content."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from recipe_texts import BASE_RECIPE, recipe_error
from refusals import refused

from finetune.recipe.load import load_recipe, parse_recipe


class TestFiles:
    @staticmethod
    def assert_load_error(path: str | Path, code: str, *expected: object) -> None:
        with refused(f"recipe.{code}", *expected):
            load_recipe(path)

    def test_error_shows_the_path_as_given(self, tmp_path: Path) -> None:
        path = tmp_path / "r.yaml"
        path.write_text(BASE_RECIPE.replace("lr:", "lrr:"))
        self.assert_load_error(path, "unknown_key", f"{path}:4: optim.lrr: ")

    def test_missing_file_suggests_a_fix(self, tmp_path: Path) -> None:
        (tmp_path / "quickstart.yaml").write_text(BASE_RECIPE)
        self.assert_load_error(
            tmp_path / "quikstart.yaml", "not_found", f"'{tmp_path}/quickstart.yaml'"
        )
        self.assert_load_error(
            tmp_path / "nowhere" / "x.yaml", "not_found", "finetune recipes list"
        )

    def test_folder_suggests_a_recipe_inside(self, tmp_path: Path) -> None:
        (tmp_path / "a.yaml").write_text(BASE_RECIPE)
        self.assert_load_error(tmp_path, "not_a_recipe", f"{tmp_path}: ", f"{tmp_path}/a.yaml")

    def test_invalid_utf8(self, tmp_path: Path) -> None:
        path = tmp_path / "r.yaml"
        path.write_bytes(b"model:\n  name: caf\xe9\n")
        self.assert_load_error(path, "syntax", f"{path}:2: ", "0xe9")

    @pytest.mark.parametrize("url", ["https://example.org/r.yaml", "file:///r.yaml", "s3://a/b"])
    def test_url_is_not_a_recipe(self, url: str) -> None:
        self.assert_load_error(url, "not_a_recipe", url)

    def test_unreadable_paths(self, tmp_path: Path) -> None:
        self.assert_load_error("a\0b", "unreadable", r"a\x00b")
        self.assert_load_error("x" * 5000, "unreadable", "x" * 200 + "…")
        (tmp_path / "file").write_text("")
        self.assert_load_error(tmp_path / "file" / "r.yaml", "unreadable", "Not a directory")
        (tmp_path / "loop.yaml").symlink_to("loop.yaml")
        self.assert_load_error(tmp_path / "loop.yaml", "unreadable", "loop.yaml")

    def test_large_file_is_not_parsed(self, tmp_path: Path) -> None:
        path = tmp_path / "weights.bin"
        path.write_bytes(b"0" * 1_000_001)
        self.assert_load_error(path, "not_a_recipe", "1,000,000 bytes")


class TestHostileYaml:
    BOMB = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
        f"{b}: &{b} [*{a}, *{a}, *{a}, *{a}, *{a}, *{a}, *{a}, *{a}, *{a}]\n"
        for a, b in zip("abcdefghi", "bcdefghij", strict=True)
    )

    @pytest.mark.parametrize("text", [BOMB, "model: *x\n", "model: &m {name: x}\n"])
    def test_anchors_and_aliases_are_rejected_before_expansion(self, text: str) -> None:
        started = time.perf_counter()
        assert recipe_error("syntax", text).startswith("r.yaml:1: anchors and aliases")
        assert time.perf_counter() - started < 1

    @pytest.mark.parametrize(
        "tag",
        [
            "!!python/object/apply:os.system [echo]",
            "!!python/name:os.system x",
            "!!binary aGk=",
            "!!set {a, b}",
            "!custom x",
            "!!timestamp 2024-01-01",
        ],
    )
    def test_tags_are_rejected(self, tag: str) -> None:
        line = recipe_error("syntax", BASE_RECIPE.replace("vit_tiny", tag))
        assert line.startswith("r.yaml:1: model.name: the tag !")

    def test_tag_on_the_document_is_rejected(self) -> None:
        assert "os.system" in recipe_error("syntax", "!!python/object:os.system {}\n")

    def test_python_tags_execute_nothing(self, tmp_path: Path) -> None:
        created = tmp_path / "created"
        tag = f"!!python/object/apply:os.mkdir ['{created}']"
        assert recipe_error("syntax", BASE_RECIPE.replace("vit_tiny", tag))
        assert recipe_error("not_a_recipe", f"{tag}\n")
        assert parse_recipe(BASE_RECIPE, overrides=[f"model.name={tag}"]).model.name.startswith(
            "!!python"
        )
        assert "os.mkdir" in recipe_error("syntax", BASE_RECIPE, f"model.args={{a: {tag}}}")
        assert not created.exists()

    @pytest.mark.parametrize("text", ["model: " + "[" * 5000, "model: " + "{a: " * 5000])
    def test_deep_nesting_is_rejected(self, text: str) -> None:
        assert recipe_error("syntax", text).startswith("r.yaml:1: more than 20 levels")

    def test_merge_key_is_an_unknown_key(self) -> None:
        assert "run.<<: " in recipe_error("unknown_key", BASE_RECIPE + "run: {<<: {seed: 3}}\n")

    @pytest.mark.parametrize(
        "text,code,expected",
        [
            ("", "not_a_recipe", "r.yaml: "),
            ("# only a comment\n", "not_a_recipe", "r.yaml: "),
            ("null\n", "not_a_recipe", "r.yaml: "),
            ("- a\n", "not_a_recipe", "r.yaml:1: "),
            ("hello\n", "not_a_recipe", "r.yaml:1: "),
            ("model: {name: x\n", "syntax", "r.yaml:2: "),
            ("model:\n\tname: x\n", "syntax", "r.yaml:2: "),
            ("model: a: b\n", "syntax", "r.yaml:1: "),
            ("\nmodel: \0\n", "syntax", "r.yaml:2: character 0x00"),
            (BASE_RECIPE + "---\n" + BASE_RECIPE, "syntax", "r.yaml:6: "),
        ],
    )
    def test_texts_that_are_not_recipes(self, text: str, code: str, expected: str) -> None:
        assert recipe_error(code, text).startswith(expected)

    def test_tabs_get_a_hint(self) -> None:
        assert recipe_error("syntax", "model:\n\tname: x\n").endswith("spaces, not tabs")


class TestMappings:
    def test_duplicate_key_reports_both_lines(self) -> None:
        line = recipe_error("duplicate_key", BASE_RECIPE + "  steps: 200\n")
        assert line.startswith("r.yaml:6: optim.steps: ")
        assert "line 5" in line
        assert " model: " in recipe_error("duplicate_key", BASE_RECIPE + "model: {name: x}\n")

    @pytest.mark.parametrize(
        "key,kind",
        [("on", "a boolean"), ("1", "a number"), ("~", "nothing"), ("[a]", "a structure")],
    )
    def test_keys_must_be_text(self, key: str, kind: str) -> None:
        line = recipe_error("syntax", BASE_RECIPE + f"? {key}\n: 3\n")
        assert line.startswith("r.yaml:6: ")
        assert f" {kind}," in line
