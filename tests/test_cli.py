"""The command line: what it prints, how it exits, how it stops. The engine is local; Ray has its own tests."""

from __future__ import annotations

import errno
import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
from importlib.metadata import requires
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import ray
import torch
import yaml
from command import Command, held
from typer.testing import CliRunner, Result

from raysim import machine
from raysim.analysis import MEASURES
from raysim.api.errors import faults_of
from raysim.api.folder import new_folder
from raysim.api.launch import check_address
from raysim.api.lines import aligned, bytes_, percent
from raysim.api.preview import preview
from raysim.cli import complete, doctor
from raysim.cli.app import app
from raysim.config import (
    ENGINES,
    INSTRUMENTS,
    MODELS,
    PARTITIONS,
    PRESETS,
    SINKS,
    SOURCES,
    STACKS,
    ConfigError,
    fingerprint,
    from_dict,
    load,
)  # fmt: skip
from raysim.config.shipped import find
from raysim.core.availability import AVAILABILITIES
from raysim.core.simulated import TRAITS
from raysim.engine.ray.cluster import cluster
from raysim.methods import SELECTIONS
from raysim.report.figures import FIGURES
from raysim.report.runs import Run
from raysim.store import manifest, tables
from raysim.sweep.grid import grid

ROOT = Path(__file__).parent.parent

TINY = """
name: tiny
data: {name: {synthetic: {samples: 60, test_samples: 20}}, partition: {iid_equal: {clients: 4}}}
model: {name: mlp, options: {hidden: [8]}}
rounds: {total: 3, participation: 0.5, checkpoint_every: 100}
local: {batch_size: 5, lr: 0.1}
server: [fedlws]
engine: local
"""


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    path = tmp_path / "tiny.yaml"
    path.write_text(TINY)
    return path


def raysim(*args: object) -> Result:
    return CliRunner().invoke(app, [str(arg) for arg in args])


def sha256(text: str) -> str:
    found = re.search(r"^sha256 +([0-9a-f]{64})$", text, re.MULTILINE)
    assert found, text
    return found[1]


def test_help_needs_no_heavy_package() -> None:
    code = "import sys, raysim.cli.app; print(*{'torch', 'ray', 'numpy', 'pydantic', 'matplotlib'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""


@pytest.mark.parametrize(
    "words",
    [
        ["--help"],
        ["list", "methods"],
        ["list", "models"],
        ["explain"],
        ["explain", "fedala"],
        ["run", "tiny.yaml", "local.lrr=1"],
    ],
    ids=" ".join,
)
def test_what_computes_nothing_does_without_pytorch(tiny: Path, words: list[str]) -> None:
    code = "import sys, raysim.cli.app\ntry: raysim.cli.app.main()\n"
    code += "finally: print(*{'torch', 'sklearn', 'ray'} & set(sys.modules), file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True)
    assert done.returncode == (2 if "run" in words else 0)
    assert done.stderr.splitlines()[-1] == ""


def test_run_prints_a_line_a_round_and_a_summary(tiny: Path) -> None:
    result = raysim("run", tiny)
    assert result.exit_code == 0, result.output
    lines = result.output.splitlines()
    assert lines[0] == "tiny | fedavg + fedlws | mlp | synthetic, 2 of 4 clients a round | local engine"
    form = r"round {}/3   accuracy +[\d.]+ %    +test loss +[\d.]+   clients 2 ok, 0 failed   [\d.]+ s"
    for number in (1, 2, 3):
        assert re.fullmatch(form.format(number), lines[number]), lines[number]
    labels = [line.split("  ")[0] for line in lines[5:]]
    assert labels == ["accuracy", "traffic", "time", "sha256", "folder"]
    folder = Path(lines[-1].split()[-1])
    assert re.fullmatch(r"tiny-\d{8}-\d{6}", folder.name)
    assert folder.parent == Path("runs")
    assert load(folder / "config.yaml") == load(tiny)


def test_settings_may_stand_without_set(tiny: Path) -> None:
    ran = raysim("run", tiny, "rounds.total=1", "--out", "run", "server=fedavgm", "--set", "local.lr=0.2")
    assert ran.exit_code == 0, ran.output
    assert ran.output.startswith("tiny | fedavg + fedavgm |")
    assert load("run/config.yaml").local.lr == 0.2
    assert "round 2/2" in raysim("resume", "run", "rounds.total=2").output
    assert raysim("run", tiny, "rounds").stderr.startswith("rounds: write it as path=value")
    assert raysim("sweep", tiny, "rounds.total=1", "local.lr=0.1,0.2", "--out", "sweep").exit_code == 0
    assert {path.name for path in Path("sweep").iterdir()} == {"lr0.1", "lr0.2", "report.html"}


