"""Images on the GPU: every operation gives the CPU's pixels; photos of mixed sizes; features."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gpu_runs import DEVICE, apart, needs_gpu, strict_float32, trained

from finetune.transforms.operations import INTERPOLATIONS, OPERATIONS

SIZE = (48, 48)
IMAGES = 16
SENTENCES = {
    **{f"resize {kernel}": f"resize(interpolation='{kernel}')" for kernel in INTERPOLATIONS},
    **{
        f"random_resized_crop {kernel}": f"random_resized_crop(48, interpolation='{kernel}')"
        for kernel in INTERPOLATIONS
    },
    "resize, center_crop": "resize(60) | center_crop(48)",
    "resize, random_crop": "resize((56, 56)) | random_crop(48, padding=6)",
    "flips": "resize | flip | vertical_flip",
    "rotate nearest": "resize | rotate(30)",
    "rotate bilinear": "resize | rotate(30, interpolation='bilinear')",
    "color_jitter": "resize | color_jitter(0.4, 0.4, 0.4, 0.2)",
    "rand_augment": "resize | rand_augment(num_ops=4, magnitude=12)",
    "rand_augment bilinear": "resize | rand_augment(num_ops=4, interpolation='bilinear')",
    # jpeg is computed on the host, from rounded levels
    **{f"corrupt {k}": f"resize | corrupt('{k}', 3)" for k in ("noise", "blur", "contrast")},
    "random_erasing": "resize | normalise | random_erasing(p=1.0)",
    "mixup": "resize | mixup(0.8)",
    "cutmix": "resize | cutmix(1.0)",
    "all": "random_resized_crop | flip | rotate(15) | color_jitter(0.2, 0.2, 0.2, 0.1) "
    "| random_erasing(p=0.5) | mixup(0.8) | cutmix(1.0)",
}
# Of 255. Everything differs by roundings of float32 sums; nearest pixels may fall on the other side
# of an edge by one of them, and so may a step of equalize, which moves all pixels of a level by 1.
BOUND, LEVEL = 0.05, 1.01


def test_every_operation_is_tried() -> None:
    written = " ".join(SENTENCES.values())
    assert [name for name in OPERATIONS if name not in written] == []


def photos(sizes: str) -> list[torch.Tensor]:
    """Smooth images with some texture, uint8 (3, H, W)."""
    generator = np.random.default_rng(0)
    found = []
    for number in range(IMAGES):
        height, width = generator.integers(40, 130, size=2)
        if sizes == "alike" or (sizes == "mostly alike" and number % 4):
            height, width = 64, 72
        y, x = np.mgrid[0:height, 0:width] / 20
        waves = [np.sin(x * (1 + c / 3) + number) * np.cos(y + c) for c in range(3)]
        noise = generator.normal(0, 0.1, (3, int(height), int(width)))
        values = np.clip(127 + 100 * np.stack(waves) + 127 * noise, 0, 255)
        found.append(torch.from_numpy(values.astype(np.uint8)))
    return found


@pytest.mark.parametrize("sizes", ["alike", "mixed", "mostly alike"])
@pytest.mark.parametrize("kind", SENTENCES)
def test_pixels_are_those_of_the_cpu(kind: str, sizes: str, figure: Any) -> None:
    from finetune.data.device_prefetch import as_dense, collate_ragged
    from finetune.transforms.pipeline import Pipeline, sample_keys

    settings: dict[str, Any] = {"image_size": SIZE, "mean": (0.5,) * 3, "std": (0.25,) * 3}
    prepare = Pipeline(SENTENCES[kind], **settings, train="corrupt" not in kind)
    keys = sample_keys(3, 1, np.arange(IMAGES))
    images = photos(sizes)
    given: Any = torch.stack(images) if sizes == "alike" else images
    if sizes == "mostly alike":  # as workers send them, with some images of another size
        arrays = [image.permute(1, 2, 0).numpy() for image in images]
        given = as_dense(collate_ragged(arrays, torch.device("cpu")), (64, 72))
    targets = torch.eye(10)[torch.arange(IMAGES) % 10]
    partner = torch.arange(IMAGES) ^ 1

    def made(on: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        found = prepare(given, keys=keys, device=on)
        if not prepare.has_mixing:
            return found, targets
        return prepare.mix_batch(found, targets.to(on), keys, partner.to(on))

    (theirs, their_targets), (mine, my_targets) = made(DEVICE), made(torch.device("cpu"))
    assert theirs.device.type == DEVICE.type
    # in steps of a pixel's 255
    difference = (theirs.cpu() - mine).abs() * 255 * 0.25
    bound = LEVEL if "rand_augment" in kind else BOUND
    jumped = float((difference > bound).float().mean())
    may_jump = any(word in kind for word in ("nearest", "rand_augment", "all"))
    figure(
        f"pixels of the same sample on the GPU and the CPU: {kind}",
        f"all{' but 1 %' if may_jump else ''} within {bound:g} of 255",
        f"{sizes}: largest {difference.max():.1e}, mean {difference.mean():.1e}"
        + (f", {jumped:.2%} above" if jumped else ""),
    )
    assert mine.std() > 0.3, "there is nothing to see"
    assert jumped <= (0.01 if may_jump else 0)
    torch.testing.assert_close(their_targets.cpu(), my_targets, rtol=0, atol=1e-6)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_under_autocast_evaluation_is_resampled_in_float32(dtype: str, figure: Any) -> None:
    from finetune.data.loader import ImageLoader
    from finetune.data.open_source import open_source
    from finetune.data.pixel_store import build_pixel_store
    from finetune.transforms.pipeline import Pipeline

    split = open_source("embedded:digits").splits["test"]
    prepare = Pipeline("resize", image_size=SIZE, mean=(0.5,) * 3, std=(0.25,) * 3)
    found = []
    for on in (DEVICE, torch.device("cpu")):
        store = build_pixel_store(
            split,
            keep="auto",
            device=on,
            num_workers=0,
            unreadable="stop",
            local_world_size=1,
            progress=False,
        )
        loader = ImageLoader(store, prepare, num_classes=10, device=on)
        half = getattr(torch, dtype)
        with torch.autocast(on.type, torch.bfloat16, enabled=half is torch.bfloat16):
            found.append(next(iter(loader.eval_batches(batch_size=64))).images_BCHW)
    theirs, mine = (images.cpu() for images in found)
    difference = float((mine - theirs).abs().max()) * 255 * 0.25
    figure(
        "evaluation's images under autocast",
        "float32, within 0.05 of 255 of the CPU's",
        f"{dtype}: {theirs.dtype}, largest {difference:.1e}",
    )
    assert theirs.dtype == torch.float32
    assert difference < 0.05


PHOTOS = (
    *("data.batch_size=24", "data.eval=resize(36) | center_crop(32)", "run.test=true"),
    "data.train=random_resized_crop(scale=(0.4, 1.0)) | flip | color_jitter(0.2, 0.2, 0.2)",
)


def test_photos_of_mixed_sizes(folder: Path, tmp_path: Path, figure: Any) -> None:
    strict_float32()
    source = (f"data.source=folder:{folder}", *PHOTOS)
    ways = {
        "kept, on the CPU": ("cpu", "data.keep=auto"),
        "kept": (DEVICE.type, "data.keep=auto"),
        "on the device": (DEVICE.type, "data.keep=device"),
        "in memory": (DEVICE.type, "data.keep=memory"),
        "decoded by 2 workers": (DEVICE.type, "data.keep=none", "data.workers=2"),
        "decoded by none": (DEVICE.type, "data.keep=none", "data.workers=0"),
    }
    found = {
        name: trained(tmp_path / name.replace(" ", "-"), *source, *more, on=on)
        for name, (on, *more) in ways.items()
    }
    expected = found.pop("kept, on the CPU")
    apart_by = {name: apart(run["losses"], expected["losses"]) for name, run in found.items()}
    figure(
        "72 JPEG photos of 40 to 300 pixels: losses against the CPU's",
        "relative difference below 1e-3: photos' own sums are longer than those of digits",
        ", ".join(f"{name} {value:.1e}" for name, value in apart_by.items())
        + f"; test accuracy {found['kept']['test']['top1']:.3f}",
    )
    assert expected["losses"][-1] < expected["losses"][0]
    assert max(apart_by.values()) < 1e-3


def test_photos_as_a_graphics_card_trains(folder: Path, tmp_path: Path, figure: Any) -> None:
    """bf16, workers, several epochs: nothing is lost on the way."""
    found = trained(
        tmp_path / "run",
        f"data.source=folder:{folder}",
        *PHOTOS,
        *("data.keep=none", "data.workers=3", "run.precision=bf16", "optim.steps=40"),
    )
    figure(
        "photos in bf16, decoded by 3 workers, 40 steps",
        "test accuracy above 0.9",
        f"{found['test']['top1']:.3f}",
    )
    assert found["test"]["top1"] > 0.9


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_features_once_or_passes(
    precision: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, figure: Any
) -> None:
    """The head alone is trained, on features that are kept, or through the whole network."""
    from finetune.training import frozen_backbone as frozen

    strict_float32()
    head = ("model.freeze=backbone", "data.train=resize", "run.test=true", "optim.lr=1e-2")
    wish = f"run.precision={precision}"
    first = trained(tmp_path / "features", *head, wish)
    cached = trained(tmp_path / "cached", *head, wish)
    with monkeypatch.context() as patch:
        patch.setattr(frozen, "_find_obstacle_to_caching", lambda *_: "a test wants them")
        passes = trained(tmp_path / "passes", *head, wish)
    bound = 1e-4 if precision == "fp32" else 3e-2
    difference = apart(first["losses"], passes["losses"])
    again = apart(cached["losses"], first["losses"])
    rates = [run["test"]["images_per_second"] for run in (first, passes)]
    accuracies = [run["test"]["top1"] for run in (first, passes)]
    figure(
        "the head alone: features computed once against passes through the network",
        "losses within 1e-4 in float32, 3e-2 in bf16; the same from the cache; accuracies within "
        "one image in 100",
        f"{precision}: {difference:.1e}, from the cache {again:.1e}; accuracy {accuracies[0]:.4f} "
        f"and {accuracies[1]:.4f}; evaluation {rates[0]:.0f} and {rates[1]:.0f} images/s",
    )
    assert difference < bound
    assert again < 1e-6
    assert abs(accuracies[0] - accuracies[1]) <= 0.01


@needs_gpu
def test_images_are_kept_on_the_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, figure: Any
) -> None:
    from finetune.training.trainer_state import TrainerState

    places: list[str] = []
    init = TrainerState.__init__

    def noted(trainer: TrainerState, *arguments: Any, **named: Any) -> None:
        init(trainer, *arguments, **named)
        make_loader = trainer.build_loader

        def opened(*given: Any, **keys: Any) -> Any:
            loader = make_loader(*given, **keys)
            images: Any = loader.store.images
            places.append(str(images.device))
            return loader

        trainer.build_loader = opened  # type: ignore[method-assign]

    monkeypatch.setattr(TrainerState, "__init__", noted)
    short = ("optim.steps=2", "optim.warmup_steps=0")
    trained(tmp_path / "auto", *short)
    trained(tmp_path / "memory", *short, "data.keep=memory")
    figure(
        "where decoded images live: `data.keep` auto, then memory",
        "on the device, then not",
        ", ".join(places),
    )
    assert places[0].startswith("cuda")
    assert places[-1] == "cpu"


def test_real_photos_if_they_are_there(shared: Path, tmp_path: Path, figure: Any) -> None:
    """CIFAR-10, where the folder of shared data has it."""
    data = shared / "data" / "cifar10"
    if not data.is_dir():
        pytest.skip(f"no {data}")
    found = trained(
        tmp_path / "run",
        f"data.source=parquet:{data}",
        *("data.num_train=5000", "data.val_fraction=0.1", "data.batch_size=128"),
        *("data.train=resize | flip | random_crop(padding=4)", "run.precision=bf16"),
        *("optim.steps=60", "optim.lr=1e-3", "data.eval_batch_size=1000", "run.log_every=20"),
    )
    figure(
        "60 steps of the embedded network on 5,000 images of CIFAR-10, bf16",
        "validation accuracy above 0.25",
        f"{found['val']['top1']:.3f}, {found['train'].get('images_per_second')} images/s",
    )
    assert found["val"]["top1"] > 0.25
