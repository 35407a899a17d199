"""Recipes and overrides that are wrong: exit 2, every problem with its place, and no run begun."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from faults_bad import PROMISE, Bad, Content, parametrised, refuse

BASE = """\
model: {name: embedded:vit_nano}
data: {source: "embedded:digits"}
optim: {lr: 1e-3, steps: 4}
"""


def lines(old: str = "", new: str = "") -> str:
    """The good recipe with one part replaced, or with something at its end."""
    assert old in BASE
    return BASE.replace(old, new) if old else BASE + new


def file(content: Content, said: str) -> Bad:
    return Bad("train bad.yaml --out run", 2, said, {"bad.yaml": content})


def override(*words: str, said: str, code: int = 2) -> Bad:
    return Bad(["train", "good.yaml", *words, "--out", "run"], code, said, {"good.yaml": BASE})


def laughs() -> str:
    """A billion laughs: nine lists of nine of the one before."""
    parts = ["a0: &a0 [lol]"]
    parts += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 10)]
    return "\n".join(parts)


def loop(path: Path) -> None:
    path.symlink_to(path.name)


FILES = {
    "no such file": Bad("train bda.yaml", 2, "did you mean 'bad.yaml'", {"bad.yaml": BASE}),
    "an empty name": Bad(["train", ""], 2, "an empty name"),
    "a name with a zero byte": Bad(["train", "a\0b.yaml"], 2, "cannot be read"),
    "a name too long": Bad(["train", "x" * 5000], 2, "cannot be read"),
    "a URL": Bad("train https://example.org/r.yaml", 2, "a local file, not a URL"),
    "a folder": Bad("train bad.yaml", 2, "a folder", {"bad.yaml": Path.mkdir}),
    "a named pipe": file(os.mkfifo, "a pipe or a device"),
    "a device": Bad("train /dev/zero", 2, "a pipe or a device"),
    "a link to nothing": file(lambda path: path.symlink_to("gone"), "no such file"),
    "a link to itself": file(loop, "cannot be read"),
    "zero bytes": file(b"", "empty"),
    "comments only": file("# nothing\n", "empty"),
    "the word null": file("null\n", "empty"),
    "larger than any recipe": file("# long\n" * 200_000, "this is not a recipe"),
    "a picture": file(b"\x89PNG\r\n\x1a\n" + bytes(50), "not UTF-8"),
    "zero bytes inside": file(b"model: \0\0\n", "is not text"),
    "a control character": file("model: \x07\n", "is not text"),
    "UTF-16": file(BASE.encode("utf-16"), "not UTF-8"),
    "UTF-16 without a mark": file(BASE.encode("utf-16-le"), "is not text"),
    "Latin-1": file("# café\n".encode("latin-1") + BASE.encode(), "not UTF-8"),
    "a list": file("- model\n- data\n", "expected a mapping"),
    "one word": file("hello\n", "expected a mapping"),
    "JSON that is cut": file('{"model": {"name": "x"', "not valid YAML"),
    "tabs": file(lines(new="run:\n\tseed: 1\n"), "not tabs"),
    "an open bracket": file(lines("4}", "4"), "not valid YAML"),
    "an open quote": file(lines('digits"', "digits"), "not valid YAML"),
    "two documents": file(lines(new="---\nmodel: {name: x}\n"), "but found another document"),
    "an anchor": file(lines("1e-3", "&lr 1e-3"), "anchors and aliases"),
    "a merge": file(lines(new="run:\n  <<: {seed: 1}\n"), "unknown key"),
    "a billion laughs": file(laughs(), "anchors and aliases"),
    "an object of Python": file(
        lines("1e-3", "!!python/object/apply:os.system [id]"), "is refused"
    ),
    "a tag on the whole": file("!!python/object:x.y\n" + BASE, "is refused"),
    "a name of Python": file(lines(new="run: !!python/name:os.system x\n"), "is refused"),
    "bytes": file(lines("embedded:vit_nano", "!!binary aGVsbG8="), "is refused"),
    "a set": file(lines("{lr: 1e-3, steps: 4}", "!!set {lr, steps}"), "is refused"),
    "a tag that lies": file(lines("1e-3", "!!int fast"), "not what its tag says"),
    "a thousand levels": file("model: " + "[" * 1000 + "]" * 1000, "levels deep"),
    "a hundred thousand brackets": file("[" * 100_000, "levels deep"),
    "a directive": file("%TAG ! tag:x,2000:\n--- !a\nmodel: 1\n", "is refused"),
    "a key that is a boolean": file(lines(new="on: {seed: 1}\n"), "read as a boolean"),
    "a key that is a list": file(lines(new="? [a, b]\n: 1\n"), "not as a key"),
    "a key that is a number": file(lines(new="1: 2\n"), "read as a number"),
    "a section twice": file(lines(new="model: {name: x}\n"), "duplicate key"),
    "a key twice": file(lines("lr: 1e-3", "lr: 1e-3, lr: 1"), "duplicate key"),
}
KEYS = {
    "no model": (lines("model: {name: embedded:vit_nano}\n"), "missing section"),
    "no lr": (lines("lr: 1e-3, "), "optim.lr: missing"),
    "no name": (lines("name: embedded:vit_nano"), "model.name: missing"),
    "no length": (lines(", steps: 4"), "give steps or epochs"),
    "two lengths": (lines("steps: 4", "steps: 4, epochs: 1"), "keep one"),
    "an unknown section": (lines(new="optimizer: {lr: 1}\n"), "unknown section"),
    "an unknown key": (lines("lr:", "learning_rate: 1, lr:"), "unknown key"),
    "a slip of the pen": (lines("steps: 4", "step: 4"), "did you mean 'steps'"),
    "a key of another section": (lines("4}", "4, seed: 1}"), "'run.seed'"),
    "a section that is a word": (lines("{lr: 1e-3, steps: 4}", "fast"), "a mapping of keys"),
    "a section that is a list": (lines("{lr: 1e-3, steps: 4}", "[1]"), "a mapping of keys"),
    "a section that is nothing": (lines(new="run:\n"), "a mapping of keys"),
    "a word for a number": (lines("1e-3", "fast"), "expected a number"),
    "a list for a number": (lines("1e-3", "[1]"), "expected a number"),
    "a boolean for a number": (lines("1e-3", "yes"), "expected a number"),
    "not a number": (lines("1e-3", ".nan"), "a finite number"),
    "infinity": (lines("1e-3", ".inf"), "a finite number"),
    "beyond a float": (lines("1e-3", "1e400"), "a finite number"),
    "hexadecimal": (lines("1e-3", "0x10"), "expected a number"),
    "a negative rate": (lines("1e-3", "-1"), "above 0"),
    "a rate of zero": (lines("1e-3", "0"), "above 0"),
    "half a step": (lines("steps: 4", "steps: 1.5"), "a whole number"),
    "no steps": (lines("steps: 4", "steps: 0"), "at least 1"),
    "negative steps": (lines("steps: 4", "steps: -4"), "at least 1"),
    "more steps than can be counted": (lines("steps: 4", "steps: 1e30"), "at most"),
    "a number of a thousand digits": (lines("steps: 4", "steps: " + "9" * 1000), "whole number"),
    "an octal number": (lines("steps: 4", "steps: 010"), "whole number"),
    "a negative seed": (lines(new="run: {seed: -1}\n"), "at least 0"),
    "a seed of 2**32": (lines(new="run: {seed: 4294967296}\n"), "below 4294967296"),
    "a precision of nobody": (lines(new="run: {precision: fp8}\n"), "'bf16' or 'fp16', got 'fp8'"),
    "a thousand thousand threads": (lines(new="run: {threads: 1000000}\n"), "at most 1024"),
    "no time": (lines(new="run: {timeout_seconds: 0}\n"), "above 0"),
    "a repository of nobody": (lines(new="run: {push_to: me}\n"), "owner/name"),
    "a word for a list": (lines(new="run: {trackers: tensorboard}\n"), "expected a list"),
    "a negative size": (lines("vit_nano", "vit_nano, image_size: -224"), "pixels"),
    "a size of three": (lines("vit_nano", "vit_nano, image_size: [1, 2, 3]"), "pixels"),
    "a size of a million": (lines("vit_nano", "vit_nano, image_size: 1000000"), "at most"),
    "a quoted boolean": (lines("vit_nano", 'vit_nano, pretrained: "false"'), "true or false"),
    "a name that is a number": (lines("embedded:vit_nano", "16"), "quote it"),
    "a share above one": (lines("vit_nano", "vit_nano, dropout: 1"), "below 1"),
    "minus one block": (lines("vit_nano", "vit_nano, freeze: -1"), "number of blocks"),
    "arguments that are a list": (lines("vit_nano", "vit_nano, args: [1]"), "keyword arguments"),
    "an argument that is NaN": (lines("vit_nano", "vit_nano, args: {a: .nan}"), "finite"),
    "means of 0 to 255": (lines('digits"', 'digits", mean: [127, 127, 127]'), "at most 1"),
    "a mean for one channel": (lines('digits"', 'digits", mean: [0.5]'), "3 numbers"),
    "a std of zero": (lines('digits"', 'digits", std: [0, 1, 1]'), "above 0"),
    "a batch of nothing": (lines('digits"', 'digits", batch_size: 0'), "at least 1"),
    "all for validation": (lines('digits"', 'digits", val_fraction: 1'), "below 1"),
    "a crop of nothing": (lines('digits"', 'digits", crop_pct: 0'), "above 0"),
    "no operation": (lines('digits"', 'digits", train: ""'), "expected text"),
    "an unknown operation": (lines('digits"', 'digits", train: flipp'), "did you mean 'flip'"),
    "code for an operation": (
        lines('digits"', "digits\", train: \"__import__('os').system('id')\""),
        "is not an operation",
    ),
    "an operation without its number": (lines('digits"', 'digits", train: rotate'), "needs"),
    "a resize to a million": (lines('digits"', 'digits", train: "resize(1000000)"'), "8192"),
    "chance in evaluation": (lines('digits"', 'digits", eval: flip'), "is random"),
    "an endless sentence": (
        lines('digits"', f'digits", train: "{"flip | " * 999}flip"'),
        "characters",
    ),
    "brackets without end": (
        lines('digits"', f'digits", train: "resize({"(" * 900}1{")" * 900})"'),
        "not readable",
    ),
    "a warm-up longer than the run": (lines("4}", "4, warmup_steps: 9}"), "longer than the run"),
    "a floor above the rate": (lines("4}", "4, min_lr: 1}"), "above lr"),
    "three betas": (lines("4}", "4, betas: [0.9, 0.9, 0.9]}"), "list of 2"),
    "a beta of one": (lines("4}", "4, betas: [1, 0.9]}"), "below 1"),
    "an unknown schedule": (lines("4}", "4, schedule: cosin}"), "did you mean 'cosine'"),
    "cuts without a schedule for them": (lines("4}", "4, step_every: 2}"), "only schedule step"),
    "a claim of nothing": (lines(new="claims: [{metric: val.top1, source: x}]\n"), "exactly one"),
    "a claim in per cent": (
        lines(new="claims: [{metric: val.top1, value: 98, source: x}]\n"),
        "fractions",
    ),
    "a claim of an unknown figure": (
        lines(new="claims: [{metric: val.f1, value: 1, source: x}]\n"),
        "top1, top5",
    ),
    "claims that are a mapping": (lines(new="claims: {metric: val.top1}\n"), "expected a list"),
}
OVERRIDES = {
    "no equals sign": override("optim.lr", said="expected section.key=value"),
    "no key": override("=3", said="expected section.key=value"),
    "an empty part": override("optim..lr=3", said="expected section.key=value"),
    "no section": override("lr=3", said="did you mean 'optim.lr=3'"),
    "a whole section": override("optim=3", said="whole section"),
    "claims": override("claims.0.value=1", said="edit the file"),
    "an unknown section": override("optm.lr=3", said="unknown section"),
    "an unknown key": override("optim.lrr=3", said="did you mean 'lr'"),
    "a key below a value": override("optim.lr.x=3", said="set it whole"),
    "no value": override("optim.lr=", said="got nothing"),
    "a list that is cut": override("data.mean=[0.5", said="not valid YAML"),
    "an anchor": override("data.mean=[&a 0.5]", said="anchors and aliases"),
    "an object of Python": override("optim.lr=!!python/name:os.system", said="expected a number"),
    "both lengths": override("optim.epochs=3", said="keep one"),
    "neither length": override("optim.steps=null", said="give steps or epochs"),
    "one key twice": override("optim.lr=1", "optim.lr=2", said="undoes 'optim.lr=1'"),
    "one key after what is below it": override(
        "model.args.depth=2", "model.args={depth: 1}", said="undoes 'model.args.depth=2'"
    ),
    "is not text": override("run.note=\udcff", said="UTF-8"),
    "an option for an override": override("--lr", "3", said="No such option"),
}
FIT = {
    "classes of the recipe's own": override(
        "model.args.num_classes=0", "--dry-run", said="the classes come from the data"
    ),
    "an argument of nobody": override("model.args.dpth=2", "--dry-run", said="'dpth'"),
    "an argument without a value": override("model.args.depth=null", "--dry-run", said="no value"),
    "patience without validation": override(
        "run.patience=2", "data.val_fraction=0", "--dry-run", said="no validation split"
    ),
    "a size beside the patches": override("model.image_size=65", "--dry-run", said="use 64 or"),
    "an optimiser of nobody": override("optim.name=adamv", "--dry-run", said="did you mean"),
    "a tracker of nobody": override("run.trackers=[wandbb]", "--dry-run", said="unknown 'wandbb'"),
    "more images than there are": Bad(
        "train good.yaml data.num_train=99999 --dry-run --out run",
        3,
        "give a number from",
        {"good.yaml": BASE},
    ),
    "more processes than there are": Bad(
        "train good.yaml run.num_processes=3 --dry-run --out run",
        5,
        "accelerate launch",
        {"good.yaml": BASE},
    ),
}


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@parametrised({**FILES, **{name: file(*case) for name, case in KEYS.items()}})
def test_recipes(bad: Bad, fault: Callable[..., None]) -> None:
    refuse(bad)
    fault("bad input: recipes", PROMISE)


@parametrised({**OVERRIDES, **FIT})
def test_overrides(bad: Bad, fault: Callable[..., None]) -> None:
    refuse(bad)
    fault("bad input: overrides", PROMISE)
