"""Every test here needs a CUDA GPU, and is skipped with a reason where there is none.

FINETUNE_GPU_TESTS_ON=cpu runs those that a CPU can run, to find slips in the tests themselves.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from gpu_runs import DEVICE, ON_GPU, one_device, trained

_HERE = Path(__file__).parent


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    mine = [item for item in items if _HERE in item.path.parents]
    missing = ON_GPU and bool(mine) and not torch.cuda.is_available()
    for item in mine:
        item.add_marker(pytest.mark.gpu)
        item.add_marker(pytest.mark.timeout(300))
        if missing:
            item.add_marker(pytest.mark.skip(reason="no CUDA GPU on this machine"))


@pytest.fixture(scope="module")
def teacher(no_pictures: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that knows digits, of the CPU."""
    out = tmp_path_factory.mktemp("teacher") / "run"
    trained(out, "run.seed=1", on="cpu")
    return out


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """JPEG files of many sizes in three classes, which differ by their brightest channel."""
    from PIL import Image

    generator = np.random.default_rng(0)
    top = tmp_path / "photos"
    for split, count in (("train", 24), ("test", 8)):
        for channel, name in enumerate(("red", "green", "blue")):
            place = top / split / name
            place.mkdir(parents=True)
            for number in range(count):
                height, width = generator.integers(40, 300, size=2)
                small = generator.integers(0, 120, size=(6, 8, 3), dtype=np.uint8)
                small[..., channel] += 80
                image = Image.fromarray(small).resize((int(width), int(height)))
                image.save(place / f"{number}.jpg", quality=90)
    return top


@pytest.fixture(autouse=True)
def as_torch_ships_it(
    no_pictures: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[None]:
    """Runs of this process are on the device; what a test switches is switched back."""
    monkeypatch.setenv("FINETUNE_CACHE", str(tmp_path / "cache"))
    with one_device(DEVICE.type):
        yield
    torch.use_deterministic_algorithms(False)
    torch.backends.cudnn.allow_tf32 = True
    torch.backends.cuda.matmul.allow_tf32 = False
    if ON_GPU:
        torch.cuda.set_sync_debug_mode("default")
        torch.cuda.empty_cache()  # eight processes share the device
