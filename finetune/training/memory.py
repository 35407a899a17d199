"""Memory and operations of a pass, from a twin of the network whose tensors have no content.

So the network itself stays as it is, nothing large is allocated, and a pass of a large batch takes
the time of a small one.
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

from finetune.models.head import set_train_mode
from finetune.models.profile import count_operations
from finetune.recipe.load import OptimSection
from finetune.training.optim import build_optimizer

__all__ = [
    "NO_NEED",
    "LiveBytes",
    "Need",
    "checkpoint_bytes",
    "need_of",
    "num_bytes",
    "pass_once",
    "state_bytes",
    "step_bytes",
    "twin_of",
]

Change = Callable[[nn.Module], None]

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
        inputs = {storage._cdata for storage in _storages((args, kwargs))}
        result = func(*args, **kwargs)
        for storage in _storages(result):
            key = storage._cdata
            if key not in inputs and key not in self._known:
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
    """Memory of a pass through the network, beyond the weights and their gradients.

    Attributes:
        fixed: bytes, whatever the number of images: weights cast to bf16, for instance.
        per_image: bytes.
        operations: of an image; two make a multiply-accumulate. None where they were not counted.
    """

    fixed: int
    per_image: int
    operations: float | None = None

    def __add__(self, other: Need) -> Need:
        """Both at once; the operations are this one's."""
        fixed, per_image = self.fixed + other.fixed, self.per_image + other.per_image
        return Need(fixed, per_image, self.operations)

    def at(self, images: int) -> int:
        """Bytes for so many images at once."""
        return self.fixed + images * self.per_image


NO_NEED = Need(0, 0)


def need_of(
    network: nn.Module,
    *,
    image_size: tuple[int, int],
    dtype: torch.dtype,
    images: int = 8,
    train: bool = True,
    change: Change | None = None,
    operations: bool = False,
) -> Need:
    """Predict what a pass takes: a straight line through the peaks of two sizes.

    Args:
        network: on its device; it stays as it is.
        image_size: (height, width) in pixels.
        dtype: of the forward pass; float32 without autocast.
        images: of the smaller pass, at least 2; the other has twice as many.
        train: forward and backward in training mode; else the forward pass of an evaluation.
        change: made to the twin before: freeze blocks, switch checkpointing on.
    Raises: whatever the network raises at such images.
    """
    mode: FakeTensorMode | None = FakeTensorMode(allow_non_fake_inputs=True)

    @contextlib.contextmanager
    def changed_twin() -> Iterator[nn.Module]:
        twin = twin_of(network, mode)
        if change is not None:
            change(twin)
        with mode or contextlib.nullcontext(), torch.compiler.set_stance("force_eager"):
            yield twin

    def peak(number: int) -> int:
        with changed_twin() as twin, LiveBytes() as counter:
            pass_once(twin, number, image_size, dtype, train=train)
        return counter.peak

    few, many = max(images, 2), 2 * max(images, 2)
    try:
        first, second = peak(few), peak(many)
    except _NO_TWIN:  # the network looks at values: small passes of real tensors show the same
        mode, few, many = None, 2, 4
        first, second = peak(few), peak(many)
    per_image = max(second - first, 0) // (many - few)
    counted = None
    if operations:  # apart: a counter holds on to what checkpointing would have dropped
        with changed_twin() as twin:
            run = functools.partial(pass_once, twin, few, image_size, dtype, train=train)
            counted = count_operations(run) / few
    return Need(max(first - per_image * few, 0), per_image, counted)


def twin_of(network: nn.Module, mode: FakeTensorMode | None = None) -> nn.Module:
    """Copy a network.

    Args:
        network: not wrapped by DDP.
        mode: makes tensors without content; None copies what is trained and shares the rest.
    """
    memo: dict[int, Any]
    if mode is not None:
        tensors: list[Tensor] = [*network.parameters(), *network.buffers()]
        memo = {id(tensor): mode.from_tensor(tensor) for tensor in tensors}
    else:
        memo = {id(p): p for p in network.parameters() if not p.requires_grad}
    return copy.deepcopy(network, memo)


def pass_once(
    twin: nn.Module, images: int, image_size: tuple[int, int], dtype: torch.dtype, *, train: bool
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


def step_bytes(network: nn.Module, optim: OptimSection) -> dict[str, int]:
    """Bytes that each training step finds or leaves behind, whatever the number of images.

    Args:
        network: not wrapped; also a twin without content.
    Returns: "weights", "gradients", "moments" (the optimiser's) and "average" (the EMA's).
    Raises: as `state_bytes`.
    """
    weights = num_bytes(network.state_dict().values())
    return {
        "weights": weights,
        "gradients": num_bytes(p for p in network.parameters() if p.requires_grad),
        "moments": state_bytes(network, optim),
        "average": weights if optim.ema_decay else 0,
    }


def checkpoint_bytes(kept: Mapping[str, int], *, adapter: bool) -> int:
    """Bytes of a checkpoint, from `step_bytes`; with an adapter it holds only what is trained."""
    if not adapter:
        return kept["weights"] + kept["moments"] + kept["average"]
    return kept["gradients"] * (2 if kept["average"] else 1) + kept["moments"]


def state_bytes(network: nn.Module, optim: OptimSection) -> int:
    """Bytes that an optimiser keeps for a network's trained parameters.

    One parameter of each shape takes a step of its own, so the network stays as it is.

    Raises: RecipeError or SetupError as `build_optimizer` does.
    """
    names = {"name", "lr", "momentum", "betas", "weight_decay", "args"}
    settings = optim.model_dump(include=names)  # the others only group parameters
    shapes = Counter(p.shape for p in network.parameters() if p.requires_grad)
    kept = 0
    for shape, times in shapes.items():
        alone = nn.ParameterList([torch.zeros(shape)])
        optimizer = build_optimizer(alone, **settings, decay="all")
        alone[0].grad = torch.zeros(shape)
        optimizer.step()
        values = tree_leaves([dict(state) for state in optimizer.state.values()])
        kept += times * num_bytes(value for value in values if isinstance(value, Tensor))
    return kept
