"""Exit codes of the errors, suggestions for misspelled names, redaction of secrets."""

from __future__ import annotations

import random
import time
from pathlib import Path

import pytest
import torch

from finetune import errors
from finetune.errors import root_cause_message


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
        ("RegressionError", "regression", 8),
    ],
)
def test_exit_codes_and_error_families_are_stable(name: str, family: str, exit_code: int) -> None:
    error_class = getattr(errors, name)
    assert issubclass(error_class, errors.FinetuneError)
    default_code, own_code = (
        error_class("what: cause; fix"),
        error_class("what", code=f"{family}.cause"),
    )
    assert (default_code.exit_code, default_code.code) == (exit_code, family)
    assert (own_code.exit_code, own_code.code) == (exit_code, f"{family}.cause")


def test_a_signal_exits_with_128_plus_its_number() -> None:
    assert errors.Interrupted("stopped", 15).exit_code == 143
    assert errors.Interrupted("stopped", 2).exit_code == 130


def test_did_you_mean_suggests_only_similar_names() -> None:
    assert errors.did_you_mean("modl", ["model", "data"]) == "; did you mean 'model'?"
    assert errors.did_you_mean("zzz", ["model", "data"]) == ""


def test_control_characters_are_escaped() -> None:
    assert errors.escape_control_chars("two\nlines\tand 日本語") == "two\nlines\tand 日本語"
    assert errors.escape_control_chars("red \x1b[31m, back \u202e, gone \u200b") == (
        r"red \x1b[31m, back \u202e, gone \u200b"
    )
    assert errors.escape_control_chars("two\nlines", keep="") == r"two\nlines"


def test_tokens_and_passwords_are_redacted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SOME_API_KEY", "a-secret-of-the-environment")
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")
    monkeypatch.setenv("HF_TOKEN_PATH", str(tmp_path / "token"))
    (tmp_path / "token").write_text("the-token-of-the-login\n")
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    (tmp_path / "stored_tokens").write_text("[work]\nhf_token = the-token-of-another-login\n")
    for place in ("XDG_CACHE_HOME", "HF_HOME"):  # where huggingface_hub reads a login
        with monkeypatch.context() as patch:
            patch.delenv("HF_TOKEN_PATH")
            patch.delenv("HF_HOME")
            patch.setenv("CACHE", str(tmp_path))
            patch.setenv(place, f"$CACHE/{place}")
            login = (
                tmp_path / place / ("huggingface" if place == "XDG_CACHE_HOME" else "") / "token"
            )
            login.parent.mkdir(parents=True)
            login.write_text("the-token-of-a-cache")
            assert errors.redact_secrets("the-token-of-a-cache") == "***"
    monkeypatch.setenv("GITHUB_PAT", "the-token-of-git")
    assert errors.redact_secrets("the-token-of-another-login the-token-of-git") == "*** ***"
    redacted = errors.redact_secrets(
        "a-secret-of-the-environment https://me:word@host/x the-token-of-the-login false "
        "hf_abcdefghijklmnopqrstuvwxyz 'https://me:p@ss@host/x.tar?a=b&sig=c,d==': gone; is it /x?"
    )
    assert redacted == (
        "*** https://***@host/x *** false *** 'https://***@host/x.tar?***': gone; is it /x?"
    )
    assert errors.redact_secrets(redacted) == redacted
    assert str(errors.DataError("S3://me:word@host/x?sig=y")) == "S3://***@host/x?***"


