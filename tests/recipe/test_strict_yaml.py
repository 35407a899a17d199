"""YAML of recipes: files, error locations and rejected content."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from recipe_texts import BASE_RECIPE, recipe_error
from refusals import refused

from finetune.recipe.load import load_recipe, parse_recipe


class TestFiles:
    def test_error_shows_the_path_as_given(self, tmp_path: Path) -> None:
        path = tmp_path / "r.yaml"
        path.write_text(BASE_RECIPE.replace("lr:", "lrr:"))
        with refused("recipe.unknown_key", f"{path}:4: optim.lrr: "):
            load_recipe(path)

    def test_missing_file_suggests_a_fix(self, tmp_path: Path) -> None:
        (tmp_path / "quickstart.yaml").write_text(BASE_RECIPE)
        with refused("recipe.not_found", f"'{tmp_path}/quickstart.yaml'"):
            load_recipe(tmp_path / "quikstart.yaml")
        with refused("recipe.not_found", "finetune recipes list"):
            load_recipe(tmp_path / "nowhere" / "x.yaml")

    def test_folder_suggests_a_recipe_inside(self, tmp_path: Path) -> None:
        (tmp_path / "a.yaml").write_text(BASE_RECIPE)
        with refused("recipe.not_a_recipe", f"{tmp_path}: ", f"{tmp_path}/a.yaml"):
            load_recipe(tmp_path)

    @pytest.mark.parametrize(
        "path,code,expected",
        [
            ("", "not_a_recipe", "''"),
            ("https://example.org/r.yaml", "not_a_recipe", "https://example.org/r.yaml"),
            ("file:///r.yaml", "not_a_recipe", "file:///r.yaml"),
            ("s3://a/b", "not_a_recipe", "s3://a/b"),
            ("/dev/zero", "not_a_recipe", "/dev/zero"),  # an endless device
            ("a\0b", "unreadable", r"a\x00b"),
            ("x" * 5000, "unreadable", "x" * 200 + "…"),
            ("/dev/null/r.yaml", "unreadable", "Not a directory"),
        ],
    )
    def test_paths_that_are_no_recipe_files(self, path: str, code: str, expected: str) -> None:
        with refused(f"recipe.{code}", expected):
            load_recipe(path)

    @pytest.mark.parametrize(
        "make,code",
        [
            (os.mkfifo, "not_a_recipe"),  # opening a pipe would block
            (lambda path: path.symlink_to("gone"), "not_found"),
            (lambda path: path.symlink_to(path.name), "unreadable"),
            (lambda path: path.write_bytes(b"0" * 1_000_001), "not_a_recipe"),
            (lambda path: path.write_bytes(b"\x89PNG\r\n\x1a\n" + bytes(50)), "syntax"),
            (lambda path: path.write_bytes(b"# caf\xe9\n"), "syntax"),
            (lambda path: path.write_text(BASE_RECIPE, encoding="utf-16"), "syntax"),
            (lambda path: path.write_text(BASE_RECIPE, encoding="utf-16-le"), "syntax"),
        ],
        ids=["pipe", "broken link", "link to itself", "large", "image", "latin-1", "utf-16", "le"],
    )
    def test_files_that_are_no_recipes(
        self, make: Callable[[Path], object], code: str, tmp_path: Path
    ) -> None:
        make(tmp_path / "r.yaml")
        with refused(f"recipe.{code}", tmp_path / "r.yaml"):
            load_recipe(tmp_path / "r.yaml")

    def test_invalid_utf8_names_the_line_and_the_byte(self, tmp_path: Path) -> None:
        (tmp_path / "r.yaml").write_bytes(b"model:\n  name: caf\xe9\n")
        with refused("recipe.syntax", f"{tmp_path}/r.yaml:2: ", "0xe9"):
            load_recipe(tmp_path / "r.yaml")


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
            "!!int fast",  # not the type of its value
        ],
    )
    def test_tags_are_rejected(self, tag: str) -> None:
        line = recipe_error("syntax", BASE_RECIPE.replace("vit_tiny", tag))
        assert line.startswith("r.yaml:1: model.name: ")
        assert " tag" in line

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

    @pytest.mark.parametrize(
        "text", ["model: " + "[" * 5000, "model: " + "{a: " * 5000, "[" * 100_000]
    )
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
            ("model: \x07\n", "syntax", "r.yaml:1: character 0x07"),
            (BASE_RECIPE.replace('digits"', "digits"), "syntax", "r.yaml:"),  # an open quote
            ("%TAG ! tag:x,2000:\n--- !a\nmodel: 1\n", "syntax", "r.yaml: the tag tag:x,2000:a"),
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
