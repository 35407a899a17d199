"""The model card: what a reader of `model/README.md` needs to know, from the run's own figures."""

from __future__ import annotations

import html
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import timm
from huggingface_hub import EvalResult, ModelCardData

from finetune.evaluation.claims import table
from finetune.evaluation.intervals import TOO_FEW_IMAGES, interval
from finetune.evaluation.metrics import mean_std
from finetune.recipe.load import Recipe
from finetune.run.record import RunRecord, teacher_in_words
from finetune.text import MISSING, TOO_FEW, counted, markdown_table, mean_and_std, percent_range

__all__ = ["Facts", "licence_keys", "write_adapter_card", "write_card"]

_LICENCES = (  # what the hub knows: it refuses a card with any other
    "apache-2.0 mit bsd-2-clause bsd-3-clause cc0-1.0 cc-by-4.0 cc-by-nc-4.0 cc-by-sa-4.0 "
    "cc-by-nc-sa-4.0 gpl-3.0 agpl-3.0 openrail gemma apple-amlr unknown other"
)


def licence_keys(licence: object) -> dict[str, str]:
    """Return the keys of a licence in the head of a card; one unknown to the hub is named."""
    if not licence or str(licence) in _LICENCES.split():
        return {"license": str(licence)} if licence else {}
    name = re.sub(r"[^a-z0-9.]+", "-", str(licence).lower()).strip("-.")
    return {"license": "other", "license_name": name or "unknown"}


_SHOWN_CLASSES = 30
_TAME = re.compile(r"[\w. -]+")  # what nobody takes for markup
_TURNS = re.compile("[\u202a-\u202e\u2066-\u2069]")  # they would turn the text behind a name too
_REPOSITORY = re.compile(r"[\w.-]+/[\w.-]+", re.ASCII)
_COLUMNS = {
    **{"top1": "top-1", "top5": "top-5", "balanced_accuracy": "balanced accuracy"},
    **{"map": "mAP", "macro_f1": "macro F1", "micro_f1": "micro F1"},
    **{"loss": "loss", "ece": "calibration error"},
}
_PICTURES = {
    "curves.png": ("Curves", "Loss, accuracy and learning rate over the run"),
    "confusion.png": ("Confusion matrix", "Rows are true classes, columns predicted ones"),
    "reliability.png": ("Calibration", "Accuracy against confidence"),
}


@dataclass(frozen=True)
class Facts:
    """The content of a card.

    Attributes:
        recipe: of the run, as it may be published.
        record: the content of run.json.
        results: the content of results.json so far.
        config: the content of the model's config.json.
        sha256: of model.safetensors.
        seeds: (seed, results) of the runs that differ in nothing but the seed, this one included.
        pictures: names of the pictures beside the card.
        repository: owner/name on the hub; None before it is known.
    """

    recipe: Recipe
    record: RunRecord
    results: Mapping[str, Any]
    config: Mapping[str, Any]
    sha256: str
    seeds: Sequence[tuple[int, Mapping[str, Any]]] = ()
    pictures: Sequence[str] = ()
    repository: str | None = None
    weights: Mapping[str, Any] = field(default_factory=dict)

    @property
    def data_name(self) -> str:
        """The data set's name: owner/name on the hub, else the last part of its path."""
        kind, _, rest = self.recipe.data.source.partition(":")
        return re.split(r"[@:]", rest)[0] if kind == "hub" else rest.rstrip("/").rpartition("/")[2]

    @property
    def data_id(self) -> str:
        """The same where only what could be a repository's name is taken, as for `my photos`."""
        plain = re.sub(r"[^A-Za-z0-9_]+", "-", self.data_name).strip("-_")[:96] or "data"
        return self.data_name if _REPOSITORY.fullmatch(self.data_name) else plain

    @property
    def is_multilabel(self) -> bool:
        """True if an image has any number of labels."""
        return self.recipe.data.task == "multilabel"

    @property
    def columns(self) -> dict[str, str]:
        """The figures of a split to show, with their heads; top-5 of five classes is always 1."""
        every = [self.results, *(results for _, results in self.seeds)]
        measured = [one[split] for one in every for split in ("test", "val") if one.get(split)]
        missing = {key for key in _COLUMNS if not all(key in one for one in measured)}
        missing |= {"top5"} if 0 < len(self.config.get("label_names") or []) <= 5 else set()
        missing |= {"top1", "top5"} if self.is_multilabel else {"map", "micro_f1"}
        return {key: head for key, head in _COLUMNS.items() if key not in missing}

    @property
    def name(self) -> str:
        """The model's name."""
        if self.repository:
            return self.repository.partition("/")[2]
        start = re.sub(r"[^\w.-]+", "-", self.recipe.model.name.rpartition("/")[2])
        return f"{start}-{self.data_name.rpartition('/')[2]}".removeprefix("embedded-")


