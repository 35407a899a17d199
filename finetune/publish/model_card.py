"""Render the model card `model/README.md` from the recipe, the run record and the results."""

from __future__ import annotations

import html
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import timm
from huggingface_hub import EvalResult, ModelCardData

from finetune.evaluation.claims import claims_table
from finetune.evaluation.confidence_intervals import TOO_FEW_IMAGES, accuracy_interval
from finetune.evaluation.metrics import mean_std
from finetune.evaluation.selective import select_threshold
from finetune.evaluation.unknown_classes import FALSE_UNKNOWN_RATE
from finetune.evaluation.validation_scores import ValidationScores
from finetune.formatting import (
    MISSING,
    TOO_FEW_IMAGES_NOTE,
    format_bytes,
    format_mean_std,
    format_percent,
    format_percent_range,
    markdown_table,
    pluralize,
)
from finetune.recipe.schema import Recipe
from finetune.run.record import (
    RunRecord,
    describe_changed_metrics,
    describe_decisions,
    describe_split_decisions,
    describe_teacher,
)
from finetune.transforms.eval_transforms import default_eval_spec, spec_to_preprocessing
from finetune.transforms.preprocessing import resolve_preprocessing

__all__ = ["CardContent", "license_metadata", "render_adapter_card", "render_card"]

_HUB_LICENSES = (  # license ids of the Hugging Face Hub, which rejects other ids in a card
    "apache-2.0 mit bsd-2-clause bsd-3-clause cc0-1.0 cc-by-4.0 cc-by-nc-4.0 cc-by-sa-4.0 "
    "cc-by-nc-sa-4.0 gpl-3.0 agpl-3.0 openrail gemma apple-amlr unknown other"
)


def license_metadata(license_id: object) -> dict[str, str]:
    """Return a license as card metadata; a license unknown to the Hub becomes "other"."""
    if not license_id or str(license_id) in _HUB_LICENSES.split():
        return {"license": str(license_id)} if license_id else {}
    name = re.sub(r"[^a-z0-9.]+", "-", str(license_id).lower()).strip("-.")
    return {"license": "other", "license_name": name or "unknown"}


_MAX_LISTED_CLASSES = 30
_PLAIN_TITLE = re.compile(r"[\w. -]+")  # no Markdown or HTML characters
_BIDI_CONTROLS = re.compile(
    "[\u202a-\u202e\u2066-\u2069]"
)  # bidi controls in a name would also reorder the text after it
_REPO_ID = re.compile(r"[\w.-]+/[\w.-]+", re.ASCII)
_METRIC_COLUMNS = {
    **{"top1": "top-1", "top5": "top-5", "balanced_accuracy": "balanced accuracy"},
    **{"map": "mAP", "macro_f1": "macro F1", "micro_f1": "micro F1"},
    **{"loss": "loss", "ece": "calibration error"},
}
_ERROR_RATES = (0.01, 0.02, 0.05)
_PLOTS = {
    "curves.png": ("Curves", "Loss, accuracy and learning rate during the run"),
    "confusion.png": ("Confusion matrix", "Rows are true classes, columns are predicted classes"),
    "reliability.png": ("Calibration", "Accuracy against confidence"),
}


