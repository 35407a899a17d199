"""What runs on a GPU keeps its tensors there: tried without one, on tensors without content.

Fake tensors have a device, and refuse to be mixed with those of another; whatever asks for a value
of one, so that a host would wait for its GPU, is refused, too.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from finetune.data.device_copy import _copy_stream
from finetune.data.image_store import Store
from finetune.data.loader import Loader, Sampler, _side_stream
from finetune.data.source import open_source
from finetune.evaluation.evaluate import _on_host
from finetune.evaluation.metrics import Counts
from finetune.models.fast_blocks import compute_class_token
from finetune.training.meter import Meter
from finetune.training.optim import build_optimizer, can_mask
from finetune.training.trainer_state import DelayedScalars
from finetune.transforms.pipeline import Pipeline
from finetune.transforms.random import sample_keys
from tests import networks

GPU = torch.device("cuda", 0)
KERNELS = ("nearest", "bilinear", "bicubic", "lanczos")
SENTENCES = [
    *(f"resize((24, 24), interpolation='{kernel}')" for kernel in KERNELS),
    "random_resized_crop(24) | flip | rotate(20)",
    "resize(30) | random_crop(24, padding=4) | vertical_flip | center_crop(24)",
    "color_jitter(0.3, 0.3, 0.3, 0.1) | resize((24, 24))",
    "rand_augment(num_ops=6, interpolation='bilinear') | resize((24, 24)) | random_erasing(p=1.0)",
    "resize((24, 24)) | mixup(0.8) | cutmix(1.0)",
]
IMAGES = 12


class _Stream:
    """In the place of a CUDA stream or event: nothing is under way."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.device = GPU

    def wait_stream(self, other: _Stream) -> None: ...

    def record(self) -> None: ...

    def synchronize(self) -> None: ...


class _Strict(TorchDispatchMode):
    """Refuses what fake tensors let pass, indices and values of another device.

    A number of the host is no reason to wait: it may be read, and is 1.
    """

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default and args[0].device.type == "cpu":
            return 1.0 if args[0].is_floating_point() else 1
        if func._schema.name in ("aten::index", "aten::index_put", "aten::index_put_"):
            whole, indices, *values = args
            given = [each for each in indices if each is not None]
            given += [each for each in values[:1] if each.ndim]
            assert {each.device for each in given} <= {whole.device}, func
        return func(*args, **(kwargs or {}))


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("Stream", "Event"):
        monkeypatch.setattr(torch.cuda, name, _Stream)
    monkeypatch.setattr(torch.cuda, "current_stream", _Stream)
    monkeypatch.setattr(torch.cuda, "stream", nullcontext)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: None)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)
    _side_stream.cache_clear()
    _copy_stream.cache_clear()
    with FakeTensorMode(allow_non_fake_inputs=True), _Strict():
        yield


def pipeline(sentence: str) -> Pipeline:
    return Pipeline(sentence, image_size=(24, 24), mean=(0.5,) * 3, std=(0.5,) * 3)