def test_a_dry_run_says_what_the_run_will_be(tiny: Path) -> None:
    settings = ("--set", "client=[fedala]", "--set", "data.client_test_frac=0.2")
    for own in ((), settings):
        shown = raysim("run", tiny, "--dry-run", *own)
        assert shown.exit_code == 0, shown.output
        assert {path.name for path in Path().iterdir()} == {"tiny.yaml"}
        rows, _, text = shown.output.partition("\nNothing was started. All settings:\n")
        assert from_dict(yaml.safe_load(text)) == load(tiny, own[1::2])
        rows = rows.partition("\nclients ")[2]
        said = dict(line.split("  ", 1) for line in f"clients {rows}".splitlines() if "  " in line)
        assert said["clients"].strip() == "4, 2 a round"
        assert said["hosts"].strip() == "this process"
        assert re.match(r" *about [\d.e-]+ s a round, [\d.e-]+ s in all", said["time"])
    ran = raysim("run", tiny, "rounds.total=1")
    counted = re.search(r"^traffic +(.*)$", ran.output, re.MULTILINE)
    assert "a client takes 2 s in the median, 2 s at most" in raysim("run", tiny, "--dry-run", "clock.latency=2").output
    planned = re.search(r"^traffic +(.*) in a round", raysim("run", tiny, "--dry-run").output, re.MULTILINE)
    assert counted and planned and counted[1] == planned[1]


def test_a_dry_run_marks_what_is_not_the_default(tiny: Path) -> None:
    """Also where a long value takes two lines, in an entry of a stack, and where another entry was chosen."""
    folder = "a long name " * 12
    settings = ["server=[{fedlws: {beta: 0.2}}]", f"record.dir={folder}", "engine=local", "local.lr=0.3"]
    shown = raysim("run", tiny, "--dry-run", *settings)
    assert shown.exit_code == 0, shown.output
    text = shown.output.partition("All settings:\n")[2]
    assert from_dict(yaml.safe_load(text)) == load(tiny, settings)
    marked = {tuple(line.split("  # default: ")) for line in text.splitlines() if "# default" in line}
    assert {("    beta: 0.2", "0.1"), ("engine:", '"ray"'), ("server:", "[]")} <= {(a.rstrip(), b) for a, b in marked}
    assert any("name" in line and default == '"runs"' for line, default in marked)
    assert not any(line.strip().startswith(("tau_stat", "precision", "init:")) for line, _ in marked)


def test_a_model_refuses_options_that_it_cannot_be_made_with(tiny: Path) -> None:
    refused = raysim("run", tiny, "--dry-run", "model.options.hidden=[abc]")
    assert refused.exit_code == 2
    assert refused.stderr.startswith("model.options.hidden=[abc]: must be a list, each a whole number > 0")
    assert raysim("run", tiny, "--dry-run", "model={name: vit, options: {dropout: 1e-1}}").exit_code == 0


def test_a_run_that_nothing_can_be_tested_on_is_refused_or_told(tiny: Path) -> None:
    np.savez("untested.npz", x_train=np.zeros((60, 4), np.float32), y_train=np.arange(60) % 3)
    untested = ("run", tiny, "--dry-run", "data.name={npz: untested.npz}")
    told = "evaluate.global: there are no samples to test a model on."
    with pytest.warns(UserWarning, match=told):
        assert raysim(*untested).exit_code == 0
    refused = raysim(*untested, "rounds.until.accuracy=0.9")
    assert refused.exit_code == 2
    assert told in refused.stderr


