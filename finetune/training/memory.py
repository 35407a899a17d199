"""Estimate activation memory and FLOPs with a fake-tensor copy of the network.

The network itself does not change, nothing large is allocated, and a large batch takes no longer
than a small one.
"""

# B batch, K classes, C channels, H W pixels

from __future__ import annotations

import contextlib
import copy
import functools
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    UnsupportedFakeTensorException,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from finetune.models.freeze import set_train_mode
from finetune.models.summary import count_flops
from finetune.recipe.load import OptimSection
from finetune.training.optim import build_optimizer

__all__ = [
    "NO_MEMORY",
    "MemoryEstimate",
    "TensorMemoryTracker",
    "checkpoint_bytes",
    "estimate_memory",
    "fake_copy",
    "optimizer_state_bytes",
    "run_step",
    "tensor_bytes",
    "training_state_bytes",
]

PrepareModel = Callable[[nn.Module], None]

_FAKE_TENSOR_ERRORS = (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedFakeTensorException,
)


class TensorMemoryTracker(TorchDispatchMode):
    """Track the bytes of the tensors created inside this context that are still alive.

    Temporary workspace that a kernel frees before it returns is not counted.

    Attributes:
        current_bytes: bytes alive now.
        peak_bytes: the highest number of bytes alive so far.
    """

    def __init__(self) -> None:
        super().__init__()
        self.current_bytes = 0
        self.peak_bytes = 0
        self._bytes_of_storage: dict[int, int] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operation and count the storages that it creates; a view creates none."""
        kwargs = kwargs or {}
        inputs = {storage._cdata for storage in _storages((args, kwargs))}
        result = func(*args, **kwargs)
        for storage in _storages(result):
            key = storage._cdata
            if key not in inputs and key not in self._bytes_of_storage:
                self._bytes_of_storage[key] = storage.nbytes()
                self.current_bytes += self._bytes_of_storage[key]
                weakref.finalize(storage, self._release, key)
        self.peak_bytes = max(self.peak_bytes, self.current_bytes)
        return result

    def _release(self, key: int) -> None:
        self.current_bytes -= self._bytes_of_storage.pop(key)


def _storages(values: Any) -> Iterator[Any]:
    for leaf in tree_leaves(values):
        if isinstance(leaf, Tensor) and leaf.layout is torch.strided:
            yield leaf.untyped_storage()


@dataclass(frozen=True)
class MemoryEstimate:
    """Memory of a forward (and backward) pass, in addition to weights and gradients.

    Attributes:
        fixed_bytes: independent of the number of images, such as weights cast to bf16.
        bytes_per_image: additional bytes for each image.
        flops_per_image: a multiply-accumulate counts as two; None if not counted.
    """

    fixed_bytes: int
    bytes_per_image: int
    flops_per_image: float | None = None

    def __add__(self, other: MemoryEstimate) -> MemoryEstimate:
        """Add the memory of two passes; keep the FLOPs of the first."""
        fixed = self.fixed_bytes + other.fixed_bytes
        per_image = self.bytes_per_image + other.bytes_per_image
        return MemoryEstimate(fixed, per_image, self.flops_per_image)

    def bytes_for(self, num_images: int) -> int:
        """Return the bytes for a micro-batch of `num_images`."""
        return self.fixed_bytes + num_images * self.bytes_per_image


NO_MEMORY = MemoryEstimate(0, 0)


def estimate_memory(
    network: nn.Module,
    *,
    image_size: tuple[int, int],
    dtype: torch.dtype,
    num_images: int = 8,
    train: bool = True,
    prepare: PrepareModel | None = None,
    with_flops: bool = False,
) -> MemoryEstimate:
    """Estimate the memory of a pass by a linear fit to the peaks of two batch sizes.

    Args:
        network: network on its device; it does not change.
        image_size: (height, width) in pixels.
        dtype: autocast dtype of the forward pass; float32 means no autocast.
        num_images: size of the smaller batch, at least 2; the other is twice as large.
        train: True for forward and backward in training mode, False for forward in evaluation mode.
        prepare: applied to the fake copy before the pass, for example to freeze blocks or to enable
            activation checkpointing.
        with_flops: also count the FLOPs.
    Raises: any error that the network raises for images of this size.
    """
    fake_mode: FakeTensorMode | None = FakeTensorMode(allow_non_fake_inputs=True)

    @contextlib.contextmanager
    def prepared_copy() -> Iterator[nn.Module]:
        network_copy = fake_copy(network, fake_mode)
        if prepare is not None:
            prepare(network_copy)
        with fake_mode or contextlib.nullcontext(), torch.compiler.set_stance("force_eager"):
            yield network_copy

    def peak(number: int) -> int:
        with prepared_copy() as network_copy, TensorMemoryTracker() as tracker:
            run_step(network_copy, number, image_size, dtype, train=train)
        return tracker.peak_bytes

    num_small, num_large = max(num_images, 2), 2 * max(num_images, 2)
    try:
        first, second = peak(num_small), peak(num_large)
    except _FAKE_TENSOR_ERRORS:  # the network reads tensor values: use small real batches
        fake_mode, num_small, num_large = None, 2, 4
        first, second = peak(num_small), peak(num_large)
    per_image = max(second - first, 0) // (num_large - num_small)
    flops = None
    # In a separate pass: the counter keeps tensors that activation checkpointing would free.
    if with_flops:
        with prepared_copy() as network_copy:
            run = functools.partial(
                run_step, network_copy, num_small, image_size, dtype, train=train
            )
            flops = count_flops(run) / num_small
    return MemoryEstimate(max(first - per_image * num_small, 0), per_image, flops)


def fake_copy(network: nn.Module, fake_mode: FakeTensorMode | None = None) -> nn.Module:
    """Copy a network, with fake tensors if a mode is given.

    Args:
        network: the network, not wrapped by DDP.
        fake_mode: mode that creates the fake tensors; None copies real tensors, except frozen
            weights, which are shared.
    """
    memo: dict[int, Any]
    if fake_mode is not None:
        tensors: list[Tensor] = [*network.parameters(), *network.buffers()]
        memo = {id(tensor): fake_mode.from_tensor(tensor) for tensor in tensors}
    else:
        memo = {id(p): p for p in network.parameters() if not p.requires_grad}
    return copy.deepcopy(network, memo)


def run_step(
    network: nn.Module,
    num_images: int,
    image_size: tuple[int, int],
    dtype: torch.dtype,
    *,
    train: bool,
) -> None:
    """Run a forward pass on black images and, in training, a backward pass.

    Gradients are freed at once, because the estimate does not include them.
    """
    device = next(network.parameters()).device
    images_BCHW = torch.zeros(num_images, 3, *image_size, dtype=dtype, device=device)
    labels_B = torch.zeros(num_images, dtype=torch.long, device=device)
    autocast = torch.autocast(device.type, dtype, enabled=dtype != torch.float32)
    if not train:
        network.eval()
        with torch.no_grad(), autocast:
            network(images_BCHW.float()).float()
        return
    set_train_mode(network)
    hooks = [
        parameter.register_post_accumulate_grad_hook(_discard_gradient)
        for parameter in network.parameters()
        if parameter.requires_grad
    ]
    with autocast:
        logits_BK = network(images_BCHW)
    nn.functional.cross_entropy(logits_BK.float(), labels_B, reduction="sum").backward()
    for hook in hooks:
        hook.remove()


def _discard_gradient(parameter: Tensor) -> None:
    parameter.grad = None


def tensor_bytes(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of these tensors; repeated tensors count once."""
    return sum({id(t): t.numel() * t.element_size() for t in tensors}.values())


