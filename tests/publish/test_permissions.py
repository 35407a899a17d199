"""Permissions: each reason for which the hub would refuse, with a message of its own."""

from __future__ import annotations

from typing import Any

import pytest
from hub_fixtures import OTHER_TOKEN, READ_TOKEN, WRITE_TOKEN, hub, sleep_durations
from hub_server import HubServer
from huggingface_hub import HfApi, constants
from refusals import refused

from finetune.errors import HubError
from finetune.publish.permissions import check_rights

Patch = pytest.MonkeyPatch

__all__ = ["hub", "sleep_durations"]  # fixtures

SHA = "0123456789abcdef0123456789abcdef01234567"


def refusal(repository: str = "alice/net", **options: Any) -> str:
    with pytest.raises(HubError) as caught:
        check_rights(repository, **options)
    assert caught.value.exit_code == 7
    message = str(caught.value)
    assert message.startswith(f"{repository}: ")
    assert "hf_" not in message
    return message


def tell(monkeypatch: Patch, **answer: Any) -> None:
    """Let whoami answer what the loopback hub cannot."""
    told = {"name": "alice", "orgs": [], **answer}
    monkeypatch.setattr(HfApi, "whoami", lambda self, **_: told)


def fine_grained(*scoped: tuple[str, str]) -> dict[str, Any]:
    scopes = [{"entity": {"name": n}, "permissions": ["repo.read", p]} for n, p in scoped]
    return {"accessToken": {"role": "fineGrained", "fineGrained": {"scoped": scopes}}}


class TestAllowed:
    @pytest.mark.parametrize("repository", ["alice/new", "zoo/new", "Alice/new", "alice/mine"])
    @pytest.mark.parametrize("private", [False, True])
    def test_without_creating_anything(
        self, hub: HubServer, repository: str, private: bool
    ) -> None:
        hub.add_repo("alice/mine", private=True)
        check_rights(repository, private=private)
        assert {method for method, _ in hub.requests} == {"GET"}
        assert list(hub.store.repositories) == [("model", "alice/mine")]

    def test_a_public_push_to_a_private_repository(self, hub: HubServer) -> None:
        hub.add_repo("alice/mine", private=True)
        check_rights("alice/mine")
        assert hub.store.repository("alice/mine").private

    def test_a_branch(self, hub: HubServer) -> None:
        hub.add_repo("alice/mine")
        check_rights("alice/mine", revision="new/branch")
        assert list(hub.store.repository("alice/mine").branches) == ["main"]

    @pytest.mark.parametrize("entity", ["alice", "alice/net"])
    def test_a_fine_grained_token(self, hub: HubServer, monkeypatch: Patch, entity: str) -> None:
        tell(monkeypatch, auth=fine_grained(("zoo", "x"), (entity, "repo.write")))
        check_rights("alice/net")

    @pytest.mark.parametrize(
        "auth", [None, {"type": "oauth"}, {"accessToken": {"role": "fineGrained"}}]
    )
    def test_a_token_whose_rights_are_not_told(
        self, hub: HubServer, monkeypatch: Patch, auth: Any
    ) -> None:
        tell(monkeypatch, auth=auth)
        check_rights("alice/net")

    def test_a_hub_without_the_question_for_write_access(self, hub: HubServer) -> None:
        hub.add_repo("alice/mine")
        hub.fail("auth-check", status=404)
        check_rights("alice/mine")
        assert hub.count("auth-check/write") == 1

    def test_one_503_for_each_question(self, hub: HubServer) -> None:
        hub.add_repo("alice/mine")
        for pattern in ("whoami", r"models/alice/mine(\?|$)", "auth-check", "refs"):
            hub.fail(pattern)
        check_rights("alice/mine")
        assert [fault.times for fault in hub.faults] == [0, 0, 0, 0]