def completed(*words: str) -> list[str]:
    """What bash is offered after these words."""
    env = {"_RAYSIM_COMPLETE": "complete_bash", "COMP_WORDS": " ".join(words), "COMP_CWORD": str(len(words) - 1)}
    return CliRunner().invoke(app, [], prog_name="raysim", env=env).output.split()


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        ("run quickst", ["quickstart"]),
        ("run quickstart local.lr", ["local.lr=", "local.lr_decay=", "local.lr_schedule="]),
        ("run quickstart --set server=fedl", ["server=fedlws"]),
        ("run quickstart server = fedl", ["fedlws"]),  # as bash has it, to which `=` ends a word
        ("run quickstart model.name=simple", ["model.name=simple_cnn"]),
        ("explain fedal", ["fedala"]),
        ("plot timel", ["timeline"]),
        ("measure hess", ["hessian"]),
        ("reproduce fedlws/table12", ["fedlws/table12"]),
        ("run configs/quickst", ["configs/quickstart.yaml"]),
    ],
)
def test_tab_offers_names(words: str, offered: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    assert completed("raysim", *words.split()) == offered


def test_every_name_is_offered() -> None:
    """Completion reads the source, because the registry takes seconds to import: both know the same names."""
    known = {path: set(catalogue.entries) for path, catalogue in STACKS.items()} | {
        "model.name": set(MODELS), "data.name": set(SOURCES), "data.partition": set(PARTITIONS),
        "record.instruments": set(INSTRUMENTS), "record.sinks": set(SINKS), "engine": set(ENGINES),
        "preset": set(PRESETS), "rounds.selection": set(SELECTIONS),
        "clock.availability": set(AVAILABILITIES),
        **{f"clock.{name}": set(TRAITS) for name in ("speed", "up", "down", "latency")},
    }  # fmt: skip
    assert {path: set(complete._named(path)) for path in complete.TABLES} == known
    assert set(complete.figures("")) == set(FIGURES)
    assert set(complete.measures("")) == set(MEASURES)


def test_configuration_faults_exit_with_2_and_leave_nothing(tiny: Path) -> None:
    result = raysim("run", tiny, "--set", "local.lrr=1", "--set", "rounds.total=x")
    assert result.exit_code == 2
    assert result.stdout == ""
    total, lrr = result.stderr.splitlines()  # in the order of the sections
    assert total == "rounds.total=x: must be a whole number > 0, but is 'x'."
    assert lrr.startswith("local.lrr=1: unknown field (set to 1). Did you mean 'lr'?")
    assert {p.name for p in Path().iterdir()} == {"tiny.yaml"}


def test_other_known_errors_are_one_line_and_exit_with_1(tiny: Path) -> None:
    np.savez("bad.npz", x=np.zeros((4, 3)), y=np.array([0, 1, 7, 1]))
    result = raysim("run", tiny, "--set", "data.name={npz: bad.npz}")
    assert result.exit_code == 1
    assert result.stderr.startswith("raysim: bad.npz")
    assert result.stderr.count("\n") == 1
    assert not any(Path("runs").glob("*"))  # the folder it was given is gone again


def test_a_file_that_the_system_refuses_is_named(tiny: Path) -> None:
    """As it was asked for, and without raysim's own file beside it. What was read is not said to be written."""
    result = raysim("schema", "--out", tiny / "schema.json")
    assert result.stderr == f"raysim: {tiny / 'schema.json'} cannot be written: Not a directory.\n"
    for code, path, said in (
        (errno.EACCES, "runs/.lock", "runs cannot be written: Permission denied."),
        (errno.ENOSPC, "runs/rounds", "runs/rounds cannot be written: No space left on device."),
        (errno.EACCES, "data.csv", "data.csv: Permission denied."),
    ):
        assert faults_of(OSError(code, os.strerror(code), path)) == (f"raysim: {said}",)
    assert faults_of(OSError("disk")) == ("raysim: disk",)


def test_out_must_be_new_or_empty(tiny: Path) -> None:
    assert raysim("run", tiny, "--out", "here", "--set", "rounds.total=1").exit_code == 0
    again = raysim("run", tiny, "--out", "here")
    assert again.exit_code == 2
    assert (
        again.stderr == "out: here is not empty. Name a new or empty folder, or continue with `raysim resume here`.\n"
    )
    assert "is a file" in raysim("run", tiny, "--out", tiny).stderr
    assert raysim("run", tiny, "--out", tiny / "run").stderr.startswith(f"out: {tiny / 'run'} cannot be written: ")


def test_a_command_to_type_is_quoted(tiny: Path) -> None:
    folder = "it's my; run"
    assert raysim("run", tiny, "--out", folder, "rounds.total=1").exit_code == 0
    typed = raysim("run", tiny, "--out", folder).stderr.split("`")[1]
    assert shlex.split(typed) == ["raysim", "resume", folder]
    assert f"cd {shlex.quote(folder)} && raysim run" in raysim("init", folder).output


def test_runs_of_one_second_get_folders_of_their_own(tmp_path: Path) -> None:
    assert len({new_folder(None, tmp_path, "run") for _ in range(4)}) == 4


def waits(gate: Path, t: int) -> str:
    """A setting with which a client waits at the gate in round `t`, to the same bits."""
    return f"client=[{{waits: {{gate: {gate}, t: {t}}}}}]"


def test_one_ctrl_c_ends_the_round_and_resume_gives_the_same_bits(tiny: Path, gate: Path) -> None:
    run = Command("run", tiny, "--out", "run", waits(gate, 1))
    with held(gate):
        run.signal(signal.SIGINT)
        run.wait_for("Stopping after this round; once more stops at once.")
    assert run.end() == 130
    assert "Stopped. `raysim resume run` continues." in run.err
    assert "Traceback" not in run.output
    assert run.out.splitlines()[-1].startswith("round 2/3 ")
    resumed = raysim("resume", "run")
    assert resumed.exit_code == 0, resumed.output
    assert resumed.output.splitlines()[1].startswith("round 3/3 ")
    assert sha256(resumed.output) == sha256(raysim("run", tiny).output)


def test_a_second_signal_stops_at_once(tiny: Path, gate: Path) -> None:
    run = Command("run", tiny, "--out", "run", waits(gate, 1))
    with held(gate):
        run.signal(signal.SIGTERM)
        run.wait_for("Stopping after this round")
        run.signal(signal.SIGTERM)
        assert run.end() == 128 + signal.SIGTERM
    assert "Traceback" not in run.output


def test_resume_refuses_other_settings(tiny: Path) -> None:
    assert raysim("run", tiny, "--out", "run").exit_code == 0
    config = Path("run/config.yaml")
    text = config.read_text()
    config.write_text(
        text.replace("total: 3", "total: 5").replace("lr: 0.1\n", "lr: 0.3\n").replace("beta: 0.1", "beta: 0.2")
    )
    refused = raysim("resume", "run")
    assert refused.exit_code == 2
    assert "local.lr was 0.1 when the run began" in refused.output
    assert "server was [{" in refused.output
    assert "rounds" not in refused.output
    config.write_text(text.replace("total: 3", "total: 5"))
    assert "round 5/5" in raysim("resume", "run").output
    config.write_text(text.replace("total: 3", "total: 4"))
    assert "rounds.total is 4, but 5 rounds are done" in raysim("resume", "run").stderr


def test_resume_of_a_complete_run_says_so_and_changes_nothing(tiny: Path) -> None:
    ran = raysim("run", tiny, "--out", "run")
    before = {path: path.read_bytes() for path in Path("run").rglob("*.*")}
    again = raysim("resume", "run")
    assert again.exit_code == 0
    assert again.output.startswith("This run is complete.\n")
    assert again.output.splitlines()[2:] == ran.output.splitlines()[-5:]
    assert before == {path: path.read_bytes() for path in Path("run").rglob("*.*")}
    changed = raysim("resume", "run", "evaluate.batch_size=7", "record.pairs=false", "engine.local.batch_clients=1")
    told = "run: the run is complete, so evaluate.batch_size, record.pairs have no effect; a larger rounds.total"
    assert changed.exit_code == 0 and changed.stderr.startswith(f"raysim: {told}")
    assert before == {path: path.read_bytes() for path in Path("run").rglob("*.*")}


@pytest.mark.parametrize("manifest", [None, "{", "[]", '{"settings": 5}'])
def test_resume_wants_the_manifest(tiny: Path, manifest: str | None) -> None:
    raysim("run", tiny, "--out", "run", "--set", "rounds.total=1")
    path = Path("run/manifest.json")
    path.unlink() if manifest is None else path.write_text(manifest)
    result = raysim("resume", "run")
    assert result.exit_code == 2
    assert result.stderr.startswith(f"{path} is ")
    assert result.stderr.count("\n") == 1


def test_resume_refuses_other_data_and_names_another_machine(tiny: Path) -> None:
    x, y = np.arange(240, dtype=np.float32).reshape(60, 4) / 240, np.arange(60) % 3
    np.savez("own.npz", x_train=x, y_train=y, x_test=x[:9], y_test=y[:9])
    own = ("--set", "data.name={npz: own.npz}", "--set", f"data.root={tiny.parent}")
    assert raysim("run", tiny, "--out", "run", "--set", "rounds.total=1", *own).exit_code == 0
    config, manifest = Path("run/config.yaml"), Path("run/manifest.json")
    config.write_text(config.read_text().replace("total: 1", "total: 2"))
    np.savez("own.npz", x_train=x[:, ::-1].copy(), y_train=y, x_test=x[:9], y_test=y[:9])
    refused = raysim("resume", "run")
    assert refused.exit_code == 2
    assert refused.stderr.startswith("data: not what the run in run began with.")
    np.savez("own.npz", x_train=x, y_train=y, x_test=x[:9], y_test=y[:9])
    manifest.write_text(re.sub('"torch": "[^"]*"', '"torch": "2.11.0"', manifest.read_text()))
    with pytest.warns(UserWarning, match=r"the run began with torch 2\.11\.0, and now it is "):
        resumed = raysim("resume", "run")
    assert resumed.exit_code == 0


def test_resume_names_a_damaged_table(tiny: Path) -> None:
    raysim("run", tiny, "--out", "run", "--set", "rounds.total=1")
    config, [part] = Path("run/config.yaml"), Path("run/clients").iterdir()
    config.write_text(config.read_text().replace("total: 1", "total: 2"))
    part.write_bytes(part.read_bytes()[:50])
    result = raysim("resume", "run")
    assert result.exit_code == 1
    assert result.stderr.startswith(f"raysim: {part.absolute()} is damaged: ")


def test_a_run_belongs_to_one_process(tiny: Path, gate: Path) -> None:
    run = Command("run", tiny, "--out", "run", waits(gate, 1))
    with held(gate):
        second = raysim("resume", "run")
    assert second.exit_code == 2
    assert second.stderr == "run: another process uses this run; wait until it has ended.\n"
    assert run.end() == 0
    assert "Traceback" not in run.output


def test_personal_scores_stand_beside_the_global_ones(tiny: Path) -> None:
    ran = raysim(
        "run", tiny, "--out", "run", "--set", "evaluate.personal=after_init", "--set", "data.client_test_frac=0.2"
    )
    last = tables.read(Path("run"), "rounds").to_pylist()[-1]
    shown = f"accuracy {percent(last['accuracy']):>7}   personal {percent(last['personal_accuracy_micro']):>7}"
    assert shown in ran.output
    lines = dict(line.split(maxsplit=1) for line in ran.output.splitlines()[-7:])
    assert lines["accuracy"].startswith(f"final {percent(last['accuracy'])}")
    assert lines["personal"].startswith(f"final {percent(last['personal_accuracy_micro'])}")
    assert f"worst tenth {percent(last['personal_accuracy_worst10'])}" in lines["clients"]
    assert f"mean {percent(last['personal_accuracy_macro'])}" in lines["clients"]


def test_a_run_of_which_no_client_comes_back_ends_in_a_sentence(tiny: Path) -> None:
    ran = raysim("run", tiny, "--set", "local.lr=1e18", "--set", "server=[]")
    assert "not finite (NaN or Inf): refused. A lower local.lr" in ran.stderr
    assert ran.stderr.startswith("raysim: 0 of the 2 clients of round 1 came back, and rounds.min_clients is 1.")
    assert ran.exit_code == 1


@pytest.mark.skipif(torch.cuda.device_count() > 0, reason="there is a GPU")
def test_gpus_that_do_not_exist_are_found_before_ray_starts(tiny: Path) -> None:
    result = raysim("run", tiny, "--set", "engine={ray: {gpu_per_client: 1}}")
    assert result.exit_code == 2
    assert "engine.ray.gpu_per_client: 1 of a GPU, but this machine has none" in result.stderr


def test_resume_wants_a_run(tmp_path: Path) -> None:
    result = raysim("resume", tmp_path)
    assert result.exit_code == 2
    assert result.stderr == f"{tmp_path}: holds no config.yaml, so it is not the folder of a run.\n"


@pytest.mark.parametrize("engine", ["local", "ray"])
def test_an_address_that_cannot_be_joined(tiny: Path, engine: str) -> None:
    with socket.socket() as free:  # bound, but nobody listens
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
        result = raysim("run", tiny, "--set", f"engine={engine}", "--address", address)
    assert result.exit_code == 2
    assert result.stderr.startswith("--address: ")


@pytest.mark.parametrize(
    ("what", "role", "name", "source"),
    [
        ("methods", "server", "fedlws", "2025"),
        ("models", "model", "simple_cnn", "FedLAW"),
        ("datasets", "dataset", "digits", "Alpaydin"),
        ("partitions", "partition", "dirichlet_counts", "2023"),
    ],
)
def test_list_has_one_line_an_entry_with_its_source(what: str, role: str, name: str, source: str) -> None:
    result = raysim("list", what)
    assert result.exit_code == 0
    (line,) = [line for line in result.output.splitlines() if line.split()[1] == name]
    assert line.split()[0] == role
    assert source in line
    assert all(len(line.split()) > 2 for line in result.output.splitlines()), "an entry says nothing of itself"
    starts = {line.index(line.split(None, 2)[2], 10) for line in result.output.splitlines()}
    assert len(starts) == 1, "the columns are not aligned"


def test_list_as_json() -> None:
    listed = json.loads(raysim("list", "methods", "--json").output)
    assert {"role", "name", "about"} == listed[0].keys()
    assert {one["name"] for one in listed if one["role"] == "server"} == set(STACKS["server"].entries)


def test_list_refuses_what_it_does_not_know() -> None:
    assert raysim("list", "animals").exit_code == 2
    assert raysim("list", "instruments").exit_code == 0


def test_data_show_prints_the_partition_and_draws_it(tiny: Path) -> None:
    result = raysim("data", "show", tiny, "--set", "data.client_test_frac=0.2")
    assert result.exit_code == 0, result.output
    lines = result.output.splitlines()
    assert lines[0].split() == ["client", "train", "test", *(f"c{c}" for c in range(10))]
    client, train, test, *classes = lines[1].split()
    assert (client, train, test) == ("0", "12", "3")
    assert sum(int(n) for n in classes if n != ".") == 12
    assert "4 clients, 48 training samples: 12 to 12 each" in lines
    assert lines[-1] == f"The chart of clients and classes is in {Path('tiny-partition.png').resolve()}"
    assert Path("tiny-partition.png").read_bytes().startswith(b"\x89PNG")


def test_data_show_without_matplotlib_says_what_to_install(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    result = raysim("data", "show", tiny)
    assert result.exit_code == 0
    assert "pip install 'raysim[report]'" in result.stderr


def test_data_show_names_clients_with_nothing(tiny: Path) -> None:
    skewed = "data.partition={dirichlet_counts: {alpha: 0.001, clients: 20}}"
    result = raysim("data", "show", tiny, "--set", skewed)
    assert "clients without training samples: " in result.output


def test_doctor_is_content_or_says_what_to_do(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    good = [doctor.Finding("cpus", "2")]
    monkeypatch.setattr(doctor, "examine", lambda: iter(good))
    well = raysim("doctor")
    assert (well.exit_code, well.output) == (0, "cpus      2\n\nNothing is wrong.\n")
    monkeypatch.setattr(
        doctor, "examine", lambda: iter([*good, doctor.Finding("data", "x", "x is missing. Create it.")])
    )
    ill = raysim("doctor")
    assert ill.exit_code == 1
    assert ill.output.endswith("1 problem:\n- x is missing. Create it.\n")


def test_doctor_examines_this_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("RAYSIM_DATA", str(tmp_path / "nowhere"))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    findings = {finding.topic: finding for finding in doctor.examine()}
    assert findings.keys() >= {"python", "packages", "cpus", "memory", "/dev/shm", "disk", "data", "ray"}
    assert "torch 2." in findings["packages"].text
    brought = {re.split(r"[^\w-]", need)[0] for need in requires("raysim") or () if "extra ==" not in need}
    assert set(doctor.PACKAGES) <= {"raysim", *brought}  # none that only who develops raysim has
    assert findings["packages"].problem is None
    assert (
        findings["data"].problem
        == f"RAYSIM_DATA is {tmp_path / 'nowhere'}, which is not a folder. Correct or unset it."
    )
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Mock(total=100 << 30, free=4 << 30))
    assert "96.0 % full, and Ray stores nothing more" in str(doctor._disk().problem)
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    assert "nothing answers at 127.0.0.1:1" in str(doctor._ray().problem)


@pytest.mark.parametrize("address", ["garbage", "garbage:", ":6379", "head:port", "head:99999", "tcp://head"])
def test_what_is_no_address_of_a_cluster_is_refused(address: str, tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before anything is started, and with the form that an address has."""
    refused = f"{address} is no address of a Ray cluster; write HOST:PORT, such as "
    for given, place in ((address, "--address"), (None, "RAY_ADDRESS")):
        monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1" if given else address)
        for ask in (lambda: check_address(given), lambda: preview(load(tiny, [("engine", "ray")]), given)):  # noqa: B023
            with pytest.raises(ConfigError, match=f"^{re.escape(f'{place}: {refused}')}"):
                ask()
    finding = doctor._ray()
    assert "found" not in finding.text and str(finding.problem).startswith(f"RAY_ADDRESS: {refused}")
    monkeypatch.setattr(ray, "is_initialized", lambda: False)  # of another test's cluster
    monkeypatch.setattr(ray, "init", Mock(side_effect=ValueError("Invalid address")))
    with pytest.raises(ConnectionError, match="Invalid address"), cluster("garbage"):
        pass


@pytest.mark.parametrize("address", ["auto", "local", "ray://head"])
def test_doctor_does_not_find_a_cluster_that_it_has_not_tried(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", address)
    check_address(None)
    finding = doctor._ray()
    assert "found" not in finding.text and address in finding.text and finding.problem is None


def test_doctor_finds_what_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        monkeypatch.setenv("RAY_ADDRESS", address)
        assert doctor._ray() == doctor.Finding("ray", f"cluster found at {address}")


@pytest.mark.parametrize(("limit", "quota"), [("max 100000", None), ("50000 100000", 0.5), ("400000 100000", 4.0)])
def test_doctor_reads_the_containers_cpu_limit(
    limit: str, quota: float | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cpu.max").write_text(limit + "\n")
    monkeypatch.setattr(machine, "CGROUP", tmp_path)
    assert machine.cpu_quota() == quota
    allowed = len(os.sched_getaffinity(0))
    assert (
        machine.cpus() == {None: allowed, 0.5: 1, 4.0: min(allowed, 4)}[quota]
    )  # what a cluster and a sweep start with
    assert (doctor._cpus().problem is not None) == (quota == 0.5)


def test_a_cluster_is_not_started_where_there_is_no_room_for_its_threads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import ray

    from raysim.engine.ray.cluster import cluster

    (tmp_path / "pids.max").write_text("300\n")
    (tmp_path / "pids.current").write_text("101\n")
    monkeypatch.setattr(machine, "CGROUP", tmp_path)
    monkeypatch.setattr(ray, "is_initialized", lambda: False)  # other tests have one
    monkeypatch.setattr(ray, "shutdown", lambda: None)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with pytest.raises(ConnectionError, match="and only 199 more may be started"), cluster():
        pass
    (tmp_path / "pids.max").write_text("max\n")
    monkeypatch.setattr(os, "geteuid", lambda: 0)  # root has no ulimit
    assert machine.free_threads() is None


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0 B"), (999, "999 B"), (1000, "1.0 kB"), (27_400_000, "27.4 MB"), (3e15, "3000.0 TB")]
)
def test_bytes(count: float, text: str) -> None:
    assert bytes_(count) == text


def test_aligned() -> None:
    assert aligned([("a", "bb"), ("ccc", "d")]) == ["a    bb", "ccc  d"]
    assert aligned([("a", "bb"), ("ccc", "d")], ">") == ["  a  bb", "ccc   d"]
    assert aligned([]) == []


def test_new_folder_refuses_a_folder_with_something_in_it(tmp_path: Path) -> None:
    (tmp_path / "x").touch()
    with pytest.raises(ConfigError, match=r"is not empty\. Name a new or empty folder\.$"):
        new_folder(tmp_path, tmp_path, "run")


# ---------------------------------------------------------------------------------------- going on with other settings

STATEFUL = ("--set", "client=[fedala]", "--set", "data.client_test_frac=0.2")


@pytest.mark.parametrize("methods", [(), STATEFUL], ids=["fedlws", "fedala + fedlws"])
def test_a_finished_run_is_extended_to_the_bits_of_a_longer_one(tiny: Path, methods: tuple[str, ...]) -> None:
    longer = raysim("run", tiny, "--out", "longer", "--set", "rounds.total=6", *methods)
    assert raysim("run", tiny, "--out", "run", *methods).exit_code == 0
    began = Path("run/config.yaml").stat().st_mtime_ns
    extended = raysim("resume", "run", "--set", "rounds.total=6", "--set", "evaluate.batch_size=7")
    assert extended.exit_code == 0, extended.output
    assert extended.output.splitlines()[1].startswith("round 4/6 ")
    assert sha256(extended.output) == sha256(longer.output)
    config = load("run/config.yaml")
    assert (config.rounds.total, config.evaluate.batch_size) == (6, 7)
    assert manifest.read_manifest(Path("run"))["config_hash"] == fingerprint(config)
    assert Path("run/config.yaml").stat().st_mtime_ns == began  # which is what `raysim runs` takes a run's age from
    assert tables.read(Path("run"), "rounds")["round"].to_pylist() == list(range(6))
    again = raysim("resume", "run")
    assert again.output.startswith("This run is complete.\n")
    assert sha256(again.output) == sha256(longer.output)


def test_an_extension_that_is_stopped_leaves_no_old_end(tiny: Path, gate: Path) -> None:
    """What the folder says is of the longer run from its first further round on."""
    assert raysim("run", tiny, "--out", "run", waits(gate, 4)).exit_code == 0
    longer = Command("resume", "run", "rounds.total=9")
    with held(gate):
        assert not Path("run/result.json").exists()
        longer.signal(signal.SIGINT)
        longer.wait_for("Stopping after this round")
    assert longer.end() == 130
    assert not Path("run/result.json").exists()
    assert load("run/config.yaml").rounds.total == 9


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("local.lr=0.3", "run/config.yaml: local.lr was 0.1 when the run began. Put it back, or start another run.\n"),
        (
            "rounds.selection=round_robin",
            'run/config.yaml: rounds.selection was {"uniform": {}} when the run began. Put it back, or start another run.\n',
        ),
        ("rounds.total=2", "run/config.yaml: rounds.total is 2, but 3 rounds are done. "),
        ("rounds.totl=9", "rounds.totl=9: unknown field (set to 9). Did you mean 'total'?"),
    ],
)
def test_a_run_does_not_go_on_with_settings_that_change_its_bits(tiny: Path, change: str, message: str) -> None:
    assert raysim("run", tiny, "--out", "run").exit_code == 0
    before = Path("run/config.yaml").read_bytes()
    refused = raysim("resume", "run", "--set", change)
    assert refused.exit_code == 2
    assert refused.stderr.startswith(message)
    assert Path("run/config.yaml").read_bytes() == before
    assert Path("run/result.json").exists()


def test_a_method_that_computes_with_the_number_of_rounds_is_not_extended(tiny: Path) -> None:
    assert raysim("run", tiny, "--out", "run", "--set", "client=[fedphp]").exit_code == 0
    refused = raysim("resume", "run", "--set", "rounds.total=6")
    assert refused.exit_code == 2
    assert refused.stderr == (
        "run/config.yaml: rounds.total was 3 when the run began, and fedphp computes with it. Put it back, or start "
        "another run.\n"
    )
    text = Path("run/config.yaml").read_text()
    Path("run/config.yaml").write_text(text.replace("total: 3", "total: 6"))
    assert raysim("resume", "run").stderr == refused.stderr
    Path("run/config.yaml").write_text(text)
    assert raysim("resume", "run", "--set", "evaluate.batch_size=7").exit_code == 0


# ------------------------------------------------------------------------------------- from nothing, in an empty folder


def test_a_configuration_that_comes_with_raysim_has_a_name(tiny: Path) -> None:
    for name in ("quickstart", "fedlws/table1"):
        assert load(find(name), ["data.name=digits"]).name.startswith(name[:6])
    Path("quickstart").write_text(TINY)
    assert load(find("quickstart")).name == "tiny"  # a file of one's own comes first
    wrong = raysim("run", "fedlws/tabel1")
    assert wrong.exit_code == 2
    assert wrong.stderr.endswith("Did you mean 'fedlws/table1'?\n")
    assert "Did you mean 'fedala/table7_mnist'?" in raysim("reproduce", "fedala/table7").stderr
    assert "absent.yaml: no such file" in raysim("run", "absent.yaml").stderr


def test_a_folder_is_no_configuration(tiny: Path) -> None:
    Path("mine").mkdir()
    assert raysim("run", "mine").stderr == "mine: is a folder without a YAML file. `raysim init mine` writes one.\n"
    assert raysim("init", "mine").exit_code == 0
    assert raysim("run", "mine").stderr == "mine: is a folder. Name a file in it, such as mine/federation.yaml.\n"
    assert raysim("run", tiny, "--out", "runs/base").exit_code == 0
    assert (
        raysim("run", "runs/base").stderr
        == "runs/base: is the folder of a run. `raysim resume runs/base` continues it.\n"
    )
    Path("quickstart").mkdir()
    assert load(find("quickstart")).name == "quickstart"


def test_a_refused_resume_leaves_the_run_as_it_was(tiny: Path) -> None:
    assert raysim("run", tiny, "--out", "run").exit_code == 0
    Path("run/result.json").unlink()  # as if it had been stopped
    assert Run(Path("run")).state == "stopped"
    refused = raysim("resume", "run", "seed=99")
    assert (refused.exit_code, Run(Path("run")).state) == (2, "stopped"), refused.output


def test_a_configuration_may_have_any_file_name(tiny: Path) -> None:
    Path("a first try.yaml").write_text(tiny.read_text().replace("name: tiny\n", ""))
    assert load(Path("a first try.yaml")).name == "a-first-try"
    assert [point.name for point in grid(Path("a first try.yaml"), [], [], Path("sweep"))] == ["a-first-try"]


def test_init_writes_what_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    done = raysim("init", "mine")
    assert done.exit_code == 0
    assert done.output.endswith("Now: cd mine && raysim run federation.yaml\n")
    monkeypatch.chdir("mine")
    ran = raysim("run", "federation.yaml", "--set", "rounds.total=1")
    assert ran.exit_code == 0, ran.output
    mentioned = re.findall(r"^raysim (\w+)", Path("README.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert {*mentioned} <= {command.name or command.callback.__name__ for command in app.registered_commands} | {"new"}
    text = Path("federation.yaml").read_text(encoding="utf-8")
    Path("README.md").unlink()
    again = raysim("init")
    assert again.exit_code == 2
    assert again.stderr.startswith("federation.yaml: already there")
    assert Path("federation.yaml").read_text(encoding="utf-8") == text
    assert not Path("README.md").exists()


def pytest_in(folder: Path, *arguments: str) -> str:
    """The output of a test run in a process of its own, which must be a success."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join((str(folder), str(ROOT)))}
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_a_new_method_passes_its_test(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name, role in (("sign_sgd", "client"), ("SignW", "weighting"), ("half", "server")):
        assert raysim("new", "method", name, "--role", role).exit_code == 0
    assert "there is a method fedprox already" in raysim("new", "method", "fedprox").stderr
    assert "class SignSgd(ClientMethod)" in Path("sign_sgd.py").read_text(encoding="utf-8")
    assert "class SignW(Weighting)" in Path("signw.py").read_text(encoding="utf-8")
    assert "6 passed" in pytest_in(tmp_path)
    again = raysim("new", "method", "half")
    assert again.exit_code == 2
    assert again.stderr.startswith("half.py, test_half.py: already there")
    assert raysim("new", "method", "2nd").exit_code == 2
    assert raysim("new", "method", "lambda").exit_code == 2


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("None", "no word of Python's"), ("none", "no word of Python's"), ("true", "no word of Python's"),
        ("on", "YAML reads on as true"), ("Null", "YAML reads null as none"),
        ("random", "hide the module random of Python"), ("dataclasses", "hide the module dataclasses of Python"),
        ("torch", "hide the module torch at "), ("pytest", "hide the module pytest at "), ("raysim", "hide the module raysim at "),
        ("config", "import another Config"), ("client_method", "import another ClientMethod"),
    ],
)  # fmt: skip
def test_a_name_with_which_its_files_cannot_work_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, why: str
) -> None:
    monkeypatch.chdir(tmp_path)
    refused = raysim("new", "method", name)
    assert refused.exit_code == 2
    assert why in refused.stderr.replace("\n", " ")
    assert not [*tmp_path.iterdir()]


def test_a_new_method_of_a_checkout_is_in_the_catalogue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("raysim", "configs", "pyproject.toml"):
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, tmp_path / name)
    monkeypatch.chdir(tmp_path)
    for name, role in (("aaa_first", "server"), ("MyOwn", "client")):
        done = raysim("new", "method", name, "--role", role)
        assert done.exit_code == 0, done.output
    catalogue = Path("raysim/methods/__init__.py").read_text(encoding="utf-8")
    imports = [line for line in catalogue.splitlines() if line.startswith("from raysim.methods.")]
    assert imports == sorted(imports, key=str.lower)
    assert catalogue.index('"myown": MyOwn,') < catalogue.index("WEIGHTINGS")
    assert catalogue.index('"aaa_first": AaaFirst,') > catalogue.index("STEPS")
    assert raysim("new", "method", "fedlws").stderr.startswith("raysim new method: there is a method fedlws already.")
    assert "4 passed" in pytest_in(tmp_path, "tests/methods")