@dataclass(frozen=True)
class CardContent:
    """Everything that a model card reports.

    Attributes:
        recipe: the run's recipe, without local paths.
        record: the content of run.json.
        results: the content of results.json so far.
        config: the content of the model's config.json.
        sha256: sha256 of model.safetensors.
        seed_results: (seed, results) of the runs that differ only in the seed, including this one.
        plots: names of the plot files next to the card.
        repository: owner/name on the Hub; None if unknown.
        weights: provenance of the pretrained weights, from run.json.
        certificate: the content of certificate.json, if the folder has an exported model.
    """

    recipe: Recipe
    record: RunRecord
    results: Mapping[str, Any]
    config: Mapping[str, Any]
    sha256: str
    seed_results: Sequence[tuple[int, Mapping[str, Any]]] = ()
    plots: Sequence[str] = ()
    repository: str | None = None
    weights: Mapping[str, Any] = field(default_factory=dict)
    certificate: Mapping[str, Any] | None = None

    @property
    def dataset_name(self) -> str:
        """The dataset's name: owner/name on the Hub, else the last part of its path."""
        kind, _, rest = self.recipe.data.source.partition(":")
        return re.split(r"[@:]", rest)[0] if kind == "hub" else rest.rstrip("/").rpartition("/")[2]

    @property
    def dataset_id(self) -> str:
        """The dataset's name as a valid Hub id: `my photos` becomes `my-photos`."""
        plain = re.sub(r"[^A-Za-z0-9_]+", "-", self.dataset_name).strip("-_")[:96] or "data"
        return self.dataset_name if _REPO_ID.fullmatch(self.dataset_name) else plain

    @property
    def is_multilabel(self) -> bool:
        """True for a multi-label task."""
        return self.recipe.data.task == "multilabel"

    @property
    def is_fitted_on_other_images(self) -> bool:
        """True if `eval --fit-temperature` had other images than the split of the run."""
        fitted = (self.config.get("calibration") or {}).get("fingerprints", {})
        recorded = {
            **self.record.get("whole_fingerprints", {}),
            **self.record.get("split_fingerprints", {}),
        }
        return any(recorded.get(name) != sha256 for name, sha256 in fitted.items())

    @property
    def libraries(self) -> list[str]:
        """The libraries that load the model without finetune."""
        if _is_in_timm(self.config["architecture"]):
            return ["timm", "transformers"]
        return ["transformers"] if "image_processor_type" in self.config else []

    @property
    def metric_columns(self) -> dict[str, str]:
        """Metrics to show, by key, with column titles; top-5 only for more than five classes."""
        every = [self.results, *(results for _, results in self.seed_results)]
        measured = [one[split] for one in every for split in ("test", "val") if one.get(split)]
        missing = {key for key in _METRIC_COLUMNS if not all(key in one for one in measured)}
        missing |= {"top5"} if 0 < len(self.config.get("label_names") or []) <= 5 else set()
        missing |= {"top1", "top5"} if self.is_multilabel else {"map", "micro_f1"}
        return {key: head for key, head in _METRIC_COLUMNS.items() if key not in missing}

    @property
    def model_name(self) -> str:
        """The model's name: the repository's without its owner, else MODEL-DATASET."""
        if self.repository:
            return self.repository.partition("/")[2]
        start = re.sub(r"[^\w.-]+", "-", self.recipe.model.name.rpartition("/")[2])
        return f"{start}-{self.dataset_name.rpartition('/')[2]}".removeprefix("embedded-")


def render_card(content: CardContent) -> str:
    """Render the card of a fine-tuned model.

    Returns: the text of README.md, with the Hub's YAML header.
    """
    sections = [
        _summary_section(content),
        _usage_section(content),
        _results_section(content),
        _temperature_note(content),
        _abstention_note(content),
        _export_section(content),
        _classes_section(content, config="[config.json](config.json)"),
        _claims_section(content),
        _training_section(content),
        _plots_section(content),
        _data_section(content),
        _limits_section(content),
        _provenance_section(content),
    ]
    head = _card_metadata(content).to_yaml()
    return f"---\n{head}\n---\n\n" + "\n".join(line for part in sections for line in part)


def render_adapter_card(content: CardContent) -> str:
    """Render the card of a run's adapter.

    Args:
        content: content of the run's card, with `repository` set to that of the adapter.
    Returns: the text of README.md, with the Hub's YAML header.
    """
    adapter = content.recipe.model.adapter
    assert adapter is not None, "the run has an adapter"
    kind = {"lora": "LoRA", "dora": "DoRA"}[adapter.kind]
    about = f"{kind} of rank {adapter.rank} on {', '.join(map(_inline_code, adapter.targets))}"
    sections = [
        _summary_section(content),
        [f"This repository holds only the adapter ({about}) and the classifier.", ""],
        _adapter_usage_section(content),
        _results_section(content),
        _classes_section(content, config="config.json of the merged model"),
        _data_section(content),
        _limits_section(content),
        [f"The base weights have sha256 `{content.weights.get('sha256')}`.", ""],
    ]
    head = _card_metadata(content, library="peft", relation="adapter").to_yaml()
    return f"---\n{head}\n---\n\n" + "\n".join(line for part in sections for line in part)


