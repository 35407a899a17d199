"""Recipes and overrides that are wrong: exit 2, every problem with its place, and no run begun."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from faults_bad import PROMISE, Bad, Content, parametrised, refuse
from networks import timm_folder

BASE = """\
model: {name: embedded:vit_nano}
data: {source: "embedded:digits"}
optim: {lr: 1e-3, steps: 4}
"""


def lines(old: str = "", new: str = "") -> str:
    """The good recipe with one part replaced, or with something at its end."""
    assert old in BASE
    return BASE.replace(old, new) if old else BASE + new


def file(content: Content, *, named: str = "bad.yaml", code: str = "recipe.syntax") -> Bad:
    return Bad("train bad.yaml --out run", code, named, {"bad.yaml": content})


def override(*words: str, code: str, named: str) -> Bad:
    return Bad(["train", "good.yaml", *words, "--out", "run"], code, named, {"good.yaml": BASE})


def adapted(*words: str, code: str, named: str) -> Bad:
    """An override of a recipe that trains an adapter."""
    return override("model.adapter.kind=lora", *words, code=code, named=named)


def distilled(*words: str, code: str = "recipe.wrong_value", named: str) -> Bad:
    """An override of a recipe with a teacher."""
    return override("distill.teacher=embedded:vit_ti", *words, code=code, named=named)


def taught(teacher: str, *, code: str, named: str) -> Bad:
    """A recipe with another teacher, beside which lies one that is cut off."""
    words = ["train", "good.yaml", f"distill.teacher={teacher}", "--out", "run"]
    return Bad(words, code, named, {"good.yaml": BASE, "damaged": damaged})


def damaged(path: Path) -> None:
    tensors = timm_folder(path) / "model.safetensors"
    tensors.write_bytes(tensors.read_bytes()[:-100])


def laughs() -> str:
    """A billion laughs: nine lists of nine of the one before."""
    parts = ["a0: &a0 [lol]"]
    parts += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 10)]
    return "\n".join(parts)


def loop(path: Path) -> None:
    path.symlink_to(path.name)


FILES = {
    "no such file": Bad("train bda.yaml", "recipe.not_found", "'bad.yaml'", {"bad.yaml": BASE}),
    "an empty name": Bad(["train", ""], "recipe.not_a_recipe", "''"),
    "a name with a zero byte": Bad(["train", "a\0b.yaml"], "recipe.unreadable", "b.yaml"),
    "a name too long": Bad(["train", "x" * 5000], "recipe.unreadable", "xxx"),
    "a URL": Bad(
        "train https://example.org/r.yaml", "recipe.not_a_recipe", "https://example.org/r.yaml"
    ),
    "a folder": Bad("train bad.yaml", "recipe.not_a_recipe", "bad.yaml", {"bad.yaml": Path.mkdir}),
    "a named pipe": file(os.mkfifo, code="recipe.not_a_recipe"),
    "a device": Bad("train /dev/zero", "recipe.not_a_recipe", "/dev/zero"),
    "a link to nothing": file(lambda path: path.symlink_to("gone"), code="recipe.not_found"),
    "a link to itself": file(loop, code="recipe.unreadable"),
    "zero bytes": file(b"", code="recipe.not_a_recipe"),
    "comments only": file("# nothing\n", code="recipe.not_a_recipe"),
    "the word null": file("null\n", code="recipe.not_a_recipe"),
    "larger than any recipe": file("# long\n" * 200_000, code="recipe.not_a_recipe"),
    "a picture": file(b"\x89PNG\r\n\x1a\n" + bytes(50)),
    "zero bytes inside": file(b"model: \0\0\n"),
    "a control character": file("model: \x07\n"),
    "UTF-16": file(BASE.encode("utf-16")),
    "UTF-16 without a mark": file(BASE.encode("utf-16-le")),
    "Latin-1": file("# café\n".encode("latin-1") + BASE.encode()),
    "a list": file("- model\n- data\n", code="recipe.not_a_recipe"),
    "one word": file("hello\n", code="recipe.not_a_recipe"),
    "JSON that is cut": file('{"model": {"name": "x"'),
    "tabs": file(lines(new="run:\n\tseed: 1\n"), named="bad.yaml:5"),
    "an open bracket": file(lines("4}", "4"), named="bad.yaml:4"),
    "an open quote": file(lines('digits"', "digits"), named="bad.yaml:4"),
    "two documents": file(lines(new="---\nmodel: {name: x}\n"), named="bad.yaml:4"),
    "an anchor": file(lines("1e-3", "&lr 1e-3"), named="bad.yaml:3"),
    "a merge": file(
        lines(new="run:\n  <<: {seed: 1}\n"), named="run.<<", code="recipe.unknown_key"
    ),
    "a billion laughs": file(laughs()),
    "an object of Python": file(
        lines("1e-3", "!!python/object/apply:os.system [id]"), named="!!python/object"
    ),
    "a tag on the whole": file("!!python/object:x.y\n" + BASE, named="!!python/object"),
    "a name of Python": file(lines(new="run: !!python/name:os.system x\n"), named="!!python/name"),
    "bytes": file(lines("embedded:vit_nano", "!!binary aGVsbG8="), named="!!binary"),
    "a set": file(lines("{lr: 1e-3, steps: 4}", "!!set {lr, steps}"), named="!!set"),
    "a tag that lies": file(lines("1e-3", "!!int fast"), named="optim.lr"),
    "a thousand levels": file("model: " + "[" * 1000 + "]" * 1000),
    "a hundred thousand brackets": file("[" * 100_000),
    "a directive": file("%TAG ! tag:x,2000:\n--- !a\nmodel: 1\n", named="tag:x,2000:a"),
    "a key that is a boolean": file(lines(new="on: {seed: 1}\n"), named="'on'"),
    "a key that is a list": file(lines(new="? [a, b]\n: 1\n")),
    "a key that is a number": file(lines(new="1: 2\n"), named="'1'"),
    "a section twice": file(
        lines(new="model: {name: x}\n"), named="bad.yaml:4: model", code="recipe.duplicate_key"
    ),
    "a key twice": file(
        lines("lr: 1e-3", "lr: 1e-3, lr: 1"), named="optim.lr", code="recipe.duplicate_key"
    ),
}
KEYS = {
    "no model": (
        lines("model: {name: embedded:vit_nano}\n"),
        "recipe.missing_key",
        "bad.yaml: model",
    ),
    "no lr": (lines("lr: 1e-3, "), "recipe.missing_key", "optim.lr"),
    "no name": (lines("name: embedded:vit_nano"), "recipe.missing_key", "model.name"),
    "no length": (lines(", steps: 4"), "recipe.conflict", "optim.steps"),
    "two lengths": (lines("steps: 4", "steps: 4, epochs: 1"), "recipe.conflict", "optim.steps"),
    "an unknown section": (lines(new="optimizer: {lr: 1}\n"), "recipe.unknown_key", "optimizer"),
    "an unknown key": (
        lines("lr:", "learning_rate: 1, lr:"),
        "recipe.unknown_key",
        "optim.learning_rate",
    ),
    "a slip of the pen": (lines("steps: 4", "step: 4"), "recipe.unknown_key", "'steps'"),
    "a key of another section": (lines("4}", "4, seed: 1}"), "recipe.unknown_key", "'run.seed'"),
    "an unknown operation": (
        lines('digits"', 'digits", train: flipp'),
        "recipe.unknown_name",
        "'flip'",
    ),
    "code for an operation": (
        lines('digits"', "digits\", train: \"__import__('os').system('id')\""),
        "recipe.syntax",
        "data.train",
    ),
    "an operation without its number": (
        lines('digits"', 'digits", train: rotate'),
        "recipe.missing_key",
        "rotate(15)",
    ),
    "chance in evaluation": (
        lines('digits"', 'digits", eval: flip'),
        "recipe.conflict",
        "data.eval",
    ),
    "corrupted training": (
        lines('digits"', 'digits", train: "resize | corrupt(\'noise\', 3)"'),
        "recipe.conflict",
        "data.train",
    ),
    "corrupted evaluation": (
        lines('digits"', 'digits", train: resize, eval: "resize | corrupt(\'noise\', 3)"'),
        "recipe.conflict",
        "data.eval",
    ),
    "brackets without end": (
        lines('digits"', f'digits", train: "resize({"(" * 900}1{")" * 900})"'),
        "recipe.syntax",
        "data.train",
    ),
    "a floor above the rate": (lines("4}", "4, min_lr: 1}"), "recipe.conflict", "optim.min_lr"),
    "cuts without a schedule for them": (
        lines("4}", "4, step_every: 2}"),
        "recipe.conflict",
        "optim.step_every",
    ),
    "a claim of nothing": (
        lines(new="claims: [{metric: val.top1, source: x}]\n"),
        "recipe.conflict",
        "claims[0].metric",
    ),
    "a claim in per cent": (
        lines(new="claims: [{metric: val.top1, value: 98, source: x}]\n"),
        "recipe.conflict",
        "claims[0].value",
    ),
}
# values that a key cannot have
VALUES = {
    "a section that is a word": (lines("{lr: 1e-3, steps: 4}", "fast"), "bad.yaml:3: optim"),
    "a section that is a list": (lines("{lr: 1e-3, steps: 4}", "[1]"), "bad.yaml:3: optim"),
    "a section that is nothing": (lines(new="run:\n"), "bad.yaml:4: run"),
    "a word for a number": (lines("1e-3", "fast"), "optim.lr"),
    "a list for a number": (lines("1e-3", "[1]"), "optim.lr"),
    "a boolean for a number": (lines("1e-3", "yes"), "optim.lr"),
    "not a number": (lines("1e-3", ".nan"), "optim.lr"),
    "infinity": (lines("1e-3", ".inf"), "optim.lr"),
    "beyond a float": (lines("1e-3", "1e400"), "optim.lr"),
    "hexadecimal": (lines("1e-3", "0x10"), "optim.lr"),
    "a negative rate": (lines("1e-3", "-1"), "optim.lr"),
    "a rate of zero": (lines("1e-3", "0"), "optim.lr"),
    "half a step": (lines("steps: 4", "steps: 1.5"), "optim.steps"),
    "no steps": (lines("steps: 4", "steps: 0"), "optim.steps"),
    "negative steps": (lines("steps: 4", "steps: -4"), "optim.steps"),
    "more steps than can be counted": (lines("steps: 4", "steps: 1e30"), "optim.steps"),
    "a number of a thousand digits": (lines("steps: 4", "steps: " + "9" * 1000), "optim.steps"),
    "an octal number": (lines("steps: 4", "steps: 010"), "optim.steps"),
    "a negative seed": (lines(new="run: {seed: -1}\n"), "run.seed"),
    "a seed of 2**32": (lines(new="run: {seed: 4294967296}\n"), "run.seed"),
    "a precision of nobody": (lines(new="run: {precision: fp8}\n"), "'fp8'"),
    "a thousand thousand threads": (lines(new="run: {threads: 1000000}\n"), "run.threads"),
    "no time": (lines(new="run: {timeout_seconds: 0}\n"), "run.timeout_seconds"),
    "a repository of nobody": (lines(new="run: {push_to: me}\n"), "run.push_to"),
    "a number for a list": (lines(new="run: {trackers: 3}\n"), "run.trackers"),
    "a negative size": (lines("vit_nano", "vit_nano, image_size: -224"), "model.image_size"),
    "a size of three": (lines("vit_nano", "vit_nano, image_size: [1, 2, 3]"), "model.image_size"),
    "a size of a million": (lines("vit_nano", "vit_nano, image_size: 1000000"), "model.image_size"),
    "a quoted boolean": (lines("vit_nano", 'vit_nano, pretrained: "false"'), "model.pretrained"),
    "a name that is a number": (lines("embedded:vit_nano", "16"), "model.name"),
    "a share above one": (lines("vit_nano", "vit_nano, dropout: 1"), "model.dropout"),
    "minus one block": (lines("vit_nano", "vit_nano, freeze: -1"), "model.freeze"),
    "arguments that are a list": (lines("vit_nano", "vit_nano, args: [1]"), "model.args"),
    "an argument that is NaN": (lines("vit_nano", "vit_nano, args: {a: .nan}"), "model.args"),
    "means of 0 to 255": (lines('digits"', 'digits", mean: [127, 127, 127]'), "data.mean[0]"),
    "a mean for one channel": (lines('digits"', 'digits", mean: [0.5]'), "data.mean"),
    "a std of zero": (lines('digits"', 'digits", std: [0, 1, 1]'), "data.std[0]"),
    "a batch of nothing": (lines('digits"', 'digits", batch_size: 0'), "data.batch_size"),
    "all for validation": (lines('digits"', 'digits", val_fraction: 1'), "data.val_fraction"),
    "a crop of nothing": (lines('digits"', 'digits", crop_pct: 0'), "data.crop_pct"),
    "no operation": (lines('digits"', 'digits", train: ""'), "data.train"),
    "a resize to a million": (
        lines('digits"', 'digits", train: "resize(1000000)"'),
        "size=1000000",
    ),
    "an endless sentence": (
        lines('digits"', f'digits", train: "{"flip | " * 999}flip"'),
        "data.train",
    ),
    "three betas": (lines("4}", "4, betas: [0.9, 0.9, 0.9]}"), "optim.betas"),
    "a beta of one": (lines("4}", "4, betas: [1, 0.9]}"), "optim.betas[0]"),
    "an unknown schedule": (lines("4}", "4, schedule: cosin}"), "'cosine'"),
    "a claim of an unknown figure": (
        lines(new="claims: [{metric: val.f1, value: 1, source: x}]\n"),
        "claims[0].metric",
    ),
    "a single class": (lines('digits"', 'digits", classes: ["1"]'), "data.classes"),
    "a class twice": (lines('digits"', 'digits", classes: ["1", "1"]'), "data.classes"),
    "classes that are numbers": (lines('digits"', 'digits", classes: [1, 2]'), "'1'"),
    "no test images": (lines('digits"', 'digits", num_test: 0'), "data.num_test"),
    "a head of nobody": (lines("vit_nano", "vit_nano, head_init: kept"), "'keep'"),
    "claims that are a mapping": (lines(new="claims: {metric: val.top1}\n"), "bad.yaml:4: claims"),
}
OVERRIDES = {
    "no equals sign": override("optim.lr", code="recipe.syntax", named="'optim.lr'"),
    "no key": override("=3", code="recipe.syntax", named="'=3'"),
    "an empty part": override("optim..lr=3", code="recipe.syntax", named="'optim..lr=3'"),
    "no section": override("lr=3", code="recipe.unknown_key", named="'optim.lr=3'"),
    "a whole section": override("optim=3", code="recipe.unknown_key", named="'optim=3'"),
    "claims": override("claims.0.value=1", code="recipe.unknown_key", named="'claims.0.value=1'"),
    "an unknown section": override("optm.lr=3", code="recipe.unknown_key", named="'optim'"),
    "an unknown key": override("optim.lrr=3", code="recipe.unknown_key", named="'lr'"),
    "a key below a value": override("optim.lr.x=3", code="recipe.unknown_key", named="optim.lr.x"),
    "no value": override("optim.lr=", code="recipe.wrong_value", named="optim.lr"),
    "a list that is cut": override("data.mean=[0.5", code="recipe.syntax", named="data.mean"),
    "an anchor": override("data.mean=[&a 0.5]", code="recipe.syntax", named="data.mean"),
    "an object of Python": override(
        "optim.lr=!!python/name:os.system", code="recipe.wrong_value", named="optim.lr"
    ),
    "a name of transformers": override(
        "learning_rate=1e-3", code="recipe.unknown_key", named="'optim.lr=1e-3'"
    ),
    "a name of Ultralytics": override(
        "model.imgsz=64", code="recipe.unknown_key", named="'model.image_size'"
    ),
    "a key without its section": override(
        "class_weights=balanced", code="recipe.unknown_key", named="'optim.class_weights=balanced'"
    ),
    "both lengths": override(
        "optim.steps=9", "optim.epochs=3", code="recipe.conflict", named="'optim.steps=9'"
    ),
    "neither length": override("optim.steps=null", code="recipe.conflict", named="optim.steps"),
    "one key twice": override(
        "optim.lr=1", "optim.lr=2", code="recipe.conflict", named="'optim.lr=1'"
    ),
    "one key after what is below it": override(
        "model.args.depth=2",
        "model.args={depth: 1}",
        code="recipe.conflict",
        named="'model.args.depth=2'",
    ),
    "is not text": override("run.note=\udcff", code="recipe.syntax", named="run.note"),
    "an option for an override": override("--lr", "3", code="usage", named="--lr"),
}
FIT = {
    "classes of the recipe's own": override(
        "model.args.num_classes=0",
        "--dry-run",
        code="recipe.unknown_key",
        named="model.args.num_classes",
    ),
    "an argument of nobody": override(
        "model.args.dpth=2", "--dry-run", code="recipe.unknown_key", named="'dpth'"
    ),
    "an argument without a value": override(
        "model.args.depth=null", "--dry-run", code="recipe.wrong_value", named="model.args.depth"
    ),
    "patience without validation": override(
        "run.patience=2",
        "data.val_fraction=0",
        "--dry-run",
        code="recipe.conflict",
        named="run.patience",
    ),
    "a size beside the patches": override(
        "model.image_size=65", "--dry-run", code="recipe.wrong_size", named="65 px"
    ),
    "a size beside the windows": override(
        "model.name=hiera_tiny_224",
        "model.pretrained=false",
        "model.args={embed_dim: 16, num_heads: 1, stages: [1, 1, 1, 1]}",
        "model.image_size=80",
        "--dry-run",
        code="recipe.wrong_size",
        named="80x80 px",
    ),
    "an optimiser of nobody": override(
        "optim.name=adamv", "--dry-run", code="recipe.unknown_name", named="'adamv'"
    ),
    "a tracker of nobody": override(
        "run.trackers=[wandbb]", "--dry-run", code="recipe.unknown_name", named="'wandbb'"
    ),
    "more images than there are": Bad(
        "train good.yaml data.num_train=99999 --dry-run --out run",
        "data.too_few_images",
        "data.num_train",
        {"good.yaml": BASE},
    ),
    "a class of nobody": override(
        "data.classes=['1', '12']", "--dry-run", code="recipe.unknown_name", named="'12'"
    ),
    "fewer test images than classes": override(
        "data.num_test=3", "--dry-run", code="data.too_few_images", named="data.num_test"
    ),
    "validation images of no split": override(
        "data.num_val=20",
        "data.val_fraction=0",
        "--dry-run",
        code="data.no_split",
        named="data.num_val",
    ),
    "a head of weights with other classes": override(
        "model.head_init=keep",
        "--dry-run",
        code="recipe.conflict",
        named="model.head_init",
    ),
    "a head of no weights": override(
        "model.head_init=keep",
        "model.pretrained=false",
        code="recipe.conflict",
        named="model.pretrained",
    ),
    "more processes than there are": Bad(
        "train good.yaml run.num_processes=3 --dry-run --out run",
        "setup.wrong_processes",
        "3 processes",
        {"good.yaml": BASE},
    ),
}


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@parametrised(
    {
        **FILES,
        **{name: file(text, code=code, named=key) for name, (text, code, key) in KEYS.items()},
        **{
            name: file(text, code="recipe.wrong_value", named=key)
            for name, (text, key) in VALUES.items()
        },
    }
)
def test_recipes(bad: Bad, fault: Callable[..., None]) -> None:
    refuse(bad)
    fault("bad input: recipes", PROMISE)


CONFLICT, VALUE = "recipe.conflict", "recipe.wrong_value"
METHODS = {
    "an unknown adapter": override("model.adapter.kind=lore", code=VALUE, named="'lora'"),
    "an unknown key of an adapter": adapted(
        "model.adapter.rnk=4", code="recipe.unknown_key", named="'rank'"
    ),
    "a compiled DoRA": override(
        "model.adapter.kind=dora",
        "model.compile=true",
        code="recipe.conflict",
        named="model.compile",
    ),
    "an adapter of rank 0": adapted("model.adapter.rank=0", code=VALUE, named="model.adapter.rank"),
    "an adapter of a rank beyond the layer": adapted(
        "model.adapter.rank=1000", code=VALUE, named="blocks.0.attn.qkv"
    ),
    "an adapter without targets": adapted(
        "model.adapter.targets=[]", code=VALUE, named="model.adapter.targets"
    ),
    "an adapter on a layer that is not there": adapted(
        "model.adapter.targets=[qvk]", code="recipe.unknown_name", named="attn.qkv"
    ),
    "an adapter on no pattern": adapted("model.adapter.targets=['(']", code=VALUE, named="'('"),
    "an adapter and frozen blocks": adapted("model.freeze=2", code=CONFLICT, named="model.freeze"),
    "an adapter of random weights": adapted(
        "model.pretrained=false", code=CONFLICT, named="model.adapter"
    ),
    "both kinds of batch norm": override(
        "model.sync_bn=true", "model.freeze_bn=true", code=CONFLICT, named="model.sync_bn"
    ),
    "synchronised batch norm in a ViT": override(
        "model.sync_bn=true", code="recipe.unsupported", named="embedded:vit_nano"
    ),
    "frozen batch norm in a ViT": override(
        "model.freeze_bn=true", code="recipe.unsupported", named="model.freeze_bn"
    ),
    "frozen batch norm of random weights": override(
        "model.freeze_bn=true", "model.pretrained=false", code=CONFLICT, named="model.freeze_bn"
    ),
    "synchronised batch norm in a frozen backbone": override(
        "model.sync_bn=true", "model.freeze=backbone", code=CONFLICT, named="model.sync_bn"
    ),
    "frozen batch norm beside an adapter": adapted(
        "model.freeze_bn=true", code=CONFLICT, named="model.freeze_bn"
    ),
    "compiled synchronised batch norm": override(
        "model.sync_bn=true", "model.compile=true", code=CONFLICT, named="model.compile"
    ),
    "batch norm that is neither true nor false": override(
        "model.sync_bn=2", code=VALUE, named="model.sync_bn"
    ),
    "a name of Lightning": override(
        "model.sync_batchnorm=true", code="recipe.unknown_key", named="model.sync_bn"
    ),
    "a name of peft": override(
        "model.lora_rank=4", code="recipe.unknown_key", named="adapter.rank"
    ),
    "a stage of no length": override(
        "optim.stages=[{freeze: backbone}]", code=CONFLICT, named="optim.stages"
    ),
    "a stage of two lengths": override(
        "optim.stages=[{steps: 1, epochs: 1}]", code=CONFLICT, named="steps and epochs"
    ),
    "an unknown key of a stage": override(
        "optim.stages=[{steps: 1, freze: backbone}]", code="recipe.unknown_key", named="'freeze'"
    ),
    "a stage below the least rate": override(
        "optim.min_lr=1e-4", "optim.stages=[{steps: 1, lr: 1e-5}]", code=CONFLICT, named="min_lr"
    ),
    "a stage of all weights before an adapter": adapted(
        "optim.stages=[{steps: 1}]", code=CONFLICT, named="backbone"
    ),
    "a weight of a class that is not there": override(
        "optim.class_weights={'10': 2}", code="recipe.unknown_name", named="'10'"
    ),
    "a negative weight": override("optim.class_weights={'1': -2}", code=VALUE, named="'1'"),
    "a weight that is no number": override(
        "optim.class_weights={'1': .nan}", code=VALUE, named="'1'"
    ),
    "weights of no class": override("optim.class_weights={}", code=VALUE, named="balanced"),
    "a word that is no kind of weights": override(
        "optim.class_weights=balance", code=VALUE, named="balanced"
    ),
    "a gamma below 0": override("optim.focal_gamma=-1", code=VALUE, named="optim.focal_gamma"),
    "a gamma that is no number": override(
        "optim.focal_gamma=.nan", code=VALUE, named="optim.focal_gamma"
    ),
    "a tau below 0": override("optim.logit_adjustment=-1", code=VALUE, named="logit_adjustment"),
    "logits adjusted beside balanced weights": override(
        "optim.class_weights=balanced",
        "optim.logit_adjustment=1",
        code=CONFLICT,
        named="logit_adjustment",
    ),
    "balanced weights of classes drawn alike": override(
        "optim.class_weights=balanced",
        "data.sampling=class_balanced",
        code=CONFLICT,
        named="class_weights",
    ),
    "logits adjusted to classes drawn alike": override(
        "optim.logit_adjustment=1",
        "data.sampling=class_balanced",
        code=CONFLICT,
        named="logit_adjustment",
    ),
    "an unknown sampling": override("data.sampling=sqrt", code=VALUE, named="'square_root'"),
    "a sampling of a streamed source": override(
        "data.sampling=square_root",
        "data.source=parquet:x",
        "data.streaming=true",
        code=CONFLICT,
        named="data.sampling",
    ),
    "a tail longer than the head": override("data.long_tail=0.5", code=VALUE, named="long_tail"),
    "a name of keras": override(
        "optim.class_weight=balanced", code="recipe.unknown_key", named="class_weights"
    ),
    **{
        f"{key} for several labels": override(
            "data.task=multilabel", f"{key}={value}", code=CONFLICT, named=key.rpartition(".")[2]
        )
        for key, value in {
            "data.sampling": "class_balanced",
            "data.long_tail": "10",
            "optim.class_weights": "balanced",
            "optim.focal_gamma": "2",
            "optim.logit_adjustment": "1",
            "run.best": "val.top1",
            "distill.teacher": "embedded:vit_nano",
        }.items()
    },
    "an asymmetric loss for one label": override(
        "optim.asymmetric_loss.clip=0", code=CONFLICT, named="data.task"
    ),
    "a figure of several labels for one": override(
        "run.best=val.map", code=CONFLICT, named="val.map"
    ),
    "several columns for one label": override(
        "data.label_column=[a,b]", code=CONFLICT, named="multilabel"
    ),
    "a list of one column": override(
        *("data.task=multilabel", "data.label_column=[a]"), code=VALUE, named="at least two"
    ),
    "a margin of 1": override(
        *("data.task=multilabel", "optim.asymmetric_loss.clip=1"), code=VALUE, named="clip"
    ),
    "a teacher that is not there": taught(
        "gone/run", code="weights.not_found", named="distill.teacher"
    ),
    "a teacher of no name": taught("vit_tny", code="weights.unknown_name", named="distill.teacher"),
    "a damaged teacher": taught("damaged", code="weights.damaged", named="distill.teacher"),
    "a teacher of other classes": taught(
        "embedded:vit_ti", code="weights.wrong_classes", named="distill.kind=features"
    ),
    "a run that is its own teacher": taught("run", code=CONFLICT, named="this very run"),
    "no teacher": override("distill.weight=0.5", code="recipe.missing_key", named="teacher"),
    "a temperature of 0": distilled("distill.temperature=0", named="distill.temperature"),
    "a temperature that is no number": distilled("distill.temperature=.nan", named="temperature"),
    "a teacher of no weight": distilled("distill.weight=0", named="distill.weight"),
    "a teacher of a weight above 1": distilled("distill.weight=1.5", named="distill.weight"),
    "a teacher of a weight that is no number": distilled("distill.weight=.nan", named="weight"),
    "an unknown kind of distillation": distilled("distill.kind=logit", named="'logits'"),
    "a temperature of features": distilled(
        "distill.kind=features", "distill.temperature=2", code=CONFLICT, named="temperature"
    ),
    "features for a frozen backbone": distilled(
        "distill.kind=features", "model.freeze=backbone", code=CONFLICT, named="model.freeze"
    ),
    "a name of timm's teacher": override(
        "kd_temperature=4", code="recipe.unknown_key", named="'distill.temperature=4'"
    ),
    "a stage with blocks that are not there": override(
        "optim.stages=[{steps: 1, freeze: 99}]", code=VALUE, named="99"
    ),
}


@parametrised({**OVERRIDES, **FIT, **METHODS})
def test_overrides(bad: Bad, fault: Callable[..., None]) -> None:
    refuse(bad)
    fault("bad input: overrides", PROMISE)
