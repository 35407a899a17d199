"""The prediction for a changed setting equals the prediction of a run with that setting."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from forked_runs import tiny_recipe

from finetune.bench.predictor import Prediction, Predictor, TrialMeasurements
from finetune.commands.estimate import suggest_settings
from finetune.training.compile import choose_kernels
from finetune.training.setup import build_setup

BASE_OVERRIDES = (
    "data.micro_batch=16",
    "data.val_fraction=0",
    "run.test=false",
    "run.save_every=1000",
)


def create_predictor(
    *overrides: str, reuse_from: Predictor | None = None, **measured: Any
) -> Predictor:
    """Create a predictor for a run at 100 images/s (125 without input), without evaluation.

    With `reuse_from`, share its activation estimates: network and micro-batch must be the same.
    """
    setup = build_setup(
        tiny_recipe("model.args.depth=3", *BASE_OVERRIDES, *overrides),
        device=torch.device("cpu"),
        show_progress=False,
    )
    network = setup.built.model
    choose_kernels(network, device=setup.device, dtype=torch.float32)
    micro_batch = setup.recipe.data.micro_batch
    assert isinstance(micro_batch, int)
    result = Predictor(
        setup,
        network,
        dtype=torch.float32,
        micro_batch_size=micro_batch,
        measured=TrialMeasurements(
            **{
                "images_per_second": 100.0,
                "images_per_second_without_input": 125.0,
                "image_bytes": 10**6,
                **measured,
            }
        ),
        tick=lambda: None,
    )
    if reuse_from is not None:
        result._estimates = reuse_from._estimates
    return result


def predict_current(predictor: Predictor) -> Prediction:
    return predictor.predict(predictor.setup.recipe)


def suggested_options(predictor: Predictor) -> dict[str, dict[str, Any]]:
    found = suggest_settings(predictor, predict_current(predictor), predictor.network)
    return {option["change"]: option for option in found}


@pytest.fixture(scope="module")
def base_predictor() -> Predictor:
    return create_predictor()


@pytest.fixture(scope="module")
def options(base_predictor: Predictor) -> dict[str, dict[str, Any]]:
    return suggested_options(base_predictor)


def test_options_are_sorted_by_benefit(
    base_predictor: Predictor, options: dict[str, dict[str, Any]]
) -> None:
    peak = predict_current(base_predictor).peak_bytes
    gains = [
        min(option["peak"] / peak, 100 / (option["images_per_second"] or 100))
        for option in options.values()
    ]
    assert len(gains) >= 5
    assert gains == sorted(gains)
    assert gains[-1] <= 0.98
    for option in options.values():
        faster = option["images_per_second"] or 0
        halves = {"memory": option["peak"] <= peak / 2, "time": faster >= 200}
        assert option["halves"] == [name for name, is_halved in halves.items() if is_halved]
    assert any(option["halves"] for option in options.values())


@pytest.mark.parametrize(
    "change", ["model.grad_checkpointing=true", "model.freeze=1", "model.freeze=backbone"]
)
def test_prediction_of_an_override_matches_its_run(
    base_predictor: Predictor, options: dict[str, dict[str, Any]], change: str
) -> None:
    other, before = (
        predict_current(create_predictor(change)),
        predict_current(base_predictor).activations.flops_per_image,
    )
    assert options[change]["peak"] == pytest.approx(other.peak_bytes, rel=1e-3)
    assert other.activations.flops_per_image is not None
    assert before is not None
    computing = other.activations.flops_per_image / before / 125
    expected = 1 / (1 / 100 - 1 / 125 + computing)
    assert options[change]["images_per_second"] == pytest.approx(expected)
    assert (expected > 100) == change.startswith("model.freeze")


def test_half_a_micro_batch_and_another_optimizer(
    base_predictor: Predictor, options: dict[str, dict[str, Any]]
) -> None:
    before = predict_current(base_predictor)
    smaller = options["data.micro_batch=8"]
    assert smaller["peak"] == before.peak_bytes - 8 * before.activations.bytes_per_image
    assert smaller["images_per_second"] is None
    other = predict_current(create_predictor("optim.name=sgd"))
    assert other.parts["moments"] < before.parts["moments"]
    saved = before.parts["moments"] - other.parts["moments"]
    assert before.peak_bytes - other.peak_bytes == saved


def test_smaller_image_has_fewer_operations(options: dict[str, dict[str, Any]]) -> None:
    # the largest multiple of the patch size below 16 / 2**0.5
    smaller = options["model.image_size=8"]
    assert smaller["peak"] == pytest.approx(
        predict_current(create_predictor("model.image_size=8")).peak_bytes, rel=1e-3
    )
    assert smaller["images_per_second"] > 200


def test_expensive_input_is_an_option(
    base_predictor: Predictor, options: dict[str, dict[str, Any]]
) -> None:
    suggestion = options["input at no cost (data.train)"]
    assert suggestion["images_per_second"] == 125
    cheap = create_predictor(reuse_from=base_predictor, images_per_second_without_input=105.0)
    assert not any("input" in change for change in suggested_options(cheap))
    without_cache = create_predictor(
        "data.keep=none", reuse_from=base_predictor, keeps_images=False
    )
    assert "data.keep=memory" in suggested_options(without_cache)


def test_eval_batch_size_is_suggested_if_evaluation_has_the_peak(base_predictor: Predictor) -> None:
    predictor = create_predictor(
        "data.val_fraction=0.5", "data.eval_batch_size=400", reuse_from=base_predictor
    )
    before = predict_current(predictor)
    assert before.peak_bytes == before.phases["evaluation"]
    suggestions = suggested_options(predictor)
    assert suggestions["data.eval_batch_size=200"]["peak"] < before.peak_bytes
    assert "data.micro_batch=8" not in suggestions  # it would change nothing


def test_report_memory_excludes_gradients() -> None:
    prediction = predict_current(create_predictor(report_bytes=10**9))
    without_gradients = sum(prediction.parts.values()) - prediction.parts["gradients"]
    assert prediction.phases["report"] == without_gradients + 10**9
