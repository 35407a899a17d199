"""The YAML of recipes: files, places, and everything that is refused."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from recipe_texts import BASE, problem
from refusals import refused

from finetune.recipe.load import load_recipe, parse_recipe


class TestFiles:
    @staticmethod
    def refuse(path: str | Path, code: str, *named: object) -> None:
        with refused(f"recipe.{code}", *named):
            load_recipe(path)

    def test_the_file_is_named_as_given(self, tmp_path: Path) -> None:
        path = tmp_path / "r.yaml"
        path.write_text(BASE.replace("lr:", "lrr:"))
        self.refuse(path, "unknown_key", f"{path}:4: optim.lrr: ")

    def test_missing(self, tmp_path: Path) -> None:
        (tmp_path / "quickstart.yaml").write_text(BASE)
        self.refuse(tmp_path / "quikstart.yaml", "not_found", "'quickstart.yaml'")
        self.refuse(tmp_path / "nowhere" / "x.yaml", "not_found", "finetune recipes list")

    def test_a_folder(self, tmp_path: Path) -> None:
        (tmp_path / "a.yaml").write_text(BASE)
        self.refuse(tmp_path, "not_a_recipe", f"{tmp_path}: ", f"{tmp_path}/a.yaml")

    def test_not_utf8(self, tmp_path: Path) -> None:
        path = tmp_path / "r.yaml"
        path.write_bytes(b"model:\n  name: caf\xe9\n")
        self.refuse(path, "syntax", f"{path}:2: ", "0xe9")

    @pytest.mark.parametrize("url", ["https://example.org/r.yaml", "file:///r.yaml", "s3://a/b"])
    def test_a_url(self, url: str) -> None:
        self.refuse(url, "not_a_recipe", url)

    def test_odd_paths(self, tmp_path: Path) -> None:
        self.refuse("a\0b", "unreadable", r"a\x00b")
        self.refuse("x" * 5000, "unreadable", "x" * 200 + "…")
        (tmp_path / "file").write_text("")
        self.refuse(tmp_path / "file" / "r.yaml", "unreadable", "Not a directory")
        (tmp_path / "loop.yaml").symlink_to("loop.yaml")
        self.refuse(tmp_path / "loop.yaml", "unreadable", "loop.yaml")

    def test_a_large_file_is_not_parsed(self, tmp_path: Path) -> None:
        path = tmp_path / "weights.bin"
        path.write_bytes(b"0" * 1_000_001)
        self.refuse(path, "not_a_recipe", "1,000,000 bytes")


class TestHostileYaml:
    BOMB = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
        f"{b}: &{b} [*{a}, *{a}, *{a}, *{a}, *{a}, *{a}, *{a}, *{a}, *{a}]\n"
        for a, b in zip("abcdefghi", "bcdefghij", strict=True)
    )

    @pytest.mark.parametrize("text", [BOMB, "model: *x\n", "model: &m {name: x}\n"])
    def test_anchors_and_aliases_are_refused_unexpanded(self, text: str) -> None:
        started = time.perf_counter()
        assert problem("syntax", text).startswith("r.yaml:1: anchors and aliases")
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
    def test_tags_are_refused(self, tag: str) -> None:
        line = problem("syntax", BASE.replace("vit_tiny", tag))
        assert line.startswith("r.yaml:1: model.name: the tag !")

    def test_a_tag_on_the_whole(self) -> None:
        assert "os.system" in problem("syntax", "!!python/object:os.system {}\n")

    def test_nothing_is_executed(self, tmp_path: Path) -> None:
        victim = tmp_path / "victim"
        tag = f"!!python/object/apply:os.mkdir ['{victim}']"
        assert problem("syntax", BASE.replace("vit_tiny", tag))
        assert problem("not_a_recipe", f"{tag}\n")
        assert parse_recipe(BASE, overrides=[f"model.name={tag}"]).model.name.startswith("!!python")
        assert "os.mkdir" in problem("syntax", BASE, f"model.args={{a: {tag}}}")
        assert not victim.exists()

    @pytest.mark.parametrize("text", ["model: " + "[" * 5000, "model: " + "{a: " * 5000])
    def test_deep_nesting_is_refused(self, text: str) -> None:
        assert problem("syntax", text).startswith("r.yaml:1: more than 20 levels")

    def test_merge_keys_do_not_exist(self) -> None:
        assert "run.<<: " in problem("unknown_key", BASE + "run: {<<: {seed: 3}}\n")

    @pytest.mark.parametrize(
        "text,code,named",
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
            (BASE + "---\n" + BASE, "syntax", "r.yaml:6: "),
        ],
    )
    def test_what_is_no_recipe(self, text: str, code: str, named: str) -> None:
        assert problem(code, text).startswith(named)

    def test_tabs_get_a_hint(self) -> None:
        assert problem("syntax", "model:\n\tname: x\n").endswith("spaces, not tabs")


class TestMappings:
    def test_duplicates_name_both_lines(self) -> None:
        line = problem("duplicate_key", BASE + "  steps: 200\n")
        assert line.startswith("r.yaml:6: optim.steps: ")
        assert "line 5" in line
        assert " model: " in problem("duplicate_key", BASE + "model: {name: x}\n")

    @pytest.mark.parametrize(
        "key,kind",
        [("on", "a boolean"), ("1", "a number"), ("~", "nothing"), ("[a]", "a structure")],
    )
    def test_keys_are_text(self, key: str, kind: str) -> None:
        line = problem("syntax", BASE + f"? {key}\n: 3\n")
        assert line.startswith("r.yaml:6: ")
        assert f" {kind}," in line
