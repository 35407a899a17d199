"""Batched image augmentation: apply a transform spec to uint8 images on their device.

Every operation processes a whole batch, with parameters drawn per sample. The random numbers are a
pure function of (sample key, position of the operation in the spec, draw index), so a sample gets
the same augmentation in any batch, on any rank and after a resume.

Execution order. Consecutive geometric operations (resize, crops, flips) are fused into one
resampling. If they enlarge the image, a color operation or rotation written after them moves before
them, which is the same work on fewer pixels; otherwise operations run in the written order.
`Pipeline.format_plan` shows the order for a given source size. A moved operation processes the
source image: contrast uses the mean gray value of the whole source even if a crop follows; a
rotation turns around the center of the source, before any change of aspect ratio, and its nearest
interpolation picks source pixels. Normalization, random_erasing, mixup and cutmix come last.

Between operations, pixel values are float32 from 0 to 255 and are not rounded.

Batches of one image size are resampled by matrix products, batches of several sizes by weighted
sums over the pixels of each image (finetune.transforms.ragged). The number of kernel launches does
not depend on the image sizes, as long as the operations run in the same order.
"""

# B batch, b samples of one chunk of the batch, C channels, H W source pixels, h w target pixels,
# K classes

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from finetune.transforms.color import color_jitter
from finetune.transforms.corruption import corrupt
from finetune.transforms.execution_plan import (
    ExecutionPlan,
    HeightWidth,
    PlanStep,
    check_output_size,
    plan_execution,
    size_after_operation,
)
from finetune.transforms.geometry import (
    AxisTransform,
    apply_matrices,
    apply_selection,
    box_mask,
    center_crop_start,
    rotation_matrices,
    warp_affine,
)
from finetune.transforms.mixing import mix_batch
from finetune.transforms.ragged import RaggedAxisTransform, RaggedBatch, resample_ragged
from finetune.transforms.rand_augment import rand_augment
from finetune.transforms.sample_rng import (
    SampleKeys,
    SampleRNG,
    draw_crop_offsets,
    draw_crop_windows,
    draw_erase_boxes,
    sample_keys,
    to_device,
)
from finetune.transforms.spec_parser import TransformCall, parse_transform_spec

__all__ = ["Pipeline", "sample_keys"]

_MAX_CHUNK_VALUES = 2**26  # 256 MiB as float32
_MAX_CACHED_PLANS = 4096  # one per image size

IntArray = npt.NDArray[np.int64]
_AnyAxis = AxisTransform | RaggedAxisTransform


