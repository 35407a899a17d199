"""No worker outlives its launcher; the cause of a failed launch is printed once, with its code."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from refusals import refused

from finetune.errors import DataError, DivergedError, FinetuneError, Interrupted, SetupError
from finetune.processes import end_with_parent, local_processes
from finetune.training import distributed, launch
from finetune.training.distributed import Launcher, RankErrors
from finetune.training.meter import StopSignals

LOST = RuntimeError("[gloo/transport/tcp/pair.cc:1] Connection closed by peer [127.0.0.1]:1")
LATE = RuntimeError("[gloo/transport/tcp/buffer.cc:1] Timed out waiting 5000ms for recv")


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Look for the launcher, and wait for ranks that have ended without a word, less long."""
    monkeypatch.setattr(distributed, "POLL_SECONDS", 0.1)
    monkeypatch.setattr(distributed, "ANSWER_SECONDS", 1.0)


def in_child(work: Callable[[], int]) -> int:
    """Run in a fork of this process. Returns: its exit code, or minus the signal that ended it."""
    child = os.fork()
    if child == 0:
        code = 99
        try:
            code = work()
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status)


def wait_for(holds: Callable[[], bool], seconds: float = 60) -> bool:
    until = time.monotonic() + seconds
    while not holds() and time.monotonic() < until:
        time.sleep(0.02)
    return holds()


def test_processes_on_one_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    assert local_processes(4) == 4
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")  # two machines
    assert local_processes(4) == 2


class TestLauncher:
    def test_a_process_that_was_started_by_hand_has_none(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
        monkeypatch.setattr(distributed, "_is_launcher", lambda pid: False)
        assert Launcher.of_this_process() is None

    @pytest.mark.parametrize(
        "words, is_one",
        [
            (("python", "/usr/bin/torchrun", "train.py"), True),
            (("python", "-m", "torch.distributed.run", "x"), True),
            (("python", "-m", "accelerate.commands.launch"), True),
            (("/usr/bin/python3", "/opt/bin/accelerate", "launch"), True),
            (("bash", "-c", "echo torchrun"), False),
            (("python", "-m", "finetune", "accelerate/torchrun.yaml"), False),
        ],
    )
    def test_launchers_by_their_command_line(
        self, words: tuple[str, ...], is_one: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        line = "\0".join(words).encode()
        monkeypatch.setattr(distributed.Path, "read_bytes", lambda self: line)
        assert distributed._is_launcher(7) is is_one

    def test_its_end_is_a_request_and_never_the_second_signal(self) -> None:
        def work() -> int:
            for received in (0, signal.SIGINT):
                launcher = Launcher(os.getppid())
                launcher.joined = True
                with StopSignals(launcher) as stop:
                    stop.received = received
                    launcher._parent = -1  # it has gone
                    assert wait_for(lambda: stop.received != 0 and launcher.gone)  # noqa: B023
                    time.sleep(0.2)
                    assert stop.received == (received or signal.SIGTERM)
            return 0

        assert in_child(work) == 0

    def test_a_launcher_that_lives_is_left_alone(self) -> None:
        def work() -> int:
            launcher = Launcher(os.getppid())
            time.sleep(3 * distributed.POLL_SECONDS)
            return int(launcher.gone)

        assert in_child(work) == 0

    def test_a_rank_that_waits_in_c_is_ended(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(distributed, "JOIN_SECONDS", 0.2)

        def work() -> int:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)  # as good as waiting in C
            Launcher(-1)
            time.sleep(60)
            return 0

        assert in_child(work) == 143


class TestJoining:
    def test_a_rank_that_waits_for_the_others_ends_with_sigterm(self) -> None:
        def work() -> int:
            signal.signal(signal.SIGTERM, lambda *_: None)  # no handler runs while it waits in C
            with launch._joining(Launcher(os.getppid())):
                os.kill(os.getpid(), signal.SIGTERM)
            return 0

        assert in_child(work) == -signal.SIGTERM

    def test_it_joins_once(self) -> None:
        before, launcher = signal.getsignal(signal.SIGTERM), Launcher(os.getppid())
        with launch._joining(launcher):
            assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
        assert launcher.joined
        with launch._joining(launcher):
            assert signal.getsignal(signal.SIGTERM) is before

    def test_others_that_cannot_be_reached(self) -> None:
        launcher = Launcher(os.getppid())
        with refused("setup.lost_process", "refused"), launch._joining(launcher):
            raise RuntimeError("Gloo connectFullMesh failed: connection refused\nat line 7")
        assert not launcher.joined


def test_a_process_ends_with_its_parent() -> None:
    reader, writer = os.pipe()

    def parent() -> int:
        grandchild = os.fork()
        if grandchild == 0:
            end_with_parent()
            os.write(writer, b"%d\n" % os.getpid())
            time.sleep(600)
        assert os.read(reader, 20) == b"%d\n" % grandchild
        os.write(writer, b"%d\n" % grandchild)
        return 0

    assert in_child(parent) == 0
    grandchild = int(os.read(reader, 20))
    try:
        assert wait_for(lambda: not _runs(grandchild), 20), "it has outlived its parent"
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(grandchild, signal.SIGKILL)


def _runs(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] not in ("Z", "X")
    except OSError:
        return False


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> torch.distributed.TCPStore:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(port))
    return torch.distributed.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)


def ended(ranks: RankErrors, error: BaseException) -> BaseException:
    """The error that a rank ends with when `error` comes up in it."""
    with pytest.raises(BaseException) as caught, ranks.in_order():  # noqa: PT011
        raise error
    return caught.value


