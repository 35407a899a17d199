"""Push permissions: each reason for which the hub would reject a push has its own message."""

from __future__ import annotations

from typing import Any

import pytest
from hub_fixtures import READ_TOKEN, hub, sleep_durations
from hub_server import HubServer
from huggingface_hub import HfApi, constants
from refusals import refused

from finetune.errors import HubError
from finetune.publish.permissions import check_rights

__all__ = ["hub", "sleep_durations"]  # fixtures

SHA = "0123456789abcdef0123456789abcdef01234567"


def rejection_message(repository: str = "alice/net", **options: Any) -> str:
    with pytest.raises(HubError) as caught:
        check_rights(repository, **options)
    assert caught.value.exit_code == 7
    message = str(caught.value)
    assert message.startswith(f"{repository}: ")
    assert "hf_" not in message
    return message


def set_whoami(monkeypatch: pytest.MonkeyPatch, **fields: Any) -> None:
    """Make whoami return fields that the loopback hub cannot."""
    response = {"name": "alice", "orgs": [], **fields}
    monkeypatch.setattr(HfApi, "whoami", lambda self, **_: response)


def fine_grained(*scoped: tuple[str, str]) -> dict[str, Any]:
    scopes = [{"entity": {"name": n}, "permissions": ["repo.read", p]} for n, p in scoped]
    return {"accessToken": {"role": "fineGrained", "fineGrained": {"scoped": scopes}}}


class TestAllowed:
    @pytest.mark.parametrize("repository", ["alice/new", "zoo/new", "Alice/new", "alice/mine"])
    @pytest.mark.parametrize("private", [False, True])
    def test_check_creates_nothing(self, hub: HubServer, repository: str, private: bool) -> None:
        hub.add_repo("alice/mine", private=True)
        check_rights(repository, private=private)
        assert {method for method, _ in hub.requests} == {"GET"}
        assert list(hub.store.repositories) == [("model", "alice/mine")]

    def test_public_push_to_a_private_repository(self, hub: HubServer) -> None:
        hub.add_repo("alice/mine", private=True)
        check_rights("alice/mine")
        assert hub.store.repository("alice/mine").private

    def test_new_branch(self, hub: HubServer) -> None:
        hub.add_repo("alice/mine")
        check_rights("alice/mine", revision="new/branch")
        assert list(hub.store.repository("alice/mine").branches) == ["main"]

    @pytest.mark.parametrize("entity", ["alice", "alice/net"])
    def test_fine_grained_token_with_write_access(
        self, hub: HubServer, monkeypatch: pytest.MonkeyPatch, entity: str
    ) -> None:
        set_whoami(monkeypatch, auth=fine_grained(("zoo", "x"), (entity, "repo.write")))
        check_rights("alice/net")

    @pytest.mark.parametrize(
        "auth", [None, {"type": "oauth"}, {"accessToken": {"role": "fineGrained"}}]
    )
    def test_token_with_unknown_rights(
        self, hub: HubServer, monkeypatch: pytest.MonkeyPatch, auth: Any
    ) -> None:
        set_whoami(monkeypatch, auth=auth)
        check_rights("alice/net")


class TestRejected:
    def test_every_reason_has_its_own_message(
        self, hub: HubServer, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        hub.add_repo("alice/public")
        hub.add_repo("bob/public")
        messages = {
            "public repository": rejection_message("alice/public", private=True),
            "repository of another user": rejection_message("bob/public"),
            "namespace of another user": rejection_message("bob/new"),
        }
        monkeypatch.setenv("HF_TOKEN", READ_TOKEN)
        messages["read token"] = rejection_message()
        monkeypatch.setenv("HF_TOKEN", "hf_nobodys")
        messages["invalid token"] = rejection_message()
        monkeypatch.delenv("HF_TOKEN")
        messages["no token"] = rejection_message()
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
        messages["offline"] = rejection_message()
        words = {
            "public repository": "is public, and a push does not",
            "repository of another user": (
                "'bob' is neither you (alice) nor an organization where you may write (zoo)"
            ),
            "namespace of another user": "push to alice/new",
            "read token": "the token from HF_TOKEN may only read",
            "invalid token": "rejects the token from HF_TOKEN",
            "no token": "`hf auth login`, or set HF_TOKEN",
            "offline": "HF_HUB_OFFLINE",
        }
        for reason, text in words.items():
            assert text in messages[reason]
        assert len(set(messages.values())) == len(messages)
        assert not hub.count("POST")

    def test_read_token_is_rejected_first(
        self, hub: HubServer, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """create_repo(exist_ok=True) would succeed here."""
        hub.add_repo("alice/mine")
        monkeypatch.setenv("HF_TOKEN", READ_TOKEN)
        HfApi().create_repo("alice/mine", exist_ok=True)
        assert "may only read" in rejection_message("alice/mine")

    def test_private_repository_of_another_user_looks_missing(self, hub: HubServer) -> None:
        hub.add_repo("bob/secret", private=True)
        assert "'bob' is neither you" in rejection_message("bob/secret")

    def test_organization_without_write_access(
        self, hub: HubServer, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        hub.add_repo("zoo/mine")
        hub.fail("auth-check/write", status=403)
        assert "does not let you (alice) write" in rejection_message("zoo/mine")
        set_whoami(monkeypatch, orgs=[{"name": "zoo", "roleInOrg": "read"}])
        assert "'zoo' is neither you (alice)" in rejection_message("zoo/new")

    @pytest.mark.parametrize(
        "scoped", [(), (("zoo", "repo.write"),), (("alice", "repo.content.read"),)]
    )
    def test_fine_grained_token_without_write_access(
        self, hub: HubServer, monkeypatch: pytest.MonkeyPatch, scoped: tuple[tuple[str, str], ...]
    ) -> None:
        set_whoami(monkeypatch, auth=fine_grained(*scoped))
        assert "the token from HF_TOKEN may only read" in rejection_message()

    def test_unavailable_hub(self, hub: HubServer) -> None:
        hub.fail("whoami", times=None)
        assert rejection_message().endswith("503 (injected fault); try again later")


class TestNames:
    @pytest.mark.parametrize(
        "name", ["net", "hf-hub:alice/net", "https://huggingface.co/zoo/net", "a b/c", "a/b/c", ""]
    )
    def test_invalid_repository_names(self, hub: HubServer, name: str) -> None:
        with refused("recipe.wrong_value", f"'{name}'", "owner/name"):
            check_rights(name)
        assert not hub.requests

    @pytest.mark.parametrize("revision", ["", "a b", "-x", "a//b", "/a", SHA])
    def test_invalid_branch_names(self, hub: HubServer, revision: str) -> None:
        with refused("recipe.wrong_value", "--revision"):
            check_rights("alice/net", revision=revision)
        assert not hub.requests

    def test_tag_is_not_a_branch(self, hub: HubServer) -> None:
        hub.add_repo("alice/mine")
        hub.tag("alice/mine", "v1")
        with refused("recipe.wrong_value", "--revision", "v1"):
            check_rights("alice/mine", revision="v1")
