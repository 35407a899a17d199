"""Code that runs on a GPU keeps its tensors there: tested without a GPU, with fake tensors.

Fake tensors have a device but no content. They refuse operations with tensors of another device,
and every operation that reads a value and so would make the host wait for the GPU.
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

from finetune.data.device_prefetch import _copy_stream
from finetune.data.loader import ImageLoader, _get_side_stream
from finetune.data.open_source import open_source
from finetune.data.pixel_store import PixelStore
from finetune.data.sampler import DistributedBatchSampler
from finetune.evaluation.evaluator import _copy_to_host
from finetune.evaluation.metrics import ClassificationMetrics
from finetune.models.fast_layers import limit_last_block_to_class_token
from finetune.training.delayed_scalars import DelayedScalars
from finetune.training.meter import TrainMeter
from finetune.training.optim import build_optimizer, supports_found_inf
from finetune.transforms.pipeline import Pipeline
from finetune.transforms.sample_rng import sample_keys
from tests import networks

GPU = torch.device("cuda", 0)
INTERPOLATIONS = ("nearest", "bilinear", "bicubic", "lanczos")
TRANSFORM_SPECS = [
    *(f"resize((24, 24), interpolation='{interpolation}')" for interpolation in INTERPOLATIONS),
    "random_resized_crop(24) | flip | rotate(20)",
    "resize(30) | random_crop(24, padding=4) | vertical_flip | center_crop(24)",
    "color_jitter(0.3, 0.3, 0.3, 0.1) | resize((24, 24))",
    "rand_augment(num_ops=2, interpolation='bilinear') | resize((24, 24)) | random_erasing(p=1.0)",
    "resize((24, 24)) | mixup(0.8) | cutmix(1.0)",
]
NUM_IMAGES = 12


class _FakeStream:
    """Stands in for a CUDA stream or event without pending work."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.device = GPU

    def wait_stream(self, other: _FakeStream) -> None: ...

    def record(self) -> None: ...

    def synchronize(self) -> None: ...


class _StrictDeviceMode(TorchDispatchMode):
    """Rejects indices and values of another device, which fake tensors allow.

    Reading a scalar on the CPU is allowed, as it waits for nothing: it returns 1.
    """

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default and args[0].device.type == "cpu":
            return 1.0 if args[0].is_floating_point() else 1
        if func._schema.name in ("aten::index", "aten::index_put", "aten::index_put_"):
            tensor, indices, *values = args
            operands = [operand for operand in indices if operand is not None]
            operands += [operand for operand in values[:1] if operand.ndim]
            assert {operand.device for operand in operands} <= {tensor.device}, func
        return func(*args, **(kwargs or {}))


@pytest.fixture
def fake_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("Stream", "Event"):
        monkeypatch.setattr(torch.cuda, name, _FakeStream)
    monkeypatch.setattr(torch.cuda, "current_stream", _FakeStream)
    monkeypatch.setattr(torch.cuda, "stream", nullcontext)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: None)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)
    _get_side_stream.cache_clear()
    _copy_stream.cache_clear()
    with FakeTensorMode(allow_non_fake_inputs=True), _StrictDeviceMode():
        yield


def build_pipeline(transforms: str) -> Pipeline:
    return Pipeline(transforms, image_size=(24, 24), mean=(0.5,) * 3, std=(0.5,) * 3)


@pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without a GPU")
class TestDevicePlacement:
    def test_rejects_cpu_tensors_in_gpu_operations(self, fake_gpu: None) -> None:
        with pytest.raises(RuntimeError, match="device"):
            torch.zeros(2, device=GPU) + torch.zeros(2)
        with pytest.raises(AssertionError, match="index"):
            torch.zeros(2)[torch.zeros(2, dtype=torch.long, device=GPU)]

    @pytest.mark.parametrize(
        "transforms, source_device, image_size",
        [
            *((transforms, "cpu", (40, 48)) for transforms in TRANSFORM_SPECS),
            (TRANSFORM_SPECS[4], GPU, (20, 20)),
        ],
    )
    def test_transforms_keep_images_on_the_device(
        self,
        fake_gpu: None,
        transforms: str,
        source_device: torch.device | str,
        image_size: tuple[int, int],
    ) -> None:
        pipeline = build_pipeline(transforms)
        keys = sample_keys(0, 0, np.arange(NUM_IMAGES))
        uniform_images = torch.zeros(
            NUM_IMAGES, 3, *image_size, dtype=torch.uint8, device=source_device
        )
        ragged_images = [
            uniform_images[0, :, : image_size[0] - index % 3] for index in range(NUM_IMAGES)
        ]
        for pixels in (uniform_images, ragged_images):
            images = pipeline(pixels, keys=keys, dtype=torch.bfloat16, device=GPU)
            assert (images.device, images.dtype) == (GPU, torch.bfloat16)
        if pipeline.has_mixing:
            targets = torch.zeros(NUM_IMAGES, 10, device=GPU)
            mixed_batch = pipeline.mix_batch(images, targets, keys, torch.arange(NUM_IMAGES) ^ 1)
            assert {tensor.device for tensor in mixed_batch} == {GPU}

    @pytest.mark.parametrize("source_device", ["cpu", GPU])
    def test_batches_and_metrics_stay_on_the_device(
        self, fake_gpu: None, source_device: torch.device | str
    ) -> None:
        split = open_source("embedded:digits").splits["test"]
        store = PixelStore(
            split, torch.zeros(len(split), 8, 8, 3, dtype=torch.uint8, device=source_device)
        )
        loader = ImageLoader(
            store, build_pipeline("resize | mixup(0.8)"), num_classes=10, device=GPU
        )
        sampler = DistributedBatchSampler(len(split), batch_size=8, seed=0, group_size=2)
        ((_, batches),) = loader.train_steps(sampler, range(1))
        meter, delayed_scalars, metrics = (
            TrainMeter(GPU, 0.0),
            DelayedScalars(GPU),
            ClassificationMetrics(10, device=GPU),
        )
        for batch in batches:
            assert batch.targets_BK is not None
            devices = {batch.images_BCHW.device, batch.labels_B.device, batch.targets_BK.device}
            assert devices == {GPU}
            logits_BK = batch.images_BCHW.mean((2, 3)).repeat(1, 4)[:, :10]
            is_finite = logits_BK.sum().isfinite()
            meter.update(logits_BK.sum(), logits_BK, batch.labels_B, step_taken=is_finite)
            metrics.update(logits_BK, batch.labels_B)
            delayed_scalars.send(is_finite)
        assert {meter.local_sums().device, metrics.device} == {GPU}
        assert delayed_scalars.receive() == []  # the value arrives with the next step

    def test_logits_reach_the_host_one_batch_later(self, fake_gpu: None) -> None:
        computed: list[int] = []

        def batches() -> Iterator[tuple[torch.Tensor, torch.Tensor, np.ndarray]]:
            for number in range(3):
                computed.append(number)
                logits_BK, labels_B = torch.zeros(4, 2, device=GPU), torch.zeros(4, device=GPU)
                yield logits_BK, labels_B, np.full(4, number)

        for number, (*tensors, indices) in enumerate(_copy_to_host(batches())):
            assert computed == list(range(min(number + 2, 3)))
            assert {tensor.device.type for tensor in tensors} == {"cpu"}
            assert set(indices.tolist()) == {number}
        assert len(computed) == 3

    @pytest.mark.parametrize("key", ["vit", "resnet"])
    def test_logits_stay_on_the_device(self, key: str) -> None:
        network = networks.build_network(key).model
        limit_last_block_to_class_token(network)
        size = networks.NETWORKS[key][2]
        with FakeTensorMode(allow_non_fake_inputs=True) as fake:
            for module in network.modules():
                for tensors_by_name in (module._parameters, module._buffers):
                    for name, tensor in tensors_by_name.items():
                        if tensor is not None:
                            gpu_tensor = fake.from_tensor(tensor.detach()).to(GPU)
                            tensors_by_name[name] = gpu_tensor.requires_grad_(tensor.requires_grad)
            with _StrictDeviceMode():
                assert network(torch.zeros(2, 3, size, size, device=GPU)).device == GPU

    @pytest.mark.parametrize("name", ["adamw", "lamb", "lion", "rmsprop"])
    def test_optimizer_state_stays_on_the_device(self, fake_gpu: None, name: str) -> None:
        parameters = torch.nn.ParameterList([torch.zeros(4, 3, device=GPU)])
        optimizer = build_optimizer(parameters, name=name, lr=0.1)
        for _ in range(3):
            parameters[0].grad = torch.zeros(4, 3, device=GPU)
            torch.nn.utils.clip_grad_norm_(parameters.parameters(), 1.0)
            if supports_found_inf(optimizer) and optimizer.state:
                optimizer.grad_scale, optimizer.found_inf = None, torch.zeros((), device=GPU)
            optimizer.step()
        values = [value for state in optimizer.state.values() for value in state.values()]
        tensors = [value for value in values if torch.is_tensor(value) and value.ndim]
        assert tensors
        assert {value.device for value in tensors} == {GPU}