@pytest.mark.parametrize(
    "text, expected",
    [
        ("s3://b/x.tar#token=abc; check it", "s3://b/x.tar?***; check it"),
        ("http://h/x;v=1;token=abc", "http://h/x?***"),
        ("http://h/a;b/x?token=abc", "http://h/a;b/x?***"),
        ("https://h/guide#part; see it", "https://h/guide#part; see it"),
        ("tar:http:/me:word@host/x.tar", "tar:http:***@host/x.tar"),
        (r"tar:http:\\me:word@host/x.tar", "tar:http:***@host/x.tar"),
        ("hub:me:word@owner/name", "hub:***@owner/name"),
        ("tar:https://host:80/set@v1/x.tar", "tar:https://host:80/set@v1/x.tar"),
        ("hub:owner/name@main:config", "hub:owner/name@main:config"),
        ("s3://AKIA:wJalr/K7M/bPx@bucket/x", "s3://***@bucket/x"),
        ("https://bob:Ab/cdEFgh12@git.host/repo", "https://***@git.host/repo"),
        ("http://host:80?x=me@home.org", "http://host:80?***"),
        ("tar:https:/h/x.tar?sig=a-secret-value: no file", "tar:https:/h/x.tar?sig=***: no file"),
        ("hub:owner/name?sig=a-secret-value", "hub:owner/name?sig=***"),
        ("https:/h/x?X-Amz-Signature=a-secret-value", "https:/h/x?X-Amz-Signature=***"),
        ("'run.push_to=me:word@owner/name'", "'run.push_to=***@owner/name'"),
        ("'run.hf_token=a-secret-value'", "'run.hf_token=***'"),
        ("model.args.class_token=false", "model.args.class_token=false"),
    ],
)
def test_secrets_in_mistyped_arguments_are_redacted(text: str, expected: str) -> None:
    assert errors.redact_secrets(text) == expected
    assert errors.redact_secrets(expected) == expected


@pytest.mark.parametrize(
    "text",
    [
        "password=hunter2hunter2",
        "aws_secret_access_key=wJalrXUtnFEMIK7MDENG",
        "s3://AKIA:wJalr/K7M/bPx@bucket/x",
        "https://bob:Ab/cdEFgh12@git.host/repo",
        r"https://host/x.tar?X-Amz-Date=1\u0026X-Amz-Signature=hunter2hunter2",
        "hub:me:hunter2hunter2@owner/name",
        "note: token=hunter2hunter2",
        "tar:https;//me:hunter2hunter2@host/x.tar",
        "tar:htps//me:hunter2hunter2@host/x.tar",
        "DefaultEndpointsProtocol=https;AccountKey=hunter2hunter2==",
        "tar:pipe:curl -H Authorization: Bearer hunter2hunter2 https://host/x.tar",
        "https://host/x.tar&sig=hunter2hunter2",
        "https://host/x.tar?pass=hunter2hunter2",
        "https://host/x.tar?sas=hunter2hunter2",
        "AKIAABCDEFGHIJKLMNOP",
        "?SİG=hunter2hunter2 ?sıg=hunter2hunter2",
        "my.paſſword=hunter2hunter2",
        "to\N{KELVIN SIGN}en=hunter2hunter2",
        "x github_pat_0123456789012345678901234567890",
        "-----BEGIN PRIVATE KEY-----\nMIIE\n-----END PRIVATE KEY-----",
        "-----BEGIN PGP PRIVATE KEY BLOCK-----\nMIIE\n-----END PGP PRIVATE KEY BLOCK-----",
    ],
)
def test_what_is_masked_must_not_be_published(text: str) -> None:
    assert errors.holds_secret(text)
    assert "***" in (redacted := errors.redact_secrets(text))
    assert not errors.holds_secret(redacted)


def test_binary_data_are_searched_fast() -> None:
    """About 0.05 s per MB; with a search of each pattern at each character, it took 0.7 s."""
    text = "\0" + random.Random(0).randbytes(1 << 22).decode("utf-8", "replace")
    started = time.process_time()
    assert not errors.holds_secret(text)
    assert time.process_time() - started < 1.2


@pytest.mark.parametrize(
    "text",
    [
        'login(token=os.environ["HF_TOKEN"])',
        "login(token=get_token())",
        "HF_TOKEN=$MY_TOKEN finetune",
        "token=<your token>",
        "f'token={token}'",
        "\0 random:bytes:of@an image",
    ],
)
def test_placeholders_and_binary_data_are_no_secrets(text: str) -> None:
    assert not errors.holds_secret(text)


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
def test_is_out_of_memory_by_class_or_message(error: Exception, expected: bool) -> None:
    assert errors.is_out_of_memory(error) == expected


def test_the_out_of_memory_error_of_torch_is_recognized() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**60, dtype=torch.uint8)
    assert errors.is_out_of_memory(caught.value)


def test_root_cause_message_is_one_short_line() -> None:
    def fail() -> None:
        try:
            raise ValueError("a\n  long cause" + "x" * 300)
        except ValueError as error:
            raise RuntimeError("step 1 of 3 failed") from error

    with pytest.raises(RuntimeError) as caught:
        fail()
    assert root_cause_message(caught.value).startswith("a long causexxx")
    assert len(root_cause_message(caught.value)) == 201
    assert root_cause_message(KeyError()) == "KeyError"
