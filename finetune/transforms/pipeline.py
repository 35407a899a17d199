"""Batched image augmentation: apply a transform spec to uint8 images on their device.

Every operation processes a whole batch, with parameters drawn per sample. The random numbers are a
pure function of (sample key, position of the operation in the spec, draw index), so a sample gets
the same augmentation in any batch, on any rank and after a resume.

Operations run in the written order, and consecutive geometric operations (resize, crops, flips) are
fused into one resampling (finetune.transforms.execution_plan). Normalization, random_erasing, mixup
and cutmix come last.

Between operations, pixel values are float32 from 0 to 255 and are not rounded.

Batches of one image size are resampled by matrix products, batches of several sizes by weighted
sums over the pixels of each image (finetune.transforms.ragged). The number of kernel launches does
not depend on the image sizes, as long as the operations run in the same order.
"""

# B batch, b samples of one chunk of the batch, C channels, H W source pixels, h w target pixels,
# K classes

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from finetune.transforms.auto_augment import (
    augmix,
    auto_augment,
    rand_augment,
    three_augment,
    trivial_augment,
)
from finetune.transforms.blur import gaussian_blur
from finetune.transforms.color import color_jitter, grayscale
from finetune.transforms.corruption import corrupt
from finetune.transforms.execution_plan import (
    HeightWidth,
    PlanStep,
    check_output_size,
    plan_execution,
)
from finetune.transforms.geometry import (
    box_mask,
    center_crop_start,
    rotation_matrices,
    warp_affine,
)
from finetune.transforms.mixing import mix_batch
from finetune.transforms.ragged import RaggedBatch, resample_ragged, unpack
from finetune.transforms.resample import AxisTransform, resample, select_pixels
from finetune.transforms.sample_rng import (
    SampleKeys,
    SampleRNG,
    draw_crop_offsets,
    draw_crop_windows,
    draw_erase_boxes,
    sample_keys,
    to_device,
)
from finetune.transforms.spec_parser import parse_transform_spec

__all__ = ["Pipeline", "sample_keys"]

_MAX_CACHED_PLANS = 4096  # one per image size
_AUTO_AUGMENTS: dict[str, Callable[..., Tensor]] = {
    "rand_augment": rand_augment,
    "trivial_augment": trivial_augment,
    "auto_augment": auto_augment,
    "augmix": augmix,
    "three_augment": three_augment,
}

IntArray = npt.NDArray[np.int64]