def training_state_bytes(network: nn.Module, optim: OptimSection) -> dict[str, int]:
    """Return the bytes of the training state, which do not depend on the number of images.

    Args:
        network: the unwrapped network; may be a fake copy.
    Returns: a dict with keys "weights", "gradients", "moments" (optimizer) and "average" (EMA).
    Raises: same as `optimizer_state_bytes`.
    """
    weights = tensor_bytes(network.state_dict().values())
    return {
        "weights": weights,
        "gradients": tensor_bytes(p for p in network.parameters() if p.requires_grad),
        "moments": optimizer_state_bytes(network, optim),
        "average": weights if optim.ema_decay else 0,
    }


def checkpoint_bytes(state_bytes: Mapping[str, int], *, adapter: bool) -> int:
    """Return the bytes of a checkpoint; with an adapter it holds only trained weights.

    Args:
        state_bytes: the result of `training_state_bytes`.
    """
    if not adapter:
        return state_bytes["weights"] + state_bytes["moments"] + state_bytes["average"]
    return state_bytes["gradients"] * (2 if state_bytes["average"] else 1) + state_bytes["moments"]


def optimizer_state_bytes(network: nn.Module, optim: OptimSection) -> int:
    """Return the bytes of the optimizer's state for a network's trainable parameters.

    Measured by one step on one parameter of each shape, so the network does not change.

    Raises: same as `build_optimizer`.
    """
    names = {"name", "lr", "momentum", "betas", "weight_decay", "args"}
    settings = optim.model_dump(include=names)  # the others only group parameters
    shapes = Counter(p.shape for p in network.parameters() if p.requires_grad)
    total_bytes = 0
    for shape, count in shapes.items():
        parameters = nn.ParameterList([torch.zeros(shape)])
        optimizer = build_optimizer(parameters, **settings, decay="all")
        parameters[0].grad = torch.zeros(shape)
        optimizer.step()
        values = tree_leaves([dict(state) for state in optimizer.state.values()])
        total_bytes += count * tensor_bytes(value for value in values if isinstance(value, Tensor))
    return total_bytes
