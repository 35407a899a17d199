"""Check the permission to push to the Hub: repository id, token, owner, privacy, branch.

`HfApi.create_repo(exist_ok=True)` succeeds for anyone who can read the repository, so it does not
prove write access. This module asks the Hub for every permission, and creates nothing.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from huggingface_hub import constants
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, RepositoryNotFoundError
from huggingface_hub.utils import validate_repo_id

from finetune.errors import FinetuneError, HubError, RecipeError, redact_secrets
from finetune.hub.client import TransientHubError, expect_json, http_status
from finetune.publish.repo_client import RepoClient

__all__ = [
    "DEFAULT_BRANCH",
    "RepoState",
    "check_privacy",
    "check_push_access",
    "check_repo_id_and_branch",
    "check_rights",
]

DEFAULT_BRANCH = "main"


def check_rights(repository: str, *, private: bool = False, revision: str | None = None) -> None:
    """Check that the Hub would accept a push to owner/name, without creating anything.

    Raises: RecipeError for an invalid name, HubError for anything that the Hub would refuse.
    """
    check_repo_id_and_branch(repository, revision)
    hub = RepoClient(repository)
    with hub.translate_errors():
        check_push_access(hub, private=private, revision=revision or DEFAULT_BRANCH)


@dataclass(frozen=True)
class RepoState:
    """State of the repository on the Hub before the push."""

    exists: bool
    branches: Sequence[str] = ()


def check_repo_id_and_branch(repository: str, revision: str | None) -> None:
    """Raise RecipeError, with a suggestion, for an invalid repository id or branch name."""
    for text in (repository, revision or ""):
        if redact_secrets(text) != text:
            # otherwise every request would log the token, and it could become a public name
            raise RecipeError(
                f"{redact_secrets(text)}: this is a token or password, not a name; the token is "
                "read from HF_TOKEN or the login, so leave it out here, and create a new token",
                code="recipe.holds_secret",
            )
    bare = re.sub(r"^(hf-hub:|https?://[^/]+/)", "", repository).split("@")[0].strip("/ ")
    try:
        validate_repo_id(repository)
        if repository.count("/") != 1:
            raise HFValidationError("write owner/name")
    except HFValidationError:
        name = re.sub(r"[^\w.-]+", "-", bare.split("/")[-1]).strip("-.") or "name"
        owner = bare.split("/")[0] if bare.count("/") == 1 else _user_name() or "owner"
        raise RecipeError(
            f"'{repository}' is not a repository id; did you mean '{owner}/{name}'?",
            code="recipe.wrong_value",
        ) from None
    if revision is not None and not re.fullmatch(r"(?!-)[\w.-]+(/[\w.-]+)*", revision):
        raise RecipeError(
            f"--revision: '{revision}' is not a valid branch name; try 'main'",
            code="recipe.wrong_value",
        )
    if revision is not None and constants.REGEX_COMMIT_OID.fullmatch(revision):
        raise RecipeError(
            f"--revision: {revision} is a commit, which cannot change; give a branch",
            code="recipe.wrong_value",
        )


def _user_name() -> str | None:
    """Return the user's name on the Hub, for a suggestion; None if a single request fails."""
    try:
        hub = RepoClient("")
        with expect_json(""):
            return str(hub.call_once(hub.api.whoami)["name"])
    except (FinetuneError, TransientHubError, HfHubHTTPError):
        return None


def check_push_access(hub: RepoClient, *, private: bool, revision: str) -> RepoState:
    """Check that the Hub would accept a push.

    Returns: the state of the repository.
    Raises: HubError or RecipeError for the first reason why the Hub would refuse the push.
    """
    with expect_json(hub.repository):
        return _check_push_access(hub, private=private, revision=revision)


