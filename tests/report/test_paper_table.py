"""Tables for a paper: what is bold, underlined and marked is decided by numbers, in every format."""

from __future__ import annotations

import csv
import math
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest
from test_report import raysim_
from written import by_hand

from raysim.report.paper_table import ENDINGS, Column, Entry, PaperTable, made_by, render

SEEDS = (8, 9, 10)


def column(*values: tuple[float, ...], better: int = 1) -> Column:
    entries = [Entry(f"{sum(v) / len(v):.1f} ± x" if v else "-", dict(zip(SEEDS, v, strict=False))) for v in values]
    return Column("final_(%)", tuple(entries), better)


CLOSE = column((80.0, 82.0, 81.0), (79.0, 82.5, 80.0), (50.0, 53.0, 51.0), ())
TABLE = PaperTable("R&D | x", ("A_1", "B<b>", "C, c", "D"), (CLOSE, Column("seed", (Entry("1"),) * 4)))


def test_places_follow_the_means_and_marks_the_tests() -> None:
    assert (CLOSE.places(), CLOSE.differ()) == ([1, 2, 0, 0], [False, False, True, False])
    assert column((3.0,), (1.0,), (2.0,), better=-1).places() == [0, 1, 2]
    assert column((3.0,), (3.0,), (2.0,)).places() == [1, 1, 2]
    assert column((3.0,), (3.0,)).places() == [0, 0]  # all alike: none is the best
    assert column((3.0,), (1.0,), better=0).places() == [0, 0]
    assert column((3.0,), (1.0,)).differ() == [False, False]  # one seed proves nothing
    assert math.isnan(Entry("-").mean) and math.isnan(Entry("1", {8: 1.0}).std)


def test_latex_is_escaped_and_marked() -> None:
    lines = render([TABLE], "latex").splitlines()
    assert lines[0] == f"% {made_by()[0]}"
    rows = [line for line in lines if line.endswith(r"\\")]
    assert rows == [
        r"R\&D | x & final\_(\%) & seed \\",
        r"A\_1 & \textbf{81.0 $\pm$ x} & 1 \\",
        r"B<b> & \underline{80.5 $\pm$ x} & 1 \\",
        r"C, c & 51.3 $\pm$ x$^{*}$ & 1 \\",
        r"D & - & 1 \\",
    ]
    assert r"\begin{tabular}{lcc}" in lines


def test_markdown_and_html_are_escaped_and_marked() -> None:
    text = render([TABLE], "markdown")
    assert r"| R&D \| x | final_(%)" in text
    assert all(cell in text for cell in ("| **81.0 ± x** ", "| <u>80.5 ± x</u> |", r"| 51.3 ± x\* "))
    text = render([TABLE], "html")
    table = ElementTree.fromstring(text[text.index("<table>") :])
    assert [cell.text for cell in table.iter("strong")] == ["81.0 ± x"]
    assert [cell.text for cell in table.iter("u")] == ["80.5 ± x"]
    assert [row[0].text for row in table.iter("tr")] == ["R&D | x", "A_1", "B<b>", "C, c", "D"]
    assert len([row for row in table.iter("tr") if row.find("td/sup") is not None]) == 1


def test_csv_has_numbers_in_columns_of_their_own() -> None:
    lines = [line for line in render([TABLE], "csv").splitlines() if not line.startswith("#")]
    head, *rows = csv.reader(lines)
    assert head == ["R&D | x", "final_(%)", "final_(%), std", "seed"]
    assert rows[0] == ["A_1", "81", "1", "1"]
    assert rows[2][0] == "C, c" and rows[3][1:] == ["", "", "1"]


def test_what_only_some_seeds_reach_wins_nothing() -> None:
    """Rounds to a target: one seed of three was there after 3, and the other rows' seeds all after 5 and 6."""
    some = Entry("3 (1 of 3)", {8: 3.0}, missing=2)
    rounds = Column("rounds", (some, *column((5.0,) * 3, (6.0,) * 3).entries), -1)
    assert rounds.places() == [0, 1, 2]
    lines = render([PaperTable("", ("some", "all", "slow"), (rounds,))], "csv").splitlines()
    head, *rows = csv.reader(line for line in lines if not line.startswith("#"))
    assert head == ["", "rounds", "rounds, std", "rounds, seeds missing"]
    assert rows == [["some", "3", "", "2"], ["all", "5", "0", "0"], ["slow", "6", "0", "0"]]


def test_a_comment_cannot_be_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["raysim", "report", "a--><script>evil()</script>", "new\nline"])

    class Found(HTMLParser):
        def __init__(self) -> None:
            super().__init__()
            self.tags: list[str] = []

        def handle_starttag(self, tag: str, attributes: object) -> None:
            self.tags.append(tag)

    page = Found()
    page.feed(render([TABLE], "html"))
    assert "script" not in page.tags and "table" in page.tags
    assert "\nline" not in render([TABLE], "latex")


def test_the_command_and_the_commit_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["/usr/bin/raysim", "report", "two words", "--format", "latex"])
    command, source = made_by()
    assert command == "raysim report 'two words' --format latex"
    head = subprocess.run(
        ["git", "-C", Path(__file__).parent, "rev-parse", "HEAD"], capture_output=True, text=True, check=False
    )
    assert head.stdout.strip() in source


def test_report_prints_the_table(tmp_path: Path) -> None:
    for seed, scores in enumerate(([0.8, 0.5], [0.82, 0.53], [0.81, 0.51])):
        by_hand(tmp_path / f"avg-{seed}", [scores[0]], seed)
        by_hand(tmp_path / f"lws-{seed}", [scores[1]], seed, server=["fedlws"])
    for kind in ENDINGS:
        done = raysim_("report", tmp_path, "--format", kind, "--out", tmp_path / "none.html")
        assert done.exit_code == 0, done.output
    assert not (tmp_path / "none.html").exists()
    done = raysim_("report", tmp_path, "--format", "latex")
    assert r"\textbf{81.00 $\pm$ 1.00}" in done.output
    assert r"\underline{51.33 $\pm$ 1.53}$^{*}$" in done.output
    done = raysim_("report", tmp_path, "--format", "csv", "--column", "rounds", "--column", "final (%)")
    head = next(line for line in done.output.splitlines() if not line.startswith("#"))
    assert head == ',rounds,final (%),"final (%), std"'
    for wrong in (("--format", "latex", "--column", "finale"), ("--column", "rounds")):
        assert raysim_("report", tmp_path, *wrong).exit_code == 1
    for scores, cut in (([0.5, 0.8], True), ([0.01, 0.8], False)):
        by_hand(tmp_path / f"cut-{cut}", scores, 0)
        assert raysim_("report", tmp_path / f"cut-{cut}", "--out", tmp_path / f"{cut}.html").exit_code == 0
        assert ("The score axis is cut" in (tmp_path / f"{cut}.html").read_text()) == cut