class Pipeline:
    """Applies a transform spec to batches of images, for one model.

    Args:
        transform_spec: the operations; see finetune.transforms.spec_parser.
        image_size: (height, width) that the model expects, in pixels.
        mean, std: mean and standard deviation of each channel, for pixel values from 0 to 1.
        interpolation: default filter of resizes: nearest, bilinear, bicubic or lanczos.
        train: True rejects `corrupt`; False rejects all random operations except `corrupt`.
        decode_size: the recipe's data.decode_size; only stored, for the image decoder.
    Raises: RecipeError if the spec is invalid or cannot produce `image_size`.
    """

    def __init__(
        self,
        transform_spec: str,
        *,
        image_size: HeightWidth,
        mean: Sequence[float],
        std: Sequence[float],
        interpolation: str = "bicubic",
        train: bool = True,
        decode_size: int | None = None,
    ) -> None:
        self.transform_spec = transform_spec
        self.decode_size = decode_size
        self.image_size = (int(image_size[0]), int(image_size[1]))
        self.interpolation = interpolation
        calls = parse_transform_spec(transform_spec, train=train)
        self._calls = calls
        self._roles = [call.operation.role for call in calls]
        self.is_random = any(call.operation.is_random for call in calls)
        self.has_mixing = "mix" in self._roles
        self._scale = torch.tensor([1 / (255 * s) for s in std]).view(3, 1, 1)
        self._shift = torch.tensor([-m / s for m, s in zip(mean, std, strict=True)]).view(3, 1, 1)
        # {device: scale and shift on that device}
        self._normalization_on: dict[torch.device, tuple[Tensor, Tensor]] = {}
        self._plans: dict[HeightWidth, ExecutionPlan] = {}
        check_output_size(calls, self.image_size, transform_spec)

    def __call__(
        self,
        images: Sequence[Tensor] | Tensor,
        *,
        keys: SampleKeys | Tensor | None = None,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
    ) -> Tensor:
        """Augment, resize and normalize a batch, always with autocast disabled.

        Args:
            images: uint8 images: a tensor (B, 3, H, W) if all images of the dataset have one size,
                else a `RaggedBatch` or a list of tensors (3, H_i, W_i). In each of these two
                formats, the result of a sample is bit-identical in every batch; between them it is
                equal up to float32 rounding.
            keys: (B,) keys from `sample_keys`; may be None if the pipeline is not random.
            dtype: dtype of the result, and of the last resampling for images of one size.
            device: device to compute on; None for the device of the images.
        Returns: normalized images (B, 3, h, w).
        Raises: RecipeError if the spec does not turn the images into the model's image size.
        """
        host_keys = self._keys_on_host(keys, len(images))
        if not isinstance(images, Tensor | RaggedBatch):
            images = RaggedBatch.from_images(images)
        source_device = images.device if isinstance(images, Tensor) else images.pixels.device
        target = source_device if device is None else torch.device(device)
        if isinstance(images, Tensor):
            parts = _split_same_size(len(images), (images.shape[-2], images.shape[-1]))
        else:
            images, parts = images.to(target), self._split_ragged(images)
        with torch.autocast(target.type, enabled=False):  # autocast would use bf16 matmuls
            if len(parts) == 1:
                return self._process_rows(images, parts[0], host_keys, dtype, target)
            result = torch.empty(len(images), 3, *self.image_size, dtype=dtype, device=target)
            for rows in parts:
                part_keys = None if host_keys is None else host_keys[rows]
                part = self._process_rows(images, rows, part_keys, dtype, target)
                result[to_device(rows, target)] = part
        return result

    def _keys_on_host(self, keys: SampleKeys | Tensor | None, count: int) -> SampleKeys | None:
        """Return the keys as a uint64 array in host memory."""
        if keys is None:
            assert not self.is_random, f"'{self.transform_spec}' has random operations and no keys"
            return None
        array = keys.cpu().numpy() if isinstance(keys, Tensor) else np.asarray(keys)
        assert array.shape == (count,), f"{array.shape} keys for {count} images"
        return array.astype(np.uint64, copy=False)

    def _process_rows(
        self,
        images: Tensor | RaggedBatch,
        rows: IntArray,
        keys: SampleKeys | None,
        dtype: torch.dtype,
        device: torch.device,
    ) -> Tensor:
        """Process the images with indices `rows`. Returns: (b, 3, h, w), normalized."""
        if isinstance(images, RaggedBatch):
            images = images.select_rows(rows)
            if images.has_common_size.all():
                result = self._process_same_size(torch.stack(list(images)), keys, dtype)
            else:
                result = self._normalize(self._process_ragged(images, keys))
        else:
            chunk = images[rows[0] : rows[-1] + 1].to(device, non_blocking=True)
            result = self._process_same_size(chunk, keys, dtype)
        result = result.to(dtype)
        for position, role in enumerate(self._roles):
            if role == "erase":
                result = self._erase_rectangles(result, position, keys)
        return result

    def _process_same_size(
        self, images: Tensor, keys: SampleKeys | None, dtype: torch.dtype
    ) -> Tensor:
        """Process images of one size: (b, 3, H, W) uint8 to (b, 3, h, w), normalized."""
        assert images.dtype == torch.uint8, images.dtype
        assert images.shape[1] == 3, images.shape
        steps = self._plan_for((images.shape[-2], images.shape[-1])).steps
        is_normalized = False
        for step in steps:
            is_last = step is steps[-1]
            if not step.is_geometric:
                images = self._apply_pixel_operation(images.float(), step.positions[0], keys, None)
                continue
            rows, columns = self._compose_run(step, keys, len(images), images.device)
            images = apply_selection(images, rows, columns)
            if is_last and step.enlarges and not (rows.has_zero_rows or columns.has_zero_rows):
                images, is_normalized = self._normalize(images), True
            images = apply_matrices(images.to(dtype if is_last else torch.float32), rows, columns)
            if rows.overshoots or columns.overshoots:
                images = self._clamp_overshoot(images, is_normalized)
        return images if is_normalized else self._normalize(images)

    def _process_ragged(self, images: RaggedBatch, keys: SampleKeys | None) -> Tensor:
        """Process images of several sizes that share one execution order.

        Returns: (b, 3, h, w) float32 from 0 to 255.
        """
        sizes = images.sizes_B2
        canvas: Tensor | None = None
        for steps in zip(*(self._plan_for(size).steps for size in _as_tuples(sizes)), strict=True):
            if steps[0].is_geometric:
                if canvas is not None:
                    images = RaggedBatch.from_canvas(canvas, sizes)
                canvas = self._resample_run(images, steps, keys)
                sizes = np.array([step.output_size for step in steps])
                continue
            if canvas is None:
                canvas = resample_ragged(images, *map(RaggedAxisTransform, sizes.T))
            canvas = self._apply_pixel_operation(canvas, steps[0].positions[0], keys, sizes)
        return (
            resample_ragged(images, *map(RaggedAxisTransform, sizes.T))
            if canvas is None
            else canvas
        )

    def _resample_run(
        self, images: RaggedBatch, steps: Sequence[PlanStep], keys: SampleKeys | None
    ) -> Tensor:
        """Apply one geometric step to images of several sizes.

        Args:
            steps: the step of each image; sizes differ, operations are the same.
        Returns: (b, 3, h, w) float32.
        """
        rows, columns = map(RaggedAxisTransform, images.sizes_B2.T)
        sizes = np.array([step.output_sizes for step in steps])  # after each operation
        for index, position in enumerate(steps[0].positions):
            call = self._calls[position]
            if rows.is_resized and call.name in ("resize", "random_resized_crop"):
                current_sizes = np.stack([rows.length, columns.length], axis=1)
                images = RaggedBatch.from_canvas(
                    resample_ragged(images, rows, columns), current_sizes
                )
                rows, columns = map(RaggedAxisTransform, current_sizes.T)
            rng = SampleRNG(
                keys if keys is not None else np.zeros(len(images), np.uint64), position
            )
            self._add_geometric_operation(
                call, rows, columns, rng, (sizes[:, index, 0], sizes[:, index, 1])
            )
        canvas = resample_ragged(images, rows, columns)
        return canvas.clamp_(0, 255) if rows.overshoots or columns.overshoots else canvas

    def _split_ragged(self, images: RaggedBatch) -> list[IntArray]:
        """Split images of several sizes into parts of one execution order that fit in memory.

        An image much larger than the others gets its own part, because the canvas and weights of a
        part have the size of its largest image. Images of size `common_size`, if any, come first.

        Returns: the image indices of each part.
        """
        sizes_B2, common_rows = images.sizes_B2, np.flatnonzero(images.has_common_size)
        parts = [
            common_rows[rows]
            for rows in _split_same_size(len(common_rows), images.common_size or (1, 1))
        ]
        groups: dict[tuple[int, ...], list[int]] = {}
        canvas_sizes = np.zeros_like(sizes_B2)  # largest intermediate canvas of each image
        for row, size in enumerate(_as_tuples(sizes_B2)):
            if size == images.common_size:
                continue
            plan = self._plan_for(size)
            groups.setdefault(plan.order, []).append(row)
            step_sizes = [step.input_size for step in plan.steps if not step.is_geometric]
            step_sizes += [
                size_HW
                for step in plan.steps
                if step.is_geometric
                for size_HW in step.output_sizes[:-1]
            ]
            canvas_sizes[row] = np.max([(0, 0), *step_sizes], axis=0)
        for group in groups.values():
            part: list[int] = []
            for row in sorted(group, key=lambda row: sizes_B2[row].max()):
                if (
                    part
                    and _estimate_num_values(sizes_B2[[*part, row]], canvas_sizes[[*part, row]])
                    > _MAX_CHUNK_VALUES
                ):
                    parts.append(np.array(part))
                    part = []
                part.append(row)
            parts.append(np.array(sorted(part)))
        return parts

    def _compose_run(
        self, step: PlanStep, keys: SampleKeys | None, count: int, device: torch.device
    ) -> tuple[AxisTransform, AxisTransform]:
        """Fuse the operations of a geometric step into one transform per axis."""
        rows = AxisTransform(step.input_size[0], device)
        columns = AxisTransform(step.input_size[1], device)
        for position in step.positions:
            rng = SampleRNG(keys if keys is not None else np.zeros(count, np.uint64), position)
            call = self._calls[position]
            size = size_after_operation(call, (rows.length, columns.length), self.image_size)
            self._add_geometric_operation(call, rows, columns, rng, size)
        return rows, columns

    def _add_geometric_operation(
        self,
        call: TransformCall,
        rows: _AnyAxis,
        columns: _AnyAxis,
        rng: SampleRNG,
        output_size: tuple[Any, Any],
    ) -> None:
        """Add one geometric operation to the transforms of both axes.

        Args:
            output_size: (height, width) after the operation; each is an int or (b,).
        """
        arguments = call.arguments
        size = (rows.length, columns.length)
        height, width = output_size
        interpolation = arguments.get("interpolation") or self.interpolation
        if call.name == "resize":
            rows.resize(height, interpolation)
            columns.resize(width, interpolation)
        elif call.name == "flip":
            columns.flip(rng.bernoulli(arguments["p"]))
        elif call.name == "vertical_flip":
            rows.flip(rng.bernoulli(arguments["p"]))
        elif call.name == "center_crop":
            rows.crop(center_crop_start(size[0], height), height)
            columns.crop(center_crop_start(size[1], width), width)
        elif call.name == "random_crop":
            padding = arguments["padding"]
            margin = (size[0] + 2 * padding - height, size[1] + 2 * padding - width)
            top, left = draw_crop_offsets(rng, margin)
            rows.crop(top - padding, height)
            columns.crop(left - padding, width)
        else:
            top, left, heights, widths = draw_crop_windows(
                rng, size, arguments["scale"], arguments["ratio"]
            )
            rows.resize(height, interpolation, starts=top, lengths=heights)
            columns.resize(width, interpolation, starts=left, lengths=widths)

    def _apply_pixel_operation(
        self, images: Tensor, position: int, keys: SampleKeys | None, sizes: IntArray | None
    ) -> Tensor:
        """Apply one pixel operation to float32 images, which may be overwritten.

        Args:
            position: index of the operation in the transform spec.
            sizes: (b, 2) image sizes if the images share a canvas, else None; see
                finetune.transforms.color.
        """
        assert keys is not None  # all pixel operations are random
        call, rng = self._calls[position], SampleRNG(keys, position)
        if call.name == "color_jitter":
            return color_jitter(images, rng, sizes=sizes, **call.arguments)
        if call.name == "rand_augment":
            return rand_augment(images, rng, sizes=sizes, **call.arguments)
        if call.name == "corrupt":
            return corrupt(images, keys, sizes=sizes, **call.arguments)
        degrees = call.arguments["degrees"]
        low, high = degrees if isinstance(degrees, tuple) else (-degrees, degrees)
        angles = rng.uniform(1, low, high)[:, 0]
        return warp_affine(
            images, rotation_matrices(angles), call.arguments["interpolation"], sizes
        )

    def _erase_rectangles(self, images: Tensor, position: int, keys: SampleKeys | None) -> Tensor:
        """Apply the random_erasing at `position` in the spec."""
        assert keys is not None
        arguments, rng = self._calls[position].arguments, SampleRNG(keys, position)
        is_erased = rng.bernoulli(arguments["p"])
        height, width = images.shape[2:]
        boxes = draw_erase_boxes(rng, (height, width), arguments["scale"], arguments["ratio"])
        rows = np.flatnonzero(is_erased)
        mask = box_mask([side[rows] for side in boxes], (height, width), images.device)
        index = to_device(rows, images.device)
        images[index] = images[index].masked_fill_(mask, arguments["value"])
        return images

    def mix_batch(
        self,
        images_BCHW: Tensor,
        targets_BK: Tensor,
        keys: SampleKeys | Tensor,
        partner_rows: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Apply the mixup and cutmix of the spec; see `finetune.transforms.mixing.mix_batch`.

        Args:
            images_BCHW: normalized images.
            targets_BK: float targets, one distribution over the classes per row.
            keys: (B,) the same keys as for `__call__`.
            partner_rows: (B,) int64 index of the row to mix into each row.
        Returns: new images (B, C, H, W) and targets (B, K).
        """
        host_keys = self._keys_on_host(keys, len(images_BCHW))
        calls = [
            (position, call)
            for position, (call, role) in enumerate(zip(self._calls, self._roles, strict=True))
            if role == "mix"
        ]
        assert host_keys is not None
        assert calls, "the spec has neither mixup nor cutmix"
        return mix_batch(
            images_BCHW, targets_BK, host_keys, partner_rows, calls, num_calls=len(self._calls)
        )

    def format_plan(self, size: HeightWidth) -> str:
        """Format the execution plan for images of one size, one line per step."""
        return self._plan_for(size).format_steps(self._calls)

    def _plan_for(self, size: HeightWidth) -> ExecutionPlan:
        if size not in self._plans:
            if len(self._plans) >= _MAX_CACHED_PLANS:
                self._plans.clear()
            self._plans[size] = plan_execution(
                self._calls, size, self.image_size, self.transform_spec
            )
        return self._plans[size]

    def _normalize(self, images: Tensor) -> Tensor:
        """Compute (x / 255 - mean) / std in float32, in one pass over the pixels."""
        device = images.device
        if device not in self._normalization_on:
            self._normalization_on[device] = self._scale.to(device), self._shift.to(device)
        scale, shift = self._normalization_on[device]
        return torch.addcmul(shift, images.float(), scale)

    def _clamp_overshoot(self, images: Tensor, is_normalized: bool) -> Tensor:
        """Clamp to the range of uint8 pixels, which bicubic and Lanczos filters can exceed."""
        if not is_normalized:
            return images.clamp_(0, 255)
        black, white = self._shift.flatten(), (255 * self._scale + self._shift).flatten()
        for channel, bounds in enumerate(zip(black.tolist(), white.tolist(), strict=True)):
            images[:, channel].clamp_(*bounds)  # tensor bounds would take five times as long
        return images


def _split_same_size(count: int, size: HeightWidth) -> list[IntArray]:
    """Split images of one size into parts whose float32 pixels fit in memory.

    The split does not change results, because the result of a sample does not depend on its batch.
    """
    max_images = max(1, _MAX_CHUNK_VALUES // (3 * size[0] * size[1]))
    return [
        np.arange(start, min(start + max_images, count)) for start in range(0, count, max_images)
    ]


def _estimate_num_values(sizes_b2: IntArray, canvas_sizes_b2: IntArray) -> int:
    """Estimate the largest number of values in one buffer: pixels, canvas or filter weights."""
    canvas, weights = 3 * canvas_sizes_b2.max(axis=0).prod(), 16 * sizes_b2.max()
    return max(3 * int(sizes_b2.prod(axis=1).sum()), len(sizes_b2) * int(max(canvas, weights)))


def _as_tuples(sizes_B2: IntArray) -> list[HeightWidth]:
    return [(height, width) for height, width in sizes_B2.tolist()]
