"""The model card: YAML that the hub accepts, and the metrics of the run."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import yaml
from hub_store import check_card
from huggingface_hub import ModelCard

from finetune.evaluation.confidence_intervals import wilson_interval
from finetune.evaluation.validation_scores import ValidationScores
from finetune.publish.model_card import (
    CardContent,
    license_metadata,
    render_adapter_card,
    render_card,
)
from finetune.recipe.load import parse_recipe
from finetune.recipe.schema import Recipe

RECIPE = parse_recipe(
    "model: {name: vit_base_patch16_224.augreg_in21k}\n"
    "data: {source: 'hub:uoft-cs/cifar10@main:plain_text'}\n"
    "optim: {lr: 1e-3, steps: 5}\n"
)
OWN_ARCHITECTURES = ["shiftvit_tiny_patch4_48", "vit_scratch_large_patch8_32", "vit_hybrid"]
TEST = {"examples": 355, "top1": 0.98765, "top5": 1.0, "loss": 0.1, "ece": 0.02}
WEIGHTS = {
    "source": "vit_base_patch16_224.augreg_in21k",
    "repository": "timm/vit_base_patch16_224.augreg_in21k",
    "revision": "c0ffee",
    "sha256": "ab" * 32,
    "license": "apache-2.0",
}


def card_content(**changes: Any) -> CardContent:
    defaults: dict[str, Any] = {
        "recipe": RECIPE,
        "record": {
            "versions": {"torch": "2.15.0"},
            "commit": "abc123",
            "precision": "bf16",
            "num_processes": 2,
            "device": {"type": "cpu", "name": "A processor"},
            "data_fingerprint": "f" * 64,
            "plan": {
                "images": {"train": 900, "val": 100, "test": 355},
                "eval_pipeline": "resize(400) | center_crop",
            },
        },
        "results": {"steps": 5, "best_step": 4, "test": TEST},
        "config": {
            "architecture": "vit_base_patch16_224",
            "label_names": [f"class {i}" for i in range(40)],
            "pretrained_cfg": {
                "input_size": [3, 384, 384],
                "mean": [0.5, 0.5, 0.5],
                "std": [0.5, 0.5, 0.5],
                "interpolation": "bicubic",
                "crop_pct": 0.96,
            },
        },
        "sha256": "cd" * 32,
        "weights": WEIGHTS,
        "repository": "alice/my-vit",
    }
    return CardContent(**{**defaults, **changes})


def test_yaml_header_has_the_hub_metadata() -> None:
    header, _ = render_card(card_content()).split("---\n", 2)[1:]
    found = yaml.safe_load(header)
    index = found.pop("model-index")
    assert found == {
        "license": "apache-2.0",
        "library_name": "timm",
        "pipeline_tag": "image-classification",
        "tags": ["image-classification", "timm", "finetune"],
        "datasets": ["uoft-cs/cifar10"],
        "metrics": ["accuracy"],
        "base_model": "timm/vit_base_patch16_224.augreg_in21k",
        "base_model_relation": "finetune",
    }
    metrics = index[0]["results"][0]["metrics"]
    assert index[0]["name"] == "my-vit"
    assert {metric["type"]: metric["value"] for metric in metrics} == {
        "accuracy": 0.98765,
        "top-5-accuracy": 1.0,
        "cross-entropy": 0.1,
        "expected-calibration-error": 0.02,
    }
    assert all(type(metric["value"]) is float for metric in metrics)


def test_huggingface_hub_parses_the_card() -> None:
    card = ModelCard(render_card(card_content()))
    assert card.data.eval_results[0].metric_value == TEST["top1"]
    assert card.data.license == "apache-2.0"


def test_metrics_come_from_the_run_with_spread_over_seeds() -> None:
    other = {"test": {**TEST, "top1": 0.96755}}
    text = render_card(card_content(seed_results=[(0, {"test": TEST}), (1, other)]))
    assert "| test | 355 | 0.9877 | 1.0000 | 0.1000 | 0.0200 |" in text
    assert "| test, mean ± std of 2 seeds (0, 1) | 355 | 0.9776 ± 0.0142 |" in text
    assert "| val |" not in text
    assert "and 10 more" in text
    assert "step 4" in text


def test_multilabel_thresholds_without_validation() -> None:
    multilabel = parse_recipe(
        RECIPE.to_yaml(), overrides=["data.task=multilabel", "run.best=val.map"]
    )
    row = dict.fromkeys(("ap", "precision", "recall", "f1")) | {"support": 0, "threshold": 0.5}
    test = {"map": 0.4, "macro_f1": 0.3, "micro_f1": 0.2, "loss": 0.1, "examples": 355}
    results = {"steps": 5, "best_step": 4, "test": {**test, "per_class": [row] * 40}}
    text = render_card(card_content(recipe=multilabel, results=results))
    assert "| test | 355 | 0.4000 | 0.3000 | 0.2000 | 0.1000 |" in text
    assert "| class 29 | 0.5000 | – | – | – | – |" in text
    assert "class 30" not in text, "results.json has them"
    assert "under `calibration`" not in text
    assert "no validation split" in text


def test_leaks_are_next_to_the_metrics() -> None:
    record = {**card_content().record, "leakage": ["split 'test': 1 of 30 images are copies"]}
    line = "> **Leak:** split 'test': 1 of 30 images are copies."
    assert line in render_card(card_content(record=record))
    assert "Leak" not in render_card(card_content())


def test_unreadable_images_are_counted() -> None:
    record = card_content().record
    changed = {**record, "plan": {**record["plan"], "images_read": 898}}
    card = render_card(card_content(record=changed))
    assert "- train: 900 images (2 of them unreadable and left out)" in card
    assert "- test: 355 images, evaluated once" in card


def test_changed_metrics_are_named() -> None:
    changes = {"metrics_changed": True, "numerics_changed": ["processes 2 -> 1"]}
    card = render_card(card_content(record={**card_content().record, **changes}))
    assert "- changed at a resume: processes 2 -" in card
    not_tested = {key: value for key, value in card_content().results.items() if key != "test"}
    assert "evaluated once" not in render_card(card_content(results=not_tested))
    assert "> **Changed metrics:** metrics.jsonl was changed after the run had written it;" in card
    assert "Changed metrics" not in render_card(card_content())


def test_metrics_on_few_images_have_confidence_intervals() -> None:
    few_images = {**TEST, "top1": 0.75, "examples": 20}
    many_images = {**TEST, "examples": 1000}
    text = render_card(
        card_content(results={"steps": 5, "best_step": 4, "val": few_images, "test": TEST})
    )
    low, high = (f"{100 * end:.1f}" for end in wilson_interval(15, 20))
    assert f"{low}–{high} % (validation)" in text
    assert "97.1–99.6 % (test)" in text
    assert "> **Too few images** to judge the model: 20 images of validation." in text
    assert "not evaluated on a test split" not in text
    without_test = render_card(
        card_content(results={"steps": 5, "best_step": 4, "val": many_images})
    )
    assert "95 % interval" not in without_test
    assert "Too few images" not in without_test
    assert "not evaluated on a test split." in without_test
    assert "images like those of the validation split" in without_test
    last = parse_recipe(RECIPE.to_yaml(), overrides=["run.best=last"])
    with_last = render_card(
        card_content(recipe=last, results={"steps": 5, "best_step": 5, "val": many_images})
    )
    assert "weights were selected" in without_test
    assert "weights were selected" not in with_last


@pytest.mark.parametrize("num_classes", [2, 5, 6])
def test_top5_needs_more_than_five_classes(num_classes: int) -> None:
    config = {**card_content().config, "label_names": [f"class {i}" for i in range(num_classes)]}
    text = render_card(card_content(config=config))
    assert ("top-5" in text) == (num_classes > 5)
    assert "| test | 355 | 0.9877 |" in text


def test_warns_against_a_harmful_temperature() -> None:
    scaled = {"temperature": 0.05, "ece": 0.03, "loss": 0.4}
    results = {"steps": 5, "best_step": 4, "test": {**TEST, "calibrated": scaled}}
    text = render_card(card_content(results=results))
    assert "Do not divide the logits by 0.05" in text
    assert "0.4000 instead of 0.1000" in text
    assert "Dividing the logits" not in text


def test_card_lists_the_error_rates_that_the_model_can_keep() -> None:
    num_images = 200  # too few for 1 %, which needs 299
    scores = ValidationScores(
        np.arange(num_images, dtype=np.float32),
        np.zeros(num_images, np.float32),
        np.zeros(num_images, np.int64),
        "val",
    )
    config = card_content().config
    text = render_card(card_content(config={**config, "validation_scores": scores.to_config()}))
    assert "| 1 % | – |" in text
    assert "| 2 % | 100.0 % |" in text
    assert "200 validation images" in text
    record = {"split_fingerprints": {"test": "a", "val": "b", "classes": "c"}}
    own = {"temperature": 20.0, "split": "test", "fingerprints": {"test": "a", "classes": "c"}}
    entry = replace(scores, split="test").to_config()
    fitted = {**config, "validation_scores": entry, "calibration": own}
    text = render_card(card_content(config=fitted, record=record))
    assert "from 200 images of 'test', the" in text
    for changed in ({"test": "b", "classes": "c"}, {"test": "a", "classes": "d"}, {"val": "a"}):
        fitted["calibration"] = {**own, "fingerprints": changed}
        text = render_card(card_content(config=fitted, record=record))
        assert "from 200 images of a split 'test' that is not the run's" in text
    assert "--unknown" not in text
    entry = {**scores.to_config(), "unknown_class": {}}
    marking = render_card(card_content(config={**config, "validation_scores": entry}))
    assert "`finetune predict --unknown` marks" in marking
    assert "--max-error" not in render_card(card_content())


def test_adapter_card_has_the_preprocessing_and_no_command_for_whole_models() -> None:
    """`finetune predict` refuses an adapter alone, which has no config.json."""
    recipe = parse_recipe(RECIPE.to_yaml(), overrides=["model.adapter={kind: lora, rank: 2}"])
    num_images = 400
    scores = ValidationScores(
        np.arange(num_images, dtype=np.float32),
        np.zeros(num_images, np.float32),
        np.zeros(num_images, np.int64),
        "val",
    )
    config = {**card_content().config, "validation_scores": scores.to_config()}
    content = card_content(recipe=recipe, config=config)
    assert "finetune predict" in render_card(content)
    text = render_adapter_card(content)
    assert (
        "evaluation: `resize(400) | center_crop`, bicubic, mean [0.5, 0.5, 0.5], std [0.5" in text
    )
    assert "finetune predict" not in text


def test_card_has_usage_results_and_provenance() -> None:
    results = {
        "steps": 5,
        "best_step": 4,
        "test": {**TEST, "calibrated": {"temperature": 1.31, "ece": 0.011, "loss": 0.09}},
        "claims": [
            {
                "metric": "test.top1",
                "when": "end",
                "value": 0.9895,
                "tolerance": 0.0015,
                "source": "A paper, table 5",
                "measured": 0.98765,
                "verdict": "not met",
            }
        ],
    }
    text = render_card(card_content(results=results, plots=["curves.png", "confusion.png"]))
    for part in (
        'timm.create_model("hf-hub:alice/my-vit", pretrained=True)',
        'finetune.Classifier.load("hf-hub:alice/my-vit")',
        'pipeline("image-classification", model="alice/my-vit")',
        "a temperature fitted on the validation split, changes the test loss from 0.1000 to 0.0900",
        "and the calibration error from 0.0200 to 0.0110",
        "| test.top1 | A paper, table 5 | 98.95 % ± 0.15 % | 98.77 % | not met |",
        "- val: 100 images; the weights were selected on them",
        "- test: 355 images, evaluated once",
        "bf16 on 2 processes (A processor)",
        "](curves.png)",
        "](confusion.png)",
        "revision `c0ffee`",
        f"sha256 `{'cd' * 32}`",
        "torch 2.15.0",
        "`abc123`",
    ):
        assert part in text, part
    assert "](reliability.png)" not in text
    config = {**card_content().config, "calibration": {"temperature": 0.277543, "split": "test"}}
    text = render_card(card_content(results=results, config=config))
    assert "in `config.json`, 0.2775, was fitted after the test split had been evaluated" in text
    assert "changes the test loss" not in text
    same = results["test"]["calibrated"]["temperature"]
    config["calibration"] = {"temperature": same, "split": "test"}
    text = render_card(card_content(results=results, config=config))
    assert "was fitted after the test split had been evaluated, on 'test'" in text


def test_transforms_that_the_code_of_the_card_does_not_use_are_named() -> None:
    record = card_content().record
    assert "Other transforms" not in render_card(card_content())
    for spec in ("center_crop(300) | resize(384)", "resize(384)"):
        plan = {**record["plan"], "eval_pipeline": spec}
        text = render_card(card_content(record={**record, "plan": plan}))
        assert f"the results below are with `{spec}`" in text
        assert "This code uses `resize(400) | center_crop((384, 384))`" in text


@pytest.mark.parametrize("architecture", OWN_ARCHITECTURES)
def test_networks_that_only_finetune_has(architecture: str) -> None:
    """timm and transformers would fail with "Unknown model"."""
    text = render_card(card_content(config={**card_content().config, "architecture": architecture}))
    metadata = ModelCard(text).data.to_dict()
    assert metadata["library_name"] == "finetune"
    assert metadata["tags"] == ["image-classification", "finetune"]
    assert re.findall("^(?:import|from) (.*)", text, re.MULTILINE) == ["finetune"]
    assert "finetune-vision" in text


def test_embedded_recipe_equals_the_recipe() -> None:
    text = render_card(card_content()).split("```yaml\n")[1].split("```")[0]
    assert parse_recipe(text) == RECIPE


@pytest.mark.parametrize("name", ["<script>x</script>", "a|b", "two\nlines", "[x](javascript:1)"])
def test_class_names_are_escaped(name: str) -> None:
    config = {**card_content().config, "label_names": [name, "other"]}
    text = render_card(card_content(config=config))
    line = next(line for line in text.splitlines() if line.startswith("Classes (2)"))
    assert "<" not in line
    assert "](" not in line
    assert line.endswith(", other.")


@pytest.mark.parametrize("license_id", ["dinov3-license", "NVIDIA Open Model"])
def test_license_unknown_to_the_hub_is_named(license_id: str) -> None:
    text = render_card(card_content(weights={**WEIGHTS, "license": license_id}))
    found = yaml.safe_load(text.split("---\n")[1])
    assert (found["license"], found["license_name"]) == (
        "other",
        license_id.lower().replace(" ", "-"),
    )
    assert check_card(text, "model") == ([], [])


@pytest.mark.parametrize("name", ["my photos", "ph|ot`os <b>", "..", "-a--b..c-"])
def test_hub_accepts_any_data_folder_name(name: str) -> None:
    data = RECIPE.data.model_copy(update={"source": f"folder:{name}"})
    text = render_card(card_content(recipe=RECIPE.model_copy(update={"data": data})))
    assert check_card(text, "model") == ([], [])


def test_random_weights_have_no_base_model_and_local_data_has_a_name() -> None:
    recipe: Recipe = parse_recipe(
        "model: {name: vit_tiny_patch16_224, pretrained: false}\n"
        "data: {source: 'folder:photos'}\noptim: {lr: 1, steps: 5}\n"
    )
    text = render_card(
        card_content(
            recipe=recipe,
            weights={},
            repository=None,
            results={"steps": 5, "best_step": 5, "val": TEST},
        )
    )
    header = yaml.safe_load(text.split("---\n")[1])
    assert "base_model" not in header
    assert "license" not in header
    assert "model-index" not in header  # nothing was tested
    assert header["datasets"] == ["photos"]
    assert "trained from random weights on photos" in text
    assert "license of the pretrained weights is not recorded" in text


def test_note_is_the_first_line() -> None:
    recipe = RECIPE.model_copy(
        update={"run": RECIPE.run.model_copy(update={"note": "not <b>the</b> experiment"})}
    )
    body = render_card(card_content(recipe=recipe)).split("---\n", 2)[2]
    lines = [line for line in body.splitlines() if line]
    assert lines[1] == "> not &lt;b&gt;the&lt;/b&gt; experiment"


@pytest.mark.parametrize(
    "license_id,keys",
    [
        ("apache-2.0", {"license": "apache-2.0"}),
        ("other", {"license": "other"}),
        ("dinov3-license", {"license": "other", "license_name": "dinov3-license"}),
        ("Not For Sale!", {"license": "other", "license_name": "not-for-sale"}),
        ("!", {"license": "other", "license_name": "unknown"}),
        (None, {}),
        ("", {}),
    ],
)
def test_license_metadata(license_id: str | None, keys: dict[str, str]) -> None:
    assert license_metadata(license_id) == keys


def test_exported_model_is_described() -> None:
    figures = {"top1_agreement": 1.0, "max_difference": 2e-6, "latency_ms": 4.5}
    export = {**figures, "bytes": 1 << 20, "num_images": 48, "num_sizes": 11}
    export["runtimes"] = {"web": {**figures, "version": "1.30.0", "latency_ms": 90.04}}
    card = render_card(
        card_content(certificate={"versions": {"onnxruntime": "1.32.0"}, "export": export})
    )
    assert "`model.onnx` (1.0 MiB)" in card
    assert "48 images of 11 sizes" in card
    assert re.search(r"\| onnxruntime 1\.32\.0 +\| 100\.0 % +\| 2\.0e-06 +\| 4\.5 +\|", card)
    assert re.search(r"\| onnxruntime-web 1\.30\.0 +\| 100\.0 % +\| 2\.0e-06 +\| 90\.0 +\|", card)
    assert "## Export" not in render_card(card_content())
    reduced = {"precision": "INT8", "num_validation_images": 500}
    for data_changed, images in (
        (False, "500 validation images"),
        (True, "500 validation images, whose data has changed since the run"),
    ):
        figures = {"accuracy": 0.9, "accuracy_float": 0.902, "data_changed": data_changed}
        export["reduced"] = {**reduced, **figures}
        card = render_card(
            card_content(certificate={"versions": {"onnxruntime": "1.32.0"}, "export": export})
        )
        assert f"in INT8: 90.00 % accuracy on {images}, 90.20 % in float32." in card
