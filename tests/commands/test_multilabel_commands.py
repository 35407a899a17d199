"""Multi-label models after training: every command and client gives the same labels."""

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
from networks import forget_checksums
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
from finetune.recipe.training_keys import training_keys
from finetune.report.page import write_comparison, write_report_pages
from finetune.run.directory import RunDir
from finetune.run.record import read_record, write_record
from finetune.training.train import train

RunCli = Callable[[str], tuple[int, str, str]]

DATA = "task: multilabel, train: resize, eval: resize, batch_size: 32, num_test: 60, split_seed: 0"


def make_recipe(*overrides: str) -> Recipe:
    text = tiny_recipe_text(
        DATA, source="embedded:digit_pairs", optim="lr: 5e-3, steps: 40", width=48
    )
    return parse_recipe(text, overrides=overrides)


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the run `run` and its test images in `images`."""
    folder = tmp_path_factory.mktemp("several")
    train(make_recipe(), folder / "run")
    split = run_test_split()
    (folder / "images").mkdir()
    for index in range(len(split)):
        Image.fromarray(split.decode(index)).save(folder / "images" / f"{index:02}.png")
    return folder


def run_test_split() -> Split:
    """Return the test split of the run."""
    return open_full_data(make_recipe().data, 0).splits["test"]


@pytest.fixture(scope="module")
def thresholds(workspace: Path) -> list[float]:
    config = json.loads((workspace / "run" / "model" / "config.json").read_text())
    thresholds: list[float] = config["calibration"]["thresholds"]
    assert len(set(thresholds)) > 1
    return thresholds


@pytest.fixture(scope="module")
def predictions(workspace: Path) -> list[dict[str, Any]]:
    """Predictions of all classes for all test images."""
    return Classifier.load(workspace / "run", device="cpu").predict(workspace / "images", top_k=10)


@pytest.fixture
def run_cli(workspace: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> RunCli:
    """Run a command in the `workspace` folder. Returns: exit code, stdout and stderr."""
    monkeypatch.chdir(workspace)

    def run(line: str) -> tuple[int, str, str]:
        code = main(shlex.split(line))
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


def label_names(row: dict[str, Any]) -> list[str]:
    return [label["label"] for label in row["labels"]]


class TestPredict:
    def test_labels_are_classes_at_or_above_their_thresholds(
        self, workspace: Path, predictions: list[dict[str, Any]], thresholds: list[float]
    ) -> None:
        split, classifier = run_test_split(), Classifier.load(workspace / "run", device="cpu")
        for index, row in enumerate(predictions[:10]):
            pixels = torch.from_numpy(split.decode(index)).permute(2, 0, 1)[None]
            (logits_K,) = classifier.logits(classifier.pipeline(pixels)).double().numpy()
            scores_K = 1 / (1 + np.exp(-logits_K))
            confidences = {
                prediction["index"]: prediction["confidence"] for prediction in row["predictions"]
            }
            assert [confidences[k] for k in range(10)] == pytest.approx(scores_K.tolist(), abs=1e-6)
            expected = {k for k in range(10) if scores_K[k] >= thresholds[k]}
            assert {prediction["index"] for prediction in row["labels"]} == expected
        (single,) = classifier.predict(row["path"], top_k=10)
        by_index = {
            prediction["index"]: prediction["confidence"] for prediction in single["predictions"]
        }
        classifier.thresholds = [by_index[k] for k in range(10)]
        assert len(label_names(classifier.predict(row["path"])[0])) == 10, (
            "a score equal to its threshold counts"
        )
        confidences_shown = [
            prediction["confidence"] for row in predictions for prediction in row["labels"]
        ]
        assert all(
            row["labels"] == sorted(row["labels"], key=negative_confidence) for row in predictions
        )
        assert len(confidences_shown) > len(predictions) / 2, "enough labels must be predicted"

    def test_predicted_labels_match_the_evaluation(
        self, workspace: Path, predictions: list[dict[str, Any]]
    ) -> None:
        test = json.loads((workspace / "run" / "results.json").read_text())["test"]
        targets = [set(run_test_split().class_indices(index)) for index in range(60)]
        predicted = [{labels["index"] for labels in row["labels"]} for row in predictions]
        hits = sum(len(a & b) for a, b in zip(targets, predicted, strict=True))
        assert hits > 30
        assert test["micro_f1"] == 2 * hits / sum(len(labels) for labels in [*targets, *predicted])

    def test_batch_size_does_not_change_the_labels(
        self, workspace: Path, predictions: list[dict[str, Any]]
    ) -> None:
        classifier = Classifier.load(workspace / "run", device="cpu")
        one_by_one = [classifier.predict(row["path"], top_k=10)[0] for row in predictions[:20]]
        assert [label_names(row) for row in one_by_one] == [
            label_names(row) for row in predictions[:20]
        ]
        in_one_batch = classifier.predict(workspace / "images", top_k=10, batch_size=60)
        assert [label_names(row) for row in in_one_batch] == [
            label_names(row) for row in predictions
        ]

    def test_json_contains_labels_and_top_k_predictions(
        self, run_cli: RunCli, predictions: list[dict[str, Any]]
    ) -> None:
        code, out, _ = run_cli("predict run images --json --top-k 2")
        assert code == 0
        printed = json.loads(out)
        assert [row["predictions"] for row in printed] == [
            row["predictions"][:2] for row in predictions
        ]
        assert [row["labels"] for row in printed] == [row["labels"] for row in predictions]

    def test_csv_output_can_be_used_as_a_labeled_source(
        self, run_cli: RunCli, predictions: list[dict[str, Any]]
    ) -> None:
        code, _, _ = run_cli("predict run images gone.png --top-k 1 --out said.csv")
        assert code == 3
        with open("said.csv", newline="") as file:
            head, *lines = list(csv.reader(file))
        assert head == ["path", "labels", "confidences", "label_1", "confidence_1", "error"]
        assert [len(line) for line in lines] == [6] * 61
        assert lines[-1][1:5] == [""] * 4
        confidences = [f"{label['confidence']:.6f}" for label in predictions[3]["labels"]]
        assert lines[3][2] == "|".join(confidences)
        with open("said.csv", "w", newline="") as file:
            csv.writer(file).writerows([head, *lines[:-1]])
        split = open_source("csv:said.csv", multilabel=True).splits["train"]
        known = sorted({name for row in predictions for name in label_names(row)})
        assert [[known[k] for k in split.class_indices(index)] for index in range(len(split))] == [
            sorted(label_names(row)) for row in predictions
        ]

    def test_text_shows_labels_then_other_top_predictions(
        self, run_cli: RunCli, predictions: list[dict[str, Any]], thresholds: list[float]
    ) -> None:
        _, out, _ = run_cli("predict run images --top-k 1 --threshold 1")
        best = predictions[0]["predictions"][0]
        assert out.splitlines()[0].endswith(
            f"no label  ({best['label']} {100 * best['confidence']:.1f} %)"
        )
        _, out, _ = run_cli("predict run images --top-k 1 --threshold 0")
        assert "(" not in out
        assert out.splitlines()[0].count("%") == 10

    @pytest.mark.parametrize(
        "line",
        [
            *("--calibrated", "--threshold 1.5", "--threshold nan"),
            *("--max-error 0.02", "--coverage 0.9", "--unknown"),
        ],
    )
    def test_invalid_options_are_refused(self, run_cli: RunCli, line: str) -> None:
        code, out, err = run_cli(f"predict run images {line} --out never.csv")
        assert (code, out) == (2, "")
        assert "Traceback" not in err
        assert not Path("never.csv").exists()

    def test_threshold_is_only_for_multilabel_models(self, workspace: Path) -> None:
        for options, code in (
            ({"threshold": 0.5}, "recipe.conflict"),
            ({"threshold": 2.0}, "recipe.wrong_value"),
        ):
            with refused(code, "threshold"):
                Classifier.load("embedded:vit_nano", **options)
        with refused("recipe.conflict", "calibrated"):
            Classifier.load(workspace / "run", calibrated=True)

    def test_contact_sheet_is_written(self, run_cli: RunCli) -> None:
        assert run_cli("predict run images --sheet sheet.png --json")[0] == 0
        with Image.open("sheet.png") as image:
            assert min(image.size) > 500


class TestEvaluate:
    def write_flags(self, workspace: Path, class_indices: list[int]) -> str:
        """Write the test labels as CSV columns of 0 and 1 for some classes. Returns: the source."""
        table_rows = [["path", *map(str, class_indices)]]
        for index, row in enumerate(run_test_split().labels):
            table_rows.append([f"images/{index:02}.png", *(str(row[k]) for k in class_indices)])
        (workspace / "flags.csv").write_text("\n".join(map(",".join, table_rows)))
        return f"csv:{workspace / 'flags.csv'}"

    def test_missing_label_column_is_refused(self, workspace: Path) -> None:
        test = json.loads((workspace / "run" / "results.json").read_text())["test"]
        evaluated = evaluate_model(
            str(workspace / "run"), data=self.write_flags(workspace, [*range(10)])
        )
        assert evaluated["map"] == pytest.approx(test["map"], abs=1e-6)
        with refused("data.no_column", "2 of the 10 classes", "3, 7"):
            columns = [k for k in range(10) if k not in (3, 7)]
            evaluate_model(str(workspace / "run"), data=self.write_flags(workspace, columns))

    def test_column_without_positives_is_accepted(self, workspace: Path) -> None:
        source = self.write_flags(workspace, [*range(10)])
        head, *rows = (workspace / "flags.csv").read_text().splitlines()
        (workspace / "flags.csv").write_text("\n".join([head, *(f"{row[:-1]}0" for row in rows)]))
        class_row = evaluate_model(str(workspace / "run"), data=source)["per_class"][9]
        assert (class_row["support"], class_row["ap"]) == (0, None)

    def test_corrupted_images(self, run_cli: RunCli) -> None:
        code, out, _ = run_cli("eval run --corrupt noise:5 --json")
        assert code == 0
        evaluated = json.loads(out)
        (row,) = evaluated["corrupted"]["rows"]
        assert row.keys() == {"kind", "severity", "map", "loss"}
        assert (row["map"], row["loss"]) != (evaluated["map"], evaluated["loss"])
        assert evaluated["corrupted"]["mean"] == {key: row[key] for key in ("map", "loss")}
        _, out, _ = run_cli("eval run --corrupt noise:5")
        assert f"mean of 1 corruption: map {row['map']:.4f}  loss {row['loss']:.4f}" in out


def negative_confidence(prediction: dict[str, Any]) -> float:
    return -float(prediction["confidence"])


class TestOtherLibraries:
    """timm and transformers load the `model` folder."""

    def test_timm_gives_the_same_scores(self, workspace: Path) -> None:
        images_BCHW = torch.randn(4, 3, 16, 16)
        classifier = Classifier.load(workspace / "run" / "model", device="cpu")
        model = timm.create_model(
            f"local-dir:{workspace / 'run' / 'model'}", pretrained=True
        ).eval()
        with torch.inference_mode():
            scores = model(images_BCHW).sigmoid()
        expected = classifier.confidences(classifier.logits(images_BCHW)).float()
        torch.testing.assert_close(scores, expected, rtol=0, atol=1e-6)

    def test_transformers_gives_the_same_scores(
        self, workspace: Path, predictions: list[dict[str, Any]]
    ) -> None:
        transformers = pytest.importorskip("transformers", reason="transformers is not installed")
        folder, image = str(workspace / "run" / "model"), str(workspace / "images" / "00.png")
        model = transformers.AutoModelForImageClassification.from_pretrained(folder).eval()
        assert model.config.problem_type == "multi_label_classification"
        images_BCHW = torch.randn(4, 3, 16, 16)
        classifier = Classifier.load(folder, device="cpu")
        with torch.inference_mode():
            model_scores = model(images_BCHW).logits.sigmoid()
        expected = classifier.confidences(classifier.logits(images_BCHW)).float()
        torch.testing.assert_close(model_scores, expected, rtol=0, atol=1e-6)
        classify = transformers.pipeline("image-classification", model=folder, device="cpu")
        expected_scores = {
            prediction["label"]: prediction["confidence"]
            for prediction in predictions[0]["predictions"]
        }
        for options in ({}, {"function_to_apply": "sigmoid"}):
            scores = {
                prediction["label"]: prediction["score"]
                for prediction in classify(image, top_k=10, **options)
            }
            # PIL rounds to bytes after each direction of a resize
            assert scores == pytest.approx(expected_scores, abs=5e-3)
        assert sum(expected_scores.values()) != pytest.approx(1, abs=0.1), (
            "scores must not sum to 1, or a softmax would pass"
        )

    def test_export_contains_the_thresholds(
        self, workspace: Path, thresholds: list[float], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        model = Classifier.load(workspace / "run", device="cpu").network
        monkeypatch.setattr(export_module, "export_network", lambda _, __, path, *___: path.touch())
        monkeypatch.setattr(export_module, "load_exported", lambda path, format: model)
        result = export_model(
            str(workspace / "run"),
            format="torch",
            out=str(workspace / "exported"),
            preprocessing=False,
        )
        sidecar = json.loads(Path(result["preprocessing"]).read_text())
        assert sidecar["thresholds"] == thresholds
        assert "temperature" not in sidecar


class TestCard:
    @pytest.fixture
    def text(self, workspace: Path) -> str:
        return (workspace / "run" / "model" / "README.md").read_text()

    def test_metadata_is_valid_for_the_hub(self, workspace: Path, text: str) -> None:
        assert check_card(text, "model") == ([], ["no license given"])
        test = json.loads((workspace / "run" / "results.json").read_text())["test"]
        card = ModelCard(text)
        assert card.data.pipeline_tag == "image-classification"
        assert card.data.metrics == ["mean_average_precision", "f1"]
        metrics = {
            result.metric_name: (result.metric_type, result.metric_value)
            for result in card.data.eval_results
        }
        assert metrics == {
            "Mean average precision": ("mean_average_precision", round(test["map"], 6)),
            "Macro F1": ("f1", round(test["macro_f1"], 6)),
            "Micro F1": ("f1", round(test["micro_f1"], 6)),
            "Loss": ("binary-cross-entropy", round(test["loss"], 6)),
        }

    def test_card_shows_thresholds_and_no_single_label_metrics(
        self, text: str, thresholds: list[float]
    ) -> None:
        rows = re.findall(r"^\| (\d) \| (\d\.\d{4}) \|", text, re.MULTILINE)
        assert rows == [(str(k), f"{threshold:.4f}") for k, threshold in enumerate(thresholds)]
        for phrase in (
            "top-1",
            "Every image gets one",
            "Wilson",
            "confusion.png",
            "calibration error",
        ):
            assert phrase not in text

    def test_card_counts_classes_without_fitted_threshold(
        self, workspace: Path, text: str, tmp_path: Path
    ) -> None:
        assert "validation image it is" not in text
        shutil.copytree(workspace / "run", tmp_path / "run")
        forget_checksums(tmp_path / "run" / "model")
        results = json.loads((tmp_path / "run" / "results.json").read_text())
        for row in results["val"]["per_class"][:2]:
            row["support"] = 0
        (tmp_path / "run" / "results.json").write_text(json.dumps(results))
        rewrite_artifacts(RunDir(tmp_path / "run"))
        text = (tmp_path / "run" / "model" / "README.md").read_text()
        assert "For 2 labels without a validation image it is 0.5." in text

    def test_code_examples_give_the_same_labels(
        self, workspace: Path, text: str, predictions: list[dict[str, Any]]
    ) -> None:
        pytest.importorskip("transformers", reason="transformers is not installed")
        folder, image = str(workspace / "run" / "model"), str(workspace / "images" / "00.png")
        outputs = []
        for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL):
            code = block.replace("THIS_FOLDER", folder).replace("photo.jpg", image)
            *lines, last = code.strip().splitlines()
            namespace: dict[str, Any] = {}
            exec("\n".join(lines), namespace)
            if "import timm" not in block:
                outputs.append(eval(last, namespace))
        predictions_by_finetune, predictions_by_transformers = outputs
        assert label_names(predictions_by_finetune[0]) == label_names(predictions[0])
        confidences = {
            prediction["label"]: prediction["confidence"]
            for prediction in predictions[0]["predictions"]
        }
        assert {
            prediction["label"]: confidences[prediction["label"]]
            for prediction in predictions_by_transformers
        } == pytest.approx(
            {
                prediction["label"]: prediction["score"]
                for prediction in predictions_by_transformers
            },
            abs=5e-3,
        )

    def test_card_averages_seeds_and_the_folder_is_complete(self, workspace: Path) -> None:
        shutil.copytree(workspace / "run", workspace / "other")
        other, recipe = RunDir(workspace / "other"), make_recipe("run.seed=1")
        (other.path / "recipe.yaml").write_text(recipe.to_yaml())
        write_record(other, {**read_record(other), "training_keys": training_keys(recipe)})
        rewrite_artifacts(RunDir(workspace / "run"))
        files = {path.name for path in (workspace / "run" / "model").iterdir()}
        assert files == {*PUBLISHED_FILES} - {"confusion.png", "reliability.png"}
        assert (
            "mean ± std of 2 seeds (0, 1)"
            in (workspace / "run" / "model" / "README.md").read_text()
        )


class TestReport:
    def test_report_shows_multilabel_metrics(
        self, workspace: Path, thresholds: list[float]
    ) -> None:
        write_report_pages([str(workspace / "run")])
        html = (workspace / "run" / "report.html").read_text()
        for word in ("Test mAP", "Micro F1", "Mean average precision", ">AP<", ">Threshold<"):
            assert word in html
        assert f">{thresholds[0]:.3f}<" in html
        assert re.search(r"predicted <bdi>(\d(, \d)*|none)</bdi> · true <bdi>\d(, \d)?</bdi>", html)
        assert html.count('<div class="picture"><img') > 5
        for phrase in ("op-1", "Confusion", "Calibration", " confidence, "):
            assert phrase not in html.partition('<section id="recipe">')[0]

    def test_only_multilabel_runs_are_compared_with_each_other(
        self, workspace: Path, tmp_path: Path
    ) -> None:
        copies = [tmp_path / "a", tmp_path / "b"]
        for copy in copies:
            copy.mkdir()
            for name in ("run.json", "recipe.yaml", "metrics.jsonl", "results.json"):
                (copy / name).write_bytes((workspace / "run" / name).read_bytes())
        html = write_comparison(copies, tmp_path / "both.html").read_text()
        assert "Test mAP" in html
        assert "top-1" not in html.lower()
        single = write_run_dir(tmp_path / "single")
        before = sorted(tmp_path.rglob("*"))
        with refused("recipe.conflict", "single"):
            write_report_pages([str(copies[0]), str(single)])
        assert sorted(tmp_path.rglob("*")) == before


class TestDemo:
    def test_result_shows_bars_thresholds_and_labels(
        self, workspace: Path, predictions: list[dict[str, Any]], thresholds: list[float]
    ) -> None:
        all_labels = DemoPredictor(Classifier.load(workspace / "run", device="cpu", threshold=0.0))
        assert len(all_labels.predict(predictions[0]["path"]).top) == 10, (
            "predicted labels beyond the top five are shown, too"
        )
        result = DemoPredictor(Classifier.load(workspace / "run", device="cpu")).predict(
            predictions[0]["path"]
        )
        pairs = [
            (prediction["label"], prediction["confidence"])
            for prediction in predictions[0]["predictions"]
        ]
        assert [name for name, _ in result.top[:5]] == [name for name, _ in pairs[:5]]
        assert result.thresholds == [thresholds[int(name)] for name, _ in result.top]
        html = render_result(result)
        label_text = ", ".join(label_names(predictions[0])) or "No label reaches its threshold"
        assert f'<p class="ft-labels">{label_text}</p>' in html
        assert html.count('<li class="ft-predicted">') == len(predictions[0]["labels"])
        threshold_marks = re.findall(r'<b style="left:([\d.]+)%">', html)
        assert threshold_marks == [f"{100 * threshold:.2f}" for threshold in result.thresholds]

    def test_summary_and_example_images(self, workspace: Path, tmp_path: Path) -> None:
        test = json.loads((workspace / "run" / "results.json").read_text())["test"]
        summary = summarize_model(
            str(workspace / "run"), Classifier.load(workspace / "run", device="cpu")
        )
        assert f"mAP {100 * test['map']:.1f} % on 60 test images" in summary
        assert len(copy_example_images(str(workspace / "run"), tmp_path)) == 6


class TestOtherCommands:
    def test_greedy_soup_selects_by_map(self, workspace: Path) -> None:
        tuned_recipe = (
            f"model: {{name: '{workspace / 'run' / 'model'}'}}\noptim: {{lr: 1e-3, steps: 2}}\n"
        )
        tuned_recipe += (
            f"data: {{source: 'embedded:digit_pairs', {DATA}}}\nrun: {{precision: fp32}}\n"
        )
        for name in ("tuned", "worse"):
            train(parse_recipe(tuned_recipe), workspace / name)
        weights = load_file(workspace / "worse" / "model" / "model.safetensors")
        weights["head.weight"] = -weights["head.weight"]
        save_file(weights, forget_checksums(workspace / "worse" / "model") / "model.safetensors")
        runs = [str(workspace / "worse"), str(workspace / "tuned")]
        result = average_runs(runs, out=str(workspace / "soup"), greedy=True)
        assert result["chosen"] == "tuned"
        assert all(set(row) == {"name", "map", "loss"} for row in result["tried"])
        assert f"test: map {result['test']['map']:.4f}" in format_average(result)
        config = json.loads((workspace / "soup" / "config.json").read_text())
        assert config["calibration"]["thresholds"] == result["thresholds"]
        assert Classifier.load(workspace / "soup", device="cpu").thresholds == result["thresholds"]

    def test_probe_is_refused(self, run_cli: RunCli) -> None:
        code, _, err = run_cli("probe run --shots 1")
        assert code == 3
        assert "data.task" in err

    def test_image_sheets(self, workspace: Path, tmp_path: Path, run_cli: RunCli) -> None:
        assert (
            run_cli(f"data info embedded:digit_pairs --multilabel --sheet {tmp_path / 'a.png'}")[0]
            == 0
        )
        show_training(load_recipe(workspace / "run" / "recipe.yaml"), tmp_path / "b.png")
        for name in ("a.png", "b.png"):
            with Image.open(tmp_path / name) as image:
                assert min(image.size) > 400
        with refused("data.wrong_labels"):
            show_source("embedded:digit_pairs", tmp_path / "c.png")
