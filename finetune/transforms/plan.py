"""The order and the sizes in which a pipeline runs on images of one size (no torch here).

Geometric operations in a row form one run, which costs one resampling. An operation on pixels
(rotation or colour) that is written after a run moves before it where the run, up to there,
enlarges the image.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from finetune.errors import RecipeError
from finetune.transforms.grammar import Call

__all__ = ["Plan", "Size", "Step", "check_end", "make_plan", "size_after"]

Size = tuple[int, int]  # height, width in pixels


@dataclass
class Step:
    """Operations that run together: a run of geometric ones, or a single one on pixels."""

    positions: list[int]  # places in the sentence
    geometric: bool
    before: Size
    after: Size
    sizes: list[Size] = field(default_factory=list)  # after each operation of a run

    @property
    def enlarges(self) -> bool:
        return self.after[0] * self.after[1] > self.before[0] * self.before[1]


@dataclass
class Plan:
    """All steps up to normalisation, and the operations that were moved from their place."""

    steps: list[Step] = field(default_factory=list)
    moved: list[int] = field(default_factory=list)

    @property
    def order(self) -> tuple[int, ...]:
        """The operations' places in the sentence, in the order in which they run."""
        return tuple(position for step in self.steps for position in step.positions)

    def describe(self, calls: list[Call]) -> str:
        """Return one line per step, in the order in which they run."""
        lines = []
        for step in self.steps:
            names = ", ".join(calls[position].name for position in step.positions)
            if step.geometric:
                sizes = f"{_text(step.before)} to {_text(step.after)}"
                lines.append(f"{names}: {sizes}, one resampling")
            else:
                note = " (moved before the enlargement)" if step.positions[0] in self.moved else ""
                lines.append(f"{names}: at {_text(step.before)}{note}")
        lines.append("normalise")
        lines += [call.name for call in calls if call.operation.role in ("erase", "mix")]
        return "\n".join(lines)


def make_plan(calls: list[Call], size: Size, image_size: Size, sentence: str) -> Plan:
    """Order the operations for source images of one size.

    Args:
        sentence: as written, for the message.
    Raises: RecipeError if images of this size do not end at image_size.
    """
    plan, run, current = Plan(), None, size
    for position, call in enumerate(calls):
        role = call.operation.role
        if role == "geometry":
            after = size_after(call, current, image_size)
            if run is None:
                run = Step([], geometric=True, before=current, after=after)
                plan.steps.append(run)
            run.positions.append(position)
            run.sizes.append(after)
            current = run.after = after
        elif role == "pixels" and run is not None and run.enlarges:
            early = Step([position], geometric=False, before=run.before, after=run.before)
            plan.steps.insert(plan.steps.index(run), early)
            plan.moved.append(position)
        elif role == "pixels":
            plan.steps.append(Step([position], geometric=False, before=current, after=current))
            run = None
    if current != image_size:
        advice = "end with resize, or a crop without a size"
        if size[0] != size[1]:
            advice = "the image is not square: add center_crop"
        raise RecipeError(
            f"pipeline '{sentence}': turns {_text(size)} into {_text(current)} but the model "
            f"expects {_text(image_size)}; {advice}",
            code="recipe.wrong_size",
        )
    return plan


def size_after(call: Call, size: Size, image_size: Size) -> Size:
    """Return (height, width) after one geometric operation on an image of `size`.

    Raises: RecipeError if a random_crop is larger than the padded image.
    """
    if "size" not in call.arguments:
        return size
    wanted = call.arguments["size"]
    if call.name == "resize" and isinstance(wanted, int):
        height, width = size
        if height <= width:
            return wanted, max(1, int(wanted * width / height))
        return max(1, int(wanted * height / width)), wanted
    if wanted is None:
        wanted = image_size
    height, width = wanted if isinstance(wanted, tuple) else (wanted, wanted)
    if call.name == "random_crop":
        pad = call.arguments["padding"]
        if height > size[0] + 2 * pad or width > size[1] + 2 * pad:
            raise RecipeError(
                f"random_crop: {height}x{width} does not fit into an image of {_text(size)} "
                f"with padding {pad}; resize before it or add padding",
                code="recipe.wrong_size",
            )
    return height, width


def check_end(calls: list[Call], image_size: Size, sentence: str) -> None:
    """Refuse a sentence that cannot end at the model's size, whatever the source's size.

    Raises: RecipeError naming both sizes.
    """
    sized = [call for call in calls if "size" in call.arguments]
    if not sized or sized[-1].arguments["size"] is None:
        return
    last, size = sized[-1], sized[-1].arguments["size"]
    height, width = size if isinstance(size, tuple) else (size, size)
    # resize(n) makes the shorter side n; the other depends on the source
    is_shorter_side = last.name == "resize" and isinstance(size, int) and size == min(image_size)
    if not is_shorter_side and (height, width) != image_size:
        raise RecipeError(
            f"pipeline '{sentence}': ends at {height}x{width} but the model expects "
            f"{_text(image_size)}; leave the size out of {last.name}, or change "
            "model.image_size",
            code="recipe.wrong_size",
        )


def _text(size: Size) -> str:
    return f"{size[0]}x{size[1]}"
