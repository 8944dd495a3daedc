"""`raysim table`, `export` and `schema`: what other programs read, read by them."""

from __future__ import annotations

import csv
import io
import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import torch
from conftest import tiny
from safetensors.torch import load_file
from typer.testing import CliRunner, Result

import raysim
from raysim.cli.app import app
from raysim.config import Config, to_dict
from raysim.config.build import _exponents, build, canonical
from raysim.config.json_schema import json_schema
from raysim.config.messages import Faults
from raysim.registry import REGISTRY
from raysim.report import ReportError
from raysim.store.documents import parse_yaml

ROOT = Path(__file__).parents[1]


def command(*args: object) -> Result:
    return CliRunner().invoke(app, [str(arg) for arg in args])


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> raysim.Run:
    return raysim.run(tiny(), out=tmp_path_factory.mktemp("export") / "run", progress=False)


# ---- table


def test_any_table_is_comma_separated_values(measured: Path) -> None:
    run = raysim.load(measured)
    listed = dict(line.split(None, 1) for line in command("table", measured).output.splitlines())
    assert [*listed] == [*run.tables]
    for name in run.tables:
        head, *rows = csv.reader(io.StringIO(command("table", measured, name, "--csv").output))
        assert head == run[name].column_names
        assert len(rows) == run[name].num_rows
        assert listed[name] == f"{len(rows):,} rows"
        for column, *read in zip(head, *rows, strict=True):
            values = run[name][column].to_pylist()
            number = pa.types.is_floating(run[name][column].type)
            assert [float(value) if number and value else value for value in read] == [
                "" if value is None else value if number else str(value) for value in values
            ]


def test_a_table_for_people(run: raysim.Run) -> None:
    head, *rows = command("table", run.folder, "rounds").output.splitlines()
    assert head.split()[:3] == ["round", "accuracy", "loss"]
    assert [row.split()[0] for row in rows] == ["0", "1", "2"]
    assert rows[0].split()[1] == "-"
    failed = command("table", run.folder, "round")
    assert failed.exit_code == 1
    assert "no table 'round'; there are rounds, clients" in failed.stderr


# ---- export


def test_plain_torch_opens_a_model(run: raysim.Run, tmp_path: Path) -> None:
    """In a process that has no raysim."""
    for to, name in (("torch", "model.pt"), ("safetensors", "deep/model.safetensors")):
        done = command("export", run.folder, "--to", to, "--out", tmp_path / name)
        assert done.output == f"{tmp_path / name}\n{tmp_path / name}.json\n", done.output
        known = json.loads((tmp_path / f"{name}.json").read_text())
        assert known == {
            "shape": [1, 8, 8],
            "classes": ["0", "1", "2", "3"],
            "scale": 255.0,
            "mean": [0.5],
            "std": [0.5],
        }
    code = f"""import sys, torch, safetensors.torch
first = torch.load({str(tmp_path / "model.pt")!r})
second = safetensors.torch.load_file({str(tmp_path / "deep/model.safetensors")!r})
assert first.keys() == second.keys() and all(first[name].equal(second[name]) for name in first)
print(sum(float(tensor.double().sum()) for tensor in first.values()), "raysim" in sys.modules)"""
    done = subprocess.run([sys.executable, "-I", "-c", code], capture_output=True, text=True, check=True)
    total = sum(float(tensor.double().sum()) for tensor in run.model().state_dict().values())
    assert done.stdout.split() == [str(total), "False"]
    failed = command("export", run.folder, "--to", "torch", "--best")
    assert failed.exit_code == 1
    assert "record.keep_best" in failed.stderr


def test_the_words_of_a_text_model_lie_beside_it(tmp_path: Path) -> None:
    """With them a program makes of a text what the model was given."""
    texts = ['Cats; "sleep" well!', "dogs bark", "cats purr"]
    split = pa.table({"text": texts * 4, "label": [0, 1, 0] * 4})
    source = raysim.as_dataset({"train": split, "test": split})
    run = raysim.run(
        tiny(), data=source, data__partition={"iid_equal": {"clients": 2}}, model="fasttext", out=tmp_path / "run",
        progress=False,
    )  # fmt: skip
    assert command("export", run.folder, "--to", "torch", "--out", tmp_path / "model.pt").exit_code == 0
    known = json.loads((tmp_path / "model.pt.json").read_text())
    ids = {word: i for i, word in enumerate(known["words"])}
    words = [["<cls>", "cats", "sleep", "well", "!"], ["<cls>", "dogs", "bark"], ["<cls>", "cats", "purr"]]
    (length,) = known["shape"]
    encoded = {tuple(ids[word] for word in [*row, *["<pad>"] * (length - len(row))]) for row in words}
    assert {tuple(row) for row in source.x[:].tolist()} == encoded


def test_a_model_whose_class_or_manifest_is_not_here(tmp_path: Path) -> None:
    """Its tensors are those of the model that the run ended with."""
    run = raysim.run(
        tiny(),
        model=lambda: torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 4)),
        out=tmp_path / "run",
        progress=False,
    )
    expected = run.model().state_dict()
    REGISTRY.table("model").pop(run.config["model"]["name"])
    for lost in (False, True):
        if lost:
            (run.folder / "manifest.json").unlink()
        for to, load in (("torch", torch.load), ("safetensors", load_file)):
            done = command("export", run.folder, "--to", to, "--out", tmp_path / to)
            assert done.exit_code == 0, done.stderr
            found = load(tmp_path / to)
            assert found.keys() == expected.keys() and all(found[name].equal(expected[name]) for name in expected)
    with pytest.raises(ReportError, match=r"manifest\.json is missing or damaged: .* Put it back"):
        raysim.load(run.folder).model()


