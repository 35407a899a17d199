"""Commands that take a model or several, such as predict, eval, compare, export and report."""

from __future__ import annotations

import glob
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click

from finetune.cli.command import CommandResult, command
from finetune.cli.shared_arguments import (
    IMAGE_SIZE,
    PORT,
    check_model_argument,
    check_run_or_model_folder,
    checked_by,
    data_option,
    model_argument,
    moved_data_option,
    ort_web_option,
)
from finetune.errors import DataError, RecipeError
from finetune.ranks import is_main_process
from finetune.recipe.paths import check_model_name, is_data_source, resolve_data_source

if TYPE_CHECKING:
    from finetune.recipe.schema import Recipe

__all__ = [
    "average",
    "compare",
    "demo",
    "evaluate",
    "export",
    "info",
    "predict",
    "probe",
    "report",
    "show",
]

split_option = click.option(
    "--split", help="train, val or test.  [default: test, else val, else the only split]"
)
tta_option = click.option(
    "--tta",
    metavar="flip",
    type=click.Choice(["flip"]),
    help="Average the logits of each image and its mirror image.",
)


@command("predict", example="finetune predict runs/quickstart photos/ --top-k 5 --out labels.csv")
@model_argument
@click.argument("paths", metavar="PATH...", nargs=-1, required=True)
@click.option(
    "--top-k", default=3, show_default=True, type=click.IntRange(min=1), help="Classes per image."
)
@click.option("--out", metavar="FILE", help="Write the predictions to a .csv or .jsonl file.")
@click.option("--sheet", metavar="FILE", help="Draw the images and predictions into a .png file.")
@click.option("--calibrated", is_flag=True, help="Divide the logits by MODEL's temperature.")
@click.option(
    "--threshold",
    metavar="T",
    type=float,
    help="Multi-label: one threshold for all classes, 0 to 1, instead of the stored ones.",
)
@click.option(
    "--max-error",
    metavar="E",
    type=float,
    help="Abstain where needed, so that at most this share of the answers is wrong: 0.02.",
)
@click.option(
    "--coverage",
    metavar="C",
    type=float,
    help="Predict sets that contain the true class for this share of images: 0.9.",
)
@click.option(
    "--unknown",
    "mark_unknown",
    is_flag=True,
    help="Mark images of no known class, and about 5 % of the others.",
)
@click.option(
    "--batch-size",
    metavar="N",
    type=click.IntRange(min=1),
    help="Images per forward pass.  [default: 8 on a CPU, else 64]",
)
@tta_option
@click.option("--features", metavar="FILE", help="Write a .parquet file of embeddings.")
def predict(
    model: str,
    paths: tuple[str, ...],
    out: str | None,
    sheet: str | None,
    features: str | None,
    **options: Any,
) -> CommandResult:
    """Classify images.

    MODEL is a run directory, a model folder, hf-hub:owner/name[@revision], a timm name or an
    exported NAME.onnx.

    PATH is a file, a folder, a pattern, or "-" for a list of paths on standard input.
    """
    from finetune.commands.predict import predict
    from finetune.commands.prediction_output import format_predictions, unreadable_files_error

    rows = predict(model, paths, out=out, sheet=sheet, features=features, **options)
    text = format_predictions(rows, out=out, sheet=sheet, features=features)
    return CommandResult(rows, text, unreadable_files_error(rows))


@command("eval", example="finetune eval runs/quickstart --split test --out evaluation")
@model_argument
@data_option
@split_option
@click.option("--out", metavar="DIR", help="Write results.json, per_class.csv and figures.")
@click.option(
    "--fit-temperature",
    is_flag=True,
    help="Fit a temperature on val (or --split), and write it into MODEL's config.json, with the "
    "scores for predict --max-error, --coverage and --unknown.",
)
@click.option(
    "--corrupt",
    metavar="KIND",
    help="Also evaluate corrupted images: all, noise, blur, jpeg or contrast, at five severities; "
    "noise:3 only at severity 3.",
)
@tta_option
def evaluate(model: str, out: str | None, **options: Any) -> CommandResult:
    """Measure the accuracy of a model on labeled images.

    MODEL is a run directory, a model folder, hf-hub:owner/name[@revision], a timm name or an
    exported NAME.onnx.
    """
    from finetune.commands.evaluate import evaluate_model, format_evaluation, write_evaluation

    results = evaluate_model(model, out=out, **options)
    files = write_evaluation(results, out) if out and is_main_process() else []
    return CommandResult(results, "\n".join([format_evaluation(results), *files]))


def _parse_condition(ctx: click.Context, param: click.Parameter, value: str | None) -> Any:
    from finetune.evaluation.paired import parse_fail_condition

    return None if value is None else parse_fail_condition(value)


