"""End-to-end training commands: same images, weights and settings for each, and their times."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from recipe_texts import tiny_recipe_text
from refusals import refused
from small_datasets import write_image_folder, write_parquet

from finetune.bench import end_to_end
from finetune.bench.end_to_end import (
    _run_timed,
    _timm_options,
    _timm_transform_options,
    _TrainingJob,
    bench_end_to_end,
)
from finetune.recipe.load import load_recipe
from finetune.training.setup import build_setup

TIMM = """
import sys, time
if "--help" in sys.argv:
    print("[--OPTIONS]".replace("OPTIONS", "] [--".join(OPTIONS)))
else:
    print("Train: 0 [   0/2 ( 50%)]", flush=True)
    time.sleep(0.3)
"""
OPTIONS = (
    *("data-dir", "val-split", "class-map", "model", "pretrained", "num-classes", "batch-size"),
    *("train-interpolation", "validation-batch-size", "epochs", "opt", "opt-betas", "lr", "sched"),
    *("weight-decay", "warmup-epochs", "clip-grad", "smoothing", "amp", "amp-dtype", "seed"),
    *("workers", "device", "scale", "ratio", "hflip", "color-jitter"),
)


@pytest.fixture
def script(tmp_path: Path) -> Path:
    """A replacement for timm's train.py."""
    path = tmp_path / "their scripts" / "train.py"
    path.parent.mkdir()
    path.write_text(TIMM.replace("OPTIONS)", f"{OPTIONS})"))
    return path


def write_recipe(
    tmp_path: Path, data: str = "num_train: 40, val_fraction: 0.5", **options: str
) -> str:
    path = tmp_path / "tiny.yaml"
    text = tiny_recipe_text(f"{data}, batch_size: 10", optim="lr: 3e-3, epochs: 1", **options)
    path.write_text(text)
    return str(path)


def create_job(
    tmp_path: Path, recipe: str, *overrides: str, precision: str = "fp32"
) -> _TrainingJob:
    cpu = torch.device("cpu")
    loaded = load_recipe(recipe, overrides)
    setup = build_setup(loaded, device=cpu, show_progress=False)
    return _TrainingJob(setup, tmp_path / "job", precision, Path("train.py"))


class FakeRunner:
    """Replaces the commands: checks their inputs and reports preset times."""

    def __init__(self) -> None:
        self.seconds = {"finetune": [8.0, 6.0], "timm-train": [10.0, 12.0]}
        self.seconds["transformers-trainer"] = [20.0, 2.0]
        self.order: list[str] = []
        self.folders: set[Path] = set()
        self.commands: dict[str, list[str]] = {}
        self.job: dict[str, Any] = {}

    def __call__(self, job: _TrainingJob, name: str, folder: Path) -> dict[str, Any]:
        assert not list(folder.iterdir())
        self.commands[name] = job.command(name, folder)
        if name == "transformers-trainer":
            self.job = json.loads(Path(self.commands[name][-1]).read_text())
        if name not in self.order:
            self.check_inputs(job)
        self.folders.add(folder)
        seconds = self.seconds[name][self.order.count(name)]
        self.order.append(name)
        first = None if name == "timm-train" else seconds / 2
        return {
            "seconds": seconds,
            "cpu_seconds": 2 * seconds,
            "first_step": first,
            "host_bytes": 9,
        }

    def check_inputs(self, job: _TrainingJob) -> None:
        """Check that images and weights equal those at the start of training, under other names."""
        recipe = load_recipe(job.folder / "recipe.yaml")
        source = job.setup.source
        setup = build_setup(recipe, device=torch.device("cpu"), show_progress=False)
        assert list(setup.source.splits) == ["train", "val"]
        for name, ours in setup.source.splits.items():
            theirs = source.splits[name]
            names = [source.class_names[label] for label in theirs.labels]
            found = sorted(
                zip(names, map(bytes, map(theirs.decode, range(len(theirs)))), strict=True)
            )
            read = map(bytes, map(ours.decode, range(len(ours))))
            known = [source.class_names[int(setup.source.class_names[n])] for n in ours.labels]
            assert sorted(zip(known, read, strict=True)) == found
        model = timm.create_model(f"local-dir:{job.folder / 'model'}", pretrained=True)
        for state in (model.state_dict(), setup.built.model.state_dict()):
            before = job.setup.built.model.state_dict()
            assert all(torch.equal(state[name], before[name]) for name in before)
        assert setup.num_steps == job.setup.num_steps
        assert setup.eval_pipeline.transform_spec == job.setup.eval_pipeline.transform_spec
        assert setup.preprocessing == job.setup.preprocessing