def _adapter_usage_section(content: CardContent) -> list[str]:
    """Code that loads the adapter onto its base model, built by timm if possible."""
    model, classes = content.recipe.model, len(content.config.get("label_names") or [])
    changes = model.model_dump(include={"args", "rename", "image_size"})
    if (method := content.weights.get("posemb")) != "none":
        changes["posemb"] = method
    if _is_in_timm(model.name.partition(".")[0]) and not any(changes.values()):
        lines = ["import timm"]
        base = f'timm.create_model("{model.name}", pretrained=True, num_classes={classes})'
    else:
        lines = ["from finetune.models.build import build_model"]
        settings = "".join(f", {key}={value!r}" for key, value in changes.items() if value)
        base = f"build_model({model.name!r}, num_classes={classes}{settings}).model"
    lines += ["from peft import PeftModel", "", f"base = {base}"]
    lines += [f'model = PeftModel.from_pretrained(base, "{content.repository or "THIS_FOLDER"}")']
    lines += ["model.eval()  # for images that were preprocessed as under Data"]
    return ["## Use", "", "```python", *lines, "```", ""]


def _is_in_timm(architecture: str) -> bool:
    """True for a network of timm, False for one that finetune registers with timm."""
    if not timm.is_model(architecture):
        return False
    return timm.model_entrypoint(architecture).__module__.startswith("timm.")


def _card_metadata(
    content: CardContent, *, library: str | None = None, relation: str = "finetune"
) -> ModelCardData:
    """Return the metadata for the card's YAML header."""
    library = library or next(iter(content.libraries), "finetune")
    base = str(content.weights.get("repository") or "")
    on_hub = bool(_REPO_ID.fullmatch(base)) and content.recipe.model.pretrained
    is_multilabel = content.is_multilabel
    tags = dict.fromkeys([library, "finetune"])
    return ModelCardData(
        **license_metadata(content.weights.get("license")),
        library_name=library,
        pipeline_tag="image-classification",
        tags=["image-classification", *tags, *["multi-label"] * is_multilabel],
        datasets=[content.dataset_id],
        metrics=["mean_average_precision", "f1"] if is_multilabel else ["accuracy"],
        base_model=base if on_hub else None,
        base_model_relation=relation if on_hub else None,
        model_name=content.model_name,
        eval_results=_model_index(content),
        ignore_metadata_errors=False,
    )


def _model_index(content: CardContent) -> list[EvalResult] | None:
    """Return the test metrics in the Hub's model-index format; None without test metrics."""
    test = content.results.get("test")
    if not test:
        return None
    hub_metrics = {
        "top1": ("accuracy", "Top-1 accuracy"),
        "top5": ("top-5-accuracy", "Top-5 accuracy"),
        "balanced_accuracy": ("balanced_accuracy", "Balanced accuracy"),
        "map": ("mean_average_precision", "Mean average precision"),
        "macro_f1": ("f1", "Macro F1"),
        "micro_f1": ("f1", "Micro F1"),
        "loss": ("binary-cross-entropy" if content.is_multilabel else "cross-entropy", "Loss"),
        "ece": ("expected-calibration-error", "Expected calibration error"),
    }
    return [
        EvalResult(
            task_type="image-classification",
            task_name="Image Classification",
            dataset_type=content.dataset_id,
            dataset_name=content.dataset_name,
            dataset_split="test",
            metric_type=kind,
            metric_name=" ".join(filter(None, [name, describe_split_decisions(test)])),
            metric_value=round(float(test[key]), 6),
        )
        for key in content.metric_columns
        for kind, name in [hub_metrics[key]]
    ]


def _summary_section(content: CardContent) -> list[str]:
    recipe, results = content.recipe, content.results
    size = "×".join(map(str, content.config["pretrained_cfg"]["input_size"][1:]))
    start = (
        f"Fine-tuned from {_inline_code(recipe.model.name)}"
        if recipe.model.pretrained
        else f"{_inline_code(recipe.model.name)} trained from random weights"
    )
    names = [_escape_markdown(str(name)) for name in content.config.get("label_names") or []]
    shown = ", ".join(names[:_MAX_LISTED_CLASSES])
    more = (
        f" and {len(names) - _MAX_LISTED_CLASSES} more" if len(names) > _MAX_LISTED_CLASSES else ""
    )
    note = [f"> {_escape_markdown(recipe.run.note)}", ""] if recipe.run.note else []
    if average := results.get("average"):
        training = (
            f"averaged weights ({average['kind']}: {_escape_markdown(average['chosen'])}) of "
            f"{', '.join(map(_inline_code, average['runs']))}, selected on validation images. The "
            "training section below describes the first run; the averaged runs are listed under "
            "provenance."
        )
    else:
        training = (
            f"{results['steps']:,} steps of {recipe.data.batch_size} images at {size} pixels; "
            f"these are the weights of step {results['best_step']:,}."
        )
    title = content.model_name
    return [
        f"# {title if _PLAIN_TITLE.fullmatch(title) else _escape_markdown(title)}",
        "",
        *note,
        f"{start} on {_escape_markdown(content.dataset_name)}: {training}",
        "",
        f"Classes ({len(names)}): {shown}{more}.",
        "",
    ]