@command("compare", example="finetune compare runs/a runs/b --out comparison")
@click.argument("first", metavar="A", callback=checked_by(check_model_argument))
@click.argument("second", metavar="B", callback=checked_by(check_model_argument))
@data_option
@split_option
@click.option("--out", metavar="DIR", help="Write compare.json and the page compare.html.")
@click.option(
    "--fail-if",
    metavar="CONDITION",
    callback=_parse_condition,
    help='Exit with 8 if B is worse, such as "top1 drops 0.5" (points). Metrics: top1, top5, loss.',
)
def compare(first: str, second: str, out: str | None, **options: Any) -> CommandResult:
    """Compare two models on the same images.

    A and B are run directories, model folders, hf-hub:owner/name[@revision], timm names or exported
    files NAME.onnx. Both are evaluated now, by default on the data of A.

    Shows which answers flipped, whether the difference is significant, the slices where it is
    largest, and the size and speed of both.
    """
    from finetune.commands.compare import compare_models, format_comparison

    result, error = compare_models(first, second, out=out, **options)
    return CommandResult(result, format_comparison(result, out=out), error)


@command("demo", example="finetune demo runs/quickstart --port 0")
@model_argument
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option("--port", default=7860, show_default=True, type=PORT, help="0: any free port.")
@click.option("--share", is_flag=True, help="Also create a public link, through Gradio's servers.")
@click.option("--export-space", metavar="DIR", help="Write a Hugging Face Space into a folder.")
@click.option("--static", metavar="DIR", help="Write a page that runs MODEL in the browser.")
@ort_web_option
def demo(
    model: str,
    host: str,
    port: int,
    share: bool,
    export_space: str | None,
    static: str | None,
    ort_web: str | None,
) -> CommandResult:
    """Try a model in the browser.

    Drop an image to see its classes and the attention map.
    """
    if model.endswith(".onnx"):
        raise RecipeError(
            f"{model}: an exported file, but the page needs the network itself; give the run or "
            "the model folder that it was exported from",
            code="recipe.conflict",
        )
    if static and export_space:
        raise RecipeError(
            "--static: not allowed with --export-space; remove one of them", code="recipe.conflict"
        )
    if static:
        from finetune.demo.static_page import write_static_page

        written = write_static_page(model, static, ort_web=ort_web)
        return CommandResult(written, f"{written['folder']}: {len(written['files'])} files")
    if export_space:
        from finetune.demo.space import export_space as write_space

        written = write_space(model, export_space)
        return CommandResult(written, f"{written['folder']}: {len(written['files'])} files")
    from finetune.demo.server import serve

    serve(model, host=host, port=port, share=share)


def _parse_runtimes(ctx: click.Context, param: click.Parameter, value: str) -> list[str]:
    names = [name.strip() for name in value.split(",") if name.strip()]
    for name in names:
        if name not in ("openvino", "web"):
            raise click.BadParameter(f"'{name}' is not one of openvino, web", ctx, param)
    return names


@command("export", example="finetune export runs/quickstart --format onnx --out model.onnx")
@model_argument
@click.option(
    "--format",
    default="onnx",
    show_default=True,
    metavar="TEXT",
    type=click.Choice(["onnx", "torch"]),
    help="onnx or torch.",
)
@click.option("--out", metavar="PATH", help="Output file, or the folder to write it to.")
@click.option(
    "--images", metavar="PATH", multiple=True, help="Compare the outputs on these images."
)
@moved_data_option
@click.option(
    "--image-size",
    metavar="N",
    type=IMAGE_SIZE,
    help="Input size of the exported model, in pixels.",
)
@click.option(
    "--no-preprocessing",
    is_flag=True,
    help="Export only the network: from normalized images to logits, with a dynamic batch size.",
)
@click.option("--int8", is_flag=True, help="Quantize MODEL, a run directory, for CPUs.")
@click.option("--fp16", is_flag=True, help="Convert MODEL, a run directory, to FP16, for GPUs.")
@click.option(
    "--max-drop",
    metavar="POINTS",
    default=0.5,
    show_default=True,
    type=click.FloatRange(min=0, max=100),
    help="Largest drop of the accuracy by --int8 or --fp16, on validation.",
)
@click.option(
    "--certify",
    "certify_in",
    metavar="NAMES",
    default="",
    callback=_parse_runtimes,
    help="Also compare in openvino, web (onnxruntime-web in Node), or openvino,web.",
)
@ort_web_option
def export(
    model: str, no_preprocessing: bool, int8: bool, fp16: bool, **options: Any
) -> CommandResult:
    """Export a model to ONNX or torch.export.

    The exported model takes a uint8 RGB image of any size and returns probabilities. It is written
    only if they match those of MODEL; certificate.json has the figures.
    """
    if int8 and fp16:
        raise RecipeError(
            "--int8: not allowed with --fp16; remove one of them", code="recipe.conflict"
        )
    from finetune.commands.export import export_model, format_export

    precision: Literal["int8", "fp16"] | None = "int8" if int8 else "fp16" if fp16 else None
    exported = export_model(
        model, preprocessing=not no_preprocessing, precision=precision, **options
    )
    return CommandResult(exported, format_export(exported))


