"""The rights to push: names, the token, the owner, what there is already.

The client's `create_repo(exist_ok=True)` succeeds for whoever may read the repository, so that it
proves nothing; every right is asked for here, and nothing is created.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from huggingface_hub import constants
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, RepositoryNotFoundError
from huggingface_hub.utils import validate_repo_id

from finetune.errors import FinetuneError, HubError, RecipeError, masked
from finetune.hub.client import Fault, status_of, understood
from finetune.publish.repository import Hub

__all__ = ["MAIN", "Found", "check_names", "check_privacy", "check_rights", "find"]

MAIN = "main"


def check_rights(repository: str, *, private: bool = False, revision: str | None = None) -> None:
    """Make sure that a push to owner/name would be allowed, without creating anything.

    Raises: RecipeError for a name that cannot be one, HubError for what the hub would refuse.
    """
    check_names(repository, revision)
    hub = Hub(repository)
    with hub.explained():
        find(hub, private=private, revision=revision or MAIN)


@dataclass(frozen=True)
class Found:
    """The repository on the hub, before anything is changed."""

    exists: bool
    branches: Sequence[str] = ()


def check_names(repository: str, revision: str | None) -> None:
    """Refuse what is no owner/name, or no branch. Raises: RecipeError with the nearest name."""
    for text in (repository, revision or ""):
        if masked(text) != text:  # it would be published, and stands in the hub's logs at once
            raise RecipeError(
                f"{masked(text)}: a token or password in the place of a name; the token is read "
                "from HF_TOKEN or the login, so leave it out, and make a new one",
                code="recipe.holds_secret",
            )
    bare = re.sub(r"^(hf-hub:|https?://[^/]+/)", "", repository).split("@")[0].strip("/ ")
    try:
        validate_repo_id(repository)
        if repository.count("/") != 1:
            raise HFValidationError("write owner/name")
    except HFValidationError:
        name = re.sub(r"[^\w.-]+", "-", bare.split("/")[-1]).strip("-.") or "name"
        owner = bare.split("/")[0] if bare.count("/") == 1 else _own_name() or "owner"
        raise RecipeError(
            f"'{repository}' is no repository's name; did you mean '{owner}/{name}'?",
            code="recipe.wrong_value",
        ) from None
    if revision is not None and not re.fullmatch(r"(?!-)[\w.-]+(/[\w.-]+)*", revision):
        raise RecipeError(
            f"--revision: '{revision}' is no name for a branch; try 'main'",
            code="recipe.wrong_value",
        )
    if revision is not None and constants.REGEX_COMMIT_OID.fullmatch(revision):
        raise RecipeError(
            f"--revision: {revision} is a commit, which cannot change; name a branch",
            code="recipe.wrong_value",
        )


def _own_name() -> str | None:
    """Ask for the user's name, once, for a suggestion. Returns: None where it cannot be had."""
    try:
        hub = Hub("")
        with understood(""):
            return str(hub.once(hub.api.whoami)["name"])
    except (FinetuneError, Fault, HfHubHTTPError):
        return None


def find(hub: Hub, *, private: bool, revision: str) -> Found:
    """Raise the first reason for which the hub would refuse a push."""
    with understood(hub.repository):
        return _find(hub, private=private, revision=revision)


def _find(hub: Hub, *, private: bool, revision: str) -> Found:
    user = _user(hub)
    owner = hub.repository.split("/")[0]
    _check_token(hub, user, owner)
    try:
        read = "reading the repository"
        info = hub.call(read, hub.api.model_info, hub.repository)
    except RepositoryNotFoundError:
        _check_owner(hub, user, owner, writes=False)
        return Found(exists=False)
    check_privacy(hub, wanted=private, is_private=bool(info.private))
    try:
        writes = "asking for write access"
        hub.call(writes, hub.api.auth_check, hub.repository, write=True)
        known = True
    except HfHubHTTPError as error:
        if status_of(error) not in (401, 403, 404):
            raise
        known = status_of(error) != 404  # 404: a hub that has no such question
        _check_owner(hub, user, owner, writes=known)
    refs = hub.call("reading the branches", hub.api.list_repo_refs, hub.repository)
    if revision in [tag.name for tag in refs.tags]:
        raise RecipeError(
            f"--revision: {revision} is a tag, which does not move; name a branch",
            code="recipe.wrong_value",
        )
    return Found(exists=True, branches=[branch.name for branch in refs.branches])


def _user(hub: Hub) -> Mapping[str, Any]:
    try:
        user = hub.call("asking who you are", hub.api.whoami)
        return {**user, "name": user["name"]}
    except HfHubHTTPError as error:
        if status_of(error) not in (401, 403):
            raise
    raise HubError(
        f"{hub.repository}: the hub does not accept the token of {hub.token_source}; make a new "
        f"one at {hub.api.endpoint}/settings/tokens, then `hf auth login`",
        code="hub.forbidden",
    )


def _check_token(hub: Hub, user: Mapping[str, Any], owner: str) -> None:
    """Refuse a token that may not write, where the hub tells what it may."""
    token = (user.get("auth") or {}).get("accessToken") or {}
    role = token.get("role")
    more = f"{hub.api.endpoint}/settings/tokens"
    if role == "read":
        raise HubError(
            f"{hub.repository}: the token of {hub.token_source} may only read; make one with "
            f"write rights at {more}",
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


def _check_owner(hub: Hub, user: Mapping[str, Any], owner: str, *, writes: bool) -> None:
    """Refuse an owner in whose name the user cannot write; `writes`: the hub has said no."""
    name = str(user.get("name"))
    orgs = {str(org.get("name")).casefold(): org for org in user.get("orgs") or []}
    suggestion = f"{name}/{hub.repository.split('/')[1]}"
    if owner.casefold() != name.casefold() and owner.casefold() not in orgs:
        known = ", ".join(str(org.get("name")) for org in orgs.values())
        among = f" nor one of your organisations ({known})" if known else ""
        raise HubError(
            f"{hub.repository}: '{owner}' is neither you ({name}){among}; push to {suggestion}, or "
            "ask to be let into the organisation",
            code="hub.forbidden",
        )
    if orgs.get(owner.casefold(), {}).get("roleInOrg") == "read":
        raise HubError(
            f"{hub.repository}: you may only read in the organisation '{owner}'; ask it for the "
            f"role 'write', or push to {suggestion}",
            code="hub.forbidden",
        )
    if writes:
        raise HubError(
            f"{hub.repository}: it exists, and the hub does not let you ({name}) write to it; ask "
            f"its owner, or push to another name",
            code="hub.forbidden",
        )


def check_privacy(hub: Hub, *, wanted: bool, is_private: bool) -> None:
    """Refuse to push as private what is public already. Raises: HubError."""
    if wanted and not is_private:
        raise HubError(
            f"{hub.repository}: is public already, and a push does not hide it; leave --private "
            "out, push to another name, or make it private in its settings",
            code="hub.public",
        )
