"""The YAML of recipes: files, places, and everything that is refused."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from recipe_texts import BASE, problem, problems

from finetune.errors import RecipeError
from finetune.recipe.load import load_recipe, parse_recipe


class TestFiles:
    @staticmethod
    def error(path: str | Path) -> str:
        with pytest.raises(RecipeError) as caught:
            load_recipe(path)
        return str(caught.value)

    def test_the_file_is_named_as_given(self, tmp_path: Path) -> None:
        path = tmp_path / "r.yaml"
        path.write_text(BASE.replace("lr:", "lrr:"))
        assert self.error(path).startswith(f"{path}:4: optim.lrr: unknown key")

    def test_missing(self, tmp_path: Path) -> None:
        (tmp_path / "quickstart.yaml").write_text(BASE)
        said = self.error(tmp_path / "quikstart.yaml")
        assert "no such file; did you mean 'quickstart.yaml'?" in said
        assert "see: finetune recipes list" in self.error(tmp_path / "nowhere" / "x.yaml")

    def test_a_folder(self, tmp_path: Path) -> None:
        (tmp_path / "a.yaml").write_text(BASE)
        said = self.error(tmp_path)
        assert (
            said
            == f"{tmp_path}: a folder, not a recipe; give one file, for example {tmp_path}/a.yaml"
        )

    def test_not_utf8(self, tmp_path: Path) -> None:
        path = tmp_path / "r.yaml"
        path.write_bytes(b"model:\n  name: caf\xe9\n")
        assert self.error(path) == f"{path}:2: not UTF-8 text (byte 0xe9); save the file as UTF-8"

    @pytest.mark.parametrize("url", ["https://example.org/r.yaml", "file:///r.yaml", "s3://a/b"])
    def test_a_url(self, url: str) -> None:
        assert self.error(url) == f"{url}: a recipe is a local file, not a URL; download it first"

    def test_odd_paths(self, tmp_path: Path) -> None:
        assert "cannot be read" in self.error("a\0b")
        assert "cannot be read" in self.error("x" * 5000)
        (tmp_path / "file").write_text("")
        assert "cannot be read: Not a directory" in self.error(tmp_path / "file" / "r.yaml")
        (tmp_path / "loop.yaml").symlink_to("loop.yaml")
        assert "cannot be read" in self.error(tmp_path / "loop.yaml")

    def test_a_large_file_is_not_parsed(self, tmp_path: Path) -> None:
        path = tmp_path / "weights.bin"
        path.write_bytes(b"0" * 1_000_001)
        assert "this is not a recipe" in self.error(path)


class TestHostileYaml:
    BOMB = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
        f"{b}: &{b} [*{a}, *{a}, *{a}, *{a}, *{a}, *{a}, *{a}, *{a}, *{a}]\n"
        for a, b in zip("abcdefghi", "bcdefghij", strict=True)
    )

    @pytest.mark.parametrize("text", [BOMB, "model: *x\n", "model: &m {name: x}\n"])
    def test_anchors_and_aliases_are_refused_unexpanded(self, text: str) -> None:
        started = time.perf_counter()
        assert problem(text).startswith("r.yaml:1: anchors and aliases (& and *) are refused")
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
        line = problem(BASE.replace("vit_tiny", tag))
        assert line.startswith("r.yaml:1: model.name: the tag !")
        assert "is refused" in line

    def test_a_tag_on_the_whole(self) -> None:
        assert "the tag" in problem("!!python/object:os.system {}\n")

    def test_nothing_is_executed(self, tmp_path: Path) -> None:
        victim = tmp_path / "victim"
        for text in (
            f"model: {{name: !!python/object/apply:os.mkdir ['{victim}']}}\n",
            f"!!python/object/apply:os.mkdir ['{victim}']\n",
        ):
            assert problems(text)
        value = f"model.name=!!python/object/apply:os.mkdir ['{victim}']"
        assert parse_recipe(BASE, overrides=[value]).model.name.startswith("!!python")
        assert "refused" in problem(
            BASE, f"model.args={{a: !!python/object/apply:os.mkdir ['{victim}']}}"
        )
        assert not victim.exists()

    @pytest.mark.parametrize("text", ["model: " + "[" * 5000, "model: " + "{a: " * 5000])
    def test_deep_nesting_is_refused(self, text: str) -> None:
        assert problem(text) == "r.yaml:1: more than 20 levels deep; write it with fewer"

    def test_merge_keys_do_not_exist(self) -> None:
        assert "run.<<: unknown key" in problem(BASE + "run: {<<: {seed: 3}}\n")

    @pytest.mark.parametrize(
        "text,said",
        [
            ("", "empty; a recipe needs the sections"),
            ("# only a comment\n", "empty; a recipe needs the sections"),
            ("null\n", "empty; a recipe needs the sections"),
            ("- a\n", ":1: expected a mapping with the sections"),
            ("hello\n", ":1: expected a mapping with the sections"),
            ("model: {name: x\n", "not valid YAML"),
            ("model:\n\tname: x\n", ":2: not valid YAML"),
            ("model: a: b\n", ":1: not valid YAML: mapping values are not allowed here"),
            ("\nmodel: \0\n", ":2: character 0x00 is not text"),
            (BASE + "---\n" + BASE, ":6: not valid YAML"),
        ],
    )
    def test_what_is_no_recipe(self, text: str, said: str) -> None:
        assert said in problem(text)

    def test_tabs_get_a_hint(self) -> None:
        assert problem("model:\n\tname: x\n").endswith("indent with spaces, not tabs")


class TestMappings:
    def test_duplicates_name_both_lines(self) -> None:
        line = problem(BASE + "  steps: 200\n")
        assert line == "r.yaml:6: optim.steps: duplicate key, given already on line 5; keep one"
        assert "model: duplicate key" in problem(BASE + "model: {name: x}\n")

    @pytest.mark.parametrize(
        "key,kind",
        [("on", "a boolean"), ("1", "a number"), ("~", "nothing"), ("[a]", "a structure")],
    )
    def test_keys_are_text(self, key: str, kind: str) -> None:
        line = problem(BASE + f"? {key}\n: 3\n")
        assert line.startswith("r.yaml:6: ")
        assert f"is read as {kind}, not as a key" in line
