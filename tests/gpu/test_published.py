"""A run of the GPU is published, exported, evaluated and read where there is none; every verb."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gpu_runs import DEVICE, NANO, command_line, needs_gpu, one_device, trained

HALF = ("optim.steps=40", "run.precision=bf16", "run.test=true")


@pytest.fixture(scope="module")
def run(no_pictures: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of this device in bf16."""
    out = tmp_path_factory.mktemp("published") / "run"
    trained(out, *HALF)
    return out


@pytest.fixture
def pictures(tmp_path: Path) -> list[Path]:
    """Digits as PNG files, and one JPEG photo."""
    from PIL import Image
    from sklearn.datasets import load_digits

    paths = []
    for number, values in enumerate(load_digits().images[:40]):
        pixels = (values * 15.9).astype(np.uint8)
        paths.append(tmp_path / f"{number}.png")
        Image.fromarray(pixels).convert("RGB").save(paths[-1])
    return paths


@pytest.mark.parametrize("format", ["onnx", "torch"])
def test_exported_from_a_gpu_s_run(format: str, run: Path, tmp_path: Path, figure: Any) -> None:
    from finetune.commands.export import export_model

    found = export_model(str(run), format=format, out=str(tmp_path))
    figure(
        "a run of the GPU, exported and computed on the CPU",
        "logits within 1e-3 of the model's own",
        f"{format}: {found['max_difference']:.1e}, {found['bytes'] / 1e6:.1f} MB",
    )
    assert found["max_difference"] < 1e-3
    assert Path(found["file"]).is_file()


