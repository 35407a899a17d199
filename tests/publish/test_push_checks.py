"""The contents of a push: allowed files, the search for secrets, and the card check."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from hub_fixtures import CARD, WRITE_TOKEN, folder, hub, sleep_durations, write_model_folder
from hub_server import HubServer
from refusals import refused
from safetensors.torch import save_file
from torch import zeros

from finetune.errors import HubError
from finetune.publish.artifacts import PUBLISHED_FILES
from finetune.publish.push_checks import check_card, check_no_secrets, files_to_push, is_run_dir

__all__ = ["folder", "hub", "sleep_durations"]  # fixtures


class TestFilesToPush:
    def test_only_published_files_are_pushed(
        self, folder: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        for name in (
            *PUBLISHED_FILES[3:],
            ".lock",
            ".env",
            "optimizer.pt",
            "recipe.yaml~",
            "notes.md",
        ):
            (folder / name).write_text("x")
        (folder / "checkpoints").mkdir()
        (folder / "checkpoints" / "model.safetensors").write_text("x")
        assert files_to_push(folder) == {name: folder / name for name in PUBLISHED_FILES}
        shown = capsys.readouterr().err
        assert shown.count("\n") == 1
        assert "optimizer.pt, recipe.yaml~" in shown

    def test_no_message_when_no_file_is_skipped(
        self, folder: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert set(files_to_push(folder)) == {"config.json", "model.safetensors", "README.md"}
        assert capsys.readouterr().err == ""

    def test_symlinks(self, folder: Path, tmp_path: Path) -> None:
        (folder / "weights").write_bytes((folder / "model.safetensors").read_bytes())
        (folder / "model.safetensors").unlink()
        (folder / "model.safetensors").symlink_to("weights")
        assert "model.safetensors" in files_to_push(folder), "a link inside is a file of the folder"
        (tmp_path / "secret.txt").write_text("secret")
        (folder / "results.json").symlink_to(tmp_path / "secret.txt")
        with refused("hub.not_pushable", "link"):
            files_to_push(folder)
        (folder / ".env").write_text("secret")
        (folder / "results.json").unlink()
        (folder / "results.json").symlink_to(".env")
        with refused("hub.not_pushable", "link"):
            files_to_push(folder)

    def test_symlinked_folder(self, folder: Path, tmp_path: Path) -> None:
        (tmp_path / "latest").symlink_to(folder)
        assert len(files_to_push(tmp_path / "latest")) == 3

    def test_folder_named_like_a_file_is_skipped(self, folder: Path) -> None:
        (folder / "results.json").mkdir()
        assert "results.json" not in files_to_push(folder)


class TestSecrets:
    def check_secrets(self, folder: Path, text: str = "message") -> None:
        check_no_secrets(files_to_push(folder), text, folder.parent / "run")

    @pytest.mark.usefixtures("hub")
    def test_clean_folder(self, folder: Path) -> None:
        home = Path.home()
        harmless = f"hf_hub_download, https://x.org{home}/a, {home}sick, ~{home}, "
        harmless += "https://x.org/forum?id=YicbFdNTTy&design=1&keyword=a, https://***@x.org/a?***"
        (folder / "README.md").write_text(CARD + harmless)
        self.check_secrets(folder)

    @pytest.mark.usefixtures("hub")
    @pytest.mark.parametrize("name", ["README.md", "recipe.yaml", "results.json", "curves.png"])
    @pytest.mark.parametrize(
        "secret",
        [
            WRITE_TOKEN,
            "hf_" + "Ab1" * 11,
            "https://me:word@host/x.tar",
            "https://host/x.tar?X-Amz-Date=1&X-Amz-Signature=0a1b",
            "https://host/x.tar?se=1&sig=0a1b",
            "https://host/x.tar?token=0a1b",
            "password=hunter2hunter2",
            "hub:me:hunter2hunter2@owner/name",
            "-----BEGIN OPENSSH PRIVATE KEY-----",
            "glpat-" + "Ab1-" * 5,
            "sk-proj-" + "Ab1_" * 8,
        ],
    )
    def test_tokens(self, folder: Path, name: str, secret: str) -> None:
        (folder / name).write_bytes(b"\x89PNG\xff " + secret.encode() + b"\n")
        with refused("hub.holds_secret", f"{name}: ") as caught:
            self.check_secrets(folder)
        assert secret not in str(caught.value)

    @pytest.mark.usefixtures("hub")
    def test_tokens_in_the_message_and_the_weights_header(self, folder: Path) -> None:
        with refused("hub.holds_secret", "the commit message: "):
            self.check_secrets(folder, f"mine is {WRITE_TOKEN}")
        weights = folder / "model.safetensors"
        save_file({"a": zeros(3)}, weights, metadata={"note": WRITE_TOKEN})
        with refused("hub.holds_secret", "model.safetensors: "):
            self.check_secrets(folder)

    @pytest.mark.usefixtures("hub")
    @pytest.mark.parametrize(
        "form", ["{}", "{}/data/x", "source: 'folder:{}'", "({})", "file://{}/x"]
    )
    @pytest.mark.parametrize("kind", ["home", "run"])
    def test_local_paths(self, folder: Path, form: str, kind: str) -> None:
        path = Path.home() if kind == "home" else folder.parent / "run"
        (folder / "results.json").write_text(form.format(path))
        with refused("hub.holds_path", "results.json: ") as caught:
            self.check_secrets(folder)
        assert str(path) in str(caught.value)

    @pytest.mark.usefixtures("hub")
    def test_json_escaped_local_paths(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("HOME", "/homes/zoë")
        folder = write_model_folder(tmp_path / "net", results__json=json.dumps("/homes/zoë/images"))
        assert "zoë" not in (folder / "results.json").read_text()
        with refused("hub.holds_path", "/homes/zoë"):
            self.check_secrets(folder)

    @pytest.mark.usefixtures("hub")
    def test_root_as_home_forbids_no_path(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("HOME", "/")
        (folder / "results.json").write_text('"/ and /usr/share"')
        self.check_secrets(folder)


class TestCard:
    def check(self, folder: Path) -> None:
        check_card("alice/net", files_to_push(folder))

    def test_valid_and_missing_card(self, hub: HubServer, folder: Path) -> None:
        self.check(folder)
        assert hub.count("POST /api/validate-yaml") == 1
        (folder / "README.md").unlink()
        self.check(folder)
        assert hub.count("POST /api/validate-yaml") == 1

    def test_card_that_loads_another_repository(
        self, hub: HubServer, folder: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        card = folder / "README.md"
        for name in ("alice/net", "alice/first"):
            card.write_text(f'# Net\n\ntimm.create_model("hf-hub:{name}", pretrained=True)\n')
            self.check(folder)
        assert caplog.text.count("its code loads") == 1
        assert "its code loads alice/first, not alice/net" in caplog.text

    @pytest.mark.parametrize(
        "header, words",
        [
            ("license: no-such-license", "license"),
            ("license: mit\nbase_model_relation: cousin", "base_model_relation"),
            ("a: [", "flow sequence|flow node|parsing"),
        ],
    )
    def test_hub_validation_error_is_reported(
        self, hub: HubServer, folder: Path, header: str, words: str
    ) -> None:
        (folder / "README.md").write_text(f"---\n{header}\n---\n")
        with pytest.raises(HubError, match=f"does not accept this card: .*({words})") as caught:
            self.check(folder)
        assert "\n" not in str(caught.value)
        assert "fix its YAML header" in str(caught.value)

    def test_card_with_invalid_utf8(self, hub: HubServer, folder: Path) -> None:
        (folder / "README.md").write_bytes(b"---\nlicense: mit\n---\n\xff\xfe")
        with refused("hub.refused_card", "README.md", "utf-8"):
            self.check(folder)

    def test_hub_warnings_are_logged(
        self, hub: HubServer, folder: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        (folder / "README.md").write_text("# No head\n")
        self.check(folder)
        assert "the hub warns: empty or missing yaml" in capsys.readouterr().err


def test_is_run_dir(folder: Path, tmp_path: Path) -> None:
    assert is_run_dir(folder) is False
    os.rename(folder, tmp_path / "model")
    (tmp_path / "run.json").write_text('{"status": "done"}')
    assert is_run_dir(tmp_path) is True
