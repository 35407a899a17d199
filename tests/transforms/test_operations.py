"""The table of operations is complete and consistent."""

from __future__ import annotations

import pytest

from finetune.transforms.operations import OPERATIONS, format_operations_help
from finetune.transforms.spec_parser import parse_transform_spec


@pytest.mark.parametrize("name", OPERATIONS)
def test_every_default_is_within_its_own_bounds(name: str) -> None:
    required = {"rotate": "15", "corrupt": "'noise', 3"}.get(name, "")
    (call,) = parse_transform_spec(f"{name}({required})", train=name != "corrupt")
    arguments = ", ".join(
        f"{key}={value!r}" for key, value in call.arguments.items() if value is not None
    )
    (parsed_again,) = parse_transform_spec(f"{name}({arguments})", train=name != "corrupt")
    assert parsed_again == call


def test_help_names_every_operation_and_argument() -> None:
    text = format_operations_help()
    assert len(OPERATIONS) == 20
    for name, operation in OPERATIONS.items():
        assert f"{name}(" in text
        assert operation.help in text
        assert all(key in text for key in operation.parameters)