def _usage_section(content: CardContent) -> list[str]:
    where = f"hf-hub:{content.repository}" if content.repository else "local-dir:THIS_FOLDER"
    load_name = where.removeprefix("local-dir:")
    name = content.repository or load_name
    multilabel = content.is_multilabel
    extra_argument = ', function_to_apply="sigmoid"' if multilabel else ""
    code = {
        "finetune": [
            "import finetune",
            f'model = finetune.Classifier.load("{load_name}")',
            'model.predict("photo.jpg", top_k=3)'
            + "  # its labels, and the top three" * multilabel,
        ],
        "timm": [
            "import timm",
            f'model = timm.create_model("{where}", pretrained=True).eval()',
            "transform = timm.data.create_transform(**timm.data.resolve_model_data_config(model))",
            *["# labels of an image: model(transform(image)[None]).sigmoid() >= thresholds"]
            * multilabel,
        ],
        "transformers": [
            "from transformers import pipeline  # needs timm, too",
            f'pipeline("image-classification", model="{name}"{extra_argument})("photo.jpg")',
        ],
    }
    lines = ["## Use", ""]
    if not content.libraries:
        lines += ["timm and transformers cannot run this network; install finetune-vision.", ""]
    for library in ("finetune", *content.libraries):
        lines += ["```python", *code[library], "```", ""]
    return lines + _transforms_note(content)


def _transforms_note(content: CardContent) -> list[str]:
    """Name the evaluation transforms of the results if config.json does not have them."""
    spec = content.record.get("plan", {}).get("eval_pipeline")
    config = content.config["pretrained_cfg"]
    _, height, width = config["input_size"]
    preprocessing = resolve_preprocessing(config, (height, width))
    if not spec or spec_to_preprocessing(preprocessing, spec) == preprocessing:
        return []
    return [
        f"> **Other transforms:** the results below are with `{spec}`, which config.json cannot "
        f"store. This code uses `{default_eval_spec(preprocessing)}`, so it may give other "
        "predictions.",
        "",
    ]


def _results_section(content: CardContent) -> list[str]:
    rows = []
    for split in ("test", "val"):
        if result := content.results.get(split):
            numbers = [f"{result[key]:.4f}" for key in content.metric_columns]
            label = ", ".join(filter(None, [split, describe_split_decisions(result)]))
            rows.append([label, f"{result['examples']:,}", *numbers])
    measured = [(seed, one["test"]) for seed, one in content.seed_results if one.get("test")]
    if len(measured) > 1:
        spread = []
        for key in content.metric_columns:
            mean, std, _ = mean_std(result[key] for _, result in measured)
            spread.append(format_mean_std(mean, std, 4))
        seeds = ", ".join(str(seed) for seed, _ in measured)
        label = f"test, mean ± std of {len(measured)} seeds ({seeds})"
        label = ", ".join(filter(None, [label, describe_split_decisions(measured[0][1])]))
        rows.append([label, f"{measured[0][1]['examples']:,}", *spread])
    heads = ["split", "images", *content.metric_columns.values()]
    lines = ["## Results", "", *markdown_table(heads, rows), ""]
    return [*lines, *_uncertainty_notes(content)]


