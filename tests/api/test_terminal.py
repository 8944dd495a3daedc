"""What a run shows of itself: a bar in a terminal, a line a round elsewhere."""

from __future__ import annotations

import contextlib
import os
import re
import sys
import termios
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from clocks import ManualClock
from conftest import tiny

import raysim
from raysim.api.lines import header, lasting
from raysim.api.progress import Minutes, round_line
from raysim.api.simulation import RoundResult
from raysim.api.terminal import run_in_terminal

RESULT = RoundResult(
    number=5, rounds=20, headline="accuracy", accuracy=None, loss=None, train_loss=0.5, clients_ok=3,
    clients_failed=1, seconds=1.234, metrics={"personal_accuracy_micro": 0.875}, messages=(),
)  # fmt: skip


def shown(write: int, read: int, folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """All that a run of three rounds, of which the third is evaluated, prints; both descriptors are closed."""
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setenv("TERM", "xterm")
    with ThreadPoolExecutor() as reader:  # reads along: a terminal holds 4 KiB, and a slow run draws its bar more often
        text = reader.submit(read_to_the_end, read)
        with open(write, "w") as stream:
            monkeypatch.setattr(sys, "stdout", stream)
            assert run_in_terminal(tiny(), folder, resume=False) == 0
    os.close(read)
    return text.result()


def read_to_the_end(descriptor: int) -> str:
    """What was written until the last writer closed; the end of a terminal reads as an input/output error."""
    pieces = []
    with contextlib.suppress(OSError):
        while piece := os.read(descriptor, 1 << 16):
            pieces.append(piece)
    return b"".join(pieces).decode()


def test_a_terminal_has_a_line_a_round_above_a_bar_and_the_time_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    master, slave = os.openpty()
    attributes = termios.tcgetattr(slave)
    attributes[1] &= ~termios.OPOST  # bytes as they are written
    termios.tcsetattr(slave, termios.TCSANOW, attributes)
    text = shown(slave, master, tmp_path / "run", monkeypatch)
    plain = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", text)
    bars = re.findall(r"round (\d)/3   accuracy +([\d.]+ %|-)   +(train|test) loss +[\d.]+ [━╸╺ ]+ (\S+) left", plain)
    assert bars[-1][0] == "3"
    assert bars[-1][3] == "0:00:00"
    assert "\x1b[2K" in text, "the line is not written over"
    kept = re.findall(r"round (\d)/3(?:(?!round).)* clients 3 ok, 0 failed   [\d.]+ s$", plain, re.MULTILINE)
    assert kept == ["1", "2", "3"]
    assert re.search(r"^sha256 +[0-9a-f]{64}$", plain, re.MULTILINE)
    below = re.findall(r"round (\d)/3(?:(?!round)[^\n])* clients [^\n]* s\n\s*round (\d)/3", plain)
    assert below == [("1", "1"), ("2", "2"), ("3", "3")], "the bar lags behind"


def test_a_script_says_where_its_run_is_and_then_a_line_a_minute(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    clock = ManualClock()
    with Minutes(tmp_path / "run", clock) as shown:
        for number in range(1, 8):
            clock.sleep(25)
            shown.show(replace(RESULT, number=number))
    said = capfd.readouterr()
    first, *lines = said.err.splitlines()
    assert first == f"raysim: the run is in {tmp_path / 'run'}"
    assert [line[:11] for line in lines] == ["round  3/20", "round  6/20"]
    raysim.run(tiny(), out=tmp_path / "ran")
    raysim.run(tiny(), out=tmp_path / "silent", progress=False)
    said = capfd.readouterr()
    assert (said.out, said.err) == ("", f"raysim: the run is in {tmp_path / 'ran'}\n")


def test_a_pipe_has_a_plain_line_a_round(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read, write = os.pipe()
    text = shown(write, read, tmp_path / "run", monkeypatch)
    assert "\x1b" not in text
    assert "\r" not in text
    lines = [line for line in text.splitlines() if line.startswith("round ")]
    assert [line.split("   ")[0] for line in lines] == ["round 1/3", "round 2/3", "round 3/3"]
    assert [re.findall("train loss|test loss", line) for line in lines] == [["train loss"]] * 2 + [["test loss"]]


def test_a_round_shows_the_clients_own_models_where_the_global_one_is_not_tested() -> None:
    line = "round  5/20   personal 87.50 %   train loss  0.5000   clients 3 ok, 1 failed   1.23 s"
    assert re.sub(" {4,}", "   ", round_line(RESULT)) == line
    assert "accuracy       -" in round_line(replace(RESULT, metrics={}))
    assert "accuracy 12.50 %" in round_line(replace(RESULT, accuracy=0.125))
    assert "rmse  0.7500" in round_line(replace(RESULT, headline="rmse", metrics={"rmse": 0.75}))
    assert "accuracy" not in round_line(replace(RESULT, headline=None, metrics={}))


def test_times_and_shares_are_written_as_people_write_them() -> None:
    times = {
        0.0123: "0.012 s",
        9.96: "10 s",
        99.5: "100 s",
        112.0: "112 s",
        119.6: "120 s",
        120.0: "2 min",
        7200.0: "2 h",
    }
    assert {seconds: lasting(seconds) for seconds in times} == times
    for share, said in ((0.004, "0.4%"), (0.4, "40%"), (1.0, "100%")):
        config = tiny(data={"partition": "natural"}, rounds={"participation": share})
        assert f"synthetic, {said} of all clients" in header(config)
