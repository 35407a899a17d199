"""Batched image augmentation: a pipeline sentence applied to uint8 images on their own device.

Every operation works on a whole batch with parameters drawn per sample. The draws are a pure
function of (key, place of the operation in the sentence, draw number), so a sample is augmented
alike whatever the batch, the rank or a resume.

Order. Geometric operations in a row (resize, crops, flips) are composed and cost one resampling. A
colour operation or rotation that is written after such a run is moved before it where the run
enlarges the image: the same work on fewer pixels. Where the run keeps the size or shrinks, the
order is the one written. `Pipeline.describe` prints the order for a given source size. A moved
operation sees the source: contrast takes the mean grey of the whole source even where a crop
follows, a rotation turns about the source's centre and before a change of aspect ratio, and its
nearest pixels are the source's. Normalisation, random_erasing, mixup and cutmix follow.

Pixel values stay float32 from 0 to 255 between operations and are never rounded.

Images of one size are resampled by products of matrices, those of a set of several sizes by sums of
their own pixels alone (finetune.transforms.ragged): the number of kernels is the same for any sizes
whose operations run in one order.
"""

# B batch, b samples of one chunk, C channels, H W source pixels, h w target pixels, K classes

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from finetune.transforms.color import color_jitter, rand_augment
from finetune.transforms.corruption import corrupt
from finetune.transforms.geometry import Axis, central_start, multiply, rotation, select, warp
from finetune.transforms.grammar import Call, parse
from finetune.transforms.plan import Plan, Size, Step, check_end, make_plan, size_after
from finetune.transforms.ragged import Ragged, Span, resample
from finetune.transforms.random import (
    Draws,
    Keys,
    crop_offsets,
    crop_windows,
    erase_rectangles,
    mixed_rectangles,
    on_device,
    sample_keys,
)

__all__ = ["Pipeline", "sample_keys"]

_CHUNK_VALUES = 2**26  # 256 MiB as float32
_MOST_PLANS = 4096  # sizes that are kept in mind

Integers = npt.NDArray[np.int64]
_Side = Axis | Span