class Pipeline:
    """Applies a transform spec to batches of images, for one model.

    Args:
        transform_spec: the operations; see finetune.transforms.spec_parser.
        image_size: (height, width) that the model expects, in pixels.
        mean, std: mean and standard deviation of each channel, for pixel values from 0 to 1.
        interpolation: default filter of resizes: nearest, bilinear, bicubic or lanczos.
        train: True rejects `corrupt`; False rejects all random operations except `corrupt`.
        decode_size: the recipe's data.decode_size; only stored, for the image decoder.
        max_part_values: maximum number of values in one buffer; larger batches are split. The
            default is 256 MiB in float32.
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
        max_part_values: int = 2**26,
    ) -> None:
        self.transform_spec = transform_spec
        self.decode_size = decode_size
        self.max_part_values = max_part_values
        self.image_size = (int(image_size[0]), int(image_size[1]))
        self.interpolation = interpolation
        calls = parse_transform_spec(transform_spec, train=train)
        self._calls = calls
        self._roles = [call.operation.role for call in calls]
        self.is_random = any(call.operation.is_random for call in calls)
        self.has_mixing = "mix" in self._roles
        self._scale = torch.tensor([1 / (255 * s) for s in std]).view(3, 1, 1)
        self._shift = torch.tensor([-m / s for m, s in zip(mean, std, strict=True)]).view(3, 1, 1)
        self._mean_color = torch.tensor([float(round(255 * m)) for m in mean]).view(3, 1, 1)
        # {device: scale and shift on that device}
        self._normalization_on: dict[torch.device, tuple[Tensor, Tensor]] = {}
        self._plans: dict[HeightWidth, list[PlanStep]] = {}
        check_output_size(calls, self.image_size, transform_spec)

    @property
    def effective_default_interpolation(self) -> str | None:
        """The default filter; None if the spec sets the filter of every resize."""
        is_used = any(
            "interpolation" in call.arguments and call.arguments["interpolation"] is None
            for call in self._calls
        )
        return self.interpolation if is_used else None

    def __call__(
        self,
        images: Tensor | RaggedBatch | Sequence[Tensor],
        *,
        keys: SampleKeys | Tensor | None = None,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
    ) -> Tensor:
        """Augment, resize and normalize a batch, always with autocast disabled.

        Args:
            images: uint8 images: a tensor (B, 3, H, W) if all images of the dataset have one size,
                else a `RaggedBatch` or a list of tensors (3, H_i, W_i). The result of a sample is
                bit-identical in every batch; between a tensor and the other two formats, it is
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
        target = images.device if device is None else torch.device(device)
        if isinstance(images, RaggedBatch):
            images, parts = images.to(target), self._split_ragged(images)
        else:
            parts = self._split_same_size(np.arange(len(images)), images.shape[2:])
        with torch.autocast(target.type, enabled=False):  # autocast would use bf16 matmuls
            if len(parts) == 1:
                return self._process_part(images, parts[0], host_keys, dtype, target)
            result = torch.empty(len(images), 3, *self.image_size, dtype=dtype, device=target)
            for rows in parts:
                part = self._process_part(images, rows, host_keys[rows], dtype, target)
                result[to_device(rows, target)] = part
        return result

    def _keys_on_host(self, keys: SampleKeys | Tensor | None, count: int) -> SampleKeys:
        """Return the keys as a uint64 array in host memory; zeros if nothing is random."""
        if keys is None:
            assert not self.is_random, f"'{self.transform_spec}' has random operations and no keys"
            return np.zeros(count, np.uint64)
        array = keys.cpu().numpy() if isinstance(keys, Tensor) else np.asarray(keys)
        assert array.shape == (count,), f"{array.shape} keys for {count} images"
        return array.astype(np.uint64, copy=False)

    def _split_same_size(self, rows: IntArray, size: Sequence[int]) -> list[IntArray]:
        """Split images of one size into parts whose float32 pixels fit in memory.

        The split does not change results, because the result of a sample does not depend on its
        batch.
        """
        max_images = max(1, self.max_part_values // (3 * size[0] * size[1]))
        return [rows[start : start + max_images] for start in range(0, len(rows), max_images)]

    def _split_ragged(self, images: RaggedBatch) -> list[IntArray]:
        """Split images of several sizes into parts that fit in memory.

        The images of a part share one execution order. An image much larger than the others gets
        its own part, because the largest image of a part determines the size of its canvas and
        resampling weights. Images of size `common_size`, if any, come first.

        Returns: the image indices of each part.
        """
        is_common, parts = images.has_common_size, []
        if images.common_size is not None:
            parts = self._split_same_size(np.flatnonzero(is_common), images.common_size)
        sizes_B2 = images.sizes_B2
        groups: dict[tuple[int, ...], list[int]] = {}
        canvas_sizes = np.zeros_like(sizes_B2)  # largest intermediate canvas of each image
        for row in np.flatnonzero(~is_common).tolist():
            steps = self._plan_for(sizes_B2[row])
            order = tuple(position for step in steps for position in step.positions)
            groups.setdefault(order, []).append(row)
            sizes = [
                step.sizes[step is steps[0] : -1] if step.is_geometric else step.sizes
                for step in steps
            ]
            canvas_sizes[row] = np.max([(0, 0), *itertools.chain(*sizes)], axis=0)
        for group in groups.values():
            part: list[int] = []
            for row in sorted(group, key=lambda row: sizes_B2[row].max()):
                grown = [*part, row]
                num_values = _estimate_num_values(sizes_B2[grown], canvas_sizes[grown])
                if part and num_values > self.max_part_values:
                    parts.append(np.array(part))
                    grown = [row]
                part = grown
            parts.append(np.array(sorted(part)))
        return parts

    def _process_part(
        self,
        images: Tensor | RaggedBatch,
        rows: IntArray,
        keys: SampleKeys,
        dtype: torch.dtype,
        device: torch.device,
    ) -> Tensor:
        """Process the images with indices `rows`, which share one execution order.

        Returns: (b, 3, h, w), normalized.
        """
        if isinstance(images, Tensor):
            images = images[rows[0] : rows[-1] + 1].to(device, non_blocking=True)
        else:
            images = images.select_rows(rows)
            if images.has_common_size.all():
                images = torch.stack([images[row] for row in range(len(images))])
        result = self._run_steps(images, keys, dtype).to(dtype)
        for position, role in enumerate(self._roles):
            if role == "erase":
                result = self._erase_rectangles(result, position, keys)
        return result

    def _run_steps(
        self, images: Tensor | RaggedBatch, keys: SampleKeys, dtype: torch.dtype
    ) -> Tensor:
        """Apply all steps of the execution plan, and normalize.

        Between the steps, images of several sizes share a canvas (b, 3, H, W); `sizes` has the
        height and width of each.

        Returns: (b, 3, h, w), of `dtype` or float32.
        """
        if isinstance(images, Tensor):
            sizes, plans = None, [self._plan_for(images.shape[2:])]
        else:
            sizes, plans = images.sizes_B2, [self._plan_for(size) for size in images.sizes_B2]
        is_normalized = False
        for index, step in enumerate(plans[0]):
            if not step.is_geometric:
                images = unpack(images) if isinstance(images, RaggedBatch) else images.float()
                images = self._apply_pixel_operation(images, step.positions[0], keys, sizes)
                continue
            rows, columns = self._fuse_operations([plan[index] for plan in plans], keys, sizes)
            fill = self._calls[step.positions[0]].arguments.get("fill")
            if sizes is not None and isinstance(images, Tensor):
                images = RaggedBatch.from_canvas(images, sizes)
            if isinstance(images, RaggedBatch):
                images = resample_ragged(images, rows, columns)
                sizes = np.stack([rows.length, columns.length], axis=1)
            else:
                images = select_pixels(images, rows, columns)
                is_last = step is plans[0][-1]
                pads = fill is not None or rows.pads_result or columns.pads_result
                if is_last and step.enlarges and not pads:
                    images, is_normalized = self._normalize(images), True  # cheap before enlarging
                images = resample(images.to(dtype if is_last else torch.float32), rows, columns)
            if rows.overshoots or columns.overshoots:
                images = self._clamp_overshoot(images, is_normalized)
            if fill is not None:
                pad_rows, pad_columns = (
                    axis.selections[-1].indices(images.device) < 0 for axis in (rows, columns)
                )
                is_padding = pad_rows[:, None, :, None] | pad_columns[:, None, None, :]
                images = torch.where(is_padding, self._mean_color.to(images.device), images)
        if isinstance(images, RaggedBatch):
            images = unpack(images)
        return images if is_normalized else self._normalize(images)

    def _fuse_operations(
        self, steps: Sequence[PlanStep], keys: SampleKeys, image_sizes: IntArray | None
    ) -> tuple[AxisTransform, AxisTransform]:
        """Fuse the operations of a geometric step into one transform per axis.

        Args:
            steps: the step of each image, with the same operations at different sizes; or one step
                for all images.
            image_sizes: (b, 2) image sizes; None if all images have one size.
        Returns: the transforms of the rows and of the columns.
        """
        # heights, widths: before the step, then after each operation
        heights, widths = np.array([step.sizes for step in steps]).T
        if image_sizes is None:
            heights, widths = heights[:, 0], widths[:, 0]
        rows, columns = AxisTransform(heights[0]), AxisTransform(widths[0])
        for position, height, width in zip(
            steps[0].positions, heights[1:], widths[1:], strict=True
        ):
            call, rng = self._calls[position], SampleRNG(keys, position)
            arguments = call.arguments
            interpolation = arguments.get("interpolation") or self.interpolation
            if call.name == "resize":
                rows.resize(height, interpolation)
                columns.resize(width, interpolation)
            elif call.name == "flip":
                columns.flip(rng.bernoulli(arguments["p"]))
            elif call.name == "vertical_flip":
                rows.flip(rng.bernoulli(arguments["p"]))
            elif call.name == "center_crop":
                rows.crop(center_crop_start(rows.length, height), height)
                columns.crop(center_crop_start(columns.length, width), width)
            elif call.name == "random_crop":
                padding = arguments["padding"]
                margin = rows.length + 2 * padding - height, columns.length + 2 * padding - width
                top, left = draw_crop_offsets(rng, margin)
                rows.crop(top, height, padding=padding)
                columns.crop(left, width, padding=padding)
            else:
                top, left, window_heights, window_widths = draw_crop_windows(
                    rng, (rows.length, columns.length), arguments["scale"], arguments["ratio"]
                )
                rows.resize(height, interpolation, starts=top, lengths=window_heights)
                columns.resize(width, interpolation, starts=left, lengths=window_widths)
        return rows, columns

    def _apply_pixel_operation(
        self, images: Tensor, position: int, keys: SampleKeys, sizes: IntArray | None
    ) -> Tensor:
        """Apply one pixel operation to float32 images, which may be overwritten.

        Args:
            position: index of the operation in the transform spec.
            sizes: (b, 2) image sizes if the images share a canvas, else None; see
                finetune.transforms.color.
        """
        call, rng = self._calls[position], SampleRNG(keys, position)
        if call.name == "color_jitter":
            return color_jitter(images, rng, sizes=sizes, **call.arguments)
        if call.name in _AUTO_AUGMENTS:
            return _AUTO_AUGMENTS[call.name](images, rng, sizes=sizes, **call.arguments)
        if call.name == "grayscale":
            return grayscale(images, rng.bernoulli(call.arguments["p"]))
        if call.name == "gaussian_blur":
            is_blurred, sigma = rng.bernoulli(call.arguments["p"]), call.arguments["sigma"]
            return gaussian_blur(images, is_blurred, rng, sigma=sigma, sizes=sizes)
        if call.name == "corrupt":
            return corrupt(images, keys, sizes=sizes, **call.arguments)
        degrees = call.arguments["degrees"]
        low, high = degrees if isinstance(degrees, tuple) else (-degrees, degrees)
        angles = rng.uniform(1, low, high)[:, 0]
        return warp_affine(
            images, rotation_matrices(angles), call.arguments["interpolation"], sizes
        )

    def _erase_rectangles(self, images: Tensor, position: int, keys: SampleKeys) -> Tensor:
        """Apply the random_erasing at `position` in the spec."""
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
        assert calls, "the spec has neither mixup nor cutmix"
        return mix_batch(
            images_BCHW, targets_BK, host_keys, partner_rows, calls, num_calls=len(self._calls)
        )

    def _plan_for(self, size: Sequence[int] | IntArray) -> list[PlanStep]:
        """Return the execution plan for images of one size (height, width)."""
        height_width = (int(size[0]), int(size[1]))
        if height_width not in self._plans:
            if len(self._plans) >= _MAX_CACHED_PLANS:
                self._plans.clear()
            self._plans[height_width] = plan_execution(
                self._calls, height_width, self.image_size, self.transform_spec
            )
        return self._plans[height_width]

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


def _estimate_num_values(sizes_b2: IntArray, canvas_sizes_b2: IntArray) -> int:
    """Estimate the largest number of values in one buffer: pixels, canvas or filter weights."""
    canvas, weights = 3 * canvas_sizes_b2.max(axis=0).prod(), 16 * sizes_b2.max()
    return max(3 * int(sizes_b2.prod(axis=1).sum()), len(sizes_b2) * int(max(canvas, weights)))