def write_card(facts: Facts) -> str:
    """Write the card of a fine-tuned model.

    Returns: the text of README.md, with the hub's YAML at its head.
    """
    sections = [
        _summary(facts),
        _usage(facts),
        _results(facts),
        _classes(facts),
        _claims(facts),
        _training(facts),
        _pictures(facts),
        _data(facts),
        _limits(facts),
        _provenance(facts),
    ]
    head = _metadata(facts).to_yaml()
    return f"---\n{head}\n---\n\n" + "\n".join(line for part in sections for line in part)


def write_adapter_card(facts: Facts) -> str:
    """Write the card of a run's adapter.

    Args:
        facts: of the run; `repository` is the adapter's.
    Returns: the text of README.md, with the hub's YAML at its head.
    """
    adapter = facts.recipe.model.adapter
    assert adapter is not None, "the run trained one"
    kind = {"lora": "LoRA", "dora": "DoRA"}[adapter.kind]
    about = f"{kind} of rank {adapter.rank} on {', '.join(map(_code, adapter.targets))}"
    sections = [
        *(_summary(facts), [f"This is its adapter alone: {about}, and the classifier.", ""]),
        *(_adapter_usage(facts), _results(facts), _classes(facts), _limits(facts)),
        [f"Began from weights with sha256 `{facts.weights.get('sha256')}`.", ""],
    ]
    head = _metadata(facts, library="peft", relation="adapter").to_yaml()
    return f"---\n{head}\n---\n\n" + "\n".join(line for part in sections for line in part)


def _adapter_usage(facts: Facts) -> list[str]:
    """The code that loads an adapter: on timm's own network, where nothing of that was changed."""
    model, classes = facts.recipe.model, len(facts.config.get("label_names") or [])
    of_timm = timm.is_model(model.name.partition(".")[0]) and not facts.weights.get("posemb")
    changes = model.model_dump(include={"args", "rename", "image_size", "posemb"})
    if of_timm and not model.args and not model.rename:
        lines = ["import timm"]
        base = f'timm.create_model("{model.name}", pretrained=True, num_classes={classes})'
    else:
        lines = ["from finetune.models.build import build"]
        settings = "".join(f", {key}={value!r}" for key, value in changes.items() if value)
        base = f"build({model.name!r}, num_classes={classes}{settings}).model"
    lines += ["from peft import PeftModel", "", f"base = {base}"]
    lines += [f'model = PeftModel.from_pretrained(base, "{facts.repository or "THIS_FOLDER"}")']
    return ["## Use", "", "```python", *lines, "model.eval()", "```", ""]


def _metadata(facts: Facts, *, library: str = "timm", relation: str = "finetune") -> ModelCardData:
    """The YAML head, as the hub defines it."""
    base = str(facts.weights.get("repository") or "")
    on_hub = bool(_REPOSITORY.fullmatch(base)) and facts.recipe.model.pretrained
    several = facts.is_multilabel
    return ModelCardData(
        **licence_keys(facts.weights.get("license")),
        library_name=library,
        pipeline_tag="image-classification",
        tags=["image-classification", library, "finetune", *["multi-label"] * several],
        datasets=[facts.data_id],
        metrics=["mean_average_precision", "f1"] if several else ["accuracy"],
        base_model=base if on_hub else None,
        base_model_relation=relation if on_hub else None,
        model_name=facts.name,
        eval_results=_model_index(facts),
        ignore_metadata_errors=False,
    )