@command("average", example="finetune average runs/a runs/b --greedy --out soup")
@click.argument(
    "runs",
    metavar="RUN...",
    nargs=-1,
    required=True,
    callback=checked_by(check_run_or_model_folder),
)
@click.option("--out", metavar="DIR", required=True, help="Output folder for the model.")
@click.option(
    "--alpha",
    "alphas",
    metavar="A",
    multiple=True,
    type=float,
    help="WiSE-FT: weight of RUN, 0 to 1. Repeatable; the best on validation is kept.",
)
@click.option(
    "--greedy", is_flag=True, help="Add only runs that do not lower the validation metric."
)
@moved_data_option
def average(runs: tuple[str, ...], **options: Any) -> CommandResult:
    """Average the weights of several runs (model soup, WiSE-FT).

    One RUN is averaged with its pretrained weights (WiSE-FT, with --alpha), several RUNs with each
    other (model soup). The result is a model folder.
    """
    from finetune.commands.average import average_runs, format_average

    result = average_runs(runs, **options)
    return CommandResult(result, format_average(result))


@command("info", example="finetune info vit_base_patch16_224 --image-size 384")
@click.argument("model", metavar="MODEL|RECIPE")
@click.argument("overrides", metavar="[KEY=VALUE]...", nargs=-1)
@click.option(
    "--image-size",
    metavar="N",
    type=IMAGE_SIZE,
    help="Count MACs and tokens for images of N pixels.",
)
@click.option("--plan", is_flag=True, help="Measure memory and time of training RECIPE.")
def info(
    model: str, overrides: tuple[str, ...], image_size: int | None, plan: bool
) -> CommandResult:
    """Show the size, layers and preprocessing of a model.

    Parameters, MACs and tokens are counted without downloading weights.

    With --plan, train RECIPE for about half a minute to estimate the memory and time of the whole
    training on this machine, also with cheaper settings.
    """
    if plan:
        return _estimate_training(model, overrides, image_size)
    if model.endswith((".yaml", ".yml")):
        raise RecipeError(
            f"{model}: this is a recipe; add --plan to measure its training, or give a model",
            code="recipe.conflict",
        )
    if overrides:
        raise RecipeError(
            f"{overrides[0]}: overrides need a recipe and --plan; remove the override, or add "
            "--plan",
            code="recipe.conflict",
        )
    check_model_name(model)

    from finetune.commands.info import format_model_info, model_info

    result = model_info(model, image_size=image_size)
    return CommandResult(result, format_model_info(result))


def _estimate_training(
    recipe: str, overrides: tuple[str, ...], image_size: int | None
) -> CommandResult:
    if image_size is not None:
        raise RecipeError(
            f"--image-size: not allowed with --plan; write model.image_size={image_size} instead",
            code="recipe.conflict",
        )
    path, _ = _load_recipe_or_run(recipe, overrides)

    from finetune.commands.estimate import estimate_run, format_run_estimate

    estimate = estimate_run(path, overrides)
    return CommandResult(estimate, format_run_estimate(estimate))


def _load_recipe_or_run(name: str, overrides: tuple[str, ...]) -> tuple[str, Recipe]:
    """Load a recipe, or the recipe of a run directory. Returns: path of the recipe, the recipe."""
    from finetune.recipe.load import load_recipe
    from finetune.recipe.validate import check_override_conflicts
    from finetune.run.record import load_run_recipe

    check_override_conflicts(overrides)
    recipe_of_run = Path(name) / "recipe.yaml"
    path = name
    if recipe_of_run.is_file():
        load_run_recipe(name)  # raises if it was changed after the run started
        path = str(recipe_of_run)
    return path, load_recipe(path, overrides)


