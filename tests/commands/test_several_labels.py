"""Several labels for an image, from a trained run outwards: every verb and client says the same."""

# B batch, K classes

from __future__ import annotations

import csv
import json
import re
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
from hub_store import check_card
from huggingface_hub import ModelCard
from PIL import Image
from recipe_texts import tiny_recipe_text
from refusals import refused
from report_runs import write_run_dir
from safetensors.torch import load_file, save_file

from finetune.cli.main import main
from finetune.commands import export as export_module
from finetune.commands.average import average_runs, format_average
from finetune.commands.evaluate import evaluate_model
from finetune.commands.export import export_model
from finetune.commands.show_images import show_source, show_training
from finetune.data.from_recipe import open_full_data
from finetune.data.open_source import open_source
from finetune.data.source import Split
from finetune.demo.markup import render_result
from finetune.demo.model_summary import copy_example_images, summarize_model
from finetune.demo.predictor import DemoPredictor
from finetune.inference import Classifier
from finetune.publish.artifacts import PUBLISHED_FILES, rewrite_artifacts
from finetune.recipe.load import load_recipe, parse_recipe
from finetune.recipe.schema import Recipe
from finetune.report.page import write_comparison, write_report_pages
from finetune.run.directory import RunDir
from finetune.training.train import train

Call = Callable[[str], tuple[int, str, str]]

DATA = "task: multilabel, train: resize, eval: resize, batch_size: 32, num_test: 60, split_seed: 0"


def recipe(*overrides: str) -> Recipe:
    text = tiny_recipe_text(
        DATA, source="embedded:digit_pairs", optim="lr: 5e-3, steps: 40", width=48
    )
    return parse_recipe(text, overrides=overrides)


