"""Plan the execution order and image sizes of transform operations (no torch here).

Operations run in the written order. Consecutive geometric operations are fused into one step, which
costs one resampling. Only the corruption of `finetune eval --corrupt` is moved: if an image is
enlarged, the corruption is applied before that, as in CIFAR-10-C.
"""

from __future__ import annotations

from dataclasses import dataclass

from finetune.errors import RecipeError
from finetune.transforms.spec_parser import TransformCall

__all__ = [
    "HeightWidth",
    "PlanStep",
    "check_output_size",
    "plan_execution",
    "size_after_operation",
]

HeightWidth = tuple[int, int]  # height, width in pixels


@dataclass
class PlanStep:
    """One step of the plan: fused geometric operations or a single pixel operation.

    Attributes:
        positions: indices of the operations in the transform spec.
        sizes: the image size before the step, then after each geometric operation.
    """

    positions: list[int]
    sizes: list[HeightWidth]
    is_geometric: bool

    @property
    def enlarges(self) -> bool:
        (height, width), (height_after, width_after) = self.sizes[0], self.sizes[-1]
        return height_after * width_after > height * width


def plan_execution(
    calls: list[TransformCall], size: HeightWidth, image_size: HeightWidth, transform_spec: str
) -> list[PlanStep]:
    """Plan the execution of the operations for source images of one size.

    Args:
        calls: the parsed operations.
        size: (height, width) of the source images.
        image_size: (height, width) that the model expects.
        transform_spec: the spec as the user wrote it, for the error message.
    Returns: all steps before normalization.
    Raises: RecipeError if the operations do not turn `size` into `image_size`.
    """
    steps: list[PlanStep] = []
    run, current = None, size
    for position, call in enumerate(calls):
        role = call.operation.role
        if role == "geometry":
            has_fill = call.arguments.get("fill") is not None
            if run is None or has_fill:
                run = PlanStep([], [current], is_geometric=True)
                steps.append(run)
            current = size_after_operation(call, current, image_size)
            run.positions.append(position)
            run.sizes.append(current)
            if has_fill:  # a step of its own, so that no other padding gets this fill
                run = None
        elif call.name == "corrupt" and run is not None and run.enlarges:
            step = PlanStep([position], [run.sizes[0]], is_geometric=False)
            steps.insert(steps.index(run), step)
        elif role == "pixels":
            steps.append(PlanStep([position], [current], is_geometric=False))
            run = None
    if current != image_size:
        advice = "end with resize, or a crop without a size"
        if size[0] != size[1]:
            advice = "the image is not square, so add center_crop"
        raise RecipeError(
            f"pipeline '{transform_spec}': turns {_format_size(size)} into "
            f"{_format_size(current)}, but the model expects {_format_size(image_size)}; {advice}",
            code="recipe.wrong_size",
        )
    return steps


def size_after_operation(
    call: TransformCall, size: HeightWidth, image_size: HeightWidth
) -> HeightWidth:
    """Return (height, width) after one geometric operation on an image of `size`.

    Raises: RecipeError if a random_crop is larger than the padded image.
    Source: torchvision, transforms.v2.Resize; timm, data/transforms.py, ResizeKeepRatio.
    """
    if "size" not in call.arguments:
        return size
    size_argument, fit = call.arguments["size"], call.arguments.get("fit")
    if call.name == "resize" and isinstance(size_argument, int) and fit is None:
        height, width = size
        if height <= width:
            return size_argument, max(1, int(size_argument * width / height))
        return max(1, int(size_argument * height / width)), size_argument
    if size_argument is None:
        size_argument = image_size
    height, width = (
        size_argument if isinstance(size_argument, tuple) else (size_argument, size_argument)
    )
    if fit is not None:
        ratios = size[0] / height, size[1] / width
        ratio = max(ratios) if fit == "contain" else min(ratios)
        return max(1, round(size[0] / ratio)), max(1, round(size[1] / ratio))
    if call.name == "random_crop":
        padding = call.arguments["padding"]
        if height > size[0] + 2 * padding or width > size[1] + 2 * padding:
            raise RecipeError(
                f"random_crop: {height}x{width} does not fit into an image of {_format_size(size)} "
                f"with padding {padding}; resize before it or add padding",
                code="recipe.wrong_size",
            )
    return height, width


def check_output_size(
    calls: list[TransformCall], image_size: HeightWidth, transform_spec: str
) -> None:
    """Check that a transform spec can produce the model's image size for at least one source size.

    Raises: RecipeError naming the produced and the expected size.
    """
    sized = [call for call in calls if "size" in call.arguments]
    if not sized or sized[-1].arguments["size"] is None:
        return
    last, size = sized[-1], sized[-1].arguments["size"]
    height, width = size if isinstance(size, tuple) else (size, size)
    # resize(n) sets the shorter side to n; the other side depends on the source
    is_shorter_side = last.name == "resize" and isinstance(size, int) and size == min(image_size)
    if not is_shorter_side and (height, width) != image_size:
        raise RecipeError(
            f"pipeline '{transform_spec}': ends at {height}x{width}, but the model expects "
            f"{_format_size(image_size)}; leave the size out of {last.name}, or change "
            "model.image_size",
            code="recipe.wrong_size",
        )


def _format_size(size: HeightWidth) -> str:
    return f"{size[0]}x{size[1]}"
