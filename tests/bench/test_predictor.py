"""A prediction of another setting is that of a run with that setting."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from forked_runs import tiny_recipe

from finetune.bench.predictor import Prediction, Predictor, TrialMeasurements
from finetune.commands.estimate import suggest_settings
from finetune.training.compile import choose_kernels
from finetune.training.setup import build_setup

QUIET = ("data.micro_batch=16", "data.val_fraction=0", "run.test=false", "run.save_every=1000")


def predictor(*overrides: str, beside: Predictor | None = None, **measured: Any) -> Predictor:
    """Of a run that trains 100 images a second, 125 without their input; none are evaluated.

    One that stands beside another knows its passes: where its network and micro-batch are the same.
    """
    setup = build_setup(
        tiny_recipe("model.args.depth=3", *QUIET, *overrides),
        device=torch.device("cpu"),
        show_progress=False,
    )
    network = setup.built.model
    choose_kernels(network, device=setup.device, dtype=torch.float32)
    micro_batch = setup.recipe.data.micro_batch
    assert isinstance(micro_batch, int)
    made = Predictor(
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
    if beside is not None:
        made._estimates = beside._estimates
    return made


def own(of: Predictor) -> Prediction:
    return of.predict(of.setup.recipe)


def options_of(of: Predictor) -> dict[str, dict[str, Any]]:
    found = suggest_settings(of, own(of), of.network)
    return {option["change"]: option for option in found}


@pytest.fixture(scope="module")
def plain() -> Predictor:
    return predictor()


@pytest.fixture(scope="module")
def options(plain: Predictor) -> dict[str, dict[str, Any]]:
    return options_of(plain)


def test_the_most_helpful_comes_first(plain: Predictor, options: dict[str, dict[str, Any]]) -> None:
    peak = own(plain).peak_bytes
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
        assert option["halves"] == [name for name, is_so in halves.items() if is_so]
    assert any(option["halves"] for option in options.values())


@pytest.mark.parametrize(
    "change", ["model.grad_checkpointing=true", "model.freeze=1", "model.freeze=backbone"]
)
def test_an_override_is_predicted_as_a_run_of_that_recipe(
    plain: Predictor, options: dict[str, dict[str, Any]], change: str
) -> None:
    other, before = own(predictor(change)), own(plain).activations.flops_per_image
    assert options[change]["peak"] == pytest.approx(other.peak_bytes, rel=1e-3)
    assert other.activations.flops_per_image is not None
    assert before is not None
    computing = other.activations.flops_per_image / before / 125
    expected = 1 / (1 / 100 - 1 / 125 + computing)
    assert options[change]["images_per_second"] == pytest.approx(expected)
    assert (expected > 100) == change.startswith("model.freeze")


def test_half_a_micro_batch_and_another_optimiser(
    plain: Predictor, options: dict[str, dict[str, Any]]
) -> None:
    before = own(plain)
    smaller = options["data.micro_batch=8"]
    assert smaller["peak"] == before.peak_bytes - 8 * before.activations.bytes_per_image
    assert smaller["images_per_second"] is None
    other = own(predictor("optim.name=sgd"))
    assert other.parts["moments"] < before.parts["moments"]
    saved = before.parts["moments"] - other.parts["moments"]
    assert before.peak_bytes - other.peak_bytes == saved


def test_a_smaller_image_has_fewer_operations(options: dict[str, dict[str, Any]]) -> None:
    smaller = options["model.image_size=8"]  # the next that patches of 4 divide, below 16 / 2**0.5
    assert smaller["peak"] == pytest.approx(
        own(predictor("model.image_size=8")).peak_bytes, rel=1e-3
    )
    assert smaller["images_per_second"] > 200


def test_the_input_is_a_line_where_it_costs_much(
    plain: Predictor, options: dict[str, dict[str, Any]]
) -> None:
    line = options["input at no cost (data.train)"]
    assert line["images_per_second"] == 125
    cheap = predictor(beside=plain, images_per_second_without_input=105.0)
    assert not any("input" in change for change in options_of(cheap))
    decoded_anew = predictor("data.keep=none", beside=plain, keeps_images=False)
    assert "data.keep=memory" in options_of(decoded_anew)


def test_where_evaluation_takes_the_most_its_batch_is_named(plain: Predictor) -> None:
    of = predictor("data.val_fraction=0.5", "data.eval_batch_size=400", beside=plain)
    before = own(of)
    assert before.peak_bytes == before.phases["evaluation"]
    lines = options_of(of)
    assert lines["data.eval_batch_size=200"]["peak"] < before.peak_bytes
    assert "data.micro_batch=8" not in lines  # it would change nothing


def test_the_report_counts_without_gradients() -> None:
    prediction = own(predictor(report_bytes=10**9))
    kept = sum(prediction.parts.values()) - prediction.parts["gradients"]
    assert prediction.phases["report"] == kept + 10**9
