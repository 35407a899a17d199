"""tests/hub_server.py through the real client: what it keeps, refuses, and lets fail."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Iterator
from pathlib import Path

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hub_server import HubServer, point_at
from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, constants, get_session
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    HfHubHTTPError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

WRITE, READ, OTHER = "hf_write", "hf_read", "hf_other"
CARD = b"---\nlicense: mit\ntags: [small]\n---\n# A card\n"
WEIGHTS = bytes(range(256)) * 40


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    with HubServer() as hub:
        hub.add_user("alice", token=WRITE)
        hub.add_user("alice", token=READ, role="read")
        hub.add_user("bob", token=OTHER)
        point_at(hub, monkeypatch, tmp_path / "home", WRITE)
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        yield hub
        assert hub.mistakes == []


@pytest.fixture
def api(hub: HubServer) -> HfApi:
    return HfApi(endpoint=hub.url)


def push(api: HfApi, name: str, files: dict[str, bytes | None], **more: str) -> str:
    operations = [
        CommitOperationDelete(path) if content is None else CommitOperationAdd(path, content)
        for path, content in files.items()
    ]
    return api.create_commit(name, operations, commit_message="Change", **more).oid


def status(error: pytest.ExceptionInfo[HfHubHTTPError]) -> int:
    return error.value.response.status_code


class TestWriting:
    def test_what_is_pushed_is_kept_by_commit(self, hub: HubServer, api: HfApi) -> None:
        api.create_repo("alice/net")
        first = push(api, "alice/net", {"model.safetensors": WEIGHTS, "sub/a.txt": b"one"})
        second = push(api, "alice/net", {"sub/a.txt": b"two", "README.md": CARD})
        assert hub.commits("alice/net")[:2] == [second, first]
        assert hub.files("alice/net")["sub/a.txt"] == b"two"
        assert hub.files("alice/net", first)["sub/a.txt"] == b"one"
        assert hub.files("alice/net")["model.safetensors"] == WEIGHTS
        assert hub.count("PUT /lfs-upload/") == 1
        info = api.repo_info("alice/net", files_metadata=True)
        assert info.sha == second
        assert {"small", "license:mit"} <= set(info.tags or [])
        large = {s.rfilename: s.lfs and s.lfs.sha256 for s in info.siblings or []}
        assert large["model.safetensors"] == hashlib.sha256(WEIGHTS).hexdigest()
        assert large["README.md"] is None

    def test_deleting(self, hub: HubServer, api: HfApi) -> None:
        hub.add_repo("alice/net", {"old.txt": b"1", "kept.txt": b"2"})
        push(api, "alice/net", {"old.txt": None})
        assert set(hub.files("alice/net")) == {".gitattributes", "kept.txt"}
        with pytest.raises(EntryNotFoundError):
            push(api, "alice/net", {"old.txt": None})

    def test_the_head_may_not_have_moved(self, hub: HubServer, api: HfApi) -> None:
        first = hub.add_repo("alice/net")
        hub.commit("alice/net", {"a.txt": b"1"})
        with pytest.raises(HfHubHTTPError) as error:
            push(api, "alice/net", {"b.txt": b"1"}, parent_commit=first)
        assert status(error) == 412
        assert "b.txt" not in hub.files("alice/net")

    def test_creating_twice(self, hub: HubServer, api: HfApi) -> None:
        api.create_repo("alice/net", private=True)
        assert api.repo_info("alice/net").private
        api.create_repo("alice/net", exist_ok=True)
        with pytest.raises(HfHubHTTPError) as error:
            api.create_repo("alice/net")
        assert status(error) == 409
        api.delete_repo("alice/net")
        assert not api.repo_exists("alice/net")

    def test_branches_and_tags(self, hub: HubServer, api: HfApi) -> None:
        first = hub.add_repo("alice/net", {"a.txt": b"1"})
        api.create_tag("alice/net", tag="v1")
        api.create_branch("alice/net", branch="try/this")
        on_branch = push(api, "alice/net", {"a.txt": b"2"}, revision="try/this")
        assert api.repo_info("alice/net", revision="try/this").sha == on_branch
        assert api.repo_info("alice/net", revision="v1").sha == first
        assert api.repo_info("alice/net", revision=on_branch[:8]).sha == on_branch
        assert {ref.name for ref in api.list_repo_refs("alice/net").branches} == {
            "main",
            "try/this",
        }
        with pytest.raises(HfHubHTTPError):
            api.create_branch("alice/net", branch="try/this")
        with pytest.raises(RevisionNotFoundError):
            push(api, "alice/net", {"a.txt": b"3"}, revision="nowhere")

    @pytest.mark.parametrize(
        "card, complaint",
        [
            ("license: no-such", "license"),
            ("model-index: 3", "model-index"),
            ("model-index: [{name: a, results: [{}]}]", "metrics"),
            ("tags: [1]", "tags"),
            ("a: [", "cannot be read"),
        ],
    )
    def test_cards_are_checked(self, hub: HubServer, api: HfApi, card: str, complaint: str) -> None:
        hub.add_repo("alice/net")
        with pytest.raises(ValueError, match=complaint):
            push(api, "alice/net", {"README.md": f"---\n{card}\n---\n".encode()})
        with pytest.warns(UserWarning, match="empty or missing"):
            push(api, "alice/net", {"README.md": b"no metadata"})

    def test_a_result_that_is_no_number(self, hub: HubServer) -> None:
        def answer(value: str) -> int:
            metric = f"metrics: [{{type: accuracy, value: {value}}}]"
            parts = f"task: {{type: image-classification}}, dataset: {{type: a, name: b}}, {metric}"
            content = (
                f"---\nlicense: mit\nmodel-index: [{{name: a, results: [{{{parts}}}]}}]\n---\n"
            )
            body = {"content": content, "repoType": "model"}
            return get_session().post(f"{hub.url}/api/validate-yaml", json=body).status_code

        assert answer("0.5") == 200
        assert answer(".nan") == 400


class TestRights:
    def test_tokens(self, hub: HubServer, api: HfApi) -> None:
        assert api.whoami()["auth"]["accessToken"]["role"] == "write"
        assert api.whoami(token=READ)["auth"]["accessToken"]["role"] == "read"
        hub.add_repo("alice/net")
        for call in (api.whoami, lambda token: api.repo_info("alice/net", token=token)):
            with pytest.raises(HfHubHTTPError) as error:
                call(token="hf_wrong")
            assert status(error) == 401
            assert not isinstance(error.value, RepositoryNotFoundError)

    @pytest.mark.parametrize("token", [READ, OTHER])
    def test_writing_needs_the_right(self, hub: HubServer, token: str) -> None:
        hub.add_repo("alice/net")
        api = HfApi(endpoint=hub.url, token=token)
        attempts = (
            lambda: push(api, "alice/net", {"a.txt": b"1"}),
            lambda: api.create_repo("alice/new"),
            lambda: api.update_repo_settings("alice/net", private=True),
            lambda: api.create_tag("alice/net", tag="v1"),
        )
        for attempt in attempts:
            with pytest.raises(HfHubHTTPError) as error:
                attempt()
            assert status(error) == 403
        assert len(hub.commits("alice/net")) == 1

    def test_private_ones_look_absent(self, hub: HubServer, api: HfApi) -> None:
        hub.add_repo("alice/secret", {"a.txt": b"1"}, private=True)
        assert api.repo_info("alice/secret", token=READ).private
        answers = set()
        for name in ("alice/secret", "alice/absent"):
            for token in (OTHER, False):
                with pytest.raises(RepositoryNotFoundError) as error:
                    api.hf_hub_download(name, "a.txt", token=token)
                answers.add((name, status(error)))
        assert answers == {(n, s) for n in ("alice/secret", "alice/absent") for s in (401, 404)}

    def test_gated(self, hub: HubServer, api: HfApi) -> None:
        hub.add_repo("alice/gated", {"a.txt": b"1"}, gated=True)
        for token in (OTHER, False):
            with pytest.raises(GatedRepoError):
                api.hf_hub_download("alice/gated", "a.txt", token=token)
        assert api.hf_hub_download("alice/gated", "a.txt")


class TestReading:
    def test_files_by_revision(self, hub: HubServer, api: HfApi) -> None:
        first = hub.add_repo("alice/net", {"model.safetensors": WEIGHTS, "a.txt": b"one"})
        hub.tag("alice/net", "v1")
        hub.commit("alice/net", {"a.txt": b"two"})
        assert Path(api.hf_hub_download("alice/net", "a.txt")).read_bytes() == b"two"
        for revision in ("v1", first):
            path = Path(api.hf_hub_download("alice/net", "a.txt", revision=revision))
            assert path.read_bytes() == b"one"
            assert path.parent.name == first
        large = Path(api.hf_hub_download("alice/net", "model.safetensors"))
        assert large.read_bytes() == WEIGHTS
        assert large.resolve().name == hashlib.sha256(WEIGHTS).hexdigest()

    def test_large_files_come_from_elsewhere(self, hub: HubServer, api: HfApi) -> None:
        hub.add_repo("alice/net", {"model.safetensors": WEIGHTS})
        api.hf_hub_download("alice/net", "model.safetensors")
        [asked] = [h for h, (_, p) in zip(hub.headers, hub.requests, strict=True) if "/cdn/" in p]
        assert "authorization" not in asked

    def test_what_is_not_there(self, hub: HubServer, api: HfApi) -> None:
        hub.add_repo("alice/net", {"a.txt": b"1"})
        with pytest.raises(EntryNotFoundError):
            api.hf_hub_download("alice/net", "b.txt")
        with pytest.raises(RevisionNotFoundError):
            api.hf_hub_download("alice/net", "a.txt", revision="v9")
        with pytest.raises(RepositoryNotFoundError):
            api.hf_hub_download("alice/no", "a.txt")

    def test_parts_of_a_file(self, hub: HubServer) -> None:
        hub.add_repo("alice/net", {"a.txt": b"0123456789"})
        url = f"{hub.url}/alice/net/resolve/main/a.txt"
        for span, status_code, content in (
            ("bytes=2-4", 206, b"234"),
            ("bytes=7-", 206, b"789"),
            ("bytes=-2", 206, b"89"),
            ("bytes=10-", 416, b""),
        ):
            reply = get_session().get(url, headers={"Range": span})
            assert (reply.status_code, reply.content) == (status_code, content)

    def test_a_data_set(self, hub: HubServer) -> None:
        for kind in ("train", "test"):
            file = io.BytesIO()
            pq.write_table(pa.table({"label": [0, 1]}), file)
            path = f"data/{kind}-00000-of-00001.parquet"
            if kind == "train":
                hub.add_repo("alice/rows", {path: file.getvalue()}, kind="dataset")
            else:
                hub.commit("alice/rows", {path: file.getvalue()})
        hub.tag("alice/rows", "v1")
        loaded = datasets.load_dataset("alice/rows", revision="v1")
        assert {name: len(split) for name, split in loaded.items()} == {"train": 2, "test": 2}


class TestFaults:
    def test_a_status_as_often_as_asked(self, hub: HubServer, api: HfApi) -> None:
        hub.add_repo("alice/net")
        hub.fail(r"GET /api/models/", status=503, times=2, retry_after=7)
        for _ in range(2):
            with pytest.raises(HfHubHTTPError) as error:
                api.repo_info("alice/net")
            assert status(error) == 503
            assert error.value.response.headers["Retry-After"] == "7"
        assert api.repo_info("alice/net").sha
        hub.fail(r"GET /api/models/", status=429, times=None)
        for _ in range(3):
            with pytest.raises(HfHubHTTPError):
                api.repo_info("alice/net")

    def test_an_answer_that_repeats_the_token(self, hub: HubServer, api: HfApi) -> None:
        hub.fail(r"whoami", status=500, echo=True)
        with pytest.raises(HfHubHTTPError, match=WRITE):
            api.whoami()

    def test_a_closed_connection(self, hub: HubServer) -> None:
        url = f"{hub.url}/api/models/alice/net"
        hub.add_repo("alice/net")
        hub.fail(r"GET /api/models/", kind="reset")
        with pytest.raises(Exception, match="disconnected"):
            get_session().get(url)
        assert get_session().get(url).status_code == 200

    def test_a_lost_answer(self, hub: HubServer, api: HfApi) -> None:
        hub.add_repo("alice/net")
        hub.fail(r"POST .*/commit/", kind="lost")
        with pytest.raises(Exception, match="disconnected"):
            push(api, "alice/net", {"a.txt": b"1"})
        assert hub.files("alice/net")["a.txt"] == b"1"
        assert len(hub.commits("alice/net")) == 2

    def test_too_few_bytes(self, hub: HubServer) -> None:
        hub.add_repo("alice/net", {"a.txt": b"0123456789"})
        hub.fail(r"GET .*a.txt", kind="truncate")
        with pytest.raises(Exception, match=r"incomplete|peer closed"):
            get_session().get(f"{hub.url}/alice/net/resolve/main/a.txt")

    def test_other_bytes(self, hub: HubServer) -> None:
        hub.add_repo("alice/net", {"model.safetensors": WEIGHTS})
        hub.fail(r"GET /cdn/", kind="corrupt")
        url = f"{hub.url}/alice/net/resolve/main/model.safetensors"
        found = [get_session().get(url, follow_redirects=True).content for _ in range(2)]
        assert len(found[0]) == len(WEIGHTS)
        assert found[0] != WEIGHTS
        assert found[1] == WEIGHTS

    def test_it_can_go_away(self, hub: HubServer, api: HfApi) -> None:
        hub.add_repo("alice/net")
        assert api.repo_info("alice/net")
        hub.stop()
        with pytest.raises(Exception, match="refused"):
            api.repo_info("alice/net")

    def test_xet_is_announced_when_asked(self, hub: HubServer) -> None:
        hub.add_repo("alice/net", {"model.safetensors": WEIGHTS})
        url = f"{hub.url}/alice/net/resolve/main/model.safetensors"
        assert "X-Xet-Hash" not in get_session().head(url, follow_redirects=False).headers
        hub.xet = True
        assert "X-Xet-Hash" in get_session().head(url, follow_redirects=False).headers