class Pipeline:
    """A sentence made ready for one model.

    Args:
        sentence: see finetune.transforms.grammar.
        image_size: (height, width) that the model expects, in pixels.
        mean, std: per channel, for pixel values from 0 to 1.
        interpolation: of resizes that name none: nearest, bilinear, bicubic or lanczos.
        train: False refuses random operations but `corrupt`, True refuses that.
        decode_size: for the decoder of its images; see `decode`.
    Raises: RecipeError if the sentence is wrong or cannot end at image_size.
    """

    def __init__(
        self,
        sentence: str,
        *,
        image_size: Size,
        mean: Sequence[float],
        std: Sequence[float],
        interpolation: str = "bicubic",
        train: bool = True,
        decode_size: int | None = None,
    ) -> None:
        self.sentence = sentence
        self.decode_size = decode_size
        self.image_size = (int(image_size[0]), int(image_size[1]))
        self.interpolation = interpolation
        calls = parse(sentence, train=train)
        self._calls = calls
        self._roles = [call.operation.role for call in calls]
        self.random = any(call.operation.random for call in calls)
        self.mixes = "mix" in self._roles
        self._scale = torch.tensor([1 / (255 * s) for s in std]).view(3, 1, 1)
        self._shift = torch.tensor([-m / s for m, s in zip(mean, std, strict=True)]).view(3, 1, 1)
        self._affine: dict[torch.device, tuple[Tensor, Tensor]] = {}  # both, where they are needed
        self._plans: dict[Size, Plan] = {}
        check_end(calls, self.image_size, sentence)

    def __call__(
        self,
        images: Sequence[Tensor] | Tensor,
        *,
        keys: Keys | Tensor | None = None,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
    ) -> Tensor:
        """Augment, resize and normalise a batch, alike under autocast and without it.

        Args:
            images: uint8: (B, 3, H, W) of a set whose images have one size; else `Ragged`, or
                (3, H_i, W_i) each. A sample's result is the same in every batch of its kind, and
                within float32's rounding in the other kind.
            keys: (B,) from sample_keys; only a pipeline without random operations goes without.
            dtype: of the resampling of images of one size, and of the result.
            device: where to work; None: where the images are.
        Returns: (B, 3, h, w) of dtype, normalised.
        Raises: RecipeError if the images cannot end at the model's size.
        """
        numbers = self._numbers(keys, len(images))
        if not isinstance(images, Tensor | Ragged):
            images = Ragged.of(images)
        here = images.device if isinstance(images, Tensor) else images.pixels.device
        target = here if device is None else torch.device(device)
        if isinstance(images, Tensor):
            parts = _chunks(len(images), (images.shape[-2], images.shape[-1]))
        else:
            images, parts = images.to(target), self._ragged_chunks(images)
        with torch.autocast(target.type, enabled=False):  # its products would be of bf16
            if len(parts) == 1:
                return self._part(images, parts[0], numbers, dtype, target)
            result = torch.empty(len(images), 3, *self.image_size, dtype=dtype, device=target)
            for rows in parts:
                chosen = None if numbers is None else numbers[rows]
                made = self._part(images, rows, chosen, dtype, target)
                result[on_device(rows, target)] = made
        return result

    def _numbers(self, keys: Keys | Tensor | None, count: int) -> Keys | None:
        """Return the keys as uint64 on the host."""
        if keys is None:
            assert not self.random, f"'{self.sentence}' has random operations and no keys"
            return None
        array = keys.cpu().numpy() if isinstance(keys, Tensor) else np.asarray(keys)
        assert array.shape == (count,), f"{array.shape} keys for {count} images"
        return array.astype(np.uint64, copy=False)

    def _part(
        self,
        images: Tensor | Ragged,
        rows: Integers,
        keys: Keys | None,
        dtype: torch.dtype,
        device: torch.device,
    ) -> Tensor:
        """Process some of the images: (b, 3, h, w)."""
        if isinstance(images, Ragged):
            images = images.part(rows)
            if images.are_usual.all():
                made = self._group(torch.stack(list(images)), keys, dtype)
            else:
                made = self._normalise(self._several(images, keys))
        else:
            some = images[rows[0] : rows[-1] + 1].to(device, non_blocking=True)
            made = self._group(some, keys, dtype)
        made = made.to(dtype)
        for position, role in enumerate(self._roles):
            if role == "erase":
                made = self._erase(made, position, keys)
        return made

    def _group(self, images: Tensor, keys: Keys | None, dtype: torch.dtype) -> Tensor:
        """Process images of one size: (b, 3, H, W) uint8 to (b, 3, h, w), normalised."""
        assert images.dtype == torch.uint8, images.dtype
        assert images.shape[1] == 3, images.shape
        steps = self._plan((images.shape[-2], images.shape[-1])).steps
        normalised = False
        for step in steps:
            last = step is steps[-1]
            if not step.geometric:
                images = self._pixels(images.float(), step.positions[0], keys, None)
                continue
            rows, columns = self._axes(step, keys, len(images), images.device)
            images = select(images, rows, columns)
            if last and step.enlarges and not (rows.gaps or columns.gaps):
                images, normalised = self._normalise(images), True
            images = multiply(images.to(dtype if last else torch.float32), rows, columns)
            if rows.overshoots or columns.overshoots:
                images = self._clamp(images, normalised)
        return images if normalised else self._normalise(images)

    def _several(self, images: Ragged, keys: Keys | None) -> Tensor:
        """Process images of several sizes whose plans have one order: levels (b, 3, h, w)."""
        sizes = images.sizes_B2
        canvas: Tensor | None = None
        for steps in zip(*(self._plan(size).steps for size in _tuples(sizes)), strict=True):
            if steps[0].geometric:
                if canvas is not None:
                    images = Ragged.of_canvas(canvas, sizes)
                canvas = self._windows(images, steps, keys)
                sizes = np.array([step.after for step in steps])
                continue
            if canvas is None:
                canvas = resample(images, *map(Span, sizes.T))
            canvas = self._pixels(canvas, steps[0].positions[0], keys, sizes)
        return resample(images, *map(Span, sizes.T)) if canvas is None else canvas

    def _windows(self, images: Ragged, steps: Sequence[Step], keys: Keys | None) -> Tensor:
        """Resample images of several sizes by a run: float32 (b, 3, h, w)."""
        rows, columns = map(Span, images.sizes_B2.T)
        sizes = np.array([step.sizes for step in steps])  # after each operation
        for number, position in enumerate(steps[0].positions):
            call = self._calls[position]
            if rows.resized and call.name in ("resize", "random_resized_crop"):
                between = np.stack([rows.length, columns.length], axis=1)
                images = Ragged.of_canvas(resample(images, rows, columns), between)
                rows, columns = map(Span, between.T)
            draws = Draws(keys if keys is not None else np.zeros(len(images), np.uint64), position)
            self._geometry(call, rows, columns, draws, (sizes[:, number, 0], sizes[:, number, 1]))
        canvas = resample(images, rows, columns)
        return canvas.clamp_(0, 255) if rows.overshoots or columns.overshoots else canvas

    def _ragged_chunks(self, images: Ragged) -> list[Integers]:
        """Split images of several sizes: one order of operations each, within memory.

        One image that is much larger than the others comes by itself, where all would otherwise
        need a canvas, or weights, of its size. Those of the usual size, if any, come first.
        """
        sizes_B2, usual = images.sizes_B2, np.flatnonzero(images.are_usual)
        parts = [usual[rows] for rows in _chunks(len(usual), images.usual or (1, 1))]
        groups: dict[tuple[int, ...], list[int]] = {}
        rooms = np.zeros_like(sizes_B2)  # of the canvases between the first step and the last
        for row, size in enumerate(_tuples(sizes_B2)):
            if size == images.usual:
                continue
            plan = self._plan(size)
            groups.setdefault(plan.order, []).append(row)
            between = [step.before for step in plan.steps if not step.geometric]
            between += [side for step in plan.steps if step.geometric for side in step.sizes[:-1]]
            rooms[row] = np.max([(0, 0), *between], axis=0)
        for group in groups.values():
            part: list[int] = []
            for row in sorted(group, key=lambda row: sizes_B2[row].max()):
                if part and _values(sizes_B2[[*part, row]], rooms[[*part, row]]) > _CHUNK_VALUES:
                    parts.append(np.array(part))
                    part = []
                part.append(row)
            parts.append(np.array(sorted(part)))
        return parts

    def _axes(
        self, step: Step, keys: Keys | None, count: int, device: torch.device
    ) -> tuple[Axis, Axis]:
        """Compose a run of geometric operations into one row and one column axis."""
        rows, columns = Axis(step.before[0], device), Axis(step.before[1], device)
        for position in step.positions:
            draws = Draws(keys if keys is not None else np.zeros(count, np.uint64), position)
            call = self._calls[position]
            size = size_after(call, (rows.length, columns.length), self.image_size)
            self._geometry(call, rows, columns, draws, size)
        return rows, columns

    def _geometry(
        self, call: Call, rows: _Side, columns: _Side, draws: Draws, after: tuple[Any, Any]
    ) -> None:
        """Add one geometric operation to both axes, or to both sides of images of several sizes.

        Args:
            after: (height, width) that it leads to.
        """
        arguments = call.arguments
        size = (rows.length, columns.length)
        height, width = after
        kernel = arguments.get("interpolation") or self.interpolation
        if call.name == "resize":
            rows.resize(height, kernel)
            columns.resize(width, kernel)
        elif call.name == "flip":
            columns.flip(draws.chance(arguments["p"]))
        elif call.name == "vertical_flip":
            rows.flip(draws.chance(arguments["p"]))
        elif call.name == "center_crop":
            rows.crop(central_start(size[0], height), height)
            columns.crop(central_start(size[1], width), width)
        elif call.name == "random_crop":
            pad = arguments["padding"]
            spare = (size[0] + 2 * pad - height, size[1] + 2 * pad - width)
            top, left = crop_offsets(draws, spare)
            rows.crop(top - pad, height)
            columns.crop(left - pad, width)
        else:
            top, left, heights, widths = crop_windows(
                draws, size, arguments["scale"], arguments["ratio"]
            )
            rows.resize(height, kernel, starts=top, lengths=heights)
            columns.resize(width, kernel, starts=left, lengths=widths)

    def _pixels(
        self, images: Tensor, position: int, keys: Keys | None, sizes: Integers | None
    ) -> Tensor:
        """Apply one operation on pixels to float32 images, which may be overwritten.

        Args:
            sizes: (b, 2) of images of several sizes; see finetune.transforms.color.
        """
        assert keys is not None  # all of these operations are random
        call, draws = self._calls[position], Draws(keys, position)
        if call.name == "color_jitter":
            return color_jitter(images, draws, sizes=sizes, **call.arguments)
        if call.name == "rand_augment":
            return rand_augment(images, draws, sizes=sizes, **call.arguments)
        if call.name == "corrupt":
            return corrupt(images, keys, sizes=sizes, **call.arguments)
        degrees = call.arguments["degrees"]
        low, high = degrees if isinstance(degrees, tuple) else (-degrees, degrees)
        angles = draws.uniform(1, low, high)[:, 0]
        return warp(images, rotation(angles), call.arguments["interpolation"], sizes)

    def _erase(self, images: Tensor, position: int, keys: Keys | None) -> Tensor:
        """Overwrite a random rectangle of some samples."""
        assert keys is not None
        arguments, draws = self._calls[position].arguments, Draws(keys, position)
        taken = draws.chance(arguments["p"])
        height, width = images.shape[2:]
        corners = erase_rectangles(draws, (height, width), arguments["scale"], arguments["ratio"])
        rows = np.flatnonzero(taken)
        inside = _inside([side[rows] for side in corners], (height, width), images.device)
        index = on_device(rows, images.device)
        images[index] = images[index].masked_fill_(inside, arguments["value"])
        return images

    def mix(
        self, images_BCHW: Tensor, targets_BK: Tensor, keys: Keys | Tensor, partner: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Mix another row into each row, by mixup or cutmix; with both, half of the rows each.

        Args:
            images_BCHW: normalised.
            targets_BK: float, one distribution over the classes per row.
            keys: (B,) as given to the call; the row's own key decides.
            partner: (B,) int64, the row that is mixed into each row.
        Returns: new images (B, C, H, W) and targets (B, K).
        Source: torchvision, transforms.v2.MixUp and CutMix; the choice as in timm.data.Mixup.
        """
        numbers = self._numbers(keys, len(images_BCHW))
        mixes = [place for place, role in enumerate(self._roles) if role == "mix"]
        assert numbers is not None
        assert mixes, "the sentence has neither mixup nor cutmix"
        # with both, a draw of its own chooses one for each row
        chosen = Draws(numbers, len(self._calls)).integers(np.full(len(numbers), len(mixes)))
        partner = partner.to(images_BCHW.device)
        images, targets = images_BCHW.clone(), targets_BK.clone()
        for which, position in enumerate(mixes):
            rows = np.flatnonzero(chosen == which)
            if not len(rows):
                continue
            call, draws = self._calls[position], Draws(numbers[rows], position)
            index = on_device(rows, images.device)
            own, other = images_BCHW[index], images_BCHW[partner[index]]
            share = draws.beta(call.arguments["alpha"])
            if call.name == "mixup":
                weight = on_device(share, own.device).to(own.dtype).view(-1, 1, 1, 1)
                images[index] = own * weight + other * (1 - weight)
            else:
                size = (own.shape[2], own.shape[3])
                box = mixed_rectangles(draws, size, share)
                images[index] = torch.where(_inside(box, size, own.device), other, own)
                share = 1 - box[2] * box[3] / (size[0] * size[1])
            label = on_device(share, targets.device).to(targets.dtype)[:, None]
            index, mate = index.to(targets.device), partner[index].to(targets.device)
            targets[index] = targets_BK[index] * label + targets_BK[mate] * (1 - label)
        return images, targets

    def describe(self, size: Size) -> str:
        """Return the operations in the order in which they run on images of a size, a line each."""
        return self._plan(size).describe(self._calls)

    def _plan(self, size: Size) -> Plan:
        if size not in self._plans:
            if len(self._plans) >= _MOST_PLANS:
                self._plans.clear()
            self._plans[size] = make_plan(self._calls, size, self.image_size, self.sentence)
        return self._plans[size]

    def _normalise(self, images: Tensor) -> Tensor:
        """Turn pixel values from 0 to 255 into (x / 255 - mean) / std, float32, in one pass."""
        device = images.device
        if device not in self._affine:
            self._affine[device] = self._scale.to(device), self._shift.to(device)
        scale, shift = self._affine[device]
        return torch.addcmul(shift, images.float(), scale)

    def _clamp(self, images: Tensor, normalised: bool) -> Tensor:
        """Cut off the overshoots of bicubic and Lanczos, as an image of uint8 would."""
        if not normalised:
            return images.clamp_(0, 255)
        black, white = self._shift.flatten(), (255 * self._scale + self._shift).flatten()
        for channel, bounds in enumerate(zip(black.tolist(), white.tolist(), strict=True)):
            images[:, channel].clamp_(*bounds)  # bounds in a tensor cost five times as much
        return images


def _chunks(count: int, size: Size) -> list[Integers]:
    """Split images of one size so that their pixels as float32 stay within memory.

    A sample's result does not depend on the split, since none depends on the rest of its batch.
    """
    most = max(1, _CHUNK_VALUES // (3 * size[0] * size[1]))
    return [np.arange(start, min(start + most, count)) for start in range(0, count, most)]


def _values(sizes_b2: Integers, rooms_b2: Integers) -> int:
    """Return about how many values are in memory at once: pixels, a canvas, weights."""
    canvas, weights = 3 * rooms_b2.max(axis=0).prod(), 16 * sizes_b2.max()
    return max(3 * int(sizes_b2.prod(axis=1).sum()), len(sizes_b2) * int(max(canvas, weights)))


def _tuples(sizes_B2: Integers) -> list[Size]:
    return [(height, width) for height, width in sizes_B2.tolist()]


def _inside(corners: Sequence[npt.NDArray[Any]], size: Size, device: torch.device) -> Tensor:
    """Return a mask (b, 1, H, W) of rectangles given as top, left, height, width, each (b,)."""
    sides = np.stack([np.asarray(side) for side in corners])
    top, left, height, width = on_device(sides, device)[:, :, None]
    y = torch.arange(size[0], device=device)
    x = torch.arange(size[1], device=device)
    in_rows = (y >= top) & (y < top + height)
    in_columns = (x >= left) & (x < left + width)
    return (in_rows[:, :, None] & in_columns[:, None, :])[:, None]
