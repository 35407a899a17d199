"""A network in numbers: its layers, parameters, tokens and blocks, and the operations of a pass.

Two operations make a multiply-accumulate (MAC), as in every data sheet.
"""

# B batch, N tokens, D width, C channels, H W pixels

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count

__all__ = ["count_operations", "count_parameters", "depth", "survey"]

_STAGED = ("blocks", "stages", "layers")


def _of_convolution_backward(
    gradient: Sequence[int], images: Sequence[int], weight: Sequence[int], *settings: Any, **_: Any
) -> int:
    """Operations from shapes: each gradient that is computed costs what the forward pass does."""
    _bias, _stride, _padding, _dilation, transposed, _output_padding, _groups, computed = settings
    positions = math.prod((images if transposed else gradient)[2:])
    return 2 * images[0] * positions * math.prod(weight) * (computed[0] + computed[1])


def _of_attention(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    return int(sdpa_flop_count(query, key, value))


def _of_attention_backward(_: Any, query: Any, key: Any, value: Any, *__: Any, **___: Any) -> int:
    """The gradients of two products, each of two factors."""
    return 2 * int(sdpa_flop_count(query, key, value))


_ATEN = torch.ops.aten
# Beside torch's own formulas, so that every device and kernel counts the same. torch (2.11 to 2.14)
# forgets the groups in the gradient of a convolution's weight, does not know the fused attention of
# a CPU, and counts the scores that the backward pass of fused attention computes again.
_FORMULAS: dict[Any, Callable[..., int]] = {
    _ATEN.convolution_backward: _of_convolution_backward,
    _ATEN._scaled_dot_product_flash_attention_for_cpu: _of_attention,
    _ATEN._scaled_dot_product_flash_attention_for_cpu_backward: _of_attention_backward,
    _ATEN._scaled_dot_product_flash_attention_backward: _of_attention_backward,
    _ATEN._scaled_dot_product_efficient_attention_backward: _of_attention_backward,
    _ATEN._scaled_dot_product_cudnn_attention_backward: _of_attention_backward,
}


def _counter() -> FlopCounterMode:
    return FlopCounterMode(display=False, custom_mapping=_FORMULAS)


def count_operations(step: Callable[[], object]) -> int:
    """Count the operations of the matrix products and convolutions of one pass or training step.

    What gradient checkpointing computes again is counted again. What a fused attention kernel
    computes again by itself, the scores, is not: plain products keep them.

    Args:
        step: runs it; a compiled network runs without its compilation, which hides its kernels.
    """
    counter = _counter()
    with torch.compiler.set_stance("force_eager"), counter:
        step()
    return int(counter.get_total_flops())


Shapes = dict[str, tuple[int, ...]]


def survey(network: nn.Module, image_size: tuple[int, int]) -> dict[str, Any]:
    """Send one image through the network, counting.

    Args:
        network: in evaluation mode, on any device, also "meta"; left as it was.
        image_size: (height, width) in pixels.
    Returns: {"macs", "tokens", "layers"}: multiply-accumulates of one image, in matrix products
        (those of attention, too) and convolutions, not in additions and norms; {"total", "grid",
        "prefix"} of the tokens that enter the first block, None where there are none; for each
        layer {"name", "kind", "output" (shape without B), "parameters", "macs"}.
    """
    counter, shapes, parts = _counter(), Shapes(), dict(_parts(network))

    def keep_shape(name: str) -> Any:
        def hook(module: nn.Module, inputs: Any, output: Any) -> None:
            tensors = [t for t in _flat(output) if isinstance(t, Tensor)]
            if tensors:
                shapes[name] = tuple(tensors[-1].shape[1:])

        return hook

    device = next((p.device for p in network.parameters()), torch.device("cpu"))
    learned = [p for p in network.parameters() if p.requires_grad]
    with ExitStack() as stack:
        for name, module in parts.items():
            stack.callback(module.register_forward_hook(keep_shape(name)).remove)
        for parameter in learned:  # the counter asks for gradients that no_grad does not have
            parameter.requires_grad_(False)
            stack.callback(parameter.requires_grad_, True)
        stack.enter_context(torch.no_grad())
        stack.enter_context(counter)
        network(torch.zeros(1, 3, *image_size, device=device))
    counts = counter.get_flop_counts()
    root = type(network).__name__
    rows = [
        {
            "name": name,
            "kind": type(module).__name__,
            "output": list(shapes.get(name, ())),
            "parameters": count_parameters(module.parameters()),
            "macs": sum(counts.get(f"{root}.{name}", {}).values()) // 2,
        }
        for name, module in parts.items()
    ]
    own = dict(network.named_parameters(recurse=False))
    if own:  # class token and position embeddings belong to no layer
        number = count_parameters(own.values())
        loose = {"name": ", ".join(own), "kind": "", "output": [], "parameters": number, "macs": 0}
        rows.insert(0, loose)
    kept = [row for row in rows if row["parameters"] or row["macs"]]
    tokens = _tokens(network, image_size, shapes)
    return {"macs": counter.get_total_flops() // 2, "tokens": tokens, "layers": kept}


def _parts(network: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The layers that a reader wants to see: the top ones, and what sequences of them hold."""
    for name, module in network.named_children():
        # a head or stem of a few plain layers is one row
        is_deep = any(list(child.children()) for child in module.children())
        if isinstance(module, nn.Sequential | nn.ModuleList) and is_deep:
            for inner, child in module.named_children():
                yield f"{name}.{inner}", child
        else:
            yield name, module


def _flat(output: Any) -> Iterator[Any]:
    if isinstance(output, list | tuple):
        for one in output:
            yield from _flat(one)
    else:
        yield output


def count_parameters(parameters: Iterable[Tensor]) -> int:
    """Numbers in these tensors; one that several layers share counts once."""
    return sum(p.numel() for p in {id(p): p for p in parameters}.values())


def _tokens(network: Any, size: tuple[int, int], shapes: Shapes) -> dict[str, Any] | None:
    """Count the tokens that enter the first block: those of the grid, and those before them."""
    embed = getattr(network, "patch_embed", None)
    if embed is not None and hasattr(embed, "dynamic_feat_size"):
        grid = [int(side) for side in embed.dynamic_feat_size(size)]
        prefix = int(getattr(network, "num_prefix_tokens", 0) or 0)
        return {"total": grid[0] * grid[1] + prefix, "grid": grid, "prefix": prefix}
    if embed is None and not hasattr(network, "num_prefix_tokens"):
        return None
    first = next((shape for name, shape in shapes.items() if name.endswith(".0")), ())
    if len(stem := shapes.get("patch_embed", ())) == 3:
        # of a pyramid without a class token, with the channels first or last
        last = stem[-1] == getattr(getattr(embed, "proj", None), "out_channels", None)
        grid = list(stem[:2] if last else stem[1:])
        return {"total": grid[0] * grid[1], "grid": grid, "prefix": 0}
    if len(first) == 2:
        prefix = int(getattr(network, "num_prefix_tokens", 0) or 0)
        side = round((first[0] - prefix) ** 0.5)
        grid = [side, side] if side * side == first[0] - prefix else []
        return {"total": first[0], "grid": grid, "prefix": prefix}
    return None


def depth(network: nn.Module) -> list[int]:
    """Blocks of each stage, or of the whole network where it has one stage."""
    for name in _STAGED:
        sequence = getattr(network, name, None)
        if isinstance(sequence, nn.Sequential | nn.ModuleList) and len(sequence):
            counts = [_inner(stage) for stage in sequence]
            return [len(sequence)] if None in counts else [int(c or 0) for c in counts]
    stages = [getattr(network, f"layer{number}", None) for number in range(1, 5)]
    return [len(stage) for stage in stages if isinstance(stage, nn.Sequential)]


def _inner(stage: nn.Module) -> int | None:
    blocks = stage if isinstance(stage, nn.Sequential) else getattr(stage, "blocks", None)
    return len(blocks) if isinstance(blocks, nn.Sequential | nn.ModuleList) else None
