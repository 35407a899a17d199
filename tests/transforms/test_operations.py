"""The table of operations: complete, and consistent with itself."""

from __future__ import annotations

import pytest

from finetune.transforms.grammar import parse
from finetune.transforms.operations import OPERATIONS, help_text


@pytest.mark.parametrize("name", OPERATIONS)
def test_every_default_is_within_its_own_bounds(name: str) -> None:
    required = {"rotate": "15", "corrupt": "'noise', 3"}.get(name, "")
    (plain,) = parse(f"{name}({required})", train=name != "corrupt")
    written = ", ".join(
        f"{key}={value!r}" for key, value in plain.arguments.items() if value is not None
    )
    (again,) = parse(f"{name}({written})", train=name != "corrupt")
    assert again == plain


def test_help_names_every_operation_and_argument() -> None:
    text = help_text()
    assert len(OPERATIONS) == 14
    for name, operation in OPERATIONS.items():
        assert f"{name}(" in text
        assert operation.help in text
        assert all(key in text for key in operation.parameters)