def facts(error: BaseException) -> tuple[str, int, str, bool]:
    """Message, exit code and code of one of our errors, and whether another rank prints it."""
    assert isinstance(error, FinetuneError)
    return str(error), error.exit_code, error.code, error.printed_elsewhere


def two(timeout_seconds: float = 7) -> list[RankErrors]:
    return [RankErrors(rank, 2, number=0, timeout_seconds=timeout_seconds) for rank in range(2)]


@pytest.mark.usefixtures("store")
class TestRanks:
    def test_a_rank_that_loses_the_others_ends_with_their_error(self) -> None:
        first, second = two()
        cause = DataError("cat.png: is gone; restore it", code="data.not_found")
        assert ended(second, cause) is cause
        assert not cause.printed_elsewhere
        assert facts(ended(first, LOST)) == (str(cause), 3, "data.not_found", True)

    def test_errors_that_are_not_ours_end_the_others_too(self) -> None:
        first, second = two()
        assert isinstance(ended(second, KeyError("x")), KeyError)
        assert facts(ended(first, LOST)) == ("KeyError", 1, "internal", True)

    @pytest.mark.parametrize("lost, seconds", [(LOST, ""), (LATE, "7 seconds")])
    def test_a_rank_that_does_not_answer_is_named(self, lost: RuntimeError, seconds: str) -> None:
        message, *rest = facts(ended(two()[0], lost))
        assert "rank 1 of 2" in message
        assert seconds in message
        assert rest == [SetupError.exit_code, "setup.lost_process", False]

    def test_one_of_the_ranks_that_are_left_prints_it(self) -> None:
        some = [RankErrors(rank, 4, number=0, timeout_seconds=7) for rank in range(3)]
        errors: list[BaseException] = []
        threads = [
            threading.Thread(target=lambda one=one: errors.append(ended(one, LOST))) for one in some
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        messages, exits, codes, printed = zip(*map(facts, errors), strict=True)
        assert messages == (messages[0],) * 3
        assert "rank 3 of 4" in messages[0]
        assert (exits, codes) == ((5,) * 3, ("setup.lost_process",) * 3)
        assert sorted(printed) == [False, True, True]

    def test_an_error_of_all_ranks_is_printed_by_one(self) -> None:
        first, second = two()
        one = DataError("dog.png: bad")
        assert ended(second, one) is one
        other = ended(first, DataError("dog.png: bad"))
        assert (one.printed_elsewhere, facts(other)[3]) == (False, True)
        different = ended(RankErrors(0, 2, number=1, timeout_seconds=7), DataError("cow.png: bad"))
        assert facts(different)[3] is False

    def test_a_stop_is_printed_by_rank_0_which_ends_first(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        first, second = two()
        order: list[int] = []

        def end(ranks: RankErrors) -> None:
            ended(ranks, Interrupted("run: stopped at step 3", signal.SIGTERM))
            order.append(ranks.rank)

        waits = threading.Thread(target=end, args=(second,))
        waits.start()
        time.sleep(2 * distributed.POLL_SECONDS)
        assert not order
        end(first)
        waits.join()
        assert order == [0, 1]
        lost = ended(RankErrors(0, 2, number=0, timeout_seconds=7), LOST)
        assert isinstance(lost, Interrupted)
        assert facts(lost)[1:] == (143, "interrupted", False)

    def test_an_error_is_explained_once(self) -> None:
        first, _ = two()
        with pytest.raises(DivergedError), first.explained(), first.explained():
            raise DivergedError("run: the gradient was not finite")

    def test_launches_have_errors_of_their_own(self) -> None:
        ended(RankErrors(1, 2, number=0, timeout_seconds=7), DataError("of the first run"))
        error = ended(RankErrors(0, 2, number=1, timeout_seconds=7), LOST)
        assert "of the first run" not in str(error)


def test_without_a_store_each_rank_prints_its_error(
    store: torch.distributed.TCPStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(distributed, "ANSWER_SECONDS", 0.2)
    first = two()[0]
    monkeypatch.setattr(first, "_store", Silent())
    assert facts(ended(first, LOST))[1:] == (5, "setup.lost_process", False)


class Silent:
    """A store beyond a cut link."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *arguments: time.sleep(2)


@pytest.mark.parametrize(
    "error, expected",
    [
        (
            DataError("cat.png: is gone; restore it", code="data.not_found"),
            ("rank 0: cat.png: is gone; restore it", 3, "data.not_found", True),
        ),
        (KeyError("x"), ("rank 0: 'x'", 1, "internal", True)),
    ],
)
def test_every_rank_gets_the_error_of_rank_0_with_its_code(
    error: Exception, expected: tuple[str, int, str, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[object] = []

    def broadcast(outcome: list[object]) -> None:
        """Rank 0 calls it first and keeps its outcome, the other rank takes it over."""
        if sent:
            outcome[:] = sent
        else:
            sent.extend(outcome)

    def fails() -> None:
        raise error

    monkeypatch.setattr(launch, "broadcast_object_list", broadcast)
    ranks: list[Any] = [SimpleNamespace(is_main_process=main) for main in (True, False)]
    with pytest.raises(type(error)) as own:
        launch.on_main(ranks[0], fails)
    assert own.value is error
    with pytest.raises(FinetuneError) as elsewhere:
        launch.on_main(ranks[1], pytest.fail)
    assert facts(elsewhere.value) == expected


def test_one_process_tells_nobody() -> None:
    error = RuntimeError("gloo")
    assert ended(RankErrors(0, 1, number=0, timeout_seconds=7), error) is error