def _model_index(facts: Facts) -> list[EvalResult] | None:
    """The test figures, as the hub lists them."""
    test = facts.results.get("test")
    if not test:
        return None
    known = {
        "top1": ("accuracy", "Top-1 accuracy"),
        "top5": ("top-5-accuracy", "Top-5 accuracy"),
        "balanced_accuracy": ("balanced_accuracy", "Balanced accuracy"),
        "map": ("mean_average_precision", "Mean average precision"),
        "macro_f1": ("f1", "Macro F1"),
        "micro_f1": ("f1", "Micro F1"),
        "loss": ("binary-cross-entropy" if facts.is_multilabel else "cross-entropy", "Loss"),
        "ece": ("expected-calibration-error", "Expected calibration error"),
    }
    return [
        EvalResult(
            task_type="image-classification",
            task_name="Image Classification",
            dataset_type=facts.data_id,
            dataset_name=facts.data_name,
            dataset_split="test",
            metric_type=kind,
            metric_name=name,
            metric_value=round(float(test[key]), 6),
        )
        for key in facts.columns
        for kind, name in [known[key]]
    ]


def _summary(facts: Facts) -> list[str]:
    recipe, results = facts.recipe, facts.results
    size = "×".join(map(str, facts.config["pretrained_cfg"]["input_size"][1:]))
    start = (
        f"Fine-tuned from {_code(recipe.model.name)}"
        if recipe.model.pretrained
        else f"{_code(recipe.model.name)} trained from random weights"
    )
    names = [_plain(str(name)) for name in facts.config.get("label_names") or []]
    shown = ", ".join(names[:_SHOWN_CLASSES])
    more = f" and {len(names) - _SHOWN_CLASSES} more" if len(names) > _SHOWN_CLASSES else ""
    note = [f"> {_plain(recipe.run.note)}", ""] if recipe.run.note else []
    if average := results.get("average"):
        training = (
            f"averaged weights ({average['kind']}: {_plain(average['chosen'])}) of "
            f"{', '.join(map(_code, average['runs']))}, chosen on the validation images. The "
            "training below is that of the first."
        )
    else:
        training = (
            f"{results['steps']:,} steps of {recipe.data.batch_size} images at {size} pixels; "
            f"these are the weights of step {results['best_step']:,}."
        )
    return [
        f"# {facts.name if _TAME.fullmatch(facts.name) else _plain(facts.name)}",
        "",
        *note,
        f"{start} on {_plain(facts.data_name)}: {training}",
        "",
        f"Classes ({len(names)}): {shown}{more}.",
        "",
    ]


def _usage(facts: Facts) -> list[str]:
    where = f"hf-hub:{facts.repository}" if facts.repository else "local-dir:THIS_FOLDER"
    plain = where.removeprefix("local-dir:")
    name = facts.repository or plain
    several = facts.is_multilabel
    each = ', function_to_apply="sigmoid"' if several else ""
    return [
        "## Use",
        "",
        "```python",
        "import finetune",
        f'model = finetune.Classifier.load("{plain}")',
        'model.predict("photo.jpg", top_k=3)' + "  # all its labels, and the best three" * several,
        "```",
        "",
        "```python",
        "import timm",
        f'model = timm.create_model("{where}", pretrained=True).eval()',
        "transform = timm.data.create_transform(**timm.data.resolve_model_data_config(model))",
        *["# of an image: model(transform(image)[None]).sigmoid() >= thresholds"] * several,
        "```",
        "",
        "```python",
        "from transformers import pipeline",
        f'pipeline("image-classification", model="{name}"{each})("photo.jpg")',
        "```",
        "",
    ]


def _results(facts: Facts) -> list[str]:
    rows = []
    for split in ("test", "val"):
        if result := facts.results.get(split):
            numbers = [f"{result[key]:.4f}" for key in facts.columns]
            rows.append([split, f"{result['examples']:,}", *numbers])
    measured = [(seed, one["test"]) for seed, one in facts.seeds if one.get("test")]
    if len(measured) > 1:
        spread = []
        for key in facts.columns:
            mean, std, _ = mean_std(result[key] for _, result in measured)
            spread.append(mean_and_std(mean, std, 4))
        seeds = ", ".join(str(seed) for seed, _ in measured)
        label = f"test, mean ± std of {len(measured)} seeds ({seeds})"
        rows.append([label, f"{measured[0][1]['examples']:,}", *spread])
    heads = ["split", "images", *facts.columns.values()]
    lines = ["## Results", "", *markdown_table(heads, rows), ""]
    return [*lines, *_uncertainty(facts), *_temperature(facts.results)]


