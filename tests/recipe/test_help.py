"""`finetune recipes`: keys, files and the schema."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from refusals import refused

from finetune.recipe.help import help_table, help_text, json_schema, list_folder


class TestHelpAndSchema:
    def test_every_field_is_described(self) -> None:
        rows = help_table()
        assert len(rows) > 50
        for row in rows:
            assert row["description"], row["key"]
            assert row["type"], row["key"]

    def test_topics(self) -> None:
        assert {row["section"] for row in help_table("optim")} == {"optim"}
        (row,) = help_table("optim.schedule")
        assert row["type"] == "constant | linear | cosine | step"
        assert row["default"] == "cosine"
        assert "random_resized_crop(" in help_text("data.train")
        assert "random_resized_crop(" not in help_text("data.source")
        assert help_table("claims.metric")[0]["required"]

    @pytest.mark.parametrize(
        "topic,hint", [("lr", "optim.lr"), ("optm", "optim"), ("run.seeds", "run.seed")]
    )
    def test_unknown_topics(self, topic: str, hint: str) -> None:
        with refused("recipe.unknown_key", topic, f"'{hint}'"):
            help_text(topic)

    def test_schema(self) -> None:
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
        assert optim["schedule"]["enum"] == ["constant", "linear", "cosine", "step"]
        json.dumps(schema, allow_nan=False)


RECIPES = Path(__file__).parents[2] / "recipes"


class TestListing:
    def test_listing(self) -> None:
        rows = list_folder(RECIPES)
        files = RECIPES.rglob("*.yaml")
        shipped = [
            str(path)
            for path in files
            if path.parent.name != "accelerate" and path.name != "plan.yaml"
        ]
        assert len(shipped) >= 8
        assert [row["path"] for row in rows] == sorted(shipped)
        assert all(row["valid"] for row in rows)

    def test_listing_names_recipes_that_do_not_load(self, tmp_path: Path) -> None:
        (tmp_path / "bad.yaml").write_text("model: 3\n")
        (row,) = list_folder(tmp_path)
        assert row["valid"] is False
        assert "recipes check" in row["summary"]
        with refused("recipe.not_found", "nowhere", "finetune recipes list FOLDER"):
            list_folder(tmp_path / "nowhere")
