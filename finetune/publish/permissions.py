"""Check the permission to push to the Hub: names, token, owner, privacy, write access.

`HfApi.create_repo(exist_ok=True)` succeeds for anyone who can read the repository, so it does not
prove write access. This module asks the Hub for every permission, and creates nothing.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from huggingface_hub import HfApi, constants, get_token, is_offline_mode
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id

from finetune.errors import HubError, RecipeError, redact_secrets
from finetune.hub.client import call_hub, hub_errors, token_source

__all__ = ["DEFAULT_BRANCH", "authenticated_api", "check_privacy", "check_rights"]

DEFAULT_BRANCH = "main"


def check_rights(
    repository: str,
    *,
    private: bool = False,
    revision: str | None = None,
    repo_type: str = "model",
) -> None:
    """Check that the Hub would accept a push to owner/name, without creating anything.

    Raises: RecipeError for an invalid name, HubError for anything that the Hub would refuse.
    """
    _check_names(repository, revision)
    api = authenticated_api(repository)
    with hub_errors(repository):
        user = call_hub(repository, api.whoami)
        _check_token_can_write(user, repository)
        try:
            info = call_hub(repository, api.repo_info, repository, repo_type=repo_type)
        except HubError as error:
            if error.code != "hub.not_found":
                raise
            info = None
        if info is None:
            _check_owner(user, repository)
            return
        check_privacy(repository, want_private=private, is_private=bool(info.private))
        try:
            call_hub(repository, api.auth_check, repository, repo_type=repo_type, write=True)
            can_write = True
        except HubError as error:
            if error.code != "hub.forbidden":
                raise
            can_write = False
        if not can_write:
            _check_owner(user, repository)
            raise HubError(
                f"{repository}: the repository exists, and the hub does not let you "
                f"({user['name']}) write to it; ask its owner, or push to another name",
                code="hub.forbidden",
            )
        refs = call_hub(repository, api.list_repo_refs, repository, repo_type=repo_type)
        if revision in [tag.name for tag in refs.tags]:
            raise RecipeError(
                f"--revision: {revision} is a tag, which does not move; give a branch",
                code="recipe.wrong_value",
            )


def authenticated_api(repository: str) -> HfApi:
    """Return huggingface_hub's client with the user's token.

    Raises: HubError in offline mode or without a token.
    """
    if is_offline_mode():
        raise HubError(
            f"{repository}: HF_HUB_OFFLINE is set, so nothing can be pushed; unset it, or push "
            "later",
            code="hub.offline",
        )
    token = get_token()
    if token is None:
        raise HubError(
            f"{repository}: no token for the hub; log in with `hf auth login`, or set HF_TOKEN to "
            "a token with write permission",
            code="hub.no_token",
        )
    return HfApi(token=token, library_name="finetune")


def _check_names(repository: str, revision: str | None) -> None:
    """Raise RecipeError for an invalid repository id or branch name."""
    for text in (repository, revision or ""):
        if redact_secrets(text) != text:
            # otherwise every request would log the token, and it could become a public name
            raise RecipeError(
                f"{redact_secrets(text)}: this is a token or password, not a name; the token is "
                "read from HF_TOKEN or the login, so leave it out here, and create a new token",
                code="recipe.holds_secret",
            )
    try:
        validate_repo_id(repository)
        is_valid = repository.count("/") == 1
    except HFValidationError:
        is_valid = False
    if not is_valid:
        raise RecipeError(
            f"'{repository}' is not a repository id; write owner/name, such as alice/digits",
            code="recipe.wrong_value",
        )
    if revision is None:
        return
    is_commit = constants.REGEX_COMMIT_OID.fullmatch(revision)
    if is_commit or not re.fullmatch(r"(?!-)[\w.-]+(/[\w.-]+)*", revision):
        kind = "a commit, which cannot change" if is_commit else "not a valid branch name"
        raise RecipeError(
            f"--revision: '{revision}' is {kind}; give a branch, such as main",
            code="recipe.wrong_value",
        )


def _check_token_can_write(user: Mapping[str, Any], repository: str) -> None:
    """Raise HubError for a token without write permission, if the Hub reports permissions."""
    token = (user.get("auth") or {}).get("accessToken") or {}
    role, scopes = token.get("role"), (token.get("fineGrained") or {}).get("scoped")
    owner = repository.split("/")[0]
    covering = [
        scope
        for scope in scopes or []
        if scope["entity"].get("name", "").casefold() in (owner.casefold(), repository.casefold())
    ]
    is_denied = role == "read"
    if role == "fineGrained" and scopes is not None:
        is_denied = not any("repo.write" in scope["permissions"] for scope in covering)
    if is_denied:
        raise HubError(
            f"{repository}: the token from {token_source()} may only read here; create one with "
            f"write permission for {owner} at {constants.ENDPOINT}/settings/tokens",
            code="hub.forbidden",
        )


def _check_owner(user: Mapping[str, Any], repository: str) -> None:
    """Raise HubError if the user may not create repositories of this owner."""
    owner, name = repository.split("/")
    writable = [org["name"] for org in user.get("orgs") or [] if org.get("roleInOrg") != "read"]
    if owner.casefold() not in [known.casefold() for known in (user["name"], *writable)]:
        among = f" nor an organization where you may write ({', '.join(writable)})"
        raise HubError(
            f"{repository}: '{owner}' is neither you ({user['name']}){among if writable else ''}; "
            f"push to {user['name']}/{name}, or ask the organization for the role 'write'",
            code="hub.forbidden",
        )


def check_privacy(repository: str, *, want_private: bool, is_private: bool) -> None:
    """Raise HubError for a private push to a public repository."""
    if want_private and not is_private:
        raise HubError(
            f"{repository}: this repository is public, and a push does not make it private; omit "
            "--private, push to another name, or make it private in its settings",
            code="hub.public",
        )