def _export_section(content: CardContent) -> list[str]:
    if content.certificate is None:
        return []
    export, versions = content.certificate["export"], content.certificate["versions"]
    measured = {f"onnxruntime {versions['onnxruntime']}": export}
    for name, figures in export["runtimes"].items():
        measured[f"{'onnxruntime-web' if name == 'web' else name} {figures['version']}"] = figures
    rows = [
        [
            name,
            format_percent(figures["top1_agreement"], 1),
            f"{figures['max_difference']:.1e}",
            f"{figures['latency_ms']:.1f}",
        ]
        for name, figures in measured.items()
    ]
    heads = ["runtime", "same top-1", "largest difference of a probability", "ms per image"]
    compared = "Compared"
    lines = []
    if reduced := export.get("reduced"):
        compared = "Before its conversion, compared"
        images = pluralize(reduced["num_validation_images"], "validation image")
        if reduced["data_changed"]:
            images += ", whose data has changed since the run"
        lines = [
            f"It is in {reduced['precision']}: {format_percent(reduced['accuracy'])} accuracy on "
            f"{images}, {format_percent(reduced['accuracy_float'])} in float32.",
            "",
        ]
    return [
        "## Export",
        "",
        f"`model.onnx` ({format_bytes(export['bytes'])}) takes a uint8 RGB image of any size and "
        "returns probabilities.",
        "",
        *lines,
        f"{compared} with this model on {export['num_images']} images of {export['num_sizes']} "
        "sizes:",
        "",
        *markdown_table(heads, rows),
        "",
    ]


def _uncertainty_notes(content: CardContent) -> list[str]:
    """Confidence intervals, and warnings about leaks, too few images or a missing test split."""
    leakage = content.record.get("leakage", [])
    lines = [line for leak in leakage for line in (f"> **Leak:** {_escape_markdown(leak)}.", "")]
    if changed := describe_changed_metrics(content.record):
        lines += [f"> **Changed metrics:** {changed}.", ""]
    results = content.results
    ranges, few = [], []
    for split, name in (("test", "test"), ("val", "validation")):
        result = results.get(split) or {"examples": 0}
        if "top1" in result and (ends := accuracy_interval(result["top1"], result["examples"])):
            ranges.append(f"{format_percent_range(*ends)} ({name})")
        if 0 < result["examples"] < TOO_FEW_IMAGES:
            few.append(f"{pluralize(result['examples'], 'image')} of {name}")
    if few:
        lines += [
            f"> **{TOO_FEW_IMAGES_NOTE.capitalize()}** to judge the model: {', '.join(few)}.",
            "",
        ]
    if ranges:
        lines += [f"95 % interval of top-1 (Wilson): {', '.join(ranges)}.", ""]
    if results.get("val") and not results.get("test") and content.recipe.run.best != "last":
        lines += [
            "The model was not evaluated on a test split. The weights were selected on the "
            "validation images, so expect lower accuracy on new images.",
            "",
        ]
    return lines


def _classes_section(content: CardContent, *, config: str) -> list[str]:
    """For multi-label models: the threshold and the metrics of each label.

    Args:
        config: Markdown for the file with the thresholds.
    """
    split = next((one for one in ("test", "val") if content.results.get(one)), None)
    if split is None or not content.is_multilabel:
        return []
    keys = ("threshold", "ap", "precision", "recall", "f1")
    names = [_escape_markdown(str(name)) for name in content.config.get("label_names") or []]
    rows = [
        [name, *(MISSING if row[key] is None else f"{row[key]:.4f}" for key in keys)]
        for name, row in zip(names, content.results[split]["per_class"], strict=True)
    ]
    origin = "is 0.5, because the run had no validation split to tune it on."
    if content.results.get("thresholds"):
        origin = (
            "maximizes F1 on the validation images (so val F1 is slightly optimistic) and is in "
            f"{config} under `calibration`."
        )
        if unseen := sum(not row["support"] for row in content.results["val"]["per_class"]):
            origin += f" For {pluralize(unseen, 'label')} without a validation image it is 0.5."
    return [
        "The model predicts every label whose score (sigmoid of the logit) reaches the label's "
        f"threshold. The threshold {origin}",
        "",
        *markdown_table([f"label ({split})", *keys], rows[:_MAX_LISTED_CLASSES]),
        "",
    ]