@command("show", example="finetune show runs/quickstart cat.jpg --out figures")
@click.argument("model", metavar="MODEL|SOURCE|RECIPE")
@click.argument("words", metavar="[IMAGE|KEY=VALUE]...", nargs=-1)
@click.option("--images", "of_images", is_flag=True, help="Draw images of SOURCE or RECIPE.")
@click.option(
    "--out",
    metavar="PATH",
    help="Folder for the figures; with --images a .png or .jpg file, by default sheet.png.",
)
def show(model: str, words: tuple[str, ...], out: str | None, *, of_images: bool) -> CommandResult:
    """Draw attention maps, filters and training images.

    Draws the attention maps of MODEL, its patch filters, position embeddings and attention
    distances.

    With --images, draws the images of SOURCE by class, or training images of RECIPE (or of a run):
    as decoded, as augmented in eight epochs, and as in evaluation.
    """
    if of_images:
        return _show_images(model, words, out or "sheet.png")
    if out is None:
        raise click.UsageError("Missing option '--out'.")
    if model.endswith((".yaml", ".yml")):
        raise RecipeError(
            f"{model}: this is a recipe; add --images to show its training images, or give a model",
            code="recipe.conflict",
        )
    check_model_name(model)
    for word in words:
        if not glob.has_magic(word) and not os.path.lexists(word):
            raise DataError(f"{word}: no such file; check the path", code="data.not_found")
    from finetune.commands.show import show_model

    drawn = show_model(model, words, out=out)
    skipped = [f"{name}: {reason}" for name, reason in drawn["skipped"].items()]
    return CommandResult(drawn, "\n".join([*drawn["files"], *skipped]))


def _show_images(target: str, overrides: tuple[str, ...], out: str) -> CommandResult:
    """Draw images of a data source, or the training images of a recipe."""
    if is_data_source(target):
        if overrides:
            raise RecipeError(
                f"{overrides[0]}: overrides need a recipe, but {target} is a source; remove the "
                "override",
                code="recipe.conflict",
            )
        source = resolve_data_source(target)
        from finetune.commands.show_images import show_source

        path = show_source(source, out)
    else:
        recipe = _load_recipe_or_run(target, overrides)[1]
        from finetune.commands.show_images import show_training
        from finetune.run.directory import RunDir

        path = show_training(recipe, out, run=RunDir(target))
    return CommandResult({"file": str(path)}, str(path))


@command("probe", example="finetune probe vit_base_patch16_224.dino --data photos --knn 20")
@model_argument
@data_option
@click.option("--split", help="test or val.  [default: test, else val]")
@click.option("--shots", default="1,5,10,25", show_default=True, help="Training images per class.")
@click.option(
    "--seeds",
    default=3,
    show_default=True,
    type=click.IntRange(min=1),
    help="Number of random draws of the training images.",
)
@click.option("--linear", is_flag=True, help="Also fit logistic regression on all training images.")
@click.option(
    "--linear-sgd", is_flag=True, help="Also train linear heads at 13 learning rates, like DINOv2."
)
@click.option(
    "--logreg",
    is_flag=True,
    help="Also fit logistic regression like DINOv2: on raw features, with 45 values of C.",
)
@click.option(
    "--folds",
    metavar="K",
    type=click.IntRange(min=2),
    help="Also cross-validate logistic regression on the training images, in K folds.",
)
@click.option(
    "--knn", metavar="K", type=click.IntRange(min=1), help="Also fit k-NN with K neighbors."
)
@click.option(
    "--learning-curve",
    is_flag=True,
    help="Also measure accuracy against the number of training images: would more images help?",
)
@click.option("--out", metavar="DIR", help="Write probe.json, and the learning curve as SVG.")
def probe(model: str, shots: str, **options: Any) -> CommandResult:
    """Measure frozen features: few-shot and linear accuracy.

    MODEL is a run directory, a model folder, hf-hub:owner/name[@revision] or a timm name.
    """
    from finetune.commands.probe import format_probe, parse_shots, probe_model

    result = probe_model(model, shots=parse_shots(shots), **options)
    return CommandResult(result, format_probe(result))


@command("report", example="finetune report runs/a runs/b --out comparison.html")
@click.argument("runs", metavar="RUN...", nargs=-1, required=True)
@click.option(
    "--out",
    metavar="PATH",
    help="File or folder for the page; for several runs, for their comparison.",
)
@click.option(
    "--doctor",
    metavar="DIR",
    help="Show the findings of `finetune data doctor --out DIR` about the worst mistakes.",
)
def report(runs: tuple[str, ...], out: str | None, doctor: str | None) -> CommandResult:
    """Write an HTML page per run, and compare runs."""
    from finetune.report.run_data import check_run_directory

    for run in runs:
        check_run_directory(Path(run))

    from finetune.report.page import write_report_pages

    written = write_report_pages(runs, out=out, doctor=doctor)
    pages = [*written["reports"], written["comparison"]]
    return CommandResult(written, "\n".join(str(page) for page in pages if page))