@pytest.fixture(scope="module")
def top(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the run `run`, and the test images that it was measured on in `images`."""
    folder = tmp_path_factory.mktemp("several")
    train(recipe(), folder / "run")
    split = measured()
    (folder / "images").mkdir()
    for index in range(len(split)):
        Image.fromarray(split.decode(index)).save(folder / "images" / f"{index:02}.png")
    return folder


def measured() -> Split:
    """The test split of the run."""
    return open_full_data(recipe().data, 0).splits["test"]


@pytest.fixture(scope="module")
def thresholds(top: Path) -> list[float]:
    config = json.loads((top / "run" / "model" / "config.json").read_text())
    found: list[float] = config["calibration"]["thresholds"]
    assert len(set(found)) > 1
    return found


@pytest.fixture(scope="module")
def rows(top: Path) -> list[dict[str, Any]]:
    """The predictions for all test images, of every class."""
    return Classifier.load(top / "run", device="cpu").predict(top / "images", top_k=10)


@pytest.fixture
def call(top: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> Call:
    """Run a command line in `top`. Returns: exit code, standard output and standard error."""
    monkeypatch.chdir(top)

    def run(line: str) -> tuple[int, str, str]:
        code = main(shlex.split(line))
        shown = capsys.readouterr()
        return code, shown.out, shown.err

    return run


def names(row: dict[str, Any]) -> list[str]:
    return [one["label"] for one in row["labels"]]


class TestPredict:
    def test_labels_are_the_classes_at_or_above_their_thresholds(
        self, top: Path, rows: list[dict[str, Any]], thresholds: list[float]
    ) -> None:
        split, classifier = measured(), Classifier.load(top / "run", device="cpu")
        for index, row in enumerate(rows[:10]):
            pixels = torch.from_numpy(split.decode(index)).permute(2, 0, 1)[None]
            (logits_K,) = classifier.logits(classifier.pipeline(pixels)).double().numpy()
            scores_K = 1 / (1 + np.exp(-logits_K))
            found = {one["index"]: one["confidence"] for one in row["predictions"]}
            assert [found[k] for k in range(10)] == pytest.approx(scores_K.tolist(), abs=1e-6)
            said = {k for k in range(10) if scores_K[k] >= thresholds[k]}
            assert {one["index"] for one in row["labels"]} == said
        (alone,) = classifier.predict(row["path"], top_k=10)
        by_index = {one["index"]: one["confidence"] for one in alone["predictions"]}
        classifier.thresholds = [by_index[k] for k in range(10)]
        assert len(names(classifier.predict(row["path"])[0])) == 10, "at its threshold, too"
        shares = [one["confidence"] for row in rows for one in row["labels"]]
        assert all(row["labels"] == sorted(row["labels"], key=_falling) for row in rows)
        assert len(shares) > len(rows) / 2, "else nothing was tried"

    def test_they_are_those_of_the_evaluation(self, top: Path, rows: list[dict[str, Any]]) -> None:
        test = json.loads((top / "run" / "results.json").read_text())["test"]
        truth = [set(measured().class_indices(index)) for index in range(60)]
        said = [{one["index"] for one in row["labels"]} for row in rows]
        hits = sum(len(a & b) for a, b in zip(truth, said, strict=True))
        assert hits > 30
        assert test["micro_f1"] == 2 * hits / sum(len(one) for one in [*truth, *said])

    def test_one_by_one_they_are_the_same(self, top: Path, rows: list[dict[str, Any]]) -> None:
        classifier = Classifier.load(top / "run", device="cpu")
        alone = [classifier.predict(row["path"], top_k=10)[0] for row in rows[:20]]
        assert [names(row) for row in alone] == [names(row) for row in rows[:20]]
        at_once = classifier.predict(top / "images", top_k=10, batch_size=60)
        assert [names(row) for row in at_once] == [names(row) for row in rows]

    def test_the_best_scores_are_still_there(self, call: Call, rows: list[dict[str, Any]]) -> None:
        code, out, _ = call("predict run images --json --top-k 2")
        assert code == 0
        found = json.loads(out)
        assert [row["predictions"] for row in found] == [row["predictions"][:2] for row in rows]
        assert [row["labels"] for row in found] == [row["labels"] for row in rows]

    def test_a_table_reads_back_as_labels(self, call: Call, rows: list[dict[str, Any]]) -> None:
        code, _, _ = call("predict run images gone.png --top-k 1 --out said.csv")
        assert code == 3
        with open("said.csv", newline="") as file:
            head, *lines = list(csv.reader(file))
        assert head == ["path", "labels", "confidences", "label_1", "confidence_1", "error"]
        assert [len(line) for line in lines] == [6] * 61
        assert lines[-1][1:5] == [""] * 4
        shares = [f"{one['confidence']:.6f}" for one in rows[3]["labels"]]
        assert lines[3][2] == "|".join(shares)
        with open("said.csv", "w", newline="") as file:
            csv.writer(file).writerows([head, *lines[:-1]])
        split = open_source("csv:said.csv", multilabel=True).splits["train"]
        known = sorted({name for row in rows for name in names(row)})
        assert [[known[k] for k in split.class_indices(index)] for index in range(len(split))] == [
            sorted(names(row)) for row in rows
        ]

    def test_text_names_the_labels_first(
        self, call: Call, rows: list[dict[str, Any]], thresholds: list[float]
    ) -> None:
        _, out, _ = call("predict run images --top-k 1 --threshold 1")
        best = rows[0]["predictions"][0]
        assert out.splitlines()[0].endswith(
            f"no label  ({best['label']} {100 * best['confidence']:.1f} %)"
        )
        _, out, _ = call("predict run images --top-k 1 --threshold 0")
        assert "(" not in out
        assert out.splitlines()[0].count("%") == 10

    @pytest.mark.parametrize("line", ["--calibrated", "--threshold 1.5", "--threshold nan"])
    def test_what_does_not_fit_is_refused(self, call: Call, line: str) -> None:
        code, out, err = call(f"predict run images {line} --out never.csv")
        assert (code, out) == (2, "")
        assert "Traceback" not in err
        assert not Path("never.csv").exists()

    def test_a_threshold_is_for_several_labels_only(self, top: Path) -> None:
        for options, code in (
            ({"threshold": 0.5}, "recipe.conflict"),
            ({"threshold": 2.0}, "recipe.wrong_value"),
        ):
            with refused(code, "threshold"):
                Classifier.load("embedded:vit_nano", **options)
        with refused("recipe.conflict", "calibrated"):
            Classifier.load(top / "run", calibrated=True)

    def test_a_sheet_shows_them(self, call: Call) -> None:
        assert call("predict run images --sheet sheet.png --json")[0] == 0
        with Image.open("sheet.png") as picture:
            assert min(picture.size) > 500


class TestEval:
    def lines(self, top: Path, kept: list[int]) -> str:
        """The test images with columns of 0 and 1 for some classes. Returns: the source string."""
        table = [["path", *map(str, kept)]]
        for index, row in enumerate(measured().labels):
            table.append([f"images/{index:02}.png", *(str(row[k]) for k in kept)])
        (top / "flags.csv").write_text("\n".join(map(",".join, table)))
        return f"csv:{top / 'flags.csv'}"

    def test_a_class_without_a_column_is_not_absent(self, top: Path) -> None:
        test = json.loads((top / "run" / "results.json").read_text())["test"]
        whole = evaluate_model(str(top / "run"), data=self.lines(top, [*range(10)]))
        assert whole["map"] == pytest.approx(test["map"], abs=1e-6)
        with refused("data.no_column", "2 of the 10 classes", "3, 7"):
            some = [k for k in range(10) if k not in (3, 7)]
            evaluate_model(str(top / "run"), data=self.lines(top, some))

    def test_a_column_without_a_1_is(self, top: Path) -> None:
        source = self.lines(top, [*range(10)])
        head, *rows = (top / "flags.csv").read_text().splitlines()
        (top / "flags.csv").write_text("\n".join([head, *(f"{row[:-1]}0" for row in rows)]))
        found = evaluate_model(str(top / "run"), data=source)["per_class"][9]
        assert (found["support"], found["ap"]) == (0, None)

    def test_corrupted_images(self, call: Call) -> None:
        code, out, _ = call("eval run --corrupt noise:5 --json")
        assert code == 0
        found = json.loads(out)
        (row,) = found["corrupted"]["rows"]
        assert row.keys() == {"kind", "severity", "map", "loss"}
        assert (row["map"], row["loss"]) != (found["map"], found["loss"])
        assert found["corrupted"]["mean"] == {key: row[key] for key in ("map", "loss")}
        _, out, _ = call("eval run --corrupt noise:5")
        assert f"mean of 1 corruption: map {row['map']:.4f}  loss {row['loss']:.4f}" in out


def _falling(one: dict[str, Any]) -> float:
    return -float(one["confidence"])


class TestOthers:
    """timm and transformers on the folder `model`."""

    def test_timm_gives_the_same_scores(self, top: Path) -> None:
        images_BCHW = torch.randn(4, 3, 16, 16)
        own = Classifier.load(top / "run" / "model", device="cpu")
        network = timm.create_model(f"local-dir:{top / 'run' / 'model'}", pretrained=True).eval()
        with torch.inference_mode():
            theirs = network(images_BCHW).sigmoid()
        ours = own.confidences(own.logits(images_BCHW)).float()
        torch.testing.assert_close(theirs, ours, rtol=0, atol=1e-6)

    def test_transformers_does_too(self, top: Path, rows: list[dict[str, Any]]) -> None:
        transformers = pytest.importorskip("transformers", reason="transformers is not installed")
        folder, picture = str(top / "run" / "model"), str(top / "images" / "00.png")
        network = transformers.AutoModelForImageClassification.from_pretrained(folder).eval()
        assert network.config.problem_type == "multi_label_classification"
        images_BCHW = torch.randn(4, 3, 16, 16)
        own = Classifier.load(folder, device="cpu")
        with torch.inference_mode():
            theirs = network(images_BCHW).logits.sigmoid()
        ours = own.confidences(own.logits(images_BCHW)).float()
        torch.testing.assert_close(theirs, ours, rtol=0, atol=1e-6)
        classify = transformers.pipeline("image-classification", model=folder, device="cpu")
        wanted = {one["label"]: one["confidence"] for one in rows[0]["predictions"]}
        for options in ({}, {"function_to_apply": "sigmoid"}):
            scores = {one["label"]: one["score"] for one in classify(picture, top_k=10, **options)}
            # PIL rounds to whole bytes after either direction of a resize
            assert scores == pytest.approx(wanted, abs=5e-3)
        assert sum(wanted.values()) != pytest.approx(1, abs=0.1), "else a softmax would pass"

    def test_an_export_tells_the_thresholds(
        self, top: Path, thresholds: list[float], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        own = Classifier.load(top / "run", device="cpu").network
        monkeypatch.setattr(export_module, "export_network", lambda _, __, path, *___: path.touch())
        monkeypatch.setattr(export_module, "load_exported", lambda path, format: own)
        told = export_model(str(top / "run"), format="torch", out=str(top / "exported"))
        beside = json.loads(Path(told["preprocessing"]).read_text())
        assert beside["thresholds"] == thresholds
        assert beside["problem_type"] == "multi_label_classification"
        assert beside["temperature"] is None


class TestCard:
    @pytest.fixture
    def text(self, top: Path) -> str:
        return (top / "run" / "model" / "README.md").read_text()

    def test_its_head_is_the_hubs(self, top: Path, text: str) -> None:
        assert check_card(text, "model") == ([], ["no license given"])
        test = json.loads((top / "run" / "results.json").read_text())["test"]
        card = ModelCard(text)
        assert card.data.pipeline_tag == "image-classification"
        assert card.data.metrics == ["mean_average_precision", "f1"]
        told = {
            one.metric_name: (one.metric_type, one.metric_value) for one in card.data.eval_results
        }
        assert told == {
            "Mean average precision": ("mean_average_precision", round(test["map"], 6)),
            "Macro F1": ("f1", round(test["macro_f1"], 6)),
            "Micro F1": ("f1", round(test["micro_f1"], 6)),
            "Loss": ("binary-cross-entropy", round(test["loss"], 6)),
        }

    def test_it_says_what_several_labels_need(self, text: str, thresholds: list[float]) -> None:
        rows = re.findall(r"^\| (\d) \| (\d\.\d{4}) \|", text, re.MULTILINE)
        assert rows == [(str(k), f"{each:.4f}") for k, each in enumerate(thresholds)]
        for wrong in (
            "top-1",
            "Every image gets one",
            "Wilson",
            "confusion.png",
            "calibration error",
        ):
            assert wrong not in text

    def test_thresholds_of_classes_that_no_image_has_are_not_fitted(
        self, top: Path, text: str, tmp_path: Path
    ) -> None:
        assert "validation image it is" not in text
        shutil.copytree(top / "run", tmp_path / "run")
        results = json.loads((tmp_path / "run" / "results.json").read_text())
        for row in results["val"]["per_class"][:2]:
            row["support"] = 0
        (tmp_path / "run" / "results.json").write_text(json.dumps(results))
        rewrite_artifacts(RunDir(tmp_path / "run"))
        text = (tmp_path / "run" / "model" / "README.md").read_text()
        assert "For 2 labels without a validation image it is 0.5." in text

    def test_its_code_gives_the_labels(
        self, top: Path, text: str, rows: list[dict[str, Any]]
    ) -> None:
        pytest.importorskip("transformers", reason="transformers is not installed")
        folder, picture = str(top / "run" / "model"), str(top / "images" / "00.png")
        told = []
        for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL):
            code = block.replace("THIS_FOLDER", folder).replace("photo.jpg", picture)
            *lines, last = code.strip().splitlines()
            room: dict[str, Any] = {}
            exec("\n".join(lines), room)
            if "import timm" not in block:
                told.append(eval(last, room))
        ours, theirs = told
        assert names(ours[0]) == names(rows[0])
        wanted = {one["label"]: one["confidence"] for one in rows[0]["predictions"]}
        assert {one["label"]: wanted[one["label"]] for one in theirs} == pytest.approx(
            {one["label"]: one["score"] for one in theirs}, abs=5e-3
        )

    def test_seeds_count_and_the_folder_is_whole(self, top: Path) -> None:
        shutil.copytree(top / "run", top / "other")
        (top / "other" / "recipe.yaml").write_text(recipe("run.seed=1").to_yaml())
        rewrite_artifacts(RunDir(top / "run"))
        files = {path.name for path in (top / "run" / "model").iterdir()}
        assert files == {*PUBLISHED_FILES} - {"confusion.png", "reliability.png"}
        assert "mean ± std of 2 seeds (0, 1)" in (top / "run" / "model" / "README.md").read_text()


class TestReport:
    def test_a_page_shows_what_was_measured(self, top: Path, thresholds: list[float]) -> None:
        write_report_pages([str(top / "run")])
        html = (top / "run" / "report.html").read_text()
        for word in ("Test mAP", "Micro F1", "Mean average precision", ">AP<", ">Threshold<"):
            assert word in html
        assert f">{thresholds[0]:.3f}<" in html
        assert re.search(r"predicted <bdi>(\d(, \d)*|none)</bdi> · true <bdi>\d(, \d)?</bdi>", html)
        assert html.count('<div class="picture"><img') > 5
        for wrong in ("op-1", "Confusion", "Calibration", " confidence, "):
            assert wrong not in html.partition('<section id="recipe">')[0]

    def test_runs_of_a_kind_are_compared(self, top: Path, tmp_path: Path) -> None:
        copies = [tmp_path / "a", tmp_path / "b"]
        for copy in copies:
            copy.mkdir()
            for name in ("run.json", "recipe.yaml", "metrics.jsonl", "results.json"):
                (copy / name).write_bytes((top / "run" / name).read_bytes())
        html = write_comparison(copies, tmp_path / "both.html").read_text()
        assert "Test mAP" in html
        assert "top-1" not in html.lower()
        single = write_run_dir(tmp_path / "single")
        before = sorted(tmp_path.rglob("*"))
        with refused("recipe.conflict", "single"):
            write_report_pages([str(copies[0]), str(single)])
        assert sorted(tmp_path.rglob("*")) == before


class TestDemo:
    def test_bars_with_thresholds_and_the_labels_named(
        self, top: Path, rows: list[dict[str, Any]], thresholds: list[float]
    ) -> None:
        reader = DemoPredictor(Classifier.load(top / "run", device="cpu", threshold=0.0))
        assert len(reader.predict(rows[0]["path"]).top) == 10, "labels beyond the best five, too"
        reading = DemoPredictor(Classifier.load(top / "run", device="cpu")).predict(rows[0]["path"])
        pairs = [(one["label"], one["confidence"]) for one in rows[0]["predictions"]]
        assert [name for name, _ in reading.top[:5]] == [name for name, _ in pairs[:5]]
        assert reading.thresholds == [thresholds[int(name)] for name, _ in reading.top]
        html = render_result(reading)
        shown = ", ".join(names(rows[0])) or "No label reaches its threshold"
        assert f'<p class="ft-labels">{shown}</p>' in html
        assert html.count('<li class="ft-predicted">') == len(rows[0]["labels"])
        marks = re.findall(r'<b style="left:([\d.]+)%">', html)
        assert marks == [f"{100 * each:.2f}" for each in reading.thresholds]

    def test_its_facts_and_examples(self, top: Path, tmp_path: Path) -> None:
        test = json.loads((top / "run" / "results.json").read_text())["test"]
        told = summarize_model(str(top / "run"), Classifier.load(top / "run", device="cpu"))
        assert f"mAP {100 * test['map']:.1f} % on 60 test images" in told
        assert len(copy_example_images(str(top / "run"), tmp_path)) == 6


class TestOtherVerbs:
    def test_averages_are_chosen_by_map(self, top: Path) -> None:
        again = f"model: {{name: '{top / 'run' / 'model'}'}}\noptim: {{lr: 1e-3, steps: 2}}\n"
        again += f"data: {{source: 'embedded:digit_pairs', {DATA}}}\nrun: {{precision: fp32}}\n"
        train(parse_recipe(again), top / "tuned")
        shutil.copytree(top / "tuned", top / "worse")
        weights = load_file(top / "worse" / "model" / "model.safetensors")
        weights["head.weight"] = -weights["head.weight"]
        save_file(weights, top / "worse" / "model" / "model.safetensors")
        runs = [str(top / "worse"), str(top / "tuned")]
        made = average_runs(runs, out=str(top / "soup"), greedy=True)
        assert made["chosen"] == "tuned"
        assert all(set(row) == {"name", "map", "loss"} for row in made["tried"])
        assert f"test: map {made['test']['map']:.4f}" in format_average(made)
        config = json.loads((top / "soup" / "config.json").read_text())
        assert config["calibration"]["thresholds"] == made["thresholds"]
        assert Classifier.load(top / "soup", device="cpu").thresholds == made["thresholds"]

    def test_a_probe_is_refused(self, call: Call) -> None:
        code, _, err = call("probe run --shots 1")
        assert code == 3
        assert "data.task" in err

    def test_sheets_of_images(self, top: Path, tmp_path: Path, call: Call) -> None:
        assert (
            call(f"data info embedded:digit_pairs --multilabel --sheet {tmp_path / 'a.png'}")[0]
            == 0
        )
        show_training(load_recipe(top / "run" / "recipe.yaml"), tmp_path / "b.png")
        for name in ("a.png", "b.png"):
            with Image.open(tmp_path / name) as picture:
                assert min(picture.size) > 400
        with refused("data.wrong_labels"):
            show_source("embedded:digit_pairs", tmp_path / "c.png")
