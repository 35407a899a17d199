"""Plan the execution order and image sizes of transform operations (no torch here).

Consecutive geometric operations are fused into one step, which costs one resampling. A pixel
operation (rotation or color) that follows a geometric step moves before it if the step, up to that
point, enlarges the image.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from finetune.errors import RecipeError
from finetune.transforms.spec_parser import TransformCall

__all__ = [
    "ExecutionPlan",
    "HeightWidth",
    "PlanStep",
    "check_output_size",
    "plan_execution",
    "size_after_operation",
]

HeightWidth = tuple[int, int]  # height, width in pixels


@dataclass
class PlanStep:
    """One step of the plan: fused geometric operations or a single pixel operation."""

    positions: list[int]  # indices of the operations in the transform spec
    is_geometric: bool
    input_size: HeightWidth
    output_size: HeightWidth
    output_sizes: list[HeightWidth] = field(
        default_factory=list
    )  # after each operation of a geometric step

    @property
    def enlarges(self) -> bool:
        return self.output_size[0] * self.output_size[1] > self.input_size[0] * self.input_size[1]


@dataclass
class ExecutionPlan:
    """All steps before normalization, and the positions of operations that were moved."""

    steps: list[PlanStep] = field(default_factory=list)
    moved_positions: list[int] = field(default_factory=list)

    @property
    def order(self) -> tuple[int, ...]:
        """Indices of the operations in the transform spec, in execution order."""
        return tuple(position for step in self.steps for position in step.positions)

    def format_steps(self, calls: list[TransformCall]) -> str:
        """Format the plan with one line per step, in execution order."""
        lines = []
        for step in self.steps:
            names = ", ".join(calls[position].name for position in step.positions)
            if step.is_geometric:
                sizes = f"{_format_size(step.input_size)} to {_format_size(step.output_size)}"
                lines.append(f"{names}: {sizes}, one resampling")
            else:
                note = (
                    " (moved before the enlargement)"
                    if step.positions[0] in self.moved_positions
                    else ""
                )
                lines.append(f"{names}: at {_format_size(step.input_size)}{note}")
        lines.append("normalise")
        lines += [call.name for call in calls if call.operation.role in ("erase", "mix")]
        return "\n".join(lines)


def plan_execution(
    calls: list[TransformCall], size: HeightWidth, image_size: HeightWidth, transform_spec: str
) -> ExecutionPlan:
    """Plan the execution of the operations for source images of one size.

    Args:
        calls: the parsed operations.
        size: (height, width) of the source images.
        image_size: (height, width) that the model expects.
        transform_spec: the spec as the user wrote it, for the error message.
    Raises: RecipeError if the operations do not turn `size` into `image_size`.
    """
    plan, run, current = ExecutionPlan(), None, size
    for position, call in enumerate(calls):
        role = call.operation.role
        if role == "geometry":
            after = size_after_operation(call, current, image_size)
            if run is None:
                run = PlanStep([], is_geometric=True, input_size=current, output_size=after)
                plan.steps.append(run)
            run.positions.append(position)
            run.output_sizes.append(after)
            current = run.output_size = after
        elif role == "pixels" and run is not None and run.enlarges:
            moved_step = PlanStep(
                [position],
                is_geometric=False,
                input_size=run.input_size,
                output_size=run.input_size,
            )
            plan.steps.insert(plan.steps.index(run), moved_step)
            plan.moved_positions.append(position)
        elif role == "pixels":
            plan.steps.append(
                PlanStep([position], is_geometric=False, input_size=current, output_size=current)
            )
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
    return plan


def size_after_operation(
    call: TransformCall, size: HeightWidth, image_size: HeightWidth
) -> HeightWidth:
    """Return (height, width) after one geometric operation on an image of `size`.

    Raises: RecipeError if a random_crop is larger than the padded image.
    """
    if "size" not in call.arguments:
        return size
    size_argument = call.arguments["size"]
    if call.name == "resize" and isinstance(size_argument, int):
        height, width = size
        if height <= width:
            return size_argument, max(1, int(size_argument * width / height))
        return max(1, int(size_argument * height / width)), size_argument
    if size_argument is None:
        size_argument = image_size
    height, width = (
        size_argument if isinstance(size_argument, tuple) else (size_argument, size_argument)
    )
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
    """Check that a transform spec can produce the model's image size for some source size.

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
