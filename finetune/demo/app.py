"""The demo's page: a picture is dropped, classified, and shown as the model saw it."""

from __future__ import annotations

import html
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from finetune.commands.predict import Classifier
from finetune.demo import html as page
from finetune.demo.inference import Reader, pixels_of
from finetune.errors import FinetuneError, SetupError

__all__ = ["About", "build_app", "gradio", "input_kinds", "look"]

_PREVIEW_PIXELS = 1024
_BROWSERS_SHOW = (b"\xff\xd8", b"\x89PNG", b"GIF8", b"BM", b"RIFF", b"\0\0\1\0")


@dataclass(frozen=True)
class About:
    """The text of the page beside predictions.

    Attributes:
        title: the model's name.
        facts: short figures under it.
        notes: sentences at the foot.
        examples: picture files to try.
    """

    title: str
    facts: Sequence[str] = ()
    notes: Sequence[str] = ()
    examples: Sequence[Path] = field(default=())


def gradio() -> ModuleType:
    """Import Gradio, with its calls home off.

    Raises: SetupError with the line that installs it.
    """
    os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    try:
        import gradio
    except ImportError as error:
        raise SetupError(
            f"demo: needs Gradio ({error}); install it: pip install 'finetune[demo]'",
            code="setup.missing_package",
        ) from error
    return gradio


def build_app(classifier: Classifier, about: About) -> Any:
    """Make the page.

    Args:
        classifier: the model.
        about: the text about it.
    Returns: a `gradio.Blocks`, to be given to `launch`.
    """
    gr = gradio()
    answers = _Answers(gr, Reader(classifier), about.examples)
    options = {"title": about.title, "analytics_enabled": False, "delete_cache": (600, 3600)}
    with gr.Blocks(**options) as app:
        gr.HTML(page.header(about.title, about.facts))
        with gr.Row(elem_classes="ft-columns"):
            with gr.Column(elem_classes="ft-left"):
                picture = gr.Image(
                    type="filepath",
                    sources=["upload"],
                    show_label=False,
                    label="Picture",
                    placeholder="Drop a picture here, or click to choose one",
                    elem_id="ft-picture",
                    buttons=[],
                )
                tries = None
                if about.examples:
                    tries = gr.Dataset(
                        components=[picture],
                        samples=[[str(file)] for file in about.examples],
                        type="index",
                        label="Or try one of these",
                        elem_id="ft-examples",
                    )
            with gr.Column(elem_classes="ft-right"):
                shown = gr.HTML(page.EMPTY, elem_id="ft-answer")
        gr.HTML(page.footer(classifier.class_names, about.notes))
        _connect(gr, answers, picture, tries, shown)
    app.queue(max_size=32, default_concurrency_limit=1, api_open=False)
    return app


def _connect(gr: ModuleType, answers: _Answers, picture: Any, tries: Any, shown: Any) -> None:
    """Connect events to answers. Not preprocessed: Gradio would turn and re-encode the picture."""
    own = {"preprocess": False, "trigger_mode": "always_last", "concurrency_id": "model"}
    private = {"api_visibility": "private"}
    both, once = [picture, shown], {"show_progress_on": shown, **own, **private}
    gr.on(picture.upload, answers.to_upload, picture, both, **once)
    # without its input, which at that moment is still the picture
    gr.on(picture.clear, lambda: page.EMPTY, None, shown, **private)
    if tries is not None:
        gr.on(tries.click, answers.to_example, tries, both, **private)
    button, result = gr.Button(visible=False), gr.JSON(visible=False)
    gr.on(button.click, answers.to_program, picture, result, api_name="predict", **own)


class _Answers:
    """The functions behind the page, and the one for programs."""

    def __init__(self, gr: ModuleType, reader: Reader, examples: Sequence[Path]) -> None:
        self._gr = gr
        self._reader = reader
        self._examples = list(examples)

    def to_upload(self, upload: dict[str, Any] | None) -> tuple[Any, str]:
        """Answer the page. Returns: an update of the picture, and the result as HTML."""
        path = (upload or {}).get("path")
        if path is None:
            return self._gr.update(), page.EMPTY
        try:
            return self._preview(path), page.result(self._reader.read(path))
        except FinetuneError as error:
            return None, page.refusal(str(error))

    def _preview(self, path: str) -> Any:
        """Pixels for a picture that a browser cannot show; else no update."""
        with open(path, "rb") as file:
            head = file.read(12)
        if head.startswith(_BROWSERS_SHOW) or head[4:12] == b"ftypavif":
            return self._gr.update()
        pixels = pixels_of(path)
        every = max(1, -(-max(pixels.shape) // _PREVIEW_PIXELS))
        return np.ascontiguousarray(pixels[::every, ::every])

    def to_example(self, index: int) -> tuple[str | None, str]:
        """Answer a click on an example."""
        if not 0 <= index < len(self._examples):
            return None, page.refusal(f"there is no example {index}")
        path = self._examples[index]
        return str(path), page.result(self._reader.read(path))

    def to_program(self, upload: dict[str, Any] | None) -> list[dict[str, Any]]:
        """Answer a program: [{"label", "confidence"}], of several labels with "threshold", too."""
        path = (upload or {}).get("path")
        if path is None:
            raise self._refusal("no picture was sent")
        try:
            reading = self._reader.read(path)
        except FinetuneError as error:
            raise self._refusal(str(error)) from None
        answer: list[dict[str, Any]] = [
            {"label": label, "confidence": confidence} for label, confidence in reading.top
        ]
        for row, threshold in zip(answer, reading.thresholds or (), strict=False):
            row["threshold"] = threshold
        return answer

    def _refusal(self, message: str) -> Exception:
        # Gradio shows it as HTML, and it may hold the first bytes of the file
        error: Exception = self._gr.Error(html.escape(message), print_exception=False)
        return error


def input_kinds(app: Any) -> dict[int, list[str]]:
    """The kinds of the inputs of each function of a page, such as "image", by its number."""
    kinds = {each["id"]: each["type"] for each in app.config["components"]}
    functions = app.config["dependencies"]
    return {each["id"]: [kinds[number] for number in each["inputs"]] for each in functions}


def look(gr: ModuleType) -> dict[str, Any]:
    """Theme and style: system fonts only, so that nothing is asked of another host."""
    theme = gr.themes.Base(
        primary_hue="orange",
        neutral_hue="stone",
        font=["ui-sans-serif", "system-ui", "-apple-system", "Segoe UI", "sans-serif"],
        font_mono=["ui-monospace", "SFMono-Regular", "Menlo", "monospace"],
    )
    # not as css=, whose selectors Gradio rewrites, those under @media to no effect
    return {"theme": theme, "head": f"<style>\n{page.style()}</style>"}