@pytest.mark.skipif(torch.cuda.is_available(), reason="stands for a machine that has no GPU")
class TestOnAGpu:
    def test_a_tensor_of_the_host_is_refused(self, gpu: None) -> None:
        with pytest.raises(RuntimeError, match="device"):
            torch.zeros(2, device=GPU) + torch.zeros(2)
        with pytest.raises(AssertionError, match="index"):
            torch.zeros(2)[torch.zeros(2, dtype=torch.long, device=GPU)]

    @pytest.mark.parametrize("sentence", SENTENCES)
    @pytest.mark.parametrize("on, sizes", [("cpu", (40, 48)), (GPU, (20, 20))])
    def test_images(
        self, gpu: None, sentence: str, on: torch.device | str, sizes: tuple[int, int]
    ) -> None:
        prepare = pipeline(sentence)
        keys = sample_keys(0, 0, np.arange(IMAGES))
        alike = torch.zeros(IMAGES, 3, *sizes, dtype=torch.uint8, device=on)
        several = [alike[0, :, : sizes[0] - i % 3] for i in range(IMAGES)]
        for pixels in (alike, several):
            images = prepare(pixels, keys=keys, dtype=torch.bfloat16, device=GPU)
            assert (images.device, images.dtype) == (GPU, torch.bfloat16)
        if prepare.mixes:
            targets = torch.zeros(IMAGES, 10, device=GPU)
            mixed = prepare.mix(images, targets, keys, torch.arange(IMAGES) ^ 1)
            assert {tensor.device for tensor in mixed} == {GPU}

    @pytest.mark.parametrize("on", ["cpu", GPU])
    def test_batches_and_what_is_counted(self, gpu: None, on: torch.device | str) -> None:
        split = open_source("embedded:digits").splits["test"]
        store = Store(split, torch.zeros(len(split), 8, 8, 3, dtype=torch.uint8, device=on))
        loader = Loader(store, pipeline("resize | mixup(0.8)"), num_classes=10, device=GPU)
        stream = Sampler(len(split), batch_size=8, seed=0, unit=2)
        ((_, batches),) = loader.train(stream, range(1))
        meter, echo, counts = Meter(GPU, 0.0), DelayedScalars(GPU), Counts(10, device=GPU)
        for batch in batches:
            assert batch.targets_BK is not None
            found = {batch.images_BCHW.device, batch.labels_B.device, batch.targets_BK.device}
            assert found == {GPU}
            logits_BK = batch.images_BCHW.mean((2, 3)).repeat(1, 4)[:, :10]
            finite = logits_BK.sum().isfinite()
            meter.add(logits_BK.sum(), logits_BK, batch.labels_B, counts=finite)
            counts.add(logits_BK, batch.labels_B)
            echo.send(finite)
        assert {meter.sums().device, counts.tensor().device} == {GPU}
        assert echo.receive() == []  # not before the next step

    def test_logits_come_to_the_host_a_batch_later(self, gpu: None) -> None:
        computed: list[int] = []

        def batches() -> Iterator[tuple[torch.Tensor, torch.Tensor, np.ndarray]]:
            for number in range(3):
                computed.append(number)
                logits_BK, labels_B = torch.zeros(4, 2, device=GPU), torch.zeros(4, device=GPU)
                yield logits_BK, labels_B, np.full(4, number)

        for number, (*tensors, places) in enumerate(_on_host(batches())):
            assert computed == list(range(min(number + 2, 3)))
            assert {tensor.device.type for tensor in tensors} == {"cpu"}
            assert set(places.tolist()) == {number}
        assert len(computed) == 3

    @pytest.mark.parametrize("key", ["vit", "distilled", "resnet"])
    def test_logits(self, key: str) -> None:
        network = networks.built(key).model
        compute_class_token(network)
        size = networks.NETWORKS[key][2]
        with FakeTensorMode(allow_non_fake_inputs=True) as fake:
            for module in network.modules():
                for kind in (module._parameters, module._buffers):
                    for name, tensor in kind.items():
                        if tensor is not None:
                            on_gpu = fake.from_tensor(tensor.detach()).to(GPU)
                            kind[name] = on_gpu.requires_grad_(tensor.requires_grad)
            with _Strict():
                assert network(torch.zeros(2, 3, size, size, device=GPU)).device == GPU

    @pytest.mark.parametrize("name", ["adamw", "lamb", "lion", "rmsprop"])
    def test_moments(self, gpu: None, name: str) -> None:
        alone = torch.nn.ParameterList([torch.zeros(4, 3, device=GPU)])
        optimizer = build_optimizer(alone, name=name, lr=0.1)
        for _ in range(3):
            alone[0].grad = torch.zeros(4, 3, device=GPU)
            torch.nn.utils.clip_grad_norm_(alone.parameters(), 1.0)
            if can_mask(optimizer) and optimizer.state:
                optimizer.grad_scale, optimizer.found_inf = None, torch.zeros((), device=GPU)
            optimizer.step()
        state = [value for each in optimizer.state.values() for value in each.values()]
        large = [value for value in state if torch.is_tensor(value) and value.ndim]
        assert large
        assert {value.device for value in large} == {GPU}
