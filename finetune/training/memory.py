"""What a training step would take: a twin of the network is sent through one without being trained.

The twin's tensors have shapes and no content, so the network itself stays as it is, nothing large
is allocated, and a step of a large batch is rehearsed in the time of a small one.
"""

# B batch, K classes, C channels, H W pixels

from __future__ import annotations

import contextlib
import copy
import weakref
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

from finetune.models.head import set_train_mode
from finetune.training.optim import build_optimizer

__all__ = ["LiveBytes", "Need", "need_of", "num_bytes", "pass_once", "state_bytes", "twin_of"]

_NO_TWIN = (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedFakeTensorException,
)


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of the tensors that are made while it is entered, and still there.

    What a kernel takes for itself, and gives back before it returns, is not seen.

    Attributes:
        live: bytes now.
        peak: the most there were.
    """

    def __init__(self) -> None:
        super().__init__()
        self.live = 0
        self.peak = 0
        self._known: dict[int, int] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Carry out an operation and count what it made; a view makes nothing."""
        kwargs = kwargs or {}
        given = {storage._cdata for storage in _storages((args, kwargs))}
        result = func(*args, **kwargs)
        for storage in _storages(result):
            key = storage._cdata
            if key not in given and key not in self._known:
                self._known[key] = storage.nbytes()
                self.live += self._known[key]
                weakref.finalize(storage, self._forget, key)
        self.peak = max(self.peak, self.live)
        return result

    def _forget(self, key: int) -> None:
        self.live -= self._known.pop(key)


def _storages(values: Any) -> Iterator[Any]:
    for leaf in tree_leaves(values):
        if isinstance(leaf, Tensor) and leaf.layout is torch.strided:
            yield leaf.untyped_storage()


@dataclass(frozen=True)
class Need:
    """What a pass through the network takes beyond the weights and their gradients.

    Attributes:
        fixed: bytes, whatever the number of images: weights cast to bf16, for instance.
        per_image: bytes.
        operations: of an image; two make a multiply-accumulate. None where they were not counted.
    """

    fixed: int
    per_image: int
    operations: float | None = None

    def at(self, images: int) -> int:
        """Bytes for so many images at once."""
        return self.fixed + images * self.per_image


def need_of(
    network: nn.Module,
    *,
    image_size: tuple[int, int],
    dtype: torch.dtype,
    images: int = 8,
    train: bool = True,
    change: Callable[[nn.Module], None] | None = None,
    count: Callable[[Callable[[], None]], int] | None = None,
) -> Need:
    """Rehearse a pass of two sizes and draw a straight line through their peaks.

    Args:
        network: on its device; it stays as it is.
        image_size: (height, width) in pixels.
        dtype: of the forward pass; float32 without autocast.
        images: of the smaller pass, at least 2; the other has twice as many.
        train: forward and backward in training mode; else the forward pass of an evaluation.
        change: done to the twin before: freeze blocks, switch checkpointing on.
        count: `bench.flops.count_operations`.
    Raises: whatever the network raises at such images.
    """
    given = (image_size, dtype, train, change)
    sizes, real = (max(images, 2), 2 * max(images, 2)), False
    try:
        peaks = [_peak(network, number, *given) for number in sizes]
    except _NO_TWIN:  # the network looks at values: small passes of real tensors show the same
        sizes, real = (2, 4), True
        peaks = [_peak(network, number, *given, real=True) for number in sizes]
    per_image = max(peaks[1] - peaks[0], 0) // (sizes[1] - sizes[0])
    operations = None
    if count is not None:  # apart: a counter holds on to what checkpointing would have dropped
        operations = _operations(network, sizes[0], *given, count=count, real=real) / sizes[0]
    return Need(max(peaks[0] - per_image * sizes[0], 0), per_image, operations)


def _peak(
    network: nn.Module,
    images: int,
    image_size: tuple[int, int],
    dtype: torch.dtype,
    train: bool,
    change: Callable[[nn.Module], None] | None,
    *,
    real: bool = False,
) -> int:
    """The most bytes that one pass has at any moment."""
    counted = LiveBytes()
    with _twin(network, change, real=real) as twin, counted:
        pass_once(twin, images, image_size, dtype, train=train)
    return counted.peak