def test_logits_of_the_published_model_here_and_there(run: Path, figure: Any) -> None:
    from finetune.inference import Classifier

    images = torch.randn(32, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    torch.backends.cudnn.allow_tf32 = False
    on_cpu = Classifier.load(run, device="cpu")
    here = Classifier.load(run, device=DEVICE)
    expected = on_cpu.logits(images)
    found = {}
    for precision in (here.precision, "fp32"):
        here.precision = precision
        found[precision] = float((here.logits(images).cpu() - expected).abs().max())
    scale = float(expected.std())
    figure(
        "logits of the published model on the GPU against the CPU",
        "float32 within 1e-3; in the GPU's own precision within a tenth of their spread",
        f"{', '.join(f'{name} {value:.1e}' for name, value in found.items())} (spread {scale:.2f})",
    )
    assert found["fp32"] < 1e-3
    assert max(found.values()) < 0.1 * scale


def test_evaluated_on_the_cpu(run: Path, figure: Any) -> None:
    from finetune.commands.evaluate import evaluate_model

    recorded = json.loads((run / "results.json").read_text())["test"]
    with one_device("cpu"):
        on_cpu = evaluate_model(str(run))
    with one_device(DEVICE.type):
        here = evaluate_model(str(run))
    figure(
        "the test split of a run of the GPU in bf16, evaluated again",
        "on the GPU to the same accuracy as at its end; on the CPU within one image in 100",
        f"at its end {recorded['top1']:.4f}, GPU {here['top1']:.4f}, CPU {on_cpu['top1']:.4f}; "
        f"loss {recorded['loss']:.4f}, {here['loss']:.4f}, {on_cpu['loss']:.4f}; images/s "
        f"{here['images_per_second']:.0f} and {on_cpu['images_per_second']:.0f}",
    )
    assert abs(here["top1"] - recorded["top1"]) <= 0.003
    assert abs(on_cpu["top1"] - recorded["top1"]) <= 0.01


@pytest.mark.parametrize("kind", ["noise", "jpeg"])
def test_corrupted_images_here_and_there(kind: str, run: Path, figure: Any) -> None:
    """Noise is drawn on the host, and JPEG made there: the pixels are the same."""
    from finetune.commands.evaluate import evaluate_model

    found = {}
    for on in ("cpu", DEVICE.type):
        with one_device(on):
            (found[on],) = evaluate_model(str(run), corrupt=f"{kind}:3")["corrupted"]["rows"]
    here, on_cpu = found[DEVICE.type], found["cpu"]
    figure(
        "corrupted images of the test split, evaluated on the GPU and the CPU",
        "accuracies within one image in 100",
        f"{kind}: {here['top1']:.4f} and {on_cpu['top1']:.4f}; loss {here['loss']:.4f} and "
        f"{on_cpu['loss']:.4f}",
    )
    assert abs(here["top1"] - on_cpu["top1"]) <= 0.01
    assert here["loss"] == pytest.approx(on_cpu["loss"], rel=0.02)


def test_averaged_here_and_there(run: Path, tmp_path: Path, figure: Any) -> None:
    """Weights are averaged in float64 on the host, whichever device measures them."""
    from finetune.commands.average import average_runs

    folders = {tmp_path / "average_of_cpu": "cpu", tmp_path / "average": DEVICE.type}
    top1 = []
    for folder, on in folders.items():
        with one_device(on):
            top1.append(average_runs([str(run)], out=str(folder), alphas=[0.5])["val"]["top1"])
    on_cpu, here = [(folder / "model.safetensors").read_bytes() for folder in folders]
    figure(
        "a run averaged with its pretrained weights on the GPU and the CPU",
        "the same weights to the bit, validation accuracies within one image in 100",
        f"{'equal' if here == on_cpu else 'not equal'}; {top1[1]:.4f} and {top1[0]:.4f}",
    )
    assert here == on_cpu
    assert abs(top1[0] - top1[1]) <= 0.01


def test_predictions_here_and_there(run: Path, pictures: list[Path], figure: Any) -> None:
    from finetune.inference import Classifier

    here, on_cpu = (Classifier.load(run, device=on).predict(pictures) for on in (DEVICE, "cpu"))
    first = [[row["predictions"][0] for row in rows] for rows in (here, on_cpu)]
    same = sum(a["label"] == b["label"] for a, b in zip(*first, strict=True))
    largest = max(abs(a["confidence"] - b["confidence"]) for a, b in zip(*first, strict=True))
    figure(
        "predictions of 40 files on the GPU and the CPU",
        "at least 38 the same, confidences within 0.05",
        f"{same} the same, confidences {largest:.1e} apart",
    )
    assert same >= 38
    assert largest < 0.05


VERBS: dict[str, tuple[str, ...]] = {
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
    "dry run": ("train", "RUN/recipe.yaml", "--dry-run", "--out", "OUT/dry"),
    "info --plan": ("info", "RUN/recipe.yaml", "--plan"),
    "start": (
        *("train", "PHOTOS", "model.name=embedded:vit_nano", "optim.epochs=2"),
        *("--out", "OUT/start"),
    ),
    "bench": (
        *("bench", "RUN/recipe.yaml", "--against", "synthetic", "--steps", "5", "--repeats", "1"),
    ),
}


@pytest.mark.parametrize("verb", VERBS)
def test_verbs(
    verb: str,
    run: Path,
    pictures: list[Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    figure: Any,
) -> None:
    import shutil

    copied = tmp_path / "run"
    shutil.copytree(run, copied, ignore=shutil.ignore_patterns(".lock"))
    monkeypatch.chdir(tmp_path)
    for number, path in enumerate(pictures):
        place = tmp_path / "photos" / str(number % 10) / path.name
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, place)
    words: list[str] = []
    for word in VERBS[verb]:
        if word == "FILES":
            words += [str(path) for path in pictures[:4]]
        else:
            word = word.replace("RUN", str(copied)).replace("PHOTOS", str(tmp_path / "photos"))
            words.append(word.replace("OUT", str(tmp_path)))
    code = command_line(*words)
    said = capfd.readouterr()
    lines = [line for line in said.err.splitlines() if line.strip()]
    figure(
        "verbs that compute on the GPU",
        "exit code 0",
        verb if code == 0 else f"{verb}: {code}, {lines[-1][:200] if lines else 'no word'}",
    )
    assert code == 0, said.err[-3000:]


@needs_gpu
def test_resumed_on_the_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, figure: Any) -> None:
    """A run that a GPU began and a CPU ends."""
    from forked_runs import read_train_losses
    from gpu_runs import apart, recipe_of, strict_float32

    from finetune.errors import Interrupted
    from finetune.training.train import train
    from finetune.training.trainer_state import TrainerState

    strict_float32()
    more = ("run.save_every=8", "data.val_fraction=0")
    whole = trained(tmp_path / "whole", *more, text=NANO)
    out, save = tmp_path / "moved", TrainerState.save_checkpoint
    with monkeypatch.context() as patch:

        def stopped(trainer: TrainerState, meter: Any) -> None:
            save(trainer, meter)
            raise Interrupted("stopped", 15)

        patch.setattr(TrainerState, "save_checkpoint", stopped)
        with pytest.raises(Interrupted):
            train(recipe_of(NANO, *more), out)
    with one_device("cpu"):
        train(recipe_of(NANO, *more), out, resume=True)
    difference = apart(read_train_losses(out), whole["losses"])
    figure(
        "begun on the GPU, resumed on the CPU, float32",
        "losses within 1e-4 of those of the GPU alone",
        f"{difference:.1e}",
    )
    assert difference < 1e-4
