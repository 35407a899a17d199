"""`finetune recipes`: keys, listing and JSON schema."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from refusals import refused

from finetune.recipe.help import format_keys_help, json_schema, list_keys
from finetune.recipe.listing import summarize_recipe_folder


class TestHelpAndSchema:
    def test_every_field_is_described(self) -> None:
        rows = list_keys()
        assert len(rows) > 50
        for row in rows:
            assert row["description"], row["key"]
            assert row["type"], row["key"]

    def test_filters_by_section_or_key(self) -> None:
        assert {row["section"] for row in list_keys("optim")} == {"optim"}
        (row,) = list_keys("optim.schedule")
        assert row["type"] == "constant | linear | cosine | step | wsd"
        assert row["default"] == "cosine"
        assert "random_resized_crop(" in format_keys_help("data.train")
        assert "random_resized_crop(" not in format_keys_help("data.source")
        assert list_keys("claims.metric")[0]["required"]

    @pytest.mark.parametrize(
        "topic,hint", [("lr", "optim.lr"), ("optm", "optim"), ("run.seeds", "run.seed")]
    )
    def test_unknown_topic_suggests_a_key(self, topic: str, hint: str) -> None:
        with refused("recipe.unknown_key", topic, f"'{hint}'"):
            format_keys_help(topic)

    def test_json_schema(self) -> None:
        schema = json_schema()
        assert schema["$schema"].startswith("https://json-schema.org/")
        assert schema["title"] == "finetune recipe"
        assert schema["additionalProperties"] is False
        assert set(schema["required"]) == {"model", "data", "optim"}
        assert len(schema["$defs"]) == 9
        for definition in schema["$defs"].values():
            assert definition["additionalProperties"] is False
            assert all("description" in field for field in definition["properties"].values())
        optim = schema["$defs"]["OptimSection"]["properties"]
        assert optim["lr"]["type"] == "number"
        assert optim["lr"]["exclusiveMinimum"] == 0
        assert optim["schedule"]["enum"] == ["constant", "linear", "cosine", "step", "wsd"]
        json.dumps(schema, allow_nan=False)


RECIPES = Path(__file__).parents[2] / "recipes"


class TestListing:
    def test_lists_every_shipped_recipe(self) -> None:
        rows = summarize_recipe_folder(RECIPES)
        files = RECIPES.rglob("*.yaml")
        shipped = [
            str(path)
            for path in files
            if path.parent.name != "accelerate" and path.name != "plan.yaml"
        ]
        assert len(shipped) >= 8
        assert [row["path"] for row in rows] == sorted(shipped)
        assert all(row["valid"] for row in rows)

    def test_lists_a_recipe_that_does_not_load_as_invalid(self, tmp_path: Path) -> None:
        (tmp_path / "bad.yaml").write_text("model: 3\n")
        (row,) = summarize_recipe_folder(tmp_path)
        assert row["valid"] is False
        assert "recipes check" in row["summary"]
        with refused("recipe.not_found", "nowhere", "finetune recipes list FOLDER"):
            summarize_recipe_folder(tmp_path / "nowhere")
