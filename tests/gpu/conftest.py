"""Every test here needs a CUDA GPU and is skipped on a machine without one.

FINETUNE_GPU_TESTS_ON=cpu runs the tests that also work on a CPU, to find errors in the tests.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from gpu_runs import DEVICE, ON_GPU, train_here, use_device

GPU_TESTS_FOLDER = Path(__file__).parent


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    gpu_items = [item for item in items if GPU_TESTS_FOLDER in item.path.parents]
    no_gpu = ON_GPU and bool(gpu_items) and not torch.cuda.is_available()
    for item in gpu_items:
        item.add_marker(pytest.mark.gpu)
        item.add_marker(pytest.mark.timeout(300))
        if no_gpu:
            item.add_marker(pytest.mark.skip(reason="no CUDA GPU on this machine"))


@pytest.fixture(scope="module")
def teacher(no_plots: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run trained on digits, on the CPU."""
    out = tmp_path_factory.mktemp("teacher") / "run"
    train_here(out, "run.seed=1", device_type="cpu")
    return out


@pytest.fixture
def photo_folder(tmp_path: Path) -> Path:
    """A folder of JPEG files of many sizes; the brightest channel is the class."""
    from PIL import Image

    generator = np.random.default_rng(0)
    root = tmp_path / "photos"
    for split, count in (("train", 24), ("test", 8)):
        for channel, name in enumerate(("red", "green", "blue")):
            class_folder = root / split / name
            class_folder.mkdir(parents=True)
            for number in range(count):
                height, width = generator.integers(40, 300, size=2)
                coarse = generator.integers(0, 120, size=(6, 8, 3), dtype=np.uint8)
                coarse[..., channel] += 80
                image = Image.fromarray(coarse).resize((int(width), int(height)))
                image.save(class_folder / f"{number}.jpg", quality=90)
    return root


@pytest.fixture(autouse=True)
def reset_torch_settings(
    no_plots: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[None]:
    """Train on the test device; reset the settings of torch after each test."""
    monkeypatch.setenv("FINETUNE_CACHE", str(tmp_path / "cache"))
    with use_device(DEVICE.type):
        yield
    torch.use_deterministic_algorithms(False)
    torch.backends.cudnn.allow_tf32 = True
    torch.backends.cuda.matmul.allow_tf32 = False
    if ON_GPU:
        torch.cuda.set_sync_debug_mode("default")
        torch.cuda.empty_cache()  # up to eight test processes share the device