@pytest.mark.skipif(
    not (find_spec("onnxruntime") and find_spec("onnxscript")), reason="needs onnxruntime and raysim[onnx]"
)
@pytest.mark.parametrize("text", [False, True])
def test_onnxruntime_opens_a_model(text: bool, run: raysim.Run, tmp_path: Path) -> None:
    """For a batch of any size."""
    import onnxruntime

    if text:
        data = {"name": "characters", "partition": "natural"}
        run = raysim.run(
            tiny(data=data, model={"name": "char_gru"}, rounds={"total": 1}), out=tmp_path / "run", progress=False
        )
    assert command("export", run.folder, "--to", "onnx", "--out", tmp_path / "model.onnx").exit_code == 0
    session = onnxruntime.InferenceSession(tmp_path / "model.onnx")
    inputs, model = run.manifest["inputs"], run.model()
    for batch in (1, 3):
        shape = (batch, *inputs["shape"])
        x = torch.randint(inputs["vocab"], shape) if text else torch.randn(shape)
        [outputs] = session.run(["output"], {"input": x.numpy()})
        torch.testing.assert_close(torch.from_numpy(outputs), model(x).detach(), rtol=1e-4, atol=1e-5)


@pytest.mark.skipif(bool(find_spec("onnx")), reason="onnx is installed")
def test_a_missing_package_is_named(run: raysim.Run) -> None:
    failed = command("export", run.folder, "--to", "onnx")
    assert failed.exit_code == 1
    assert "pip install 'raysim[onnx]'" in failed.stderr


# ---- schema


def test_the_schema_takes_what_raysim_reads_and_refuses_what_it_does_not(
    tmp_path: Path, subtests: pytest.Subtests
) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    assert command("schema", "--out", tmp_path / "schema.json").output == f"{tmp_path / 'schema.json'}\n"
    schema = json.loads((tmp_path / "schema.json").read_text())
    assert schema == json_schema()
    jsonschema.Draft202012Validator.check_schema(schema)
    valid = jsonschema.Draft202012Validator(schema)
    shipped = {str(path.relative_to(ROOT)): parse_yaml(path.read_text()) for path in (ROOT / "configs").rglob("*.yaml")}
    read = {name: raw for name, raw in shipped.items() if "cluster/" not in name}
    read |= {"the whole": to_dict(tiny(client=[{"fedprox": {"mu": 0.1}}], server=["fedlws"]))}
    read |= {"short": {"client": "fedprox", "server": [{"fedlws": None}], "weighting": [{"feddisco": {"a": 0.1}}]}}
    forms = [
        {"data": "digits"}, {"data": {"name": "digits", "partition": {"iid_equal": 4}, "augment": "horizontal_flip"}},
        {"data": {"name": {"synthetic": {"samples": 9}}, "partition": "natural"}}, {"model": "mlp"}, {"model": {"name": "mlp"}},
        {"clock": {"speed": 75}}, {"clock": {"up": {"lognormal": {"median": 1.5}}}}, {"clock": {"speed": {"constant": 3}}},
        {"server": ["fedlws", {"fedlws": 0.1}]}, {"record": {"sinks": "tensorboard"}}, {"engine": {"ray": None}},
        {"local": {"lr_schedule": "cosine"}}, {"rounds": {"selection": "oort"}},
    ]  # fmt: skip
    for raw in forms:  # which the loader takes
        faults = Faults("")
        build(Config, canonical(Config, raw), "", faults)
        with subtests.test(takes=raw):
            assert [line for line in faults.lines if "is missing" not in line] == []
    read |= {str(raw): raw for raw in forms}
    for name, raw in read.items():
        with subtests.test(reads=name):
            assert [f"{error.json_path}: {error.message}" for error in valid.iter_errors(_exponents(raw))] == []
    wrong: list[dict[str, Any]] = [
        {"rounds": {"totl": 3}}, {"rounds": {"total": "3"}}, {"rounds": {"total": 0}}, {"seeds": 1}, {"client": ["fedprx"]},
        {"local": {"optimizer": "sgdd"}}, {"client": [{"pfedme": {"beta": -1.0}}]}, {"client": [{"fedprox": {}, "moon": {}}]},
        {"data": {"name": "digit"}}, {"engine": {"ray": {"fan_in": 1}}}, {"name": "a b"},
        {"clock": {"speed": True}}, {"clock": {"speed": "75"}}, {"clock": {"speed": -1}}, {"model": 3}, {"data": "digit"},
        {"rounds": "3"},
    ]  # fmt: skip
    for raw in wrong:
        with subtests.test(refuses=raw):
            assert not valid.is_valid(raw)


def test_the_schema_says_what_a_setting_does() -> None:
    properties = json_schema()["properties"]
    assert properties["rounds"]["properties"]["evaluate_every"]["description"].startswith("Rounds between evaluations")
    assert properties["local"]["properties"]["momentum"]["default"] == 0.0
    assert properties["engine"]["default"] == {"ray": to_dict(tiny(engine="ray"))["engine"]["ray"]}