class TestRefused:
    def test_every_reason_reads_differently(self, hub: HubServer, monkeypatch: Patch) -> None:
        hub.add_repo("alice/public")
        hub.add_repo("bob/public")
        messages = {
            "a public one": refusal("alice/public", private=True),
            "somebody's": refusal("bob/public"),
            "somebody's name": refusal("bob/new"),
        }
        monkeypatch.setenv("HF_TOKEN", READ_TOKEN)
        messages["a read token"] = refusal()
        monkeypatch.setenv("HF_TOKEN", "hf_nobodys")
        messages["a wrong token"] = refusal()
        monkeypatch.delenv("HF_TOKEN")
        messages["no token"] = refusal()
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
        messages["offline"] = refusal()
        words = {
            "a public one": "is public already",
            "somebody's": "'bob' is neither you (alice) nor one of your organizations (zoo)",
            "somebody's name": "push to alice/new",
            "a read token": "the token of HF_TOKEN may only read",
            "a wrong token": "does not accept the token of HF_TOKEN",
            "no token": "`hf auth login`, or set HF_TOKEN",
            "offline": "HF_HUB_OFFLINE",
        }
        for reason, text in words.items():
            assert text in messages[reason]
        assert len(set(messages.values())) == len(messages)
        assert not hub.count("POST")

    def test_a_read_token_before_anything_else(self, hub: HubServer, monkeypatch: Patch) -> None:
        """create_repo(exist_ok=True) would succeed here."""
        hub.add_repo("alice/mine")
        monkeypatch.setenv("HF_TOKEN", READ_TOKEN)
        HfApi().create_repo("alice/mine", exist_ok=True)
        assert "may only read" in refusal("alice/mine")

    def test_somebodys_private_repository_looks_like_none(self, hub: HubServer) -> None:
        hub.add_repo("bob/secret", private=True)
        assert "'bob' is neither you" in refusal("bob/secret")

    def test_ones_own_organization_may_not_let_one_write(
        self, hub: HubServer, monkeypatch: Patch
    ) -> None:
        hub.add_repo("zoo/mine")
        hub.fail("auth-check/write", status=403)
        assert "does not let you (alice) write" in refusal("zoo/mine")
        tell(monkeypatch, orgs=[{"name": "zoo", "roleInOrg": "read"}])
        assert "you may only read in the organization 'zoo'" in refusal("zoo/new")

    @pytest.mark.parametrize(
        "scoped", [(), (("zoo", "repo.write"),), (("alice", "repo.content.read"),)]
    )
    def test_a_fine_grained_token_without_the_right(
        self, hub: HubServer, monkeypatch: Patch, scoped: tuple[tuple[str, str], ...]
    ) -> None:
        tell(monkeypatch, auth=fine_grained(*scoped))
        assert "the fine-grained token of HF_TOKEN lacks write access" in refusal()

    def test_a_hub_that_is_out_of_order(self, hub: HubServer) -> None:
        hub.fail("whoami", times=None)
        assert refusal().endswith(
            "failed 5 times: the hub returned 503 (injected fault); try again"
        )


class TestNames:
    @pytest.mark.parametrize(
        "name, meant",
        [
            ("net", "alice/net"),
            ("hf-hub:alice/net", "alice/net"),
            ("https://huggingface.co/zoo/net", "zoo/net"),
            ("zoo/net@v1", "zoo/net"),
            ("my net", "alice/my-net"),
            ("a/b/c", "alice/c"),
            ("", "alice/name"),
            ("alice/", "alice/alice"),
        ],
    )
    def test_a_suggestion(self, hub: HubServer, name: str, meant: str) -> None:
        with refused("recipe.wrong_value", f"did you mean '{meant}'") as caught:
            check_rights(name)
        assert f"'{name}'" in str(caught.value)
        assert caught.value.exit_code == 2

    @pytest.mark.parametrize("token", [None, "hf_wrong", OTHER_TOKEN])
    def test_whose_name_is_suggested(
        self, hub: HubServer, monkeypatch: Patch, token: str | None
    ) -> None:
        monkeypatch.delenv("HF_TOKEN")
        if token:
            monkeypatch.setenv("HF_TOKEN", token)
        owner = "bob" if token == OTHER_TOKEN else "owner"
        with refused("recipe.wrong_value", f"did you mean '{owner}/net'"):
            check_rights("net")

    @pytest.mark.parametrize("revision", ["", "a b", "-x", "a//b", "/a", SHA])
    def test_what_is_no_branch(self, hub: HubServer, revision: str) -> None:
        with refused("recipe.wrong_value", "--revision"):
            check_rights("alice/net", revision=revision)
        assert not hub.requests

    def test_a_tag(self, hub: HubServer) -> None:
        hub.add_repo("alice/mine")
        hub.tag("alice/mine", "v1")
        with refused("recipe.wrong_value", "--revision", "v1"):
            check_rights("alice/mine", revision="v1")


def test_the_tokens_of_this_file_would_be_noticed() -> None:
    assert all(token.startswith("hf_") for token in (WRITE_TOKEN, READ_TOKEN, OTHER_TOKEN))
