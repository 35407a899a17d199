from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from report_runs import run_results, split_results, write_and_read_run, write_run_dir

from finetune.report.comparison import (
    claim_comparison_rows,
    differing_settings,
    group_by_recipe,
    group_rows,
    metric_columns,
    run_rows,
    unstated_differences,
)
from finetune.report.page import write_comparison
from finetune.report.run_data import Run, read_run
from finetune.run.directory import unique_run_names


@pytest.fixture
def runs(tmp_path: Path) -> list[Run]:
    """Two seeds of one recipe, and a run of another recipe with a higher learning rate."""
    runs = []
    for name, seed, lr, top1 in (
        ("a-s0", 0, 0.001, 0.7),
        ("a-s1", 1, 0.001, 0.8),
        ("b", 0, 0.1, 0.9),
    ):
        results = run_results(test=split_results(top1=top1))
        overrides = (f"run.seed={seed}", f"optim.lr={lr}", f"data.workers={seed}")
        runs.append(write_and_read_run(tmp_path / name, *overrides, results=results))
    return runs


class TestGroupByRecipe:
    def test_seeds_of_one_recipe_form_one_group(self, runs: list[Run]) -> None:
        groups = group_by_recipe(runs)
        assert [(group.name, len(group.runs)) for group in groups] == [("a", 2), ("b", 1)]

    def test_recipes_with_the_same_name_get_distinct_names(self, tmp_path: Path) -> None:
        runs = [
            write_and_read_run(tmp_path / folder / "run", f"optim.lr={lr}")
            for folder, lr in (("x", 0.1), ("y", 0.2))
        ]
        names = ["run (optim.lr=0.1)", "run (optim.lr=0.2)"]
        assert [group.name for group in group_by_recipe(runs)] == names
        assert unique_run_names([run.path for run in runs]) == ["x/run", "y/run"]
        assert [row["name"] for row in run_rows(group_by_recipe(runs), runs, [])] == [
            "x/run",
            "y/run",
        ]

    @pytest.mark.parametrize(
        "override, keys, num_groups",
        [
            ("split_seed=null", {"weights_sha256": "b"}, 2),
            ("split_seed=null", {"split_fingerprints": {"train": "b", "test": "a"}}, 1),
            ("split_seed=null", {"whole_fingerprints": {"train": "b", "test": "a"}}, 2),
            ("split_seed=null", {"whole_fingerprints": {"train": "a", "test": "b"}}, 2),
            ("split_seed=0", {"split_fingerprints": {"train": "b", "test": "a"}}, 2),
            ("num_test=20", {"split_fingerprints": {"train": "b", "test": "b"}}, 1),
            ("num_train=200", {"whole_fingerprints": {"train": "b", "test": "a"}}, 2),
            ("num_test=20", {"split_fingerprints": {"classes": "b"}}, 2),
            ("split_seed=0", {"network": {"num_heads": 1}}, 2),
            ("split_seed=0", {"teacher": {"sha256": "a", "config_sha256": "b"}}, 2),
        ],
    )
    def test_seeds_of_other_weights_or_images_are_another_group(
        self, no_figures: None, override: str, keys: dict[str, Any], num_groups: int, tmp_path: Path
    ) -> None:
        same = {
            "split_fingerprints": {"train": "a", "test": "a"},
            "whole_fingerprints": {"train": "a", "test": "a"},
            "weights_sha256": "a",
            "network": {"num_heads": 3},
            "teacher": {"sha256": "a", "config_sha256": "a"},
        }
        runs = []
        for seed, changes in enumerate(({}, keys)):
            path = write_run_dir(tmp_path / f"{seed}", f"data.{override}", f"run.seed={seed}")
            record = json.loads((path / "run.json").read_text())
            (path / "run.json").write_text(json.dumps({**record, **same, **changes}))
            runs.append(read_run(path))
        assert len(group_by_recipe(runs)) == num_groups
        write_comparison([run.path for run in runs], tmp_path / "page.html")
        assert ("The runs used different" in (tmp_path / "page.html").read_text()) == (
            num_groups == 2
        )

    @pytest.mark.parametrize(
        "override, keys, said",
        [
            ("model.image_size=32", {"weights_sha256": "b"}, []),  # the page shows model.image_size
            ("optim.lr=0.5", {"weights_sha256": "b"}, ["pretrained weights"]),
            ("data.workers=7", {"split_fingerprints": {"train": "b"}}, ["images or labels"]),
            ("data.batch_size=7", {"split_fingerprints": {"test": "b"}}, ["images or labels"]),
            ("data.num_train=7", {"split_fingerprints": {"train": "b"}}, []),
            ("data.val_fraction=0.5", {"split_fingerprints": {"val": "b"}}, ["images or labels"]),
            ("data.batch_size=7", {"split_fingerprints": {"train": "b"}}, ["images or labels"]),
            ("model.dropout=0.5", {"weights_sha256": "b"}, ["pretrained weights"]),
            ("model.dropout=0.5", {"network": {"drop_rate": 0.5}}, []),
            ("run.seed=1", {"shard_times": {"test": "a"}}, []),
            (
                "run.seed=1",
                {"shard_times": {"test": "b"}},
                ["shards (written or copied between the runs)"],
            ),
        ],
    )
    def test_differences_that_the_recipes_do_not_show(
        self, override: str, keys: dict[str, Any], said: list[str], tmp_path: Path
    ) -> None:
        runs = []
        first = {"shard_times": {"test": "a"}}
        for name, overrides, changes in (("a", (), first), ("b", (override,), keys)):
            path = write_run_dir(tmp_path / name, "data.split_seed=0", *overrides)
            record = json.loads((path / "run.json").read_text())
            (path / "run.json").write_text(json.dumps({**record, **changes}))
            runs.append(read_run(path))
        assert unstated_differences(runs) == said

    def test_other_numbers_of_readable_images_are_named(self, tmp_path: Path) -> None:
        run = read_run(write_run_dir(tmp_path / "a"))
        test = {**run.results["test"], "examples": 1}
        other = dataclasses.replace(run, results={**run.results, "test": test})
        assert unstated_differences([run, other]) == ["test images (some could not be read)"]

    @pytest.mark.parametrize("seed, said", [(0, ["images or labels"]), (1, [])])
    def test_other_validation_images_of_one_seed_are_named(
        self, seed: int, said: list[str], tmp_path: Path
    ) -> None:
        runs = []
        for number, overrides in enumerate(([], ["data.val_fraction=0.5", f"run.seed={seed}"])):
            path = write_run_dir(tmp_path / f"{number}", *overrides)
            record = json.loads((path / "run.json").read_text())
            record |= {"split_fingerprints": {"val": number}, "whole_fingerprints": {"train": "a"}}
            (path / "run.json").write_text(json.dumps(record))
            runs.append(read_run(path))
        assert unstated_differences(runs) == said

    def test_equal_splits_of_another_draw_are_the_same_images(self, tmp_path: Path) -> None:
        splits = {"train": "a", "val": "b", "test": "c", "classes": "d"}
        draws = {"data.split_seed=null": {"train": "whole", "test": "c"}, "data.split_seed=0": {}}
        runs = []
        for number, (override, whole) in enumerate(draws.items()):
            path = write_run_dir(tmp_path / f"{number}", override)
            record = json.loads((path / "run.json").read_text())
            record |= {"split_fingerprints": splits, "whole_fingerprints": whole}
            (path / "run.json").write_text(json.dumps(record))
            runs.append(read_run(path))
        assert unstated_differences(runs) == []

    def test_long_settings_are_replaced_by_numbers(self, tmp_path: Path) -> None:
        runs = [
            write_and_read_run(tmp_path / f"{n}" / "run", f"data.source=folder:{'x' * 60}{n}")
            for n in (1, 2)
        ]
        assert [group.name for group in group_by_recipe(runs)] == ["run (1)", "run (2)"]

    @pytest.mark.parametrize(
        "names, shared",
        [
            (["nano-s0", "nano-s1"], "nano"),
            (["nano_seed0", "nano_seed1"], "nano"),
            (["nano-s1", "nano-s10"], "nano"),
            (["nano_32", "nano_32b"], "nano_32"),
            (["0", "1"], "0"),
            (["classes0", "classes1"], "classes"),
        ],
    )
    def test_group_name_is_the_common_prefix(
        self, tmp_path: Path, names: list[str], shared: str
    ) -> None:
        runs = [
            write_and_read_run(tmp_path / name, f"run.seed={n}") for n, name in enumerate(names)
        ]
        assert [group.name for group in group_by_recipe(runs)] == [shared]


