"""A run of the GPU is exported, evaluated and used on the CPU; every command on the GPU."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gpu_runs import DEVICE, NANO_RECIPE, needs_gpu, run_command, train_here, use_device

BF16_OVERRIDES = ("optim.steps=40", "run.precision=bf16", "run.test=true")


@pytest.fixture(scope="module")
def gpu_run(no_plots: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bf16 run on the test device."""
    out = tmp_path_factory.mktemp("published") / "run"
    train_here(out, *BF16_OVERRIDES)
    return out


@pytest.fixture
def image_paths(tmp_path: Path) -> list[Path]:
    """Digits as PNG files."""
    from PIL import Image
    from sklearn.datasets import load_digits

    paths = []
    for number, values in enumerate(load_digits().images[:40]):
        pixels = (values * 15.9).astype(np.uint8)
        paths.append(tmp_path / f"{number}.png")
        Image.fromarray(pixels).convert("RGB").save(paths[-1])
    return paths


@pytest.mark.parametrize("export_format", ["onnx", "torch"])
def test_an_exported_run_matches_on_the_cpu(
    export_format: str, gpu_run: Path, tmp_path: Path, figure: Any
) -> None:
    from finetune.commands.export import export_model

    exported = export_model(str(gpu_run), format=export_format, out=str(tmp_path))
    figure(
        "a run of the GPU, exported and computed on the CPU",
        "logits within 1e-3 of the PyTorch model",
        f"{export_format}: {exported['max_difference']:.1e}, {exported['bytes'] / 1e6:.1f} MB",
    )
    assert exported["max_difference"] < 1e-3
    assert Path(exported["file"]).is_file()


