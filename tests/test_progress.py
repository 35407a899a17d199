"""Progress bars when standard error is a file: complete lines, and only a few."""

from __future__ import annotations

import os
import pty
import signal
import sys

import pytest

from finetune import progress
from finetune.log import logger, redirect_closed_terminal

Captured = pytest.CaptureFixture[str]


def run_steps(count: int, *, start: int = 0, shown: bool = True) -> None:
    with progress.step_bar(total=count, start=start, shown=shown) as bar:
        for number in range(start, count):
            bar.update()
            bar.set_postfix({"loss": f"{number}"}, refresh=False)
            if number % 10 == 0:
                logger.info(f"message {number}")


def test_a_short_loop_writes_one_progress_line_to_a_file(capsys: Captured) -> None:
    run_steps(301, start=1)
    lines = capsys.readouterr().err.splitlines()
    expected = [f"finetune: message {number}" for number in range(10, 301, 10)]
    assert [line for line in lines if "message" in line] == expected
    (progress,) = (line for line in lines if "message" not in line)
    assert progress.startswith("finetune: 301 of 301 steps")
    assert "loss=300" in progress
    assert not any("\r" in line for line in lines)


def test_a_long_loop_writes_one_progress_line_a_minute(
    capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    seconds = 0.0

    def clock() -> float:
        nonlocal seconds
        seconds += 10
        return seconds

    monkeypatch.setattr("time.monotonic", clock)  # the bar checks the time after each message
    run_steps(301)
    progress = [line for line in capsys.readouterr().err.splitlines() if "message" not in line]
    assert len(progress) == 301 // 10 // 6 + 1
    assert progress[-1].startswith("finetune: 301 of 301 steps")


def test_other_ranks_and_empty_loops_write_nothing(capsys: Captured) -> None:
    with progress.step_bar(total=5, start=0, shown=False) as bar:
        bar.update()
    run_steps(7, start=7)
    assert capsys.readouterr().err == ""


def test_a_slow_loop_over_a_dataset_shows_the_remaining_time(
    capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    seconds = 0.0
    monkeypatch.setattr("time.monotonic", lambda: seconds)
    for seconds_per_item, num_lines in ((0.01, 0), (10.0, 5)):
        with progress.item_bar(30, label="train") as bar:
            bar.mininterval = 0.0
            for _ in range(30):
                seconds += seconds_per_item
                bar.update()
        written = capsys.readouterr().err.splitlines()
        assert len(written) == num_lines
    assert written[0].startswith("finetune: train: 6 of 30 images, ")
    assert written[0].endswith(" left")
    with progress.item_bar(30, label="train", shown=False) as bar:
        seconds += 100
        bar.update()
    assert capsys.readouterr().err == ""


def test_a_closed_terminal_is_no_error() -> None:
    child, terminal = pty.fork()
    if child == 0:
        code = 1
        try:
            signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGHUP])
            sys.stderr = os.fdopen(2, "w", buffering=1)
            was_open = not redirect_closed_terminal()
            os.write(1, b"!")
            signal.sigwait([signal.SIGHUP])
            logger.info("nobody reads this")
            code = 0 if was_open else 2
        finally:
            os._exit(code)
    assert os.read(terminal, 1) == b"!"
    os.close(terminal)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@pytest.mark.parametrize(
    "rate, shown", [(0.534, "0.53"), (7.25, "7.2"), (12.3, "12"), (1234, "1,234")]
)
def test_steps_show_decimals_for_rates_below_ten(rate: float, shown: str) -> None:
    line = {"loss": None, "lr": 1e-3, "images_per_second": rate}
    assert progress.step_postfix(line) == {"loss": "-", "lr": "1.0e-03", "img/s": shown}