def _abstention_note(content: CardContent) -> list[str]:
    """How many images the model answers at three error rates, and whether it marks unknown ones."""
    entry = content.config.get("validation_scores")
    if content.is_multilabel or entry is None:
        return []
    num_classes = len(content.config.get("label_names") or [])
    scores = ValidationScores.from_config(entry, num_classes=num_classes, source="model")
    rows = []
    for max_error in _ERROR_RATES:
        found = select_threshold(scores, max_error)
        share = MISSING if found is None else format_percent(found.num_answered / len(scores), 1)
        rows.append([f"{100 * max_error:g} %", share])
    images = pluralize(len(scores), "validation image")
    if scores.split != "val" or content.is_fitted_on_other_images:
        images = f"{pluralize(len(scores), 'image')} of {_fitted_split(content)}"
    text = (
        "To keep an error rate, `finetune predict --max-error` abstains from the least certain "
        "images. "
        f"With 95 % confidence, from {images}, the "
        "error rate of the answers is at most the first column; the second column is the share of "
        "answered images."
    )
    if any(MISSING in row for row in rows):
        text += f" {MISSING}: too few images, or too many errors, for this promise."
    if entry.get("unknown_class") is not None:
        text += (
            " `finetune predict --unknown` marks images of no known class, and about "
            f"{100 * FALSE_UNKNOWN_RATE:g} % of the others."
        )
    return [text, "", *markdown_table(["wrong answers, at most", "answered"], rows), ""]


def _fitted_split(content: CardContent) -> str:
    """Name the split that the temperature was fitted on after the run."""
    split = (content.config.get("calibration") or {}).get("split")
    if content.is_fitted_on_other_images:
        return f"a split '{split}' that is not the run's"
    return f"'{split}'"


def _temperature_note(content: CardContent) -> list[str]:
    """The effect of temperature scaling on the test split; a warning if the loss gets worse."""
    test = content.results.get("test") or {}
    if not (scaled := test.get("calibrated")):
        return []
    calibration = content.config.get("calibration") or scaled
    if (
        calibration["temperature"] != scaled["temperature"]
        or calibration.get("split", "val") != "val"
        or content.is_fitted_on_other_images
    ):
        return [
            f"The temperature in `config.json`, {calibration['temperature']:.4g}, was fitted after "
            f"the test split had been evaluated, on {_fitted_split(content)}.",
            "",
        ]
    fitted = f"{scaled['temperature']:.4g}, a temperature fitted on the validation split,"
    if scaled["loss"] > test["loss"]:
        return [
            f"Do not divide the logits by {fitted} to calibrate them: it makes the test loss "
            f"worse, {scaled['loss']:.4f} instead of {test['loss']:.4f} (calibration error "
            f"{scaled['ece']:.4f} instead of {test['ece']:.4f}).",
            "",
        ]
    return [
        f"Dividing the logits by {fitted} changes the test loss from {test['loss']:.4f} to "
        f"{scaled['loss']:.4f} and the calibration error from {test['ece']:.4f} to "
        f"{scaled['ece']:.4f}; predictions stay the same.",
        "",
    ]


def _claims_section(content: CardContent) -> list[str]:
    answers = content.results.get("claims")
    return ["## Claims", "", _escape_html(claims_table(answers))] if answers else []


def _training_section(content: CardContent) -> list[str]:
    optim, record = content.recipe.optim, content.record
    device, processes = record.get("device", {}), record.get("num_processes", 1)
    seconds = content.results.get("train", {}).get("seconds")
    time = f", {seconds:,.0f} seconds" if seconds else ""
    recipe_text = content.recipe.to_yaml().strip()
    fence = "`" * max(3, 1 + max(map(len, re.findall("`+", recipe_text)), default=0))
    distill = content.recipe.distill
    teacher = []
    if distill is not None:
        details = _escape_markdown(describe_teacher(distill, record))
        teacher = [f"Distilled from the teacher {_inline_code(distill.teacher)}: {details}.", ""]
    return [
        "## Training",
        "",
        *teacher,
        f"{optim.name}, peak learning rate {optim.lr:g}, schedule {optim.schedule}, weight decay "
        f"{optim.weight_decay:g}, seed {content.recipe.run.seed}; "
        f"{record.get('precision') or 'fp32'} on {processes} "
        f"process{'' if processes == 1 else 'es'} ({device.get('name') or device.get('type')})"
        f"{time}. The metrics of every class are in [results.json](results.json).",
        "",
        "<details><summary>The full recipe, also in recipe.yaml</summary>",
        "",
        f"{fence}yaml",
        recipe_text,
        fence,
        "",
        "</details>",
        "",
    ]


def _plots_section(content: CardContent) -> list[str]:
    lines: list[str] = []
    for name, (title, text) in _PLOTS.items():
        if name in content.plots:
            lines += [f"## {title}", "", f"![{text}]({name})", ""]
    return lines