def test_logits_of_the_final_model_on_gpu_and_cpu(gpu_run: Path, figure: Any) -> None:
    from finetune.inference import Classifier

    images = torch.randn(32, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    torch.backends.cudnn.allow_tf32 = False
    on_cpu = Classifier.load(gpu_run, device="cpu")
    on_gpu = Classifier.load(gpu_run, device=DEVICE)
    expected = on_cpu.logits(images)
    differences = {}
    for precision in (on_gpu.precision, "fp32"):
        on_gpu.precision = precision
        differences[precision] = float((on_gpu.logits(images).cpu() - expected).abs().max())
    spread = float(expected.std())
    figure(
        "logits of the final model on the GPU against the CPU",
        "float32 within 1e-3; in the default precision of the GPU within a tenth of their spread",
        f"{', '.join(f'{name} {value:.1e}' for name, value in differences.items())} "
        f"(spread {spread:.2f})",
    )
    assert differences["fp32"] < 1e-3
    assert max(differences.values()) < 0.1 * spread


def test_eval_on_gpu_and_cpu(gpu_run: Path, figure: Any) -> None:
    from finetune.commands.evaluate import evaluate_model

    recorded = json.loads((gpu_run / "results.json").read_text())["test"]
    with use_device("cpu"):
        on_cpu = evaluate_model(str(gpu_run))
    with use_device(DEVICE.type):
        on_gpu = evaluate_model(str(gpu_run))
    figure(
        "the test split of a run of the GPU in bf16, evaluated again",
        "the same accuracy on the GPU as at the end of the run; within one image in 100 on the CPU",
        f"at the end {recorded['top1']:.4f}, GPU {on_gpu['top1']:.4f}, CPU {on_cpu['top1']:.4f}; "
        f"loss {recorded['loss']:.4f}, {on_gpu['loss']:.4f}, {on_cpu['loss']:.4f}; images/s "
        f"{on_gpu['images_per_second']:.0f} and {on_cpu['images_per_second']:.0f}",
    )
    assert abs(on_gpu["top1"] - recorded["top1"]) <= 0.003
    assert abs(on_cpu["top1"] - recorded["top1"]) <= 0.01


@pytest.mark.parametrize("kind", ["noise", "jpeg"])
def test_corrupted_images_on_gpu_and_cpu(kind: str, gpu_run: Path, figure: Any) -> None:
    """Noise and JPEG are computed on the host, so the pixels are equal."""
    from finetune.commands.evaluate import evaluate_model

    results = {}
    for device_type in ("cpu", DEVICE.type):
        with use_device(device_type):
            (results[device_type],) = evaluate_model(str(gpu_run), corrupt=f"{kind}:3")[
                "corrupted"
            ]["rows"]
    on_gpu, on_cpu = results[DEVICE.type], results["cpu"]
    figure(
        "corrupted images of the test split, evaluated on the GPU and the CPU",
        "accuracies within one image in 100",
        f"{kind}: {on_gpu['top1']:.4f} and {on_cpu['top1']:.4f}; loss {on_gpu['loss']:.4f} and "
        f"{on_cpu['loss']:.4f}",
    )
    assert abs(on_gpu["top1"] - on_cpu["top1"]) <= 0.01
    assert on_gpu["loss"] == pytest.approx(on_cpu["loss"], rel=0.02)


def test_average_on_gpu_and_cpu(gpu_run: Path, tmp_path: Path, figure: Any) -> None:
    """Weights are averaged in float64 on the host, for both devices."""
    from finetune.commands.average import average_runs

    folders = {tmp_path / "average_of_cpu": "cpu", tmp_path / "average": DEVICE.type}
    top1 = []
    for folder, device_type in folders.items():
        with use_device(device_type):
            top1.append(average_runs([str(gpu_run)], out=str(folder), alphas=[0.5])["val"]["top1"])
    on_cpu, on_gpu = [(folder / "model.safetensors").read_bytes() for folder in folders]
    figure(
        "a run averaged with its pretrained weights on the GPU and the CPU",
        "bit-identical weights, validation accuracies within one image in 100",
        f"{'equal' if on_gpu == on_cpu else 'not equal'}; {top1[1]:.4f} and {top1[0]:.4f}",
    )
    assert on_gpu == on_cpu
    assert abs(top1[0] - top1[1]) <= 0.01


def test_predictions_on_gpu_and_cpu(gpu_run: Path, image_paths: list[Path], figure: Any) -> None:
    from finetune.inference import Classifier

    on_gpu, on_cpu = (
        Classifier.load(gpu_run, device=device).predict(image_paths) for device in (DEVICE, "cpu")
    )
    top_predictions = [[row["predictions"][0] for row in rows] for rows in (on_gpu, on_cpu)]
    num_equal = sum(a["label"] == b["label"] for a, b in zip(*top_predictions, strict=True))
    largest = max(
        abs(a["confidence"] - b["confidence"]) for a, b in zip(*top_predictions, strict=True)
    )
    figure(
        "predictions of 40 files on the GPU and the CPU",
        "at least 38 equal, confidences within 0.05",
        f"{num_equal} equal, confidences {largest:.1e} apart",
    )
    assert num_equal >= 38
    assert largest < 0.05


COMMANDS: dict[str, tuple[str, ...]] = {
    "info": ("info", "RUN"),
    "eval": ("eval", "RUN"),
    "eval, fitting a temperature": ("eval", "RUN", "--fit-temperature"),
    "eval, corrupted": ("eval", "RUN", "--corrupt", "contrast"),
    "average": ("average", "RUN", "--alpha", "0.5", "--out", "OUT/average"),
    "predict": ("predict", "RUN", "FILES", "--out", "OUT/rows.csv", "--sheet", "OUT/sheet.png"),
    "probe": ("probe", "RUN", "--data", "embedded:digits", "--shots", "1,5", "--seeds", "1"),
    "show": ("show", "RUN", "FILES", "--out", "OUT/show"),
    "report": ("report", "RUN"),
    "export": ("export", "RUN", "--format", "torch", "--out", "OUT"),
    "export --fp16": (
        *("export", "RUN", "--format", "onnx", "--fp16", "--max-drop", "5", "--out", "OUT"),
    ),
    "export --int8": (
        *("export", "RUN", "--format", "onnx", "--int8", "--max-drop", "5", "--out", "OUT"),
    ),
    "compare": ("compare", "RUN", "TEACHER", "--data", "embedded:digits", "--out", "OUT/compare"),
    "predict, prediction sets": ("predict", "RUN", "FILES", "--coverage", "0.9"),
    "predict, unknown classes": ("predict", "RUN", "FILES", "--unknown"),
    "data doctor": (
        *("data", "doctor", "PHOTOS", "--weights", "embedded:vit_nano", "--out", "OUT/doctor"),
    ),
    "dry run": ("train", "RUN/recipe.yaml", "--dry-run", "--out", "OUT/dry"),
    "info --plan": ("info", "RUN/recipe.yaml", "--plan"),
    "start": (
        *("train", "PHOTOS", "model.name=embedded:vit_nano", "optim.epochs=2"),
        *("--out", "OUT/start"),
    ),
    "bench": ("bench", "RUN/recipe.yaml", "--steps", "5", "--repeats", "1"),
}


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_on_the_gpu(
    command: str,
    gpu_run: Path,
    teacher: Path,
    image_paths: list[Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    figure: Any,
) -> None:
    import shutil

    run_copy = tmp_path / "run"
    shutil.copytree(gpu_run, run_copy, ignore=shutil.ignore_patterns(".lock"))
    monkeypatch.chdir(tmp_path)
    for number, path in enumerate(image_paths):
        target = tmp_path / "photos" / str(number % 10) / path.name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, target)
    arguments: list[str] = []
    for argument in COMMANDS[command]:
        if argument == "FILES":
            arguments += [str(path) for path in image_paths[:4]]
        else:
            argument = argument.replace("RUN", str(run_copy)).replace("TEACHER", str(teacher))
            argument = argument.replace("PHOTOS", str(tmp_path / "photos"))
            arguments.append(argument.replace("OUT", str(tmp_path)))
    code = run_command(*arguments)
    output = capfd.readouterr()
    lines = [line for line in output.err.splitlines() if line.strip()]
    figure(
        "commands that use the GPU",
        "exit code 0",
        command
        if code == 0
        else f"{command}: {code}, {lines[-1][:200] if lines else 'no message'}",
    )
    assert code == 0, output.err[-3000:]


@needs_gpu
def test_resume_on_the_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, figure: Any) -> None:
    """A run that starts on the GPU and ends on the CPU."""
    from forked_runs import read_train_losses
    from gpu_runs import disable_tf32, make_recipe, max_relative_difference

    from finetune.errors import Interrupted
    from finetune.training.train import train
    from finetune.training.trainer_state import TrainerState

    disable_tf32()
    overrides = ("run.save_every=8", "data.val_fraction=0")
    uninterrupted = train_here(tmp_path / "whole", *overrides, text=NANO_RECIPE)
    out, save = tmp_path / "moved", TrainerState.save_checkpoint
    with monkeypatch.context() as patch:

        def save_and_stop(trainer: TrainerState, meter: Any) -> None:
            save(trainer, meter)
            raise Interrupted("stopped", 15)

        patch.setattr(TrainerState, "save_checkpoint", save_and_stop)
        with pytest.raises(Interrupted):
            train(make_recipe(NANO_RECIPE, *overrides), out)
    with use_device("cpu"):
        train(make_recipe(NANO_RECIPE, *overrides), out, resume=True)
    difference = max_relative_difference(read_train_losses(out), uninterrupted["losses"])
    figure(
        "started on the GPU, resumed on the CPU, float32",
        "losses within 1e-4 of a run on the GPU only",
        f"{difference:.1e}",
    )
    assert difference < 1e-4
