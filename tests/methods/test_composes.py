"""The table of docs/howto/compose.md, cell by cell."""

import re
from pathlib import Path
from typing import Any

import pytest
from case import cases
from conftest import simulate, tiny

from raysim.config import Config, ConfigError

PAGE = (Path(__file__).parents[2] / "docs" / "howto" / "compose.md").read_text(encoding="utf-8")
CLOCK = {"speed": {"lognormal": {"median": 20, "sigma": 1.0}}, "up": 4000, "down": 16000, "latency": 0.1}
COLUMNS: list[dict[str, Any]] = [  # in the order of the table
    {},
    {"clock": {"over_select": 0.5, "dropout": 0.1}},
    {"rounds": {"selection": {"fedbuff": {"buffer": 2}}}},
    {"rounds": {"selection": "fedasync"}},
    {"rounds": {"selection": "power_of_choice"}},
    {"rounds": {"selection": "oort"}},
]
SETTINGS: dict[str, dict[str, Any]] = {
    "bn_stats: local": {"model": {"bn_stats": "local"}, "evaluate": {"global": False}},
    "upload: [error_feedback, top_k]": {"upload": ["error_feedback", {"top_k": 0.1}]},
    "download: [qsgd]": {"download": ["qsgd"]},
    "attack: [sign_flip]": {"attack": [{"sign_flip": {"clients": [1, 4]}}]},
}
ROWS = [[cell.strip() for cell in line.strip("|").split("|")] for line in PAGE.splitlines() if line.startswith("| `")]
REASONS = dict(re.findall(r'^(\d+)\. .*?"(.+?)"', PAGE, re.M))
EQUAL = {"iid_equal": {"clients": 8}}


def made(row: str, column: dict[str, Any]) -> Config:
    changes = SETTINGS[row] if row in SETTINGS else cases()[row].changes
    rounds = {"total": 3, **changes.get("rounds", {}), **column.get("rounds", {})}
    return tiny(**{**changes, "rounds": rounds, "clock": {**CLOCK, **column.get("clock", {})}})


@pytest.mark.parametrize("cells", ROWS, ids=lambda cells: cells[0].strip("`"))
def test_row(cells: list[str], tmp_path: Path, subtests: Any) -> None:
    row, *cells = cells
    assert len(cells) == len(COLUMNS)
    for i, (cell, column) in enumerate(zip(cells, COLUMNS, strict=True)):
        with subtests.test(column=i):
            if cell == "yes":
                run = simulate(made(row.strip("`"), column), tmp_path / str(i))
                assert run.server.value.isfinite().all()
            else:
                with pytest.raises(ConfigError, match=re.escape(REASONS[cell])):
                    made(row.strip("`"), column)


@pytest.mark.parametrize("row", [row.strip("`") for row, *cells in ROWS if cells[2] == "yes"])
def test_a_buffer_is_a_cohort(row: str, tmp_path: Path) -> None:
    """With equal clients that all return at once, the bits of FedBuff are those of rounds in which all count alike."""
    changes = SETTINGS[row] if row in SETTINGS else cases()[row].changes
    data = {**changes.get("data", {}), "partition": EQUAL}
    rounds = {"total": 3, **changes.get("rounds", {}), "participation": 0.5}
    equal = {**changes, "data": data, "clock": {"latency": 1}, "rounds": rounds}
    buffered = tiny(**{**equal, "rounds": {**rounds, "selection": {"fedbuff": 4}}})
    weighting = [{"fedavg": {"weights": "uniform"}}, *changes.get("weighting", [])]
    uniform = tiny(**{**equal, "weighting": weighting})
    first, second = (simulate(config, tmp_path / str(i)).sha256() for i, config in enumerate((buffered, uniform)))
    assert first == second
