"""The report in a browser: looked at, hovered over, clicked through; by light, in the dark, on a telephone, on paper."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from browser import Browser, browser, needs_chromium
from conftest import simulate, tiny
from PIL import Image
from written import by_hand

from raysim.report import NoData
from raysim.report.figures import find
from raysim.report.groups import compare
from raysim.report.page import write
from raysim.report.runs import Run

pytestmark = needs_chromium

FEDAVG, FEDLWS = ([[0.2, 0.6, 0.8], [0.4, 0.7, 0.6]], [[0.5, 0.55, 0.6], [0.1, 0.3, 0.9]])
CHART = "[data-chart='0']"  # of the test accuracy


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two methods with two seeds each."""
    root = tmp_path_factory.mktemp("page")
    runs = [by_hand(root / f"avg-{seed}", scores, seed) for seed, scores in enumerate(FEDAVG)]
    runs += [by_hand(root / f"lws-{seed}", scores, seed, server=["fedlws"]) for seed, scores in enumerate(FEDLWS)]
    write(runs, root / "page.html")
    return root / "page.html"


@pytest.fixture(scope="module")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with browser(tmp_path_factory.mktemp("profile")) as found:
        yield found


def legend(chromium: Browser) -> list[str]:
    """What the chart's legend shows, of what can be seen of it."""
    rows = f"[...document.querySelectorAll(`{CHART} .u-legend tr`)].filter(row => row.offsetHeight)"
    return list(chromium.run(f"{rows}.map(row => row.cells[0].innerText + ': ' + row.cells[1].innerText)"))


def test_nothing_to_complain_about_and_nothing_from_outside(chromium: Browser, page: Path, tmp_path: Path) -> None:
    chromium.open(page)
    assert chromium.console == []
    # The page's own policy forbids every request and every other script, so that a browser complains of one.
    text = page.read_text(encoding="utf-8")
    for foreign in ('<img src="http://127.0.0.1:9/x.png">', "<script>document.title = 'other'</script>"):
        (tmp_path / "outside.html").write_text(text.replace("</body>", f"{foreign}</body>"), encoding="utf-8")
        chromium.open(tmp_path / "outside.html")
        assert "Content Security Policy" in "".join(chromium.console)
        assert chromium.run("document.title") != "other"


def test_hovering_shows_values_with_their_deviation(chromium: Browser, page: Path) -> None:
    chromium.open(page)
    chromium.move(f"{CHART} .u-over", x=0.999)
    # Of 0.8 and 0.6 the mean is 70 % and the deviation 20 / √2; of 0.6 and 0.9 they are 75 % and 30 / √2.
    assert legend(chromium) == ["round: 3", "fedavg: 70 ± 14.14", "fedavg + fedlws: 75 ± 21.21"]
    chromium.move(f"{CHART} .u-over", x=0.001)
    assert legend(chromium) == ["round: 1", "fedavg: 30 ± 14.14", "fedavg + fedlws: 30 ± 28.28"]


def test_the_axis_is_rounds_bytes_or_seconds_linear_or_logarithmic(chromium: Browser, page: Path) -> None:
    chromium.open(page)
    for against, shown in {
        "uplink": "sent by clients (MB): 3",
        "traffic": "sent up and down (MB): 12",
        "time": "time (s): 4",
    }.items():
        chromium.choose(f"{CHART} select", against)
        chromium.move(f"{CHART} .u-over", x=0.999)
        assert legend(chromium)[0] == shown  # a round is 1 MB up and 3 MB down, and the third ends after 4 s

    def at(x: float) -> str:
        chromium.move(f"{CHART} .u-over", x=x)
        return legend(chromium)[0]

    assert at(0.7) == "time (s): 4"  # of 1, 2 and 4 s, the second lies in the middle only by its logarithm
    chromium.click(f"{CHART} .controls label:nth-of-type(1) input")
    assert at(0.7) == "time (s): 2"
    chromium.click(f"{CHART} .controls label:nth-of-type(2) input")
    assert chromium.console == []


def test_a_click_on_a_name_hides_its_curve_and_band(chromium: Browser, page: Path) -> None:
    chromium.open(page)
    red, green = 230, 159  # of FedLWS
    canvas = f"document.querySelector(`{CHART} canvas`)"
    inked = f"""(() => {{ const c = {canvas}, all = c.getContext("2d").getImageData(0, 0, c.width, c.height).data;
        let n = 0; for (let i = 0; i < all.length; i += 4) n += all[i] == {red} && all[i + 1] == {green}; return n }})()"""
    assert chromium.run(inked) > 30
    chromium.click(f"{CHART} .u-legend tr:nth-child(5) th")
    assert chromium.run(inked) == 0
    chromium.click(f"{CHART} .u-legend tr:nth-child(5) th")
    assert chromium.run(inked) > 30


def test_a_click_on_a_heading_sorts_by_number(chromium: Browser, page: Path) -> None:
    chromium.open(page)
    column = "[...document.querySelectorAll('table.sort:first-of-type tbody tr')].slice(0, 2).map(row => row.cells[3].innerText)"
    heading = "table.sort th:nth-child(4) button"
    chromium.click(heading)
    assert chromium.run(column) == ["70.00 ± 14.14", "75.00 ± 21.21"]
    chromium.click(heading)
    assert chromium.run(column) == ["75.00 ± 21.21", "70.00 ± 14.14"]


@pytest.mark.parametrize("width", [400, 800, 1280])
def test_it_fits_its_window_and_the_contents_lead_somewhere(chromium: Browser, page: Path, width: int) -> None:
    chromium.open(page, width=width)
    assert chromium.run("document.documentElement.scrollWidth") <= width
    assert chromium.run(
        "[...document.querySelectorAll('nav a')].every(a => document.querySelector(a.getAttribute('href')))"
    )
    chromium.click("nav li:nth-child(3) a")
    assert chromium.run("document.querySelector(location.hash).getBoundingClientRect().top") < 200


def test_dark_is_dark_and_paper_is_white(chromium: Browser, page: Path, tmp_path: Path) -> None:
    def brightness(**how: object) -> float:
        chromium.open(page, **how)  # type: ignore[arg-type]
        chromium.picture(tmp_path / "shot.png")
        return float(np.asarray(Image.open(tmp_path / "shot.png").convert("L")).mean())

    assert brightness() > 230
    assert brightness(dark=True) < 60
    assert brightness(dark=True, media="print") > 230
    assert chromium.run("getComputedStyle(document.querySelector('nav')).display") == "none"
    assert chromium.pdf().startswith(b"%PDF")


def test_axes_are_those_of_all_runs_and_rounds_come_first(chromium: Browser, tmp_path: Path) -> None:
    """Simulated time is offered where every run has a clock."""
    none = simulate(tiny(), tmp_path / "none").folder
    slow, fast = (simulate(tiny(clock={"speed": speed}), tmp_path / f"{speed}").folder for speed in (10, 20))
    usual = ["rounds", "uplink", "traffic", "time"]
    with pytest.raises(NoData, match="has no simulated time: its clock is not set"):
        find("accuracy:clock", compare([Run(slow), Run(none)])).canvas()
    for name, folders, axes in (("mixed", (slow, none), usual), ("timed", (slow, fast), [*usual, "clock"])):
        write([Run(folder) for folder in folders], tmp_path / f"{name}.html")
        chromium.open(tmp_path / f"{name}.html")
        assert chromium.console == []
        assert chromium.run(f"[...document.querySelectorAll(`{CHART} option`)].map(option => option.value)") == axes
        assert chromium.run(f"document.querySelector(`{CHART} select`).value") == "rounds"
