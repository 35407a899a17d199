"""Images on the GPU: every operation matches the CPU; photos of mixed sizes; features."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gpu_runs import DEVICE, disable_tf32, max_relative_difference, needs_gpu, train_here

from finetune.transforms.operations import INTERPOLATIONS, OPERATIONS

IMAGE_SIZE = (48, 48)
NUM_IMAGES = 16
TRANSFORM_SPECS = {
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
    **{
        name: f"resize | {name}"
        for name in ("trivial_augment", "auto_augment", "augmix", "three_augment")
    },
    "grayscale": "resize | grayscale(0.5)",
    "gaussian_blur": "resize | gaussian_blur",
    # jpeg is computed on the host, from rounded values
    **{f"corrupt {k}": f"resize | corrupt('{k}', 3)" for k in ("noise", "blur", "contrast")},
    "random_erasing": "resize | normalise | random_erasing(p=1.0)",
    "mixup": "resize | mixup(0.8)",
    "cutmix": "resize | cutmix(1.0)",
    "all": "random_resized_crop | flip | rotate(15) | color_jitter(0.2, 0.2, 0.2, 0.1) "
    "| random_erasing(p=0.5) | mixup(0.8) | cutmix(1.0)",
}
# Of 255. All pixels differ by rounding of float32 sums. Such a rounding may move a nearest pixel
# across an edge, and a step of equalize may move all pixels of a level by 1.
MAX_DIFFERENCE, MAX_DIFFERENCE_OF_A_LEVEL = 0.05, 1.01


def test_every_operation_is_covered() -> None:
    all_specs = " ".join(TRANSFORM_SPECS.values())
    assert [name for name in OPERATIONS if name not in all_specs] == []


def make_photos(sizes: str) -> list[torch.Tensor]:
    """Smooth images with some texture, uint8 (3, H, W)."""
    generator = np.random.default_rng(0)
    images = []
    for number in range(NUM_IMAGES):
        height, width = generator.integers(40, 130, size=2)
        if sizes == "equal" or (sizes == "mostly equal" and number % 4):
            height, width = 64, 72
        rows, columns = np.mgrid[0:height, 0:width] / 20
        waves = [
            np.sin(columns * (1 + channel / 3) + number) * np.cos(rows + channel)
            for channel in range(3)
        ]
        noise = generator.normal(0, 0.1, (3, int(height), int(width)))
        values = np.clip(127 + 100 * np.stack(waves) + 127 * noise, 0, 255)
        images.append(torch.from_numpy(values.astype(np.uint8)))
    return images


@pytest.mark.parametrize("sizes", ["equal", "mixed", "mostly equal"])
@pytest.mark.parametrize("case", TRANSFORM_SPECS)
def test_pixels_match_the_cpu(case: str, sizes: str, figure: Any) -> None:
    from finetune.data.device_prefetch import as_dense, collate_ragged
    from finetune.transforms.pipeline import Pipeline, sample_keys

    settings: dict[str, Any] = {"image_size": IMAGE_SIZE, "mean": (0.5,) * 3, "std": (0.25,) * 3}
    transform = Pipeline(TRANSFORM_SPECS[case], **settings, train="corrupt" not in case)
    keys = sample_keys(3, 1, np.arange(NUM_IMAGES))
    images = make_photos(sizes)
    batch: Any = torch.stack(images) if sizes == "equal" else images
    if sizes == "mostly equal":  # as workers send them, with some images of other sizes
        arrays = [image.permute(1, 2, 0).numpy() for image in images]
        batch = as_dense(collate_ragged(arrays, torch.device("cpu")), (64, 72))
    targets = torch.eye(10)[torch.arange(NUM_IMAGES) % 10]
    partner = torch.arange(NUM_IMAGES) ^ 1

    def run_pipeline(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        images_BCHW = transform(batch, keys=keys, device=device)
        if not transform.has_mixing:
            return images_BCHW, targets
        return transform.mix_batch(images_BCHW, targets.to(device), keys, partner.to(device))

    (gpu_images, gpu_targets), (cpu_images, cpu_targets) = (
        run_pipeline(DEVICE),
        run_pipeline(torch.device("cpu")),
    )
    assert gpu_images.device.type == DEVICE.type
    # in units of 1 of 255
    difference = (gpu_images.cpu() - cpu_images).abs() * 255 * 0.25
    has_steps = "augment" in case or case == "augmix"  # equalize, posterize, solarize
    bound = MAX_DIFFERENCE_OF_A_LEVEL if has_steps else MAX_DIFFERENCE
    outlier_fraction = float((difference > bound).float().mean())
    allows_outliers = has_steps or "nearest" in case or case == "all"
    figure(
        f"pixels of the same sample on the GPU and the CPU: {case}",
        f"all{' but 1 %' if allows_outliers else ''} within {bound:g} of 255",
        f"{sizes}: largest {difference.max():.1e}, mean {difference.mean():.1e}"
        + (f", {outlier_fraction:.2%} above" if outlier_fraction else ""),
    )
    assert cpu_images.std() > 0.3, "the images are nearly constant"
    assert outlier_fraction <= (0.01 if allows_outliers else 0)
    torch.testing.assert_close(gpu_targets.cpu(), cpu_targets, rtol=0, atol=1e-6)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_evaluation_images_are_float32_under_autocast(dtype: str, figure: Any) -> None:
    from finetune.data.loader import ImageLoader
    from finetune.data.open_source import open_source
    from finetune.data.pixel_store import build_pixel_store
    from finetune.transforms.pipeline import Pipeline

    split = open_source("embedded:digits").splits["test"]
    transform = Pipeline("resize", image_size=IMAGE_SIZE, mean=(0.5,) * 3, std=(0.25,) * 3)
    images_by_device = []
    for device in (DEVICE, torch.device("cpu")):
        store = build_pixel_store(
            split,
            keep="auto",
            device=device,
            num_workers=0,
            unreadable="stop",
            local_world_size=1,
            progress=False,
        )
        loader = ImageLoader(store, transform, num_classes=10, device=device)
        autocast_dtype = getattr(torch, dtype)
        with torch.autocast(device.type, torch.bfloat16, enabled=autocast_dtype is torch.bfloat16):
            images_by_device.append(next(iter(loader.eval_batches(batch_size=64))).images_BCHW)
    gpu_images, cpu_images = (images.cpu() for images in images_by_device)
    difference = float((cpu_images - gpu_images).abs().max()) * 255 * 0.25
    figure(
        "evaluation images under autocast",
        "float32, within 0.05 of 255 of the CPU",
        f"{dtype}: {gpu_images.dtype}, largest {difference:.1e}",
    )
    assert gpu_images.dtype == torch.float32
    assert difference < 0.05


PHOTO_OVERRIDES = (
    *("data.batch_size=24", "data.eval=resize(36) | center_crop(32)", "run.test=true"),
    "data.train=random_resized_crop(scale=(0.4, 1.0)) | flip | color_jitter(0.2, 0.2, 0.2)",
)


def test_losses_on_photos_match_the_cpu(photo_folder: Path, tmp_path: Path, figure: Any) -> None:
    disable_tf32()
    source = (f"data.source=folder:{photo_folder}", *PHOTO_OVERRIDES)
    settings = {
        "data.keep=auto, CPU": ("cpu", "data.keep=auto"),
        "data.keep=auto": (DEVICE.type, "data.keep=auto"),
        "on the device": (DEVICE.type, "data.keep=device"),
        "in memory": (DEVICE.type, "data.keep=memory"),
        "decoded by 2 workers": (DEVICE.type, "data.keep=none", "data.workers=2"),
        "decoded in the main process": (DEVICE.type, "data.keep=none", "data.workers=0"),
    }
    results = {
        name: train_here(
            tmp_path / name.replace(" ", "-"), *source, *overrides, device_type=device_type
        )
        for name, (device_type, *overrides) in settings.items()
    }
    expected = results.pop("data.keep=auto, CPU")
    differences = {
        name: max_relative_difference(run["losses"], expected["losses"])
        for name, run in results.items()
    }
    figure(
        "72 JPEG photos of 40 to 300 pixels: losses against the CPU",
        "relative difference below 1e-3: sums are longer than for digits",
        ", ".join(f"{name} {value:.1e}" for name, value in differences.items())
        + f"; test accuracy {results['data.keep=auto']['test']['top1']:.3f}",
    )
    assert expected["losses"][-1] < expected["losses"][0]
    assert max(differences.values()) < 1e-3


def test_photos_in_bf16_with_workers_are_learned(
    photo_folder: Path, tmp_path: Path, figure: Any
) -> None:
    """bf16, workers, several epochs."""
    result = train_here(
        tmp_path / "run",
        f"data.source=folder:{photo_folder}",
        *PHOTO_OVERRIDES,
        *("data.keep=none", "data.workers=3", "run.precision=bf16", "optim.steps=40"),
    )
    figure(
        "photos in bf16, decoded by 3 workers, 40 steps",
        "test accuracy above 0.9",
        f"{result['test']['top1']:.3f}",
    )
    assert result["test"]["top1"] > 0.9


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_cached_features_match_full_forward_passes(
    precision: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, figure: Any
) -> None:
    """Train only the head: on cached features, or through the whole network."""
    from finetune.training import frozen_backbone as frozen

    disable_tf32()
    head = ("model.freeze=backbone", "data.train=resize", "run.test=true", "optim.lr=1e-2")
    precision_override = f"run.precision={precision}"
    computed = train_here(tmp_path / "features", *head, precision_override)
    cached = train_here(tmp_path / "cached", *head, precision_override)
    with monkeypatch.context() as patch:
        patch.setattr(frozen, "_find_obstacle_to_caching", lambda *_: "disabled by a test")
        full_forward = train_here(tmp_path / "passes", *head, precision_override)
    bound = 1e-4 if precision == "fp32" else 3e-2
    difference = max_relative_difference(computed["losses"], full_forward["losses"])
    cache_difference = max_relative_difference(cached["losses"], computed["losses"])
    rates = [run["test"]["images_per_second"] for run in (computed, full_forward)]
    accuracies = [run["test"]["top1"] for run in (computed, full_forward)]
    figure(
        "only the head: features computed once against full forward passes",
        "losses within 1e-4 in float32, 3e-2 in bf16; the same from the cache; accuracies within "
        "one image in 100",
        f"{precision}: {difference:.1e}, from the cache {cache_difference:.1e}; accuracy "
        f"{accuracies[0]:.4f} and {accuracies[1]:.4f}; evaluation {rates[0]:.0f} and "
        f"{rates[1]:.0f} images/s",
    )
    assert difference < bound
    assert cache_difference < 1e-6
    assert abs(accuracies[0] - accuracies[1]) <= 0.01


@needs_gpu
def test_images_are_kept_on_the_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, figure: Any
) -> None:
    from finetune.training.trainer_state import TrainerState

    devices: list[str] = []
    init = TrainerState.__init__

    def init_and_record(trainer: TrainerState, *arguments: Any, **options: Any) -> None:
        init(trainer, *arguments, **options)
        make_loader = trainer.build_loader

        def build_and_record(*loader_args: Any, **loader_options: Any) -> Any:
            loader = make_loader(*loader_args, **loader_options)
            images: Any = loader.store.images
            devices.append(str(images.device))
            return loader

        trainer.build_loader = build_and_record  # type: ignore[method-assign]

    monkeypatch.setattr(TrainerState, "__init__", init_and_record)
    two_steps = ("optim.steps=2", "optim.warmup_steps=0")
    train_here(tmp_path / "auto", *two_steps)
    train_here(tmp_path / "memory", *two_steps, "data.keep=memory")
    figure(
        "where decoded images are stored: `data.keep` auto, then memory",
        "on the device, then in host memory",
        ", ".join(devices),
    )
    assert devices[0].startswith("cuda")
    assert devices[-1] == "cpu"


def test_cifar10_is_learned(shared: Path, tmp_path: Path, figure: Any) -> None:
    """CIFAR-10, if the shared data folder has it."""
    data = shared / "data" / "cifar10"
    if not data.is_dir():
        pytest.skip(f"no {data}")
    result = train_here(
        tmp_path / "run",
        f"data.source=parquet:{data}",
        *("data.num_train=5000", "data.val_fraction=0.1", "data.batch_size=128"),
        *("data.train=resize | flip | random_crop(padding=4)", "run.precision=bf16"),
        *("optim.steps=60", "optim.lr=1e-3", "data.eval_batch_size=1000", "run.log_every=20"),
    )
    figure(
        "60 steps of the embedded network on 5,000 images of CIFAR-10, bf16",
        "validation accuracy above 0.25",
        f"{result['val']['top1']:.3f}, {result['train'].get('images_per_second')} images/s",
    )
    assert result["val"]["top1"] > 0.25