def _uncertainty(facts: Facts) -> list[str]:
    """Intervals of the accuracies, and marks of too few images and of a missing test split."""
    lines: list[str] = []
    results = facts.results
    ranges, few = [], []
    for split, name in (("test", "test"), ("val", "validation")):
        result = results.get(split) or {"examples": 0}
        if "top1" in result and (ends := interval(result["top1"], result["examples"])):
            ranges.append(f"{percent_range(*ends)} ({name})")
        if 0 < result["examples"] < TOO_FEW_IMAGES:
            few.append(f"{counted(result['examples'], 'image')} of {name}")
    if few:
        lines += [f"> **{TOO_FEW.capitalize()}** to judge the model by: {', '.join(few)}.", ""]
    if ranges:
        lines += [f"95 % interval of top-1, after Wilson: {', '.join(ranges)}.", ""]
    if results.get("val") and not results.get("test") and facts.recipe.run.best != "last":
        lines += [
            "No test split was measured. The validation images also chose the weights, so expect "
            "the model to do worse on new images.",
            "",
        ]
    return lines


def _classes(facts: Facts) -> list[str]:
    """Thresholds and figures of the labels, where an image has any number of them."""
    split = next((one for one in ("test", "val") if facts.results.get(one)), None)
    if split is None or not facts.is_multilabel:
        return []
    keys = ("threshold", "ap", "precision", "recall", "f1")
    names = [_plain(str(name)) for name in facts.config.get("label_names") or []]
    rows = [
        [name, *(MISSING if row[key] is None else f"{row[key]:.4f}" for key in keys)]
        for name, row in zip(names, facts.results[split]["per_class"], strict=True)
    ]
    origin = "is 0.5, as there was no validation split to fit it on."
    if facts.results.get("thresholds"):
        origin = (
            "gave the largest F1 on the validation images (so the F1 of val is a little too good) "
            "and is in [config.json](config.json) under `calibration`."
        )
        if unseen := sum(not row["support"] for row in facts.results["val"]["per_class"]):
            origin += f" For {counted(unseen, 'label')} without a validation image it is 0.5."
    return [
        "An image has every label whose score, the sigmoid of its logit, is at or above the "
        f"label's threshold, which {origin}",
        "",
        *markdown_table([f"label ({split})", *keys], rows[:_SHOWN_CLASSES]),
        "",
    ]


def _temperature(results: Mapping[str, Any]) -> list[str]:
    """The effect of the temperature on the test split, and advice against one that does harm."""
    test = results.get("test") or {}
    if not (scaled := test.get("calibrated")):
        return []
    fitted = f"{scaled['temperature']:.4g}, a temperature fitted on the validation split,"
    if scaled["loss"] > test["loss"]:
        return [
            f"Do not divide the logits by {fitted} to calibrate them: it makes the test loss "
            f"worse, {scaled['loss']:.4f} in place of {test['loss']:.4f} (calibration error "
            f"{scaled['ece']:.4f} in place of {test['ece']:.4f}).",
            "",
        ]
    return [
        f"Dividing the logits by {fitted} changes the test loss from {test['loss']:.4f} to "
        f"{scaled['loss']:.4f} and the calibration error from {test['ece']:.4f} to "
        f"{scaled['ece']:.4f}; predictions stay the same.",
        "",
    ]


def _claims(facts: Facts) -> list[str]:
    answers = facts.results.get("claims")
    return ["## Claims", "", _inert(table(answers))] if answers else []


