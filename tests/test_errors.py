"""Each kind of error has its exit code; names get their nearest."""

from __future__ import annotations

import pytest

from finetune import errors


@pytest.mark.parametrize(
    "name, code",
    [
        ("RecipeError", 2),
        ("DataError", 3),
        ("WeightsError", 4),
        ("CheckpointError", 4),
        ("SetupError", 5),
        ("DivergedError", 6),
        ("HubError", 7),
    ],
)
def test_exit_codes_are_the_contracts(name: str, code: int) -> None:
    error = getattr(errors, name)("what: why; what next")
    assert isinstance(error, errors.FinetuneError)
    assert error.exit_code == code


def test_a_signal_gives_the_shells_code() -> None:
    assert errors.Interrupted("stopped", 15).exit_code == 143
    assert errors.Interrupted("stopped", 2).exit_code == 130


def test_only_what_is_near_is_suggested() -> None:
    assert errors.nearest("modl", ["model", "data"]) == "; did you mean 'model'?"
    assert errors.nearest("zzz", ["model", "data"]) == ""