def _operations(
    network: nn.Module,
    images: int,
    image_size: tuple[int, int],
    dtype: torch.dtype,
    train: bool,
    change: Callable[[nn.Module], None] | None,
    *,
    count: Callable[[Callable[[], None]], int],
    real: bool,
) -> int:
    with _twin(network, change, real=real) as twin:
        return count(lambda: pass_once(twin, images, image_size, dtype, train=train))


@contextlib.contextmanager
def _twin(
    network: nn.Module, change: Callable[[nn.Module], None] | None, *, real: bool
) -> Iterator[nn.Module]:
    fake = None if real else FakeTensorMode(allow_non_fake_inputs=True)
    twin = twin_of(network, fake)
    if change is not None:
        change(twin)
    with fake or contextlib.nullcontext(), torch.compiler.set_stance("force_eager"):
        yield twin


def twin_of(network: nn.Module, fake: FakeTensorMode | None = None) -> nn.Module:
    """Copy a network.

    Args:
        network: not wrapped by DDP.
        fake: makes tensors without content; None copies what is trained and shares the rest.
    """
    tensors: list[Tensor] = [*network.parameters(), *network.buffers()]
    memo: dict[int, Any] = {}
    if fake is not None:
        memo = {id(tensor): fake.from_tensor(tensor) for tensor in tensors}
    else:
        frozen = (p for p in network.parameters() if not p.requires_grad)
        memo = {id(parameter): parameter for parameter in frozen}
    return copy.deepcopy(network, memo)


def pass_once(
    twin: nn.Module,
    images: int,
    image_size: tuple[int, int],
    dtype: torch.dtype,
    *,
    train: bool,
) -> None:
    """Send black images through a twin, there and, in training, back.

    Each gradient is dropped when it is there: what is counted is what is beyond them.
    """
    device = next(twin.parameters()).device
    images_BCHW = torch.zeros(images, 3, *image_size, dtype=dtype, device=device)
    labels_B = torch.zeros(images, dtype=torch.long, device=device)
    autocast = torch.autocast(device.type, dtype, enabled=dtype != torch.float32)
    if not train:
        twin.eval()
        with torch.no_grad(), autocast:
            twin(images_BCHW.float()).float()
        return
    set_train_mode(twin)
    drops = [
        parameter.register_post_accumulate_grad_hook(_drop)
        for parameter in twin.parameters()
        if parameter.requires_grad
    ]
    with autocast:
        logits_BK = twin(images_BCHW)
    nn.functional.cross_entropy(logits_BK.float(), labels_B, reduction="sum").backward()
    for drop in drops:
        drop.remove()


def _drop(parameter: Tensor) -> None:
    parameter.grad = None


def num_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of these tensors; one that stands there twice counts once."""
    return sum({id(t): t.numel() * t.element_size() for t in tensors}.values())


def state_bytes(network: nn.Module, settings: Mapping[str, Any]) -> int:
    """Bytes that an optimiser would keep for a network's trained parameters.

    One parameter of each shape takes a step of its own, so the network stays as it is.

    Args:
        network: on any device.
        settings: `build_optimizer`'s name, lr, momentum, betas, weight_decay and args.
    Raises: RecipeError or SetupError as `build_optimizer` does.
    """
    shapes: dict[torch.Size, int] = {}
    for parameter in network.parameters():
        if parameter.requires_grad:
            shapes[parameter.shape] = shapes.get(parameter.shape, 0) + 1
    kept = 0
    for shape, times in shapes.items():
        alone = nn.ParameterList([torch.zeros(shape)])
        optimizer = build_optimizer(alone, **settings, decay="all")
        alone[0].grad = torch.zeros(shape)
        optimizer.step()
        values = tree_leaves([dict(state) for state in optimizer.state.values()])
        kept += times * num_bytes(value for value in values if isinstance(value, Tensor))
    return kept