def _training(facts: Facts) -> list[str]:
    optim, record = facts.recipe.optim, facts.record
    device, processes = record.get("device", {}), record.get("num_processes", 1)
    seconds = facts.results.get("train", {}).get("seconds")
    time = f", {seconds:,.0f} seconds" if seconds else ""
    whole = facts.recipe.to_yaml().strip()
    fence = "`" * max(3, 1 + max(map(len, re.findall("`+", whole)), default=0))
    distill = facts.recipe.distill
    teacher = []
    if distill is not None:
        words = _plain(teacher_in_words(distill, record))
        teacher = [f"Distilled from the teacher {_code(distill.teacher)}: {words}.", ""]
    return [
        "## Training",
        "",
        *teacher,
        f"{optim.name}, peak learning rate {optim.lr:g}, schedule {optim.schedule}, weight decay "
        f"{optim.weight_decay:g}, seed {facts.recipe.run.seed}; "
        f"{record.get('precision') or 'fp32'} on {processes} "
        f"process{'' if processes == 1 else 'es'} ({device.get('name') or device.get('type')})"
        f"{time}. The figures of every class are in [results.json](results.json).",
        "",
        "<details><summary>The whole recipe, also in recipe.yaml</summary>",
        "",
        f"{fence}yaml",
        whole,
        fence,
        "",
        "</details>",
        "",
    ]


def _pictures(facts: Facts) -> list[str]:
    lines: list[str] = []
    for name, (title, text) in _PICTURES.items():
        if name in facts.pictures:
            lines += [f"## {title}", "", f"![{text}]({name})", ""]
    return lines


def _data(facts: Facts) -> list[str]:
    images = facts.record.get("plan", {}).get("images", {})
    config = facts.config["pretrained_cfg"]
    splits = [f"- train: {images['train']:,} images"] if "train" in images else []
    if "val" in images:
        chose = "" if facts.recipe.run.best == "last" else "; they alone chose the weights"
        splits.append(f"- val: {images['val']:,} images{chose}")
    if "test" in images:
        splits.append(f"- test: {images['test']:,} images, read once, after training was over")
    eval_pipeline = facts.record.get("plan", {}).get("eval_pipeline")
    return [
        "## Data",
        "",
        f"Source: {_code(facts.recipe.data.source)}, fingerprint "
        f"`{facts.record.get('data_fingerprint')}`.",
        "",
        *splits,
        f"- evaluation: `{eval_pipeline}`, {config['interpolation']}, mean {config['mean']}, std "
        f"{config['std']}",
        "",
    ]


def _limits(facts: Facts) -> list[str]:
    measured = "test" if facts.results.get("test") else "validation"
    lines = [
        "## Limits",
        "",
        "- It names the labels above alone, whatever else an image shows."
        if facts.is_multilabel
        else "- Every image gets one of the classes above, also one that shows none of them.",
        f"- The figures hold for images like those of the {measured} split; other sources, other "
        "cameras and damaged images were not measured, nor was any difference between groups of "
        "people.",
    ]
    if not facts.weights.get("license"):
        lines.append("- The licence of the weights that it started from is not recorded.")
    return [*lines, ""]


def _provenance(facts: Facts) -> list[str]:
    record = facts.record
    versions = ", ".join(f"{name} {value}" for name, value in record.get("versions", {}).items())
    known = {key: facts.weights.get(key) for key in ("source", "revision", "file", "sha256")}
    start = ", ".join(f"{key} {_code(str(value))}" for key, value in known.items() if value)
    return [
        "## Provenance",
        "",
        f"- model.safetensors: sha256 `{facts.sha256}`",
        f"- started from: {start or 'random weights'}",
        f"- commit of finetune: {_code(record.get('commit') or 'not known')}",
        f"- versions: {versions}",
        "",
    ]


def _plain(text: str) -> str:
    """Escape what Markdown or HTML would take for markup, on one line."""
    return re.sub(r"([\\`*_{}\[\]()#+!|~])", r"\\\1", _inert(" ".join(text.split())))


def _inert(text: str) -> str:
    """Escape HTML, and halves of characters, which JSON may hold."""
    whole = _TURNS.sub(lambda match: f"\\u{ord(match[0]):04x}", text)
    return html.escape(whole.encode("utf-8", "backslashreplace").decode(), quote=False)


def _code(text: str) -> str:
    """Text as code, or as plain text where it would end the code itself."""
    return _plain(text) if re.search(r"[`\s]", text) or _TURNS.search(text) else f"`{text}`"