def _data_section(content: CardContent) -> list[str]:
    plan, config = content.record.get("plan", {}), content.config["pretrained_cfg"]
    images, used = plan.get("images", {}), {"train": plan.get("images_read")}
    used |= {split: (content.results.get(split) or {}).get("examples") for split in ("val", "test")}
    notes = {"train": "", "val": "", "test": ""}
    if content.recipe.run.best != "last":
        notes["val"] = "; the weights were selected on them"
    if content.results.get("test"):
        notes["test"] = ", evaluated once, after training"
    splits = []
    for split, note in notes.items():
        if split in images:
            unreadable = images[split] - (used[split] or images[split])
            left_out = f" ({unreadable:,} of them unreadable and left out)" if unreadable else ""
            splits.append(f"- {split}: {images[split]:,} images{left_out}{note}")
    if decisions := plan.get("decisions"):
        splits.append(f"- decisions: {_escape_markdown(describe_decisions(decisions))}")
    eval_pipeline = plan.get("eval_pipeline")
    return [
        "## Data",
        "",
        f"Source: {_inline_code(content.recipe.data.source)}, fingerprint "
        f"`{content.record.get('data_fingerprint')}`.",
        "",
        *splits,
        f"- evaluation: `{eval_pipeline}`, {config['interpolation']}, mean {config['mean']}, std "
        f"{config['std']}",
        "",
    ]


def _limits_section(content: CardContent) -> list[str]:
    measured = "test" if content.results.get("test") else "validation"
    lines = [
        "## Limits",
        "",
        "- The model predicts only the labels above, whatever else an image shows."
        if content.is_multilabel
        else "- Every image gets one of the classes above, even if it shows none of them.",
        f"- The metrics hold for images like those of the {measured} split. Other sources, other "
        "cameras, damaged images and differences between groups of people were not evaluated.",
    ]
    if not content.weights.get("license"):
        lines.append("- The license of the pretrained weights is not recorded.")
    return [*lines, ""]


def _provenance_section(content: CardContent) -> list[str]:
    record = content.record
    versions = ", ".join(f"{name} {value}" for name, value in record.get("versions", {}).items())
    known = {key: content.weights.get(key) for key in ("source", "revision", "file", "sha256")}
    start = ", ".join(f"{key} {_inline_code(str(value))}" for key, value in known.items() if value)
    changes = record.get("numerics_changed", ())
    return [
        "## Provenance",
        "",
        f"- model.safetensors: sha256 `{content.sha256}`",
        f"- started from: {start or 'random weights'}",
        f"- commit of finetune: {_inline_code(record.get('commit') or 'unknown')}",
        f"- versions: {versions}",
        *(f"- changed at a resume: {_escape_markdown(each)}" for each in changes),
        "",
        *_averaged_runs(content),
    ]


def _averaged_runs(content: CardContent) -> list[str]:
    """List the runs of an average; empty for the card of a single run."""
    members = content.results.get("average", {}).get("members", ())
    key = "map" if content.is_multilabel else "top1"
    rows = [
        [
            _inline_code(member["name"]),
            str(member["seed"]),
            f"{member[key]:.4f}" if key in member else "not measured",
            _inline_code(member["sha256"]),
        ]
        for member in members
    ]
    if not rows:
        return []
    heads = ["averaged run", "seed", f"val {_METRIC_COLUMNS[key]}", "sha256 of its weights"]
    return [*markdown_table(heads, rows), ""]


def _escape_markdown(text: str) -> str:
    """Escape Markdown and HTML markup, and put the text on one line."""
    return re.sub(r"([\\`*_{}\[\]()#+!|~])", r"\\\1", _escape_html(" ".join(text.split())))


def _escape_html(text: str) -> str:
    """Escape HTML, bidi controls and lone surrogates, which JSON may contain."""
    whole = _BIDI_CONTROLS.sub(lambda match: f"\\u{ord(match[0]):04x}", text)
    return html.escape(whole.encode("utf-8", "backslashreplace").decode(), quote=False)


def _inline_code(text: str) -> str:
    """Return text as an inline code span, or escaped if it cannot be one."""
    return (
        _escape_markdown(text)
        if re.search(r"[`\s]", text) or _BIDI_CONTROLS.search(text)
        else f"`{text}`"
    )
