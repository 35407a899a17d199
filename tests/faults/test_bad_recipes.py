"""Invalid recipes and overrides: exit code 2, every problem with its location, no run started."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from bad_input import PROMISE, BadInput, Content, check_bad_input, parametrize_bad_inputs
from networks import write_timm_folder

VALID_RECIPE = """\
model: {name: embedded:vit_nano}
data: {source: "embedded:digits"}
optim: {lr: 1e-3, steps: 4}
"""


def edit_recipe(part: str = "", replacement: str = "") -> str:
    """Return the valid recipe with one part replaced, or with a text appended."""
    assert part in VALID_RECIPE
    return VALID_RECIPE.replace(part, replacement) if part else VALID_RECIPE + replacement


def recipe_file(
    content: Content, *, named: str = "bad.yaml", code: str = "recipe.syntax"
) -> BadInput:
    return BadInput("train bad.yaml --out run", code, named, {"bad.yaml": content})


def override_case(*overrides: str, code: str, named: str) -> BadInput:
    return BadInput(
        ["train", "good.yaml", *overrides, "--out", "run"], code, named, {"good.yaml": VALID_RECIPE}
    )


def adapter_override(*overrides: str, code: str, named: str) -> BadInput:
    """Case: overrides of a recipe that trains an adapter."""
    return override_case("model.adapter.kind=lora", *overrides, code=code, named=named)


def teacher_override(*overrides: str, code: str = "recipe.wrong_value", named: str) -> BadInput:
    """Case: overrides of a recipe with a teacher."""
    return override_case("distill.teacher=embedded:vit_ti", *overrides, code=code, named=named)


def teacher_case(teacher: str, *, code: str, named: str) -> BadInput:
    """Case: a recipe with another teacher; the folder `damaged` holds a truncated one."""
    words = ["train", "good.yaml", f"distill.teacher={teacher}", "--out", "run"]
    return BadInput(
        words, code, named, {"good.yaml": VALID_RECIPE, "damaged": write_truncated_model}
    )


def write_truncated_model(path: Path) -> None:
    tensors = write_timm_folder(path) / "model.safetensors"
    tensors.write_bytes(tensors.read_bytes()[:-100])


def billion_laughs() -> str:
    """Return a billion-laughs YAML: nine lists, each with nine references to the one before."""
    parts = ["a0: &a0 [lol]"]
    parts += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 10)]
    return "\n".join(parts)


def symlink_to_itself(path: Path) -> None:
    path.symlink_to(path.name)


FILES = {
    "no such file": BadInput(
        "train bda.yaml", "recipe.not_found", "'bad.yaml'", {"bad.yaml": VALID_RECIPE}
    ),
    "an empty name": BadInput(["train", ""], "recipe.not_a_recipe", "''"),
    "a name with a NUL byte": BadInput(["train", "a\0b.yaml"], "recipe.unreadable", "b.yaml"),
    "a name too long": BadInput(["train", "x" * 5000], "recipe.unreadable", "xxx"),
    "a URL": BadInput(
        "train https://example.org/r.yaml", "recipe.not_a_recipe", "https://example.org/r.yaml"
    ),
    "a folder": BadInput(
        "train bad.yaml", "recipe.not_a_recipe", "bad.yaml", {"bad.yaml": Path.mkdir}
    ),
    "a named pipe": recipe_file(os.mkfifo, code="recipe.not_a_recipe"),
    "a device": BadInput("train /dev/zero", "recipe.not_a_recipe", "/dev/zero"),
    "a broken link": recipe_file(lambda path: path.symlink_to("gone"), code="recipe.not_found"),
    "a link to itself": recipe_file(symlink_to_itself, code="recipe.unreadable"),
    "zero bytes": recipe_file(b"", code="recipe.not_a_recipe"),
    "comments only": recipe_file("# nothing\n", code="recipe.not_a_recipe"),
    "the word null": recipe_file("null\n", code="recipe.not_a_recipe"),
    "a file larger than any recipe": recipe_file("# long\n" * 200_000, code="recipe.not_a_recipe"),
    "a picture": recipe_file(b"\x89PNG\r\n\x1a\n" + bytes(50)),
    "NUL bytes inside": recipe_file(b"model: \0\0\n"),
    "a control character": recipe_file("model: \x07\n"),
    "UTF-16": recipe_file(VALID_RECIPE.encode("utf-16")),
    "UTF-16 without a byte order mark": recipe_file(VALID_RECIPE.encode("utf-16-le")),
    "Latin-1": recipe_file("# café\n".encode("latin-1") + VALID_RECIPE.encode()),
    "a list": recipe_file("- model\n- data\n", code="recipe.not_a_recipe"),
    "one word": recipe_file("hello\n", code="recipe.not_a_recipe"),
    "truncated JSON": recipe_file('{"model": {"name": "x"'),
    "tabs": recipe_file(edit_recipe(replacement="run:\n\tseed: 1\n"), named="bad.yaml:5"),
    "an open bracket": recipe_file(edit_recipe("4}", "4"), named="bad.yaml:4"),
    "an open quote": recipe_file(edit_recipe('digits"', "digits"), named="bad.yaml:4"),
    "two documents": recipe_file(
        edit_recipe(replacement="---\nmodel: {name: x}\n"), named="bad.yaml:4"
    ),
    "an anchor": recipe_file(edit_recipe("1e-3", "&lr 1e-3"), named="bad.yaml:3"),
    "a merge": recipe_file(
        edit_recipe(replacement="run:\n  <<: {seed: 1}\n"),
        named="run.<<",
        code="recipe.unknown_key",
    ),
    "a billion laughs": recipe_file(billion_laughs()),
    "a Python object": recipe_file(
        edit_recipe("1e-3", "!!python/object/apply:os.system [id]"), named="!!python/object"
    ),
    "a tag on the document": recipe_file(
        "!!python/object:x.y\n" + VALID_RECIPE, named="!!python/object"
    ),
    "a Python name": recipe_file(
        edit_recipe(replacement="run: !!python/name:os.system x\n"), named="!!python/name"
    ),
    "bytes": recipe_file(edit_recipe("embedded:vit_nano", "!!binary aGVsbG8="), named="!!binary"),
    "a set": recipe_file(edit_recipe("{lr: 1e-3, steps: 4}", "!!set {lr, steps}"), named="!!set"),
    "a tag that contradicts its value": recipe_file(
        edit_recipe("1e-3", "!!int fast"), named="optim.lr"
    ),
    "a thousand levels": recipe_file("model: " + "[" * 1000 + "]" * 1000),
    "a hundred thousand brackets": recipe_file("[" * 100_000),
    "a directive": recipe_file("%TAG ! tag:x,2000:\n--- !a\nmodel: 1\n", named="tag:x,2000:a"),
    "a key that is a boolean": recipe_file(
        edit_recipe(replacement="on: {seed: 1}\n"), named="'on'"
    ),
    "a key that is a list": recipe_file(edit_recipe(replacement="? [a, b]\n: 1\n")),
    "a key that is a number": recipe_file(edit_recipe(replacement="1: 2\n"), named="'1'"),
    "a section twice": recipe_file(
        edit_recipe(replacement="model: {name: x}\n"),
        named="bad.yaml:4: model",
        code="recipe.duplicate_key",
    ),
    "a key twice": recipe_file(
        edit_recipe("lr: 1e-3", "lr: 1e-3, lr: 1"), named="optim.lr", code="recipe.duplicate_key"
    ),
}
BAD_KEYS = {
    "no model": (
        edit_recipe("model: {name: embedded:vit_nano}\n"),
        "recipe.missing_key",
        "bad.yaml: model",
    ),
    "no lr": (edit_recipe("lr: 1e-3, "), "recipe.missing_key", "optim.lr"),
    "no name": (edit_recipe("name: embedded:vit_nano"), "recipe.missing_key", "model.name"),
    "no length": (edit_recipe(", steps: 4"), "recipe.conflict", "optim.steps"),
    "two lengths": (
        edit_recipe("steps: 4", "steps: 4, epochs: 1"),
        "recipe.conflict",
        "optim.steps",
    ),
    "an unknown section": (
        edit_recipe(replacement="optimizer: {lr: 1}\n"),
        "recipe.unknown_key",
        "optimizer",
    ),
    "an unknown key": (
        edit_recipe("lr:", "learning_rate: 1, lr:"),
        "recipe.unknown_key",
        "optim.learning_rate",
    ),
    "a typo": (edit_recipe("steps: 4", "step: 4"), "recipe.unknown_key", "'steps'"),
    "a key of another section": (
        edit_recipe("4}", "4, seed: 1}"),
        "recipe.unknown_key",
        "'run.seed'",
    ),
    "an unknown operation": (
        edit_recipe('digits"', 'digits", train: flipp'),
        "recipe.unknown_name",
        "'flip'",
    ),
    "code instead of an operation": (
        edit_recipe('digits"', "digits\", train: \"__import__('os').system('id')\""),
        "recipe.syntax",
        "data.train",
    ),
    "an operation without its argument": (
        edit_recipe('digits"', 'digits", train: rotate'),
        "recipe.missing_key",
        "rotate(15)",
    ),
    "a random operation in evaluation": (
        edit_recipe('digits"', 'digits", eval: flip'),
        "recipe.conflict",
        "data.eval",
    ),
    "corrupted training": (
        edit_recipe('digits"', 'digits", train: "resize | corrupt(\'noise\', 3)"'),
        "recipe.conflict",
        "data.train",
    ),
    "corrupted evaluation": (
        edit_recipe('digits"', 'digits", train: resize, eval: "resize | corrupt(\'noise\', 3)"'),
        "recipe.conflict",
        "data.eval",
    ),
    "900 nested brackets": (
        edit_recipe('digits"', f'digits", train: "resize({"(" * 900}1{")" * 900})"'),
        "recipe.syntax",
        "data.train",
    ),
    "min_lr above lr": (edit_recipe("4}", "4, min_lr: 1}"), "recipe.conflict", "optim.min_lr"),
    "step_every without the step schedule": (
        edit_recipe("4}", "4, step_every: 2}"),
        "recipe.conflict",
        "optim.step_every",
    ),
    "a claim without a value": (
        edit_recipe(replacement="claims: [{metric: val.top1, source: x}]\n"),
        "recipe.conflict",
        "claims[0].metric",
    ),
    "a claim in percent": (
        edit_recipe(replacement="claims: [{metric: val.top1, value: 98, source: x}]\n"),
        "recipe.conflict",
        "claims[0].value",
    ),
}
# invalid values of keys
BAD_VALUES = {
    "a section that is a string": (
        edit_recipe("{lr: 1e-3, steps: 4}", "fast"),
        "bad.yaml:3: optim",
    ),
    "a section that is a list": (edit_recipe("{lr: 1e-3, steps: 4}", "[1]"), "bad.yaml:3: optim"),
    "an empty section": (edit_recipe(replacement="run:\n"), "bad.yaml:4: run"),
    "a string for a number": (edit_recipe("1e-3", "fast"), "optim.lr"),
    "a list for a number": (edit_recipe("1e-3", "[1]"), "optim.lr"),
    "a boolean for a number": (edit_recipe("1e-3", "yes"), "optim.lr"),
    "not a number": (edit_recipe("1e-3", ".nan"), "optim.lr"),
    "infinity": (edit_recipe("1e-3", ".inf"), "optim.lr"),
    "beyond a float": (edit_recipe("1e-3", "1e400"), "optim.lr"),
    "hexadecimal": (edit_recipe("1e-3", "0x10"), "optim.lr"),
    "a negative lr": (edit_recipe("1e-3", "-1"), "optim.lr"),
    "lr = 0": (edit_recipe("1e-3", "0"), "optim.lr"),
    "fractional steps": (edit_recipe("steps: 4", "steps: 1.5"), "optim.steps"),
    "zero steps": (edit_recipe("steps: 4", "steps: 0"), "optim.steps"),
    "negative steps": (edit_recipe("steps: 4", "steps: -4"), "optim.steps"),
    "more steps than can be counted": (edit_recipe("steps: 4", "steps: 1e30"), "optim.steps"),
    "a number of a thousand digits": (
        edit_recipe("steps: 4", "steps: " + "9" * 1000),
        "optim.steps",
    ),
    "an octal number": (edit_recipe("steps: 4", "steps: 010"), "optim.steps"),
    "a negative seed": (edit_recipe(replacement="run: {seed: -1}\n"), "run.seed"),
    "a seed of 2**32": (edit_recipe(replacement="run: {seed: 4294967296}\n"), "run.seed"),
    "an unknown precision": (edit_recipe(replacement="run: {precision: fp8}\n"), "'fp8'"),
    "a million threads": (edit_recipe(replacement="run: {threads: 1000000}\n"), "run.threads"),
    "a timeout of 0": (
        edit_recipe(replacement="run: {timeout_seconds: 0}\n"),
        "run.timeout_seconds",
    ),
    "a repository without an owner": (
        edit_recipe(replacement="run: {push_to: me}\n"),
        "run.push_to",
    ),
    "a number for a list": (edit_recipe(replacement="run: {trackers: 3}\n"), "run.trackers"),
    "a negative size": (edit_recipe("vit_nano", "vit_nano, image_size: -224"), "model.image_size"),
    "an image size of three numbers": (
        edit_recipe("vit_nano", "vit_nano, image_size: [1, 2, 3]"),
        "model.image_size",
    ),
    "an image size of a million": (
        edit_recipe("vit_nano", "vit_nano, image_size: 1000000"),
        "model.image_size",
    ),
    "a quoted boolean": (
        edit_recipe("vit_nano", 'vit_nano, pretrained: "false"'),
        "model.pretrained",
    ),
    "a name that is a number": (edit_recipe("embedded:vit_nano", "16"), "model.name"),
    "a dropout of 1": (edit_recipe("vit_nano", "vit_nano, dropout: 1"), "model.dropout"),
    "freeze: -1": (edit_recipe("vit_nano", "vit_nano, freeze: -1"), "model.freeze"),
    "arguments that are a list": (edit_recipe("vit_nano", "vit_nano, args: [1]"), "model.args"),
    "an argument that is NaN": (edit_recipe("vit_nano", "vit_nano, args: {a: .nan}"), "model.args"),
    "means from 0 to 255": (
        edit_recipe('digits"', 'digits", mean: [127, 127, 127]'),
        "data.mean[0]",
    ),
    "a mean for one channel": (edit_recipe('digits"', 'digits", mean: [0.5]'), "data.mean"),
    "a std of zero": (edit_recipe('digits"', 'digits", std: [0, 1, 1]'), "data.std[0]"),
    "a batch size of 0": (edit_recipe('digits"', 'digits", batch_size: 0'), "data.batch_size"),
    "val_fraction of 1": (edit_recipe('digits"', 'digits", val_fraction: 1'), "data.val_fraction"),
    "a crop_pct of 0": (edit_recipe('digits"', 'digits", crop_pct: 0'), "data.crop_pct"),
    "an empty pipeline": (edit_recipe('digits"', 'digits", train: ""'), "data.train"),
    "a resize to a million": (
        edit_recipe('digits"', 'digits", train: "resize(1000000)"'),
        "size=1000000",
    ),
    "a pipeline of 1000 operations": (
        edit_recipe('digits"', f'digits", train: "{"flip | " * 999}flip"'),
        "data.train",
    ),
    "three betas": (edit_recipe("4}", "4, betas: [0.9, 0.9, 0.9]}"), "optim.betas"),
    "a beta of one": (edit_recipe("4}", "4, betas: [1, 0.9]}"), "optim.betas[0]"),
    "an unknown schedule": (edit_recipe("4}", "4, schedule: cosin}"), "'cosine'"),
    "a claim about an unknown metric": (
        edit_recipe(replacement="claims: [{metric: val.f1, value: 1, source: x}]\n"),
        "claims[0].metric",
    ),
    "a single class": (edit_recipe('digits"', 'digits", classes: ["1"]'), "data.classes"),
    "a class twice": (edit_recipe('digits"', 'digits", classes: ["1", "1"]'), "data.classes"),
    "classes that are numbers": (edit_recipe('digits"', 'digits", classes: [1, 2]'), "'1'"),
    "no test images": (edit_recipe('digits"', 'digits", num_test: 0'), "data.num_test"),
    "an unknown head_init": (edit_recipe("vit_nano", "vit_nano, head_init: kept"), "'keep'"),
    "claims that are a mapping": (
        edit_recipe(replacement="claims: {metric: val.top1}\n"),
        "bad.yaml:4: claims",
    ),
}
BAD_OVERRIDES = {
    "no equals sign": override_case("optim.lr", code="recipe.syntax", named="'optim.lr'"),
    "no key": override_case("=3", code="recipe.syntax", named="'=3'"),
    "an empty part": override_case("optim..lr=3", code="recipe.syntax", named="'optim..lr=3'"),
    "no section": override_case("lr=3", code="recipe.unknown_key", named="'optim.lr=3'"),
    "a whole section": override_case("optim=3", code="recipe.unknown_key", named="'optim=3'"),
    "claims": override_case(
        "claims.0.value=1", code="recipe.unknown_key", named="'claims.0.value=1'"
    ),
    "an unknown section": override_case("optm.lr=3", code="recipe.unknown_key", named="'optim'"),
    "an unknown key": override_case("optim.lrr=3", code="recipe.unknown_key", named="'lr'"),
    "a key below a value": override_case(
        "optim.lr.x=3", code="recipe.unknown_key", named="optim.lr.x"
    ),
    "no value": override_case("optim.lr=", code="recipe.wrong_value", named="optim.lr"),
    "an incomplete list": override_case("data.mean=[0.5", code="recipe.syntax", named="data.mean"),
    "an anchor": override_case("data.mean=[&a 0.5]", code="recipe.syntax", named="data.mean"),
    "a Python object": override_case(
        "optim.lr=!!python/name:os.system", code="recipe.wrong_value", named="optim.lr"
    ),
    "a key of transformers": override_case(
        "learning_rate=1e-3", code="recipe.unknown_key", named="'optim.lr=1e-3'"
    ),
    "a key of Ultralytics": override_case(
        "model.imgsz=64", code="recipe.unknown_key", named="'model.image_size'"
    ),
    "a key without its section": override_case(
        "class_weights=balanced", code="recipe.unknown_key", named="'optim.class_weights=balanced'"
    ),
    "both lengths": override_case(
        "optim.steps=9", "optim.epochs=3", code="recipe.conflict", named="'optim.steps=9'"
    ),
    "neither length": override_case(
        "optim.steps=null", code="recipe.conflict", named="optim.steps"
    ),
    "one key twice": override_case(
        "optim.lr=1", "optim.lr=2", code="recipe.conflict", named="'optim.lr=1'"
    ),
    "a key after a key below it": override_case(
        "model.args.depth=2",
        "model.args={depth: 1}",
        code="recipe.conflict",
        named="'model.args.depth=2'",
    ),
    "not UTF-8": override_case("run.note=\udcff", code="recipe.syntax", named="run.note"),
    "an option instead of an override": override_case("--lr", "3", code="usage", named="--lr"),
}
SETUP_CONFLICTS = {
    "num_classes in model.args": override_case(
        "model.args.num_classes=0",
        "--dry-run",
        code="recipe.unknown_key",
        named="model.args.num_classes",
    ),
    "an unknown argument": override_case(
        "model.args.dpth=2", "--dry-run", code="recipe.unknown_key", named="'dpth'"
    ),
    "an argument without a value": override_case(
        "model.args.depth=null", "--dry-run", code="recipe.wrong_value", named="model.args.depth"
    ),
    "patience without validation": override_case(
        "run.patience=2",
        "data.val_fraction=0",
        "--dry-run",
        code="recipe.conflict",
        named="run.patience",
    ),
    "an image size that the patches do not divide": override_case(
        "model.image_size=65", "--dry-run", code="recipe.wrong_size", named="65 px"
    ),
    "an image size that the windows do not divide": override_case(
        "model.name=hiera_tiny_224",
        "model.pretrained=false",
        "model.args={embed_dim: 16, num_heads: 1, stages: [1, 1, 1, 1]}",
        "model.image_size=80",
        "--dry-run",
        code="recipe.wrong_size",
        named="80x80 px",
    ),
    "an unknown optimizer": override_case(
        "optim.name=adamv", "--dry-run", code="recipe.unknown_name", named="'adamv'"
    ),
    "an unknown tracker": override_case(
        "run.trackers=[wandbb]", "--dry-run", code="recipe.unknown_name", named="'wandbb'"
    ),
    "more images than the dataset has": BadInput(
        "train good.yaml data.num_train=99999 --dry-run --out run",
        "data.too_few_images",
        "data.num_train",
        {"good.yaml": VALID_RECIPE},
    ),
    "an unknown class": override_case(
        "data.classes=['1', '12']", "--dry-run", code="recipe.unknown_name", named="'12'"
    ),
    "fewer test images than classes": override_case(
        "data.num_test=3", "--dry-run", code="data.too_few_images", named="data.num_test"
    ),
    "num_val without a validation split": override_case(
        "data.num_val=20",
        "data.val_fraction=0",
        "--dry-run",
        code="data.no_split",
        named="data.num_val",
    ),
    "keep the head of weights with other classes": override_case(
        "model.head_init=keep",
        "--dry-run",
        code="recipe.conflict",
        named="model.head_init",
    ),
    "keep the head of random weights": override_case(
        "model.head_init=keep",
        "model.pretrained=false",
        code="recipe.conflict",
        named="model.pretrained",
    ),
    "more processes than launched": BadInput(
        "train good.yaml run.num_processes=3 --dry-run --out run",
        "setup.wrong_processes",
        "3 processes",
        {"good.yaml": VALID_RECIPE},
    ),
}


@pytest.fixture(autouse=True)
def in_tmp_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@parametrize_bad_inputs(
    {
        **FILES,
        **{
            name: recipe_file(text, code=code, named=key)
            for name, (text, code, key) in BAD_KEYS.items()
        },
        **{
            name: recipe_file(text, code="recipe.wrong_value", named=key)
            for name, (text, key) in BAD_VALUES.items()
        },
    }
)
def test_recipes(bad: BadInput, fault: Callable[..., None]) -> None:
    check_bad_input(bad)
    fault("bad input: recipes", PROMISE)


CONFLICT, VALUE = "recipe.conflict", "recipe.wrong_value"
METHOD_CONFLICTS = {
    "an unknown adapter": override_case("model.adapter.kind=lore", code=VALUE, named="'lora'"),
    "an unknown key of an adapter": adapter_override(
        "model.adapter.rnk=4", code="recipe.unknown_key", named="'rank'"
    ),
    "a compiled DoRA": override_case(
        "model.adapter.kind=dora",
        "model.compile=true",
        code="recipe.conflict",
        named="model.compile",
    ),
    "an adapter with rank 0": adapter_override(
        "model.adapter.rank=0", code=VALUE, named="model.adapter.rank"
    ),
    "an adapter with a rank larger than the layer": adapter_override(
        "model.adapter.rank=1000", code=VALUE, named="blocks.0.attn.qkv"
    ),
    "an adapter without targets": adapter_override(
        "model.adapter.targets=[]", code=VALUE, named="model.adapter.targets"
    ),
    "an adapter on a missing layer": adapter_override(
        "model.adapter.targets=[qvk]", code="recipe.unknown_name", named="attn.qkv"
    ),
    "an adapter with an invalid pattern": adapter_override(
        "model.adapter.targets=['(']", code=VALUE, named="'('"
    ),
    "an adapter and frozen blocks": adapter_override(
        "model.freeze=2", code=CONFLICT, named="model.freeze"
    ),
    "an adapter on random weights": adapter_override(
        "model.pretrained=false", code=CONFLICT, named="model.adapter"
    ),
    "both kinds of batch norm": override_case(
        "model.sync_bn=true", "model.freeze_bn=true", code=CONFLICT, named="model.sync_bn"
    ),
    "synchronized batch norm in a ViT": override_case(
        "model.sync_bn=true", code="recipe.unsupported", named="embedded:vit_nano"
    ),
    "frozen batch norm in a ViT": override_case(
        "model.freeze_bn=true", code="recipe.unsupported", named="model.freeze_bn"
    ),
    "frozen batch norm with random weights": override_case(
        "model.freeze_bn=true", "model.pretrained=false", code=CONFLICT, named="model.freeze_bn"
    ),
    "synchronized batch norm in a frozen backbone": override_case(
        "model.sync_bn=true", "model.freeze=backbone", code=CONFLICT, named="model.sync_bn"
    ),
    "frozen batch norm with an adapter": adapter_override(
        "model.freeze_bn=true", code=CONFLICT, named="model.freeze_bn"
    ),
    "compiled synchronized batch norm": override_case(
        "model.sync_bn=true", "model.compile=true", code=CONFLICT, named="model.compile"
    ),
    "batch norm that is neither true nor false": override_case(
        "model.sync_bn=2", code=VALUE, named="model.sync_bn"
    ),
    "a key of Lightning": override_case(
        "model.sync_batchnorm=true", code="recipe.unknown_key", named="model.sync_bn"
    ),
    "a key of peft": override_case(
        "model.lora_rank=4", code="recipe.unknown_key", named="adapter.rank"
    ),
    "a stage without a length": override_case(
        "optim.stages=[{freeze: backbone}]", code=CONFLICT, named="optim.stages"
    ),
    "a stage with two lengths": override_case(
        "optim.stages=[{steps: 1, epochs: 1}]", code=CONFLICT, named="steps and epochs"
    ),
    "an unknown key of a stage": override_case(
        "optim.stages=[{steps: 1, freze: backbone}]", code="recipe.unknown_key", named="'freeze'"
    ),
    "a stage with lr below min_lr": override_case(
        "optim.min_lr=1e-4", "optim.stages=[{steps: 1, lr: 1e-5}]", code=CONFLICT, named="min_lr"
    ),
    "a stage that trains all weights before an adapter": adapter_override(
        "optim.stages=[{steps: 1}]", code=CONFLICT, named="backbone"
    ),
    "a class weight for an unknown class": override_case(
        "optim.class_weights={'10': 2}", code="recipe.unknown_name", named="'10'"
    ),
    "a negative class weight": override_case(
        "optim.class_weights={'1': -2}", code=VALUE, named="'1'"
    ),
    "a class weight of NaN": override_case(
        "optim.class_weights={'1': .nan}", code=VALUE, named="'1'"
    ),
    "empty class weights": override_case("optim.class_weights={}", code=VALUE, named="balanced"),
    "an unknown kind of class weights": override_case(
        "optim.class_weights=balance", code=VALUE, named="balanced"
    ),
    "a negative gamma": override_case(
        "optim.focal_gamma=-1", code=VALUE, named="optim.focal_gamma"
    ),
    "a gamma of NaN": override_case(
        "optim.focal_gamma=.nan", code=VALUE, named="optim.focal_gamma"
    ),
    "a negative tau": override_case(
        "optim.logit_adjustment=-1", code=VALUE, named="logit_adjustment"
    ),
    "logit adjustment with balanced class weights": override_case(
        "optim.class_weights=balanced",
        "optim.logit_adjustment=1",
        code=CONFLICT,
        named="logit_adjustment",
    ),
    "balanced class weights with class-balanced sampling": override_case(
        "optim.class_weights=balanced",
        "data.sampling=class_balanced",
        code=CONFLICT,
        named="class_weights",
    ),
    "logit adjustment with class-balanced sampling": override_case(
        "optim.logit_adjustment=1",
        "data.sampling=class_balanced",
        code=CONFLICT,
        named="logit_adjustment",
    ),
    "an unknown sampling": override_case("data.sampling=sqrt", code=VALUE, named="'square_root'"),
    "sampling of a streamed source": override_case(
        "data.sampling=square_root",
        "data.source=parquet:x",
        "data.streaming=true",
        code=CONFLICT,
        named="data.sampling",
    ),
    "a long_tail below 1": override_case("data.long_tail=0.5", code=VALUE, named="long_tail"),
    "a key of keras": override_case(
        "optim.class_weight=balanced", code="recipe.unknown_key", named="class_weights"
    ),
    **{
        f"{key} for multilabel": override_case(
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
    "an asymmetric loss without multilabel": override_case(
        "optim.asymmetric_loss.clip=0", code=CONFLICT, named="data.task"
    ),
    "a multilabel metric without multilabel": override_case(
        "run.best=val.map", code=CONFLICT, named="val.map"
    ),
    "several label columns without multilabel": override_case(
        "data.label_column=[a,b]", code=CONFLICT, named="multilabel"
    ),
    "a list of one column": override_case(
        *("data.task=multilabel", "data.label_column=[a]"), code=VALUE, named="at least two"
    ),
    "a margin of 1": override_case(
        *("data.task=multilabel", "optim.asymmetric_loss.clip=1"), code=VALUE, named="clip"
    ),
    "a missing teacher": teacher_case(
        "gone/run", code="weights.not_found", named="distill.teacher"
    ),
    "an unknown teacher": teacher_case(
        "vit_tny", code="weights.unknown_name", named="distill.teacher"
    ),
    "a damaged teacher": teacher_case("damaged", code="weights.damaged", named="distill.teacher"),
    "a teacher with other classes": teacher_case(
        "embedded:vit_ti", code="weights.wrong_classes", named="distill.kind=features"
    ),
    "a run that is its own teacher": teacher_case(
        "run", code=CONFLICT, named="output directory of this run"
    ),
    "no teacher": override_case("distill.weight=0.5", code="recipe.missing_key", named="teacher"),
    "a temperature of 0": teacher_override("distill.temperature=0", named="distill.temperature"),
    "a temperature of NaN": teacher_override("distill.temperature=.nan", named="temperature"),
    "a teacher weight of 0": teacher_override("distill.weight=0", named="distill.weight"),
    "a teacher weight above 1": teacher_override("distill.weight=1.5", named="distill.weight"),
    "a teacher weight of NaN": teacher_override("distill.weight=.nan", named="weight"),
    "an unknown kind of distillation": teacher_override("distill.kind=logit", named="'logits'"),
    "a temperature for feature distillation": teacher_override(
        "distill.kind=features", "distill.temperature=2", code=CONFLICT, named="temperature"
    ),
    "feature distillation of a frozen backbone": teacher_override(
        "distill.kind=features", "model.freeze=backbone", code=CONFLICT, named="model.freeze"
    ),
    "a distillation key of timm": override_case(
        "kd_temperature=4", code="recipe.unknown_key", named="'distill.temperature=4'"
    ),
    "a stage with more blocks than the model has": override_case(
        "optim.stages=[{steps: 1, freeze: 99}]", code=VALUE, named="99"
    ),
}


@parametrize_bad_inputs({**BAD_OVERRIDES, **SETUP_CONFLICTS, **METHOD_CONFLICTS})
def test_overrides(bad: BadInput, fault: Callable[..., None]) -> None:
    check_bad_input(bad)
    fault("bad input: overrides", PROMISE)