def test_commands_run_in_alternating_order(
    tmp_path: Path, script: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("transformers")
    runner, page = FakeRunner(), tmp_path / "B.md"
    monkeypatch.setattr(end_to_end, "_run_timed", runner)
    recipe = write_recipe(tmp_path, model="pretrained: false, head_init: default")
    against = [f"timm-train:{script}", "transformers-trainer"]
    found = bench_end_to_end(
        recipe, ["optim.clip_norm=1"], against=against, repeats=2, out=str(page)
    )
    names = ["finetune", "timm-train", "transformers-trainer"]
    assert runner.order == [*names, *reversed(names)]
    assert len(runner.folders) == 6
    ours, timm_job, theirs = found["jobs"]
    assert [row["name"] for row in found["jobs"]] == names
    assert (ours["seconds"]["values"], ours["cpu_seconds"]["median"]) == ([8.0, 6.0], 14.0)
    # each relative to ours of the same round
    assert timm_job["share"]["values"] == [0.8, 0.5]
    assert theirs["share"]["values"] == [0.4, 3.0]
    assert (ours["first_step"]["median"], timm_job["first_step"]) == (3.5, None)
    assert found["images"] == {"train": 20, "val": 20}
    assert found["command"].endswith(
        "--end-to-end --against timm-train:train.py --against transformers-trainer --repeats 2"
    )
    assert "timm-train" in page.read_text(encoding="utf-8")
    assert runner.commands["finetune"][2:4] == ["finetune", "train"]
    recorded = runner.job["arguments"]
    assert (recorded["num_train_epochs"], recorded["max_grad_norm"], recorded["learning_rate"]) == (
        1,
        1,
        3e-3,
    )
    assert (recorded["per_device_train_batch_size"], recorded["bf16"]) == (10, False)
    json.dumps(found)


@pytest.mark.parametrize("kind", ["folder", "parquet"])
def test_encoded_images_keep_their_bytes(tmp_path: Path, kind: str) -> None:
    if kind == "folder":
        write_image_folder(tmp_path / "set", {"a b/ü": 4, "a b/z": 4})
        source = f"folder:{tmp_path / 'set' / 'a b'}"
        jpeg = tmp_path / "set" / "a b" / "ü" / "0.png"  # the suffix does not match the format
        Image.new("RGB", (9, 9), (1, 200, 3)).save(jpeg, "JPEG")
        Image.new("RGB", (9, 9), (1, 200, 3)).save(tmp_path / "set" / "a b" / "ü" / "1.bmp")
    else:
        file = write_parquet(tmp_path / "train.parquet", [0, 1] * 4, names=["../x", "y"])
        source = f"parquet:{file}"
    recipe = write_recipe(tmp_path, "val_fraction: 0.5", source=source)
    job = create_job(tmp_path, recipe)
    job.folder.mkdir()
    end_to_end._write_images(job)
    written = {file.read_bytes() for file in job.folder.glob("images/*/*/*")}
    splits = job.setup.source.splits
    count = 0
    for split in splits.values():
        for row in split.rows if split.rows is not None else range(len(split)):
            count += 1
            body = split.images.read_bytes(int(row))
            assert body in written or body.startswith(b"BM")
    assert count == len(list(job.folder.glob("images/*/*/*.*")))
    suffixes = {file.suffix for file in job.folder.glob("images/*/*/*")}
    assert suffixes == ({".jpg", ".png"} if kind == "folder" else {".png"})


def test_unreadable_images(tmp_path: Path, script: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write_image_folder(tmp_path / "set", {"a": 6, "b": 6})
    (tmp_path / "set" / "a" / "2.png").write_bytes(b"\x89PNG\r\n\x1a\n")
    recipe, runner = write_recipe(tmp_path, "val_fraction: 0.5", source=source), FakeRunner()
    monkeypatch.setattr(end_to_end, "_run_timed", runner)
    with refused("data.unreadable", "2.png"):
        bench_end_to_end(recipe, repeats=1)
    assert not runner.order
    found = bench_end_to_end(recipe, ["data.unreadable=quarantine"], repeats=1)
    assert sum(found["images"].values()) == 11


@pytest.mark.parametrize("key", ["data.task=multilabel", "distill.teacher=embedded:vit_ti"])
def test_unsupported_recipes_fail_before_reading_data(tmp_path: Path, key: str) -> None:
    name = key.partition("=")[0].removesuffix(".teacher")
    with refused("recipe.unsupported", name, "--end-to-end"):
        bench_end_to_end(write_recipe(tmp_path, source="folder:nowhere"), [key])


def test_timm_options_match_the_recipe(tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path)
    overrides = ["optim.label_smoothing=0.1", "optim.betas=[0.9, 0.95]", "data.workers=3"]
    arguments = " ".join(_timm_options(create_job(tmp_path, recipe, *overrides, precision="bf16")))
    for option in (
        *("--smoothing 0.1", "--opt-betas 0.9 0.95", "--workers 3", "--amp --amp-dtype bfloat16"),
        *("--batch-size 10", "--epochs 1", "--lr 0.003", "--warmup-epochs 0", "--num-classes 10"),
    ):
        assert f"{option} " in f"{arguments} "
    plain = _timm_options(create_job(tmp_path, recipe))
    assert not {"--amp", "--amp-dtype", "--opt-betas", "--clip-grad", "--torchcompile"} & {*plain}


@pytest.mark.parametrize(
    "spec, expected_changes",
    [
        ("resize", {}),
        ("resize(40) | center_crop(32) | flip(0.3)", {"hflip": 0.3}),
        ("random_resized_crop(scale=(0.5, 1)) | flip", {"scale": (0.5, 1), "hflip": 0.5}),
    ],
)
def test_timm_transform_options(spec: str, expected_changes: dict[str, Any]) -> None:
    found = _timm_transform_options(spec)
    if "scale" in expected_changes:
        assert np.allclose(found.pop("ratio"), (3 / 4, 4 / 3))
    else:
        assert found.pop("ratio") == (1, 1)
    plain = {"scale": (1, 1), "hflip": 0, "color-jitter": 0}
    assert found == {**plain, **expected_changes}


class TestRunTimed:
    """A measurement covers a command from start to end, with all its processes."""

    @pytest.fixture
    def job(self, tmp_path: Path) -> _TrainingJob:
        job = create_job(tmp_path, write_recipe(tmp_path), "run.threads=3")
        job.folder.mkdir()
        return job

    def run_code(
        self, job: _TrainingJob, code: str, monkeypatch: pytest.MonkeyPatch
    ) -> dict[str, Any]:
        monkeypatch.setattr(_TrainingJob, "command", lambda *_: [sys.executable, "-c", code])
        return _run_timed(job, "timm-train", job.folder)

    def test_measures_time_and_memory(
        self, job: _TrainingJob, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        code = """
import json, os, time, subprocess, sys
names = ("OMP_NUM_THREADS", "FINETUNE_CACHE", "HF_HUB_OFFLINE", "CUDA_VISIBLE_DEVICES")
open("env", "w").write(json.dumps({name: os.environ[name] for name in names}))
print("Train: 0 [   0/2", flush=True)
time.sleep(0.4)
busy = "import time\\nwhile time.process_time() < 0.5: pass"
subprocess.run([sys.executable, "-c", busy])
block = b"x" * 2**26
"""
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,4")
        found = self.run_code(job, code, monkeypatch)
        assert found["first_step"] + 0.4 < found["seconds"] < 60
        assert 0.5 < found["cpu_seconds"] < 30  # includes its child process
        assert 2**26 < found["host_bytes"] < 2**30
        recorded = json.loads((job.folder / "env").read_text())
        assert recorded["FINETUNE_CACHE"].startswith(str(job.folder))
        assert (recorded["OMP_NUM_THREADS"], recorded["CUDA_VISIBLE_DEVICES"]) == ("3", "3")
        assert recorded["HF_HUB_OFFLINE"] == "1"

    def test_output_without_a_first_step(
        self, job: _TrainingJob, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        assert self.run_code(job, "print('done')", monkeypatch)["first_step"] is None

    def test_failing_command(self, job: _TrainingJob, monkeypatch: pytest.MonkeyPatch) -> None:
        with refused("setup.worker_ended", "timm-train", "code 3", "no more disk"):
            self.run_code(job, "import sys; print('no more disk'); sys.exit(3)", monkeypatch)


def test_timm_script_of_another_version(tmp_path: Path, script: Path) -> None:
    script.write_text(script.read_text().replace("class-map", "classes"))
    with refused("recipe.wrong_value", str(script), "--class-map"):
        bench_end_to_end(write_recipe(tmp_path), against=[f"timm-train:{script}"])


def test_model_that_timm_lacks(tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path, model="pretrained: false")
    text = Path(recipe).read_text().replace("vit_tiny_patch16_224", "shiftvit_tiny_patch4_48")
    text = text.replace("args: {patch_size: 4, embed_dim: 32, depth: 1, num_heads: 2}", "args: {}")
    Path(recipe).write_text(text.replace("image_size: 16", "image_size: 48"))
    with refused("recipe.unsupported", "model.name", "shiftvit_tiny_patch4_48"):
        bench_end_to_end(recipe)


def test_multiple_processes_are_rejected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with refused("setup.one_process", "--end-to-end"):
        bench_end_to_end(write_recipe(tmp_path))


@pytest.mark.faults
def test_full_benchmark(tmp_path: Path, script: Path) -> None:
    """Run finetune and the Trainer for real; no temporary files remain."""
    pytest.importorskip("transformers")
    (tmp_path / "tmp").mkdir()
    arguments = [write_recipe(tmp_path), "--end-to-end", "--repeats", "1", "--json"]
    arguments += ["--against", f"timm-train:{script}", "--against", "transformers-trainer"]
    start = time.monotonic()
    completed = subprocess.run(
        [sys.executable, "-m", "finetune", "bench", *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, "TMPDIR": str(tmp_path / "tmp")},
        timeout=300,
    )
    assert completed.returncode == 0, completed.stderr
    rows = {row["name"]: row for row in json.loads(completed.stdout)["jobs"]}
    assert list(rows) == ["finetune", "timm-train", "transformers-trainer"]
    for row in rows.values():
        (seconds,), (first,) = row["seconds"]["values"], row["first_step"]["values"]
        assert 0 < first < seconds < time.monotonic() - start
        assert row["cpu_seconds"]["median"] > 0
    assert rows["transformers-trainer"]["host_bytes"] > 2**27
    assert not list((tmp_path / "tmp").iterdir())
