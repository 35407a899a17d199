"""The Gradio page: upload an image, classify it, and show the model input and attention map."""

from __future__ import annotations

import html
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from finetune.demo import markup as page
from finetune.demo.predictor import DemoPredictor, decode_upload
from finetune.errors import FinetuneError, SetupError, install_hint
from finetune.inference import Classifier

__all__ = ["PageContent", "build_app", "import_gradio", "theme_options"]

_MAX_PREVIEW_PIXELS = 1024
_BROWSER_IMAGE_SIGNATURES = (b"\xff\xd8", b"\x89PNG", b"GIF8", b"BM", b"RIFF", b"\0\0\1\0")


@dataclass(frozen=True)
class PageContent:
    """Content of the demo page besides predictions.

    Attributes:
        title: the model's name.
        facts: short facts about the model, below the title.
        notes: sentences in the footer.
        examples: files of the example images to try.
    """

    title: str
    facts: Sequence[str] = ()
    notes: Sequence[str] = ()
    examples: Sequence[Path] = field(default=())


def import_gradio() -> ModuleType:
    """Import Gradio with telemetry disabled.

    Raises: SetupError with the install command if Gradio is missing.
    """
    os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    try:
        import gradio
    except ImportError as error:
        raise SetupError(
            f"demo: Gradio is not installed ({error}); {install_hint('demo')}",
            code="setup.missing_package",
        ) from error
    return gradio


def build_app(classifier: Classifier, content: PageContent) -> Any:
    """Build the demo page.

    Args:
        classifier: the model.
        content: texts and example images.
    Returns: a `gradio.Blocks`, to pass to `run_server`.
    """
    gr = import_gradio()
    handlers = _EventHandlers(gr, DemoPredictor(classifier), content.examples)
    options = {"title": content.title, "analytics_enabled": False, "delete_cache": (600, 3600)}
    with gr.Blocks(**options) as app:
        gr.HTML(page.render_header(content.title, content.facts))
        with gr.Row(elem_classes="ft-columns"):
            with gr.Column(elem_classes="ft-left"):
                image_input = gr.Image(
                    type="filepath",
                    sources=["upload"],
                    show_label=False,
                    label="Image",
                    placeholder="Drop an image here, or click to upload",
                    elem_id="ft-image",
                    buttons=[],
                )
                examples = None
                if content.examples:
                    examples = gr.Dataset(
                        components=[image_input],
                        samples=[[str(file)] for file in content.examples],
                        type="index",
                        label="Examples",
                        elem_id="ft-examples",
                    )
            with gr.Column(elem_classes="ft-right"):
                output = gr.HTML(page.EMPTY_RESULT, elem_id="ft-output")
        gr.HTML(page.render_footer(classifier.class_names, content.notes))
        _connect_events(gr, handlers, image_input, examples, output)
    app.queue(max_size=32, default_concurrency_limit=1, api_open=False)
    return app


def _connect_events(
    gr: ModuleType, handlers: _EventHandlers, image: Any, examples: Any, output: Any
) -> None:
    """Connect events to handlers, without Gradio's preprocessing, which re-encodes images."""
    event_options = {"preprocess": False, "trigger_mode": "always_last", "concurrency_id": "model"}
    private = {"api_visibility": "private"}
    image_and_output = [image, output]
    upload_options = {"show_progress_on": output, **event_options, **private}
    gr.on(image.upload, handlers.on_upload, image, image_and_output, **upload_options)
    # without inputs, because the component still has the old image at this moment
    gr.on(image.clear, lambda: page.EMPTY_RESULT, None, output, **private)
    if examples is not None:
        gr.on(examples.click, handlers.on_example_click, examples, image_and_output, **private)
    button, result = gr.Button(visible=False), gr.JSON(visible=False)
    gr.on(button.click, handlers.on_api_call, image, result, api_name="predict", **event_options)


class _EventHandlers:
    """Handlers of the page's events and of the API endpoint."""

    def __init__(self, gr: ModuleType, predictor: DemoPredictor, examples: Sequence[Path]) -> None:
        self._gr = gr
        self._predictor = predictor
        self._examples = list(examples)

    def on_upload(self, upload: Any) -> tuple[Any, str]:
        """Classify an uploaded image. Returns: an update of the image component, and HTML."""
        path = _upload_path(upload)
        if path is None:
            return self._gr.update(), page.EMPTY_RESULT
        try:
            result = page.render_result(self._predictor.predict(path))
            return self._preview(path), result
        except FinetuneError as error:
            return None, page.render_error(str(error))

    def _preview(self, path: str) -> Any:
        """Return pixels for an image format that browsers cannot show, else no update."""
        with open(path, "rb") as file:
            header = file.read(12)
        if header.startswith(_BROWSER_IMAGE_SIGNATURES) or header[4:12] == b"ftypavif":
            return self._gr.update()
        pixels = decode_upload(path)
        stride = max(1, -(-max(pixels.shape) // _MAX_PREVIEW_PIXELS))
        return np.ascontiguousarray(pixels[::stride, ::stride])

    def on_example_click(self, index: Any) -> tuple[str | None, str]:
        """Classify the example image that was clicked. Returns: its path, and HTML."""
        if not isinstance(index, int) or not 0 <= index < len(self._examples):
            return None, page.render_error(f"example {index} does not exist")
        path = self._examples[index]
        return str(path), page.render_result(self._predictor.predict(path))

    def on_api_call(self, upload: Any) -> list[dict[str, Any]]:
        """Classify an uploaded image for the API.

        Returns: dicts with keys "label" and "confidence"; for multi-label models also "threshold".
        """
        path = _upload_path(upload)
        if path is None:
            raise self._api_error("no image was sent")
        try:
            prediction = self._predictor.predict(path)
        except FinetuneError as error:
            raise self._api_error(str(error)) from None
        predictions: list[dict[str, Any]] = [
            {"label": label, "confidence": confidence} for label, confidence in prediction.top
        ]
        for row, threshold in zip(predictions, prediction.thresholds or (), strict=False):
            row["threshold"] = threshold
        return predictions

    def _api_error(self, message: str) -> Exception:
        # escape the message: Gradio shows it as HTML, and it may quote bytes of the file
        error: Exception = self._gr.Error(html.escape(message), print_exception=False)
        return error


def _upload_path(upload: Any) -> str | None:
    """Return the path of an uploaded image; None for any other input that a client sends."""
    return upload.get("path") if isinstance(upload, dict) else None


def theme_options(gr: ModuleType) -> dict[str, Any]:
    """Return Gradio's theme and our CSS, with system fonts, which need no other host."""
    theme = gr.themes.Base(
        primary_hue="orange",
        neutral_hue="stone",
        font=["ui-sans-serif", "system-ui", "-apple-system", "Segoe UI", "sans-serif"],
        font_mono=["ui-monospace", "SFMono-Regular", "Menlo", "monospace"],
    )
    # not `css=`: Gradio would rewrite the selectors, which breaks those inside @media
    return {"theme": theme, "head": f"<style>\n{page.stylesheet()}</style>"}
