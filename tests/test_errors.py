"""Each kind of error has its exit code; names get their nearest."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from finetune import errors


@pytest.mark.parametrize(
    "name, family, exit_code",
    [
        ("RecipeError", "recipe", 2),
        ("DataError", "data", 3),
        ("WeightsError", "weights", 4),
        ("CheckpointError", "checkpoint", 4),
        ("SetupError", "setup", 5),
        ("DivergedError", "diverged", 6),
        ("HubError", "hub", 7),
    ],
)
def test_exit_codes_and_families_are_the_contracts(name: str, family: str, exit_code: int) -> None:
    kind = getattr(errors, name)
    assert issubclass(kind, errors.FinetuneError)
    plain, precise = kind("what: why; what next"), kind("what", code=f"{family}.cause")
    assert (plain.exit_code, plain.code) == (exit_code, family)
    assert (precise.exit_code, precise.code) == (exit_code, f"{family}.cause")


def test_a_signal_gives_the_shells_code() -> None:
    assert errors.Interrupted("stopped", 15).exit_code == 143
    assert errors.Interrupted("stopped", 2).exit_code == 130


def test_only_what_is_near_is_suggested() -> None:
    assert errors.nearest("modl", ["model", "data"]) == "; did you mean 'model'?"
    assert errors.nearest("zzz", ["model", "data"]) == ""


def test_what_a_terminal_would_obey_becomes_visible() -> None:
    assert errors.visible("two\nlines\tand 日本語") == "two\nlines\tand 日本語"
    assert errors.visible("red \x1b[31m, back \u202e, gone \u200b") == (
        r"red \x1b[31m, back \u202e, gone \u200b"
    )
    assert errors.visible("two\nlines", keep="") == r"two\nlines"


def test_tokens_and_passwords_are_masked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SOME_API_KEY", "a-secret-of-the-environment")
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")
    monkeypatch.setenv("HF_TOKEN_PATH", str(tmp_path / "token"))
    (tmp_path / "token").write_text("the-token-of-the-login\n")
    shown = errors.masked(
        "a-secret-of-the-environment https://me:word@host/x the-token-of-the-login false "
        "hf_abcdefghijklmnopqrstuvwxyz"
    )
    assert shown == "*** https://***@host/x *** false ***"


@pytest.mark.parametrize(
    "error, expected",
    [
        (MemoryError(), True),
        (torch.OutOfMemoryError("no room for it"), True),
        (torch.AcceleratorError("CUDA error: out of memory"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate`"), True),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (errors.DataError("cat.jpg: out of memory"), False),
    ],
)
def test_memory_that_ran_out_is_known_by_name_or_words(error: Exception, expected: bool) -> None:
    assert errors.is_of_memory(error) == expected


def test_torch_says_it_so() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**60, dtype=torch.uint8)
    assert errors.is_of_memory(caught.value)