def _check_push_access(hub: RepoClient, *, private: bool, revision: str) -> RepoState:
    user = _whoami(hub)
    owner = hub.repository.split("/")[0]
    _check_token_can_write(hub, user, owner)
    try:
        read = "reading the repository"
        info = hub.call_with_retries(read, hub.api.model_info, hub.repository)
    except RepositoryNotFoundError:
        _check_owner(hub, user, owner, write_denied=False)
        return RepoState(exists=False)
    check_privacy(hub, want_private=private, is_private=bool(info.private))
    try:
        writes = "asking for write access"
        hub.call_with_retries(writes, hub.api.auth_check, hub.repository, write=True)
        endpoint_exists = True
    except HfHubHTTPError as error:
        if http_status(error) not in (401, 403, 404):
            raise
        endpoint_exists = http_status(error) != 404  # 404: this Hub server lacks the endpoint
        _check_owner(hub, user, owner, write_denied=endpoint_exists)
    refs = hub.call_with_retries("reading the branches", hub.api.list_repo_refs, hub.repository)
    if revision in [tag.name for tag in refs.tags]:
        raise RecipeError(
            f"--revision: {revision} is a tag, which does not move; give a branch",
            code="recipe.wrong_value",
        )
    return RepoState(exists=True, branches=[branch.name for branch in refs.branches])


def _whoami(hub: RepoClient) -> Mapping[str, Any]:
    try:
        user = hub.call_with_retries("asking who you are", hub.api.whoami)
        return {**user, "name": user["name"]}
    except HfHubHTTPError as error:
        if http_status(error) not in (401, 403):
            raise
    raise HubError(
        f"{hub.repository}: the hub does not accept the token of {hub.token_source}; create a "
        f"new one at {hub.api.endpoint}/settings/tokens, then `hf auth login`",
        code="hub.forbidden",
    )


def _check_token_can_write(hub: RepoClient, user: Mapping[str, Any], owner: str) -> None:
    """Raise HubError for a token without write permission, if the Hub reports permissions."""
    token = (user.get("auth") or {}).get("accessToken") or {}
    role = token.get("role")
    more = f"{hub.api.endpoint}/settings/tokens"
    if role == "read":
        raise HubError(
            f"{hub.repository}: the token of {hub.token_source} may only read; create one with "
            f"write permission at {more}",
            code="hub.forbidden",
        )
    scopes = (token.get("fineGrained") or {}).get("scoped")
    if role == "fineGrained" and scopes is not None:
        mine = {owner.casefold(), hub.repository.casefold()}
        for scope in scopes:
            name = str((scope.get("entity") or {}).get("name")).casefold()
            if name in mine and "repo.write" in (scope.get("permissions") or []):
                return
        raise HubError(
            f"{hub.repository}: the fine-grained token of {hub.token_source} lacks write access to "
            f"the repositories of {owner}; add it at {more}",
            code="hub.forbidden",
        )


def _check_owner(
    hub: RepoClient, user: Mapping[str, Any], owner: str, *, write_denied: bool
) -> None:
    """Raise HubError if the user may not write to repositories of `owner`.

    Args:
        write_denied: True if the Hub has already denied write access to this repository.
    """
    name = str(user.get("name"))
    orgs = {str(org.get("name")).casefold(): org for org in user.get("orgs") or []}
    suggestion = f"{name}/{hub.repository.split('/')[1]}"
    if owner.casefold() != name.casefold() and owner.casefold() not in orgs:
        known = ", ".join(str(org.get("name")) for org in orgs.values())
        among = f" nor one of your organizations ({known})" if known else ""
        raise HubError(
            f"{hub.repository}: '{owner}' is neither you ({name}){among}; push to {suggestion}, or "
            "ask to join the organization",
            code="hub.forbidden",
        )
    if orgs.get(owner.casefold(), {}).get("roleInOrg") == "read":
        raise HubError(
            f"{hub.repository}: you may only read in the organization '{owner}'; ask it "
            f"for the role 'write', or push to {suggestion}",
            code="hub.forbidden",
        )
    if write_denied:
        raise HubError(
            f"{hub.repository}: the repository exists, and the hub does not let you ({name}) write "
            f"to it; ask its owner, or push to another name",
            code="hub.forbidden",
        )


def check_privacy(hub: RepoClient, *, want_private: bool, is_private: bool) -> None:
    """Raise HubError for a private push to a public repository."""
    if want_private and not is_private:
        raise HubError(
            f"{hub.repository}: is public already, and a push does not make it private; "
            "omit --private, push to another name, or make it private in its settings",
            code="hub.public",
        )
