"""What another setting would take is what the same run with that setting takes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from faults_runs import tiny

from finetune.commands.plan_options import Baseline, rehearsed
from finetune.training.compile import choose_kernels
from finetune.training.memory import num_bytes, state_bytes
from finetune.training.micro_batch import optimizer_settings
from finetune.training.setup import open_setup

PARTS = {"program": 0, "average": 0, "images": 10**6, "snapshot": 0}


def baseline(*overrides: str, **given: Any) -> Baseline:
    """A run of which 100 images a second are trained, 125 without their input."""
    setup = open_setup(
        tiny("model.args.depth=4", *overrides),
        device=torch.device("cpu"),
        notice=print,
        progress=False,
    )
    network = setup.built.model
    choose_kernels(network, device=setup.device, dtype=torch.float32)
    trained = num_bytes(p for p in network.parameters() if p.requires_grad)
    own = {
        "weights": num_bytes(network.state_dict().values()),
        "gradients": trained,
        "moments": state_bytes(network, optimizer_settings(setup.recipe.optim)),
    }
    settings: dict[str, Any] = {"dtype": torch.float32, "images": 16}
    facts: dict[str, Any] = {
        "dtype": torch.float32,
        "part": 16,
        "evaluated": 0,
        "parts": {**PARTS, **own},
        "report": 0,
        "need": rehearsed(setup, network, **settings),
        "evaluation": rehearsed(setup, network, train=False, **settings),
        "real": 100.0,
        "synthetic": 125.0,
        "in_memory": True,
        "features_at_once": 0,
        "tick": lambda: None,
        **given,
    }
    return Baseline(setup=setup, network=network, **facts)


def peak_of(found: Baseline) -> int:
    return max(found.phases(found.parts, found.need.at(found.part)).values())


@pytest.fixture(scope="module")
def plain() -> Baseline:
    return baseline()


@pytest.fixture(scope="module")
def options(plain: Baseline) -> dict[str, dict[str, Any]]:
    return {option["change"]: option for option in plain.options()}


def test_the_most_helpful_comes_first(plain: Baseline, options: dict[str, dict[str, Any]]) -> None:
    peak = peak_of(plain)
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
    "change", ["model.grad_checkpointing=true", "model.freeze=2", "model.freeze=backbone"]
)
def test_a_line_is_what_a_run_of_that_setting_takes(
    plain: Baseline, options: dict[str, dict[str, Any]], change: str
) -> None:
    other = baseline(change)
    assert options[change]["peak"] == pytest.approx(peak_of(other), rel=1e-3)
    assert other.need.operations is not None
    before = plain.need.operations
    assert before is not None
    computing = other.need.operations / before / 125
    expected = 1 / (1 / 100 - 1 / 125 + computing)
    assert options[change]["images_per_second"] == pytest.approx(expected)
    assert (expected > 100) == change.startswith("model.freeze")


def test_half_a_micro_batch_and_another_optimiser(
    plain: Baseline, options: dict[str, dict[str, Any]]
) -> None:
    peak, each = peak_of(plain), plain.need.per_image
    assert options["data.micro_batch=8"]["peak"] == peak - 8 * each
    assert options["data.micro_batch=8"]["images_per_second"] is None
    other = baseline("optim.name=sgd")
    assert other.parts["moments"] < plain.parts["moments"]
    saved = plain.parts["moments"] - other.parts["moments"]
    assert plain._option("x", moments=other.parts["moments"])["peak"] == peak - saved


def test_a_smaller_image_has_fewer_operations(options: dict[str, dict[str, Any]]) -> None:
    smaller = options["model.image_size=8"]  # the next that patches of 4 divide, below 16 / 2**0.5
    other = baseline("model.image_size=8")
    assert smaller["peak"] == pytest.approx(peak_of(other), rel=1e-3)
    assert smaller["images_per_second"] > 200


def test_the_input_is_a_line_where_it_costs_much(options: dict[str, dict[str, Any]]) -> None:
    line = options["an input that costs nothing (data.train)"]
    assert line["images_per_second"] == 125
    cheap = {option["change"] for option in baseline(synthetic=105.0).options()}
    assert not any("input" in change for change in cheap)
    files = {option["change"] for option in baseline(in_memory=False).options()}
    assert "data.keep=memory" in files


def test_where_evaluation_takes_the_most_its_batch_is_named() -> None:
    found = baseline(evaluated=4000)
    assert peak_of(found) == found.phases(found.parts, 0)["evaluation"]
    lines = {option["change"]: option for option in found.options()}
    assert lines["data.eval_batch_size=2000"]["peak"] < peak_of(found)
    assert "data.micro_batch=8" not in lines  # it would change nothing


def test_the_report_counts_without_gradients() -> None:
    found = baseline(report=10**9)
    kept = sum(found.parts.values()) - found.parts["gradients"]
    assert found.phases(found.parts, 0)["report"] == kept + 10**9
