"""Model summary: layers, parameters, tokens, blocks and MACs; FLOPs of a pass or training step.

One multiply-accumulate (MAC) counts as two FLOPs, as in GPU data sheets.
"""

# B batch, N tokens, D width, C channels, H W pixels

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count

from finetune.models.hooks import forward_hooks

__all__ = ["blocks_per_stage", "count_flops", "count_parameters", "summarize_model"]

_STAGE_NAMES = ("blocks", "stages", "layers")


def _conv_backward_flops(
    gradient: Sequence[int], images: Sequence[int], weight: Sequence[int], *settings: Any, **_: Any
) -> int:
    """Return the FLOPs of a convolution's backward pass, from the shapes of its arguments.

    Each of the two gradients (input and weight) that is computed costs as much as the forward pass.
    """
    _bias, _stride, _padding, _dilation, transposed, _output_padding, _groups, computed = settings
    positions = math.prod((images if transposed else gradient)[2:])
    return 2 * images[0] * positions * math.prod(weight) * (computed[0] + computed[1])


def _attention_flops(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    return int(sdpa_flop_count(query, key, value))


def _attention_backward_flops(
    _: Any, query: Any, key: Any, value: Any, *__: Any, **___: Any
) -> int:
    """Return the backward FLOPs: twice the forward FLOPs.

    Each of the two forward products needs a gradient for both of its factors.
    """
    return 2 * int(sdpa_flop_count(query, key, value))


_ATEN = torch.ops.aten
# Replacements for some of torch's FLOP formulas, so that every device and kernel gives the same
# count. torch (2.11 to 2.14) ignores groups in the weight gradient of convolutions, has no formula
# for fused attention on a CPU, and counts the attention scores that the backward pass of fused
# attention recomputes.
_FLOP_FORMULAS: dict[Any, Callable[..., int]] = {
    _ATEN.convolution_backward: _conv_backward_flops,
    _ATEN._scaled_dot_product_flash_attention_for_cpu: _attention_flops,
    _ATEN._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward_flops,
    _ATEN._scaled_dot_product_flash_attention_backward: _attention_backward_flops,
    _ATEN._scaled_dot_product_efficient_attention_backward: _attention_backward_flops,
    _ATEN._scaled_dot_product_cudnn_attention_backward: _attention_backward_flops,
}


def _flop_counter() -> FlopCounterMode:
    return FlopCounterMode(display=False, custom_mapping=_FLOP_FORMULAS)


def count_flops(step: Callable[[], object]) -> int:
    """Count the FLOPs of matrix products and convolutions in one pass or training step.

    Recomputation by activation checkpointing is included. Recomputation of attention scores inside
    fused attention kernels is not, so that fused and unfused attention give the same count.

    Args:
        step: function that runs the pass or step. Compiled networks run in eager mode, because the
            counter cannot see into compiled kernels.
    """
    counter = _flop_counter()
    with torch.compiler.set_stance("force_eager"), counter:
        step()
    return int(counter.get_total_flops())


LayerShapes = dict[str, tuple[int, ...]]


def summarize_model(network: nn.Module, image_size: tuple[int, int]) -> dict[str, Any]:
    """Summarize a network with a forward pass of one image.

    Args:
        network: a network in evaluation mode, on any device including "meta"; it is not changed.
        image_size: (height, width) in pixels.
    Returns: a dict with these keys.
        "macs": multiply-accumulates per image in matrix products (attention included) and
            convolutions; elementwise operations and norms are not counted.
        "tokens": {"total", "grid", "prefix"}, the number of tokens at the first block, their grid
            (height, width) and the number of prefix tokens; None for a network without tokens.
        "layers": one dict per layer: {"name", "kind", "output" (shape without B), "parameters",
            "macs"}.
    """
    counter, shapes, parts = _flop_counter(), LayerShapes(), dict(_summary_layers(network))

    def record_shape(name: str, module: nn.Module, inputs: Any, output: Any) -> None:
        tensors = [t for t in _flatten(output) if isinstance(t, Tensor)]
        if tensors:
            shapes[name] = tuple(tensors[-1].shape[1:])

    device = next((p.device for p in network.parameters()), torch.device("cpu"))
    trainable = [p for p in network.parameters() if p.requires_grad]
    with ExitStack() as stack:
        hooks = {name: partial(record_shape, name) for name in parts}
        stack.enter_context(forward_hooks(network, hooks))
        for parameter in trainable:  # else the counter needs autograd, which no_grad disables
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
    if own:  # parameters of the network itself: class token, position embeddings
        number = count_parameters(own.values())
        row = {"name": ", ".join(own), "kind": "", "output": [], "parameters": number, "macs": 0}
        rows.insert(0, row)
    nonempty = [row for row in rows if row["parameters"] or row["macs"]]
    tokens = _count_tokens(network, image_size, shapes)
    return {"macs": counter.get_total_flops() // 2, "tokens": tokens, "layers": nonempty}


def _summary_layers(network: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield (name, module) of the layers to list.

    These are the top-level modules; a sequence of blocks or stages is replaced by its children.
    """
    for name, module in network.named_children():
        # a sequence of simple layers, such as a head or stem, stays one row
        is_deep = any(list(child.children()) for child in module.children())
        if isinstance(module, nn.Sequential | nn.ModuleList) and is_deep:
            for inner, child in module.named_children():
                yield f"{name}.{inner}", child
        else:
            yield name, module


def _flatten(output: Any) -> Iterator[Any]:
    if isinstance(output, list | tuple):
        for one in output:
            yield from _flatten(one)
    else:
        yield output


def count_parameters(parameters: Iterable[Tensor]) -> int:
    """Return the total number of elements; shared tensors are counted once."""
    return sum(p.numel() for p in {id(p): p for p in parameters}.values())


def _count_tokens(
    network: Any, image_size: tuple[int, int], shapes: LayerShapes
) -> dict[str, Any] | None:
    """Count the tokens at the first block; `summarize_model` documents the result."""
    embed = getattr(network, "patch_embed", None)
    if embed is not None and hasattr(embed, "dynamic_feat_size"):
        grid = [int(side) for side in embed.dynamic_feat_size(image_size)]
        prefix = int(getattr(network, "num_prefix_tokens", 0) or 0)
        return {"total": grid[0] * grid[1] + prefix, "grid": grid, "prefix": prefix}
    if embed is None and not hasattr(network, "num_prefix_tokens"):
        return None
    first = next((shape for name, shape in shapes.items() if name.endswith(".0")), ())
    if len(stem := shapes.get("patch_embed", ())) == 3:
        # a hierarchical network without a class token, with channels first or last
        last = stem[-1] == getattr(getattr(embed, "proj", None), "out_channels", None)
        grid = list(stem[:2] if last else stem[1:])
        return {"total": grid[0] * grid[1], "grid": grid, "prefix": 0}
    if len(first) == 2:
        prefix = int(getattr(network, "num_prefix_tokens", 0) or 0)
        side = round((first[0] - prefix) ** 0.5)
        grid = [side, side] if side * side == first[0] - prefix else []
        return {"total": first[0], "grid": grid, "prefix": prefix}
    return None


def blocks_per_stage(network: nn.Module) -> list[int]:
    """Return the number of blocks per stage; a single entry for a network without stages."""
    sequences = nn.Sequential | nn.ModuleList
    for name in _STAGE_NAMES:
        stages = getattr(network, name, None)
        if isinstance(stages, sequences) and len(stages):
            blocks = [
                stage if isinstance(stage, nn.Sequential) else getattr(stage, "blocks", None)
                for stage in stages
            ]
            counts = [len(block) for block in blocks if isinstance(block, sequences)]
            return counts if len(counts) == len(stages) else [len(stages)]
    stages = [getattr(network, f"layer{number}", None) for number in range(1, 5)]
    return [len(stage) for stage in stages if isinstance(stage, nn.Sequential)]
