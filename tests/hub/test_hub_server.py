"""What of tests/hub_server.py its users' tests would not notice: rights, parts, strange numbers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from hub_server import HubServer, point_at
from huggingface_hub import CommitOperationAdd, HfApi, get_session
from huggingface_hub.errors import HfHubHTTPError

WRITE, READ, OTHER = "hf_write", "hf_read", "hf_other"


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    with HubServer() as hub:
        hub.add_user("alice", token=WRITE)
        hub.add_user("alice", token=READ, role="read")
        hub.add_user("bob", token=OTHER)
        hub.add_repo("alice/net", {"a.txt": b"0123456789"})
        point_at(hub, monkeypatch, tmp_path / "home", WRITE)
        yield hub
        assert hub.mistakes == []


@pytest.mark.parametrize("token", [READ, OTHER])
def test_writing_needs_the_right(hub: HubServer, token: str) -> None:
    api = HfApi(endpoint=hub.url, token=token)
    added = [CommitOperationAdd("b.txt", b"1")]
    commits = hub.commits("alice/net")
    attempts = (
        lambda: api.create_commit("alice/net", added, commit_message="Change"),
        lambda: api.create_repo("alice/new"),
        lambda: api.update_repo_settings("alice/net", private=True),
        lambda: api.create_tag("alice/net", tag="v1"),
    )
    for attempt in attempts:
        with pytest.raises(HfHubHTTPError) as error:
            attempt()
        assert error.value.response.status_code == 403
    assert hub.commits("alice/net") == commits


def test_parts_of_a_file(hub: HubServer) -> None:
    url = f"{hub.url}/alice/net/resolve/main/a.txt"
    for span, status_code, content in (
        ("bytes=2-4", 206, b"234"),
        ("bytes=7-", 206, b"789"),
        ("bytes=-2", 206, b"89"),
        ("bytes=10-", 416, b""),
    ):
        reply = get_session().get(url, headers={"Range": span})
        assert (reply.status_code, reply.content) == (status_code, content)


@pytest.mark.parametrize("value, status", [("0.5", 200), (".nan", 400)])
def test_a_result_that_is_no_number(hub: HubServer, value: str, status: int) -> None:
    metric = f"metrics: [{{type: accuracy, value: {value}}}]"
    parts = f"task: {{type: image-classification}}, dataset: {{type: a, name: b}}, {metric}"
    index = f"model-index: [{{name: a, results: [{{{parts}}}]}}]"
    body = {"content": f"---\nlicense: mit\n{index}\n---\n", "repoType": "model"}
    answer = get_session().post(f"{hub.url}/api/validate-yaml", json=body)
    assert answer.status_code == status