class TestRows:
    def test_differing_settings_ignore_seed_and_workers(self, runs: list[Run]) -> None:
        assert differing_settings([run.recipe for run in runs]) == [
            ("optim.lr", ["0.001", "0.001", "0.1"])
        ]
        assert differing_settings([run.recipe for run in runs[:2]]) == []

    def test_group_rows_have_mean_and_standard_deviation(self, runs: list[Run]) -> None:
        columns = metric_columns(runs)
        heads = ["Test top-1", "Test top-5", "Test loss", "Test ECE", "Val top-1"]
        assert [head for *_, head in columns] == heads
        rows, scale = group_rows(group_by_recipe(runs), columns)
        assert rows[0]["cells"][0]["text"] == "75.00 ± 7.07\u202f%"
        assert rows[1]["cells"][0]["text"] == "90.00\u202f%"
        assert not any(row["notes"] for row in rows)
        assert [row["n"] for row in rows] == [2, 1]
        assert scale == ("70\u202f%", "90\u202f%")
        assert rows[0]["dots"] == pytest.approx([0, 50])
        assert rows[1]["dots"] == pytest.approx([100])

    def test_runs_without_metrics(self, tmp_path: Path) -> None:
        runs = [write_and_read_run(tmp_path / "a", status="running")]
        assert metric_columns(runs) == []
        rows, scale = group_rows(group_by_recipe(runs), [])
        assert scale is None
        assert rows[0]["cells"] == []
        assert run_rows(group_by_recipe(runs), runs, [])[0]["status"] == "running"

    def test_without_a_test_split_validation_comes_first(self, tmp_path: Path) -> None:
        results = run_results()
        del results["test"]
        runs = [write_and_read_run(tmp_path / "a", results=results)]
        columns = metric_columns(runs)
        assert [head for *_, head in columns] == ["Val top-1", "Val top-5", "Val loss", "Val ECE"]
        rows, scale = group_rows(group_by_recipe(runs), columns)
        assert rows[0]["cells"][0]["text"] == "70.00\u202f%"
        assert scale == ("70\u202f%", "70\u202f%")
        tested = write_and_read_run(tmp_path / "b")
        mixed = metric_columns([*runs, tested])
        assert [split for split, *_ in mixed] == ["val"] * 4 + ["test"] * 4
        assert {split for split, *_ in metric_columns([tested])} == {"test", "val"}
        assert metric_columns([tested])[0][0] == "test"
        runs[0].plan["classes"] = 5
        rows = run_rows(group_by_recipe([*runs, tested]), [*runs, tested], mixed)
        assert [row["figures"][1]["text"] for row in rows] == ["–", "99.00\u202f%"]
        assert "Val top-5" not in [head for *_, head in metric_columns(runs)]

    def test_runs_with_the_same_seed_count_once(self, tmp_path: Path) -> None:
        runs = [
            write_and_read_run(
                tmp_path / str(n),
                f"run.seed={seed}",
                results=run_results(test=split_results(top1=top1)),
            )
            for n, (seed, top1) in enumerate([(0, 0.7), (0, 0.7), (1, 0.8)])
        ]
        (row,), _ = group_rows(group_by_recipe(runs), metric_columns(runs))
        assert row["cells"][0]["text"] == "75.00 ± 7.07\u202f%"  # over two seeds
        assert (row["n"], row["notes"]) == (2, ["2 runs of seed 0: counted once"])
        assert not row["cells"][0]["interval"]  # the spread over seeds is not a confidence interval
        (row,), _ = group_rows(group_by_recipe(runs[:2]), metric_columns(runs[:2]))
        assert row["cells"][0]["interval"] == "65.3–74.3\u202f%"
        assert row["cells"][0]["text"] == "70.00\u202f%"  # without ± 0.00

    def test_one_row_per_run(self, runs: list[Run]) -> None:
        rows = run_rows(group_by_recipe(runs), runs, metric_columns(runs))
        assert [row["name"] for row in rows] == ["a-s0", "a-s1", "b"]
        assert [row["color"] for row in rows] == [1, 1, 2]
        assert [row["keys"] for row in rows] == [["0.001"], ["0.001"], ["0.1"]]
        assert [row["seed"] for row in rows] == ["0", "1", "0"]
        cell = {"text": "70.00\u202f%", "value": 0.7, "is_too_few": False}
        assert rows[0]["figures"][0] == {**cell, "interval": "65.3–74.3\u202f%"}
        assert rows[0]["time"] == "10.0\u202fs"


def test_metrics_on_too_few_images_are_marked(tmp_path: Path) -> None:
    runs = []
    for images in (20, 400):
        results = run_results(test={**split_results(), "examples": images})
        runs.append(
            write_and_read_run(tmp_path / f"{images}", f"run.seed={images}", results=results)
        )
    columns = metric_columns(runs)
    rows = run_rows(group_by_recipe(runs), runs, columns)
    marks = [[cell["is_too_few"] for cell in row["figures"]] for row in rows]
    assert marks == [[True, True, False, False, False], [False] * 5]
    (row,), _ = group_rows(group_by_recipe(runs), columns)
    assert [cell["is_too_few"] for cell in row["cells"]] == marks[0]


class TestClaims:
    def test_claims_of_all_runs_side_by_side(self, runs: list[Run]) -> None:
        runs[1].results["claims"] = []
        rows = claim_comparison_rows(runs)
        assert len(rows) == 5
        first = rows[0]
        assert (first["what"], first["source"]) == ("test.top1", "table 1")
        assert [answer and answer["verdict"] for answer in first["answers"]] == ["met", None, "met"]
