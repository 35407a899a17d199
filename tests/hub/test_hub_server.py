"""tests/hub_server.py: permissions, byte ranges and invalid metric values."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from hub_server import HubServer, point_clients_at
from huggingface_hub import CommitOperationAdd, HfApi, get_session
from huggingface_hub.errors import HfHubHTTPError

WRITE_TOKEN, READ_TOKEN, OTHER_TOKEN = "hf_write", "hf_read", "hf_other"


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    with HubServer() as hub:
        hub.add_user("alice", token=WRITE_TOKEN)
        hub.add_user("alice", token=READ_TOKEN, role="read")
        hub.add_user("bob", token=OTHER_TOKEN)
        hub.add_repo("alice/net", {"a.txt": b"0123456789"})
        point_clients_at(hub, monkeypatch, tmp_path / "home", WRITE_TOKEN)
        yield hub
        assert hub.server_errors == []


@pytest.mark.parametrize("token", [READ_TOKEN, OTHER_TOKEN])
def test_writing_needs_write_permission(hub: HubServer, token: str) -> None:
    api = HfApi(endpoint=hub.url, token=token)
    operations = [CommitOperationAdd("b.txt", b"1")]
    commits = hub.commits("alice/net")
    attempts = (
        lambda: api.create_commit("alice/net", operations, commit_message="Change"),
        lambda: api.create_repo("alice/new"),
        lambda: api.update_repo_settings("alice/net", private=True),
        lambda: api.create_tag("alice/net", tag="v1"),
    )
    for attempt in attempts:
        with pytest.raises(HfHubHTTPError) as error:
            attempt()
        assert error.value.response.status_code == 403
    assert hub.commits("alice/net") == commits


def test_byte_ranges(hub: HubServer) -> None:
    url = f"{hub.url}/alice/net/resolve/main/a.txt"
    for byte_range, status_code, content in (
        ("bytes=2-4", 206, b"234"),
        ("bytes=7-", 206, b"789"),
        ("bytes=-2", 206, b"89"),
        ("bytes=10-", 416, b""),
    ):
        response = get_session().get(url, headers={"Range": byte_range})
        assert (response.status_code, response.content) == (status_code, content)


@pytest.mark.parametrize("value, status", [("0.5", 200), (".nan", 400)])
def test_rejects_a_metric_that_is_not_a_number(hub: HubServer, value: str, status: int) -> None:
    metric = f"metrics: [{{type: accuracy, value: {value}}}]"
    result = f"task: {{type: image-classification}}, dataset: {{type: a, name: b}}, {metric}"
    index = f"model-index: [{{name: a, results: [{{{result}}}]}}]"
    body = {"content": f"---\nlicense: mit\n{index}\n---\n", "repoType": "model"}
    response = get_session().post(f"{hub.url}/api/validate-yaml", json=body)
    assert response.status_code == status
