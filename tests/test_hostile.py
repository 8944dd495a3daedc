"""Hostile and damaged input: a sentence, never a traceback, never a write outside. tests/fuzz has the random cases."""

from __future__ import annotations

import base64
import hashlib
import io
import json
import math
import os
import re
import shutil
import socket
import string
import subprocess
import sys
import unicodedata
import zlib
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from browser import CHROMIUM, needs_chromium
from clocks import calls
from conftest import contents, simulate, tiny
from PIL import Image
from typer.testing import CliRunner

import raysim
from raysim.api.lines import aligned, among_clients
from raysim.cli.app import app
from raysim.config import ConfigError, load, to_dict, to_yaml
from raysim.data import DataError
from raysim.data.sources import Images, Parquet
from raysim.federation import Federation
from raysim.federation.checkpoint import CheckpointError, Checkpoints
from raysim.federation.code import saved_config
from raysim.methods import STEPS
from raysim.paths import UnsafeName, below
from raysim.printable import printable
from raysim.registry import REGISTRY
from raysim.report import NoData, ReportError
from raysim.report.figures import FIGURES, draw
from raysim.report.groups import compare
from raysim.report.page import write
from raysim.report.summary import summarise
from raysim.store.atomic import write_json
from raysim.store.documents import NODES, DamagedFile, parse_yaml, read_label, read_result
from raysim.store.tables import Recorder
from raysim.sweep.grid import grid

# ------------------------------------------------------------------------------------------------ names become paths


@pytest.mark.parametrize("name", ["..", ".", "", "/etc", "a/../../b", "a//b", "a\0b", "a\nb", "x" * 256, "é" * 128])
def test_no_name_leads_out_of_its_folder(name: str, tmp_path: Path) -> None:
    with pytest.raises(UnsafeName):
        below(tmp_path, name)
    assert below(tmp_path, "a/b.c") == tmp_path / "a" / "b.c"


def test_a_sweep_writes_nowhere_else(tmp_path: Path) -> None:
    """A method of a sweep called `..` was run into the folder above, whose tables it cleared."""
    raw = to_dict(tiny()) | {"methods": {"..": {}, "fine": {}}}
    del raw["name"]
    base = tmp_path / "base.yaml"
    base.write_text(yaml.safe_dump(raw))
    with pytest.raises(ConfigError, match=r"the name of a run becomes that of its folder: '\.\.' leads out of"):
        grid(base, [], [], tmp_path / "out")
    done = CliRunner().invoke(app, ["sweep", str(base), "--out", str(tmp_path / "out")])
    assert done.exit_code == 2
    assert [*tmp_path.iterdir()] == [base]


@pytest.mark.parametrize("file", ["/etc/passwd", "../../outside", "round-000001/../../x"])
def test_a_checkpoint_names_no_file_outside(file: str, tmp_path: Path) -> None:
    entry = {"file": file, "sha256": "0" * 64}
    manifest = {"round": 1, "server": entry, "clients": {}, "info": {}}
    (tmp_path / "checkpoints").mkdir()
    write_json(tmp_path / "checkpoints" / "round-000001.json", manifest)
    with pytest.raises(CheckpointError, match="leads out of"):  # not: is missing, or not as it was written
        Checkpoints(tmp_path).load(1)


def test_a_checkpoint_that_lacks_a_client_is_damaged(tmp_path: Path) -> None:
    """A manifest that is sound JSON, but has lost a state, would resume to other bits."""
    import torch

    Checkpoints(tmp_path).save(1, {"value": torch.ones(2)}, {"wall": 0}, [(3, {"x": np.ones(1)})])
    path = tmp_path / "checkpoints" / "round-000001.json"
    assert Checkpoints(tmp_path).load(1).info == {"wall": 0}
    manifest = json.loads(path.read_text())
    manifest["segments"] = []
    write_json(path, manifest)
    with pytest.raises(CheckpointError, match=r"round-000001\.json is not as it was written"):
        Checkpoints(tmp_path).load(1)
    del manifest["sha256"], manifest["info"]["wall"]  # as an older raysim wrote it, and damaged
    write_json(path, manifest)
    with pytest.raises(CheckpointError, match=r"round-000001\.json is damaged: info\.wall is missing"):
        Checkpoints(tmp_path).load(1).info["wall"]


# ---------------------------------------------------------------------------------------------------------------- YAML

BOMB = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{new}: &{new} [{', '.join([f'*{old}'] * 9)}]\n" for old, new in zip("abcdefgh", "bcdefghi", strict=True)
)


def parsed(text: str) -> None:
    with suppress(yaml.YAMLError):
        parse_yaml(text)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("seed: " + "9" * 5000, "is not a whole number"),
        ("seed: !!int abc", "'abc' is not a whole number"),
        ("seed: !!int ''", "'' is not a whole number"),
        ("seed: !!bool abc", "'abc' is not true or false"),
        ("seed: !!float x", "'x' is not a number"),
        ("seed: &a [*a]", "stands within what it names"),
        (BOMB, f"more than {NODES:,} values"),
        ("? [a, b]\n: c", "a key must be a word or a number"),
        ("[" * 300, "more than 64 levels"),
        ("seed: " + "{a: " * 300, "more than 64 levels"),
        ("[" * 3000, "(more than 64 levels|exceeded maximum nesting depth)"),  # the latter from PyYAML 6.0.4 on
        ("seed: !!python/object/apply:os.system [true]", "the tag .* is not allowed"),
        ("seed: !!binary YQ==", "the tag .* is not allowed"),
        ('name: "\\ud800"', "not valid YAML"),
    ],
)
def test_yaml_is_bounded_before_it_is_made(text: str, sentence: str, tmp_path: Path) -> None:
    path = tmp_path / "case.yaml"
    path.write_text(text)
    assert calls(lambda: parsed(text)) < 1000 + 20 * len(text)  # nothing is made of what a text only names
    with pytest.raises(ConfigError, match=f"case.yaml: .*{sentence}"):
        load(path)
    with pytest.raises(ConfigError, match="is not valid YAML"):
        load("configs/quickstart.yaml", [f"seed={text}"])
    (tmp_path / "config.yaml").write_text(text)
    with pytest.raises(DamagedFile, match=sentence):
        raysim.load(tmp_path)


def test_yaml_keeps_what_configurations_use() -> None:
    text = "a: &a {x: 1, y: 2}\nb: {<<: *a, y: 3}\nc: [1.5, ~, true, 2020-01-01, '1', =, 0x1f, !!str 5]"
    found = parse_yaml(text)
    assert found["b"] == {"x": 1, "y": 3}
    assert found["c"] == [1.5, None, True, "2020-01-01", "1", "=", 31, "5"]


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("a." * 3000 + "b=1", "a path has at most 64 parts"),
        ("client." + "9" * 5000 + "=1", "a path has at most 64 parts of 255 characters"),
        ("seed=" + "[" * 3000, "is not valid YAML"),
    ],
)
def test_overrides_are_bounded(text: str, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        load("configs/quickstart.yaml", [text])


def test_a_pipe_is_no_configuration(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.yaml")
    with pytest.raises(ConfigError, match="is not a regular file"):
        load(tmp_path / "pipe.yaml")


def test_a_corrupt_initial_model(tmp_path: Path) -> None:
    (tmp_path / "init.safetensors").write_bytes(b"\xff" * 64)
    with pytest.raises(ConfigError, match=r"model\.init: .*init\.safetensors cannot be read as safetensors"):
        tiny(model={"name": "tiny_bn_cnn", "init": str(tmp_path / "init.safetensors")})


# ---------------------------------------------------------------------------------------------------------------- data


def png(size: int = 4) -> bytes:
    stream = io.BytesIO()
    Image.fromarray(np.zeros((size, size), np.uint8)).save(stream, "PNG")
    return stream.getvalue()


def bomb() -> bytes:
    """A PNG that says that it is 6,000 by 6,000, and fills that with a few kilobytes."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        return len(content).to_bytes(4, "big") + kind + content + zlib.crc32(kind + content).to_bytes(4, "big")

    side = 6_000
    header = side.to_bytes(4, "big") * 2 + b"\x08\x00\x00\x00\x00"
    body = zlib.compress(bytes(side + 1) * 100)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", body) + chunk(b"IEND", b"")


@pytest.fixture
def images(tmp_path: Path) -> Path:
    for name in ("a", "b"):
        (tmp_path / "set" / "train" / name).mkdir(parents=True)
        (tmp_path / "set" / "train" / name / "0.png").write_bytes(png())
    (tmp_path / "outside.png").write_bytes(png())
    return tmp_path / "set"


def bound(path: str | Path) -> None:
    where = os.getcwd()
    os.chdir(Path(path).parent)  # the name of a socket has at most 107 bytes
    try:
        socket.socket(socket.AF_UNIX).bind(Path(path).name)
    finally:
        os.chdir(where)


@pytest.mark.parametrize(
    ("harm", "sentence"),
    [
        (lambda folder: os.mkfifo(folder / "train/a/1.png"), "is not a regular file"),
        (lambda folder: bound(str(folder / "train/a/1.png")), "is not a regular file"),
        (lambda folder: (folder / "train/a/1.png").symlink_to("/dev/zero"), "is a symbolic link"),
        (lambda folder: (folder / "train/a/1.png").symlink_to(folder.parent / "outside.png"), "is a symbolic link"),
        (lambda folder: (folder / "train/a/sub").symlink_to(folder.parent), "is a symbolic link"),
        (lambda folder: (folder / "train/c").symlink_to(folder / "train/a"), "is a symbolic link"),
        (lambda folder: (folder / "train/a/1.png").write_bytes(bomb()), "6000×6000 pixels, more than"),
    ],
)
def test_an_image_folder_leads_nowhere(harm: Callable[[Path], object], sentence: str, images: Path) -> None:
    assert Images(str(images)).load(None).train_rows == 2
    harm(images)
    with pytest.raises(DataError, match=sentence):
        Images(str(images)).load(None)


def test_links_are_followed_where_that_is_asked_for(images: Path) -> None:
    (images / "train" / "a" / "1.png").symlink_to(images.parent / "outside.png")
    (images / "train" / "a" / "round").symlink_to(images / "train" / "a")  # a link back ends
    assert Images(str(images), follow_links=True).load(None).train_rows == 3


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        (b"../../../outside.png\ta", "row 0: .* leads out of"),
        (b"/etc/passwd\ta", "row 0: .* leads out of"),
        (b"\xff.png\ta", "not a text in UTF-8"),
        (b"link.png\ta", "is a symbolic link"),
    ],
)
def test_annotations_lead_nowhere(line: bytes, sentence: str, images: Path) -> None:
    (images / "val" / "images").mkdir(parents=True)
    (images / "val" / "images" / "link.png").symlink_to(images.parent / "outside.png")
    (images / "val" / "val_annotations.txt").write_bytes(line)
    with pytest.raises(DataError, match=sentence):
        Images(str(images)).load(None)


@pytest.mark.parametrize(
    "metadata", ["{", "[]", '{"info": 5}', '{"info": {"features": {"label": {"names": [1]}}}}', "[" * 9999]
)
def test_parquet_with_malformed_metadata(metadata: str, tmp_path: Path) -> None:
    table = pa.table({"text": ["a", "b"], "label": [0, 1]}).replace_schema_metadata({"huggingface": metadata})
    pq.write_table(table, tmp_path / "train.parquet")
    with pytest.raises(DataError, match="its metadata 'huggingface'"):
        Parquet(".").load(tmp_path)


def test_parquet_with_a_column_twice_a_bomb_or_a_pipe(tmp_path: Path) -> None:
    twice = pa.Table.from_arrays([pa.array(["a"]), pa.array([0]), pa.array([0])], names=["text", "label", "label"])
    pq.write_table(twice, tmp_path / "train.parquet")
    with pytest.raises(DataError, match="has the column 'label' twice"):
        Parquet(".").load(tmp_path)
    encoded = pa.table({"image": [{"bytes": bomb(), "path": ""}], "label": [0]})
    pq.write_table(encoded, tmp_path / "train.parquet")
    with pytest.raises(DataError, match="6000×6000 pixels"):
        Parquet(".").load(tmp_path)
    (tmp_path / "train.parquet").unlink()
    os.mkfifo(tmp_path / "train.parquet")
    with pytest.raises(DataError, match="is not a regular file"):
        Parquet(".").load(tmp_path)


# ------------------------------------------------------------------------------------------------- runs and reports


def test_a_folder_a_pipe_or_a_socket_in_place_of_a_run_s_file(
    subtests: pytest.Subtests, ran: Callable[..., Federation], tmp_path: Path
) -> None:
    """It is named; it is neither waited for nor taken for a file that is not there."""
    readers: dict[str, Callable[[Path], object]] = {
        "config.yaml": saved_config, "result.json": read_result, "label.json": read_label,
        "manifest.json": lambda folder: raysim.load(folder).manifest,
        "model.safetensors": lambda folder: raysim.load(folder).model(),
    }  # fmt: skip
    for put in (Path.mkdir, os.mkfifo, bound):
        for name, read in readers.items():
            with subtests.test(f"{put.__name__} {name}"):
                folder = shutil.copytree(ran().folder, tmp_path / f"{put.__name__} {name}")
                (folder / name).unlink(missing_ok=True)
                put(folder / name)
                with pytest.raises((ValueError, ConfigError), match=f"{name}: is not a regular file"):
                    read(folder)


def test_a_run_that_was_killed_in_its_first_round_has_a_report(tmp_path: Path) -> None:
    """`timeline` is written before `rounds`, so a kill or a look in between finds the one without the other."""
    (tmp_path / "config.yaml").write_text(to_yaml(tiny()))
    with Recorder(tmp_path) as recorder:
        recorder.add("timeline", round=0, host=0, node="n", phase="train", start=0.0, stop=1.0)
        recorder.add("layers", round=0, layer=0, name="w", parameters=3, norm=1.0, update_norm=1.0)
    run = raysim.load(tmp_path)
    for name in FIGURES:
        with pytest.raises((NoData, ReportError)):
            draw(name, [run])
    summary = write([run], tmp_path / "report.html")
    assert summary.sentence == (
        "No model has been evaluated yet. The run was stopped before its end: these are not the final numbers."
    )


def test_a_headline_says_why_it_is_not_the_final_one(tmp_path: Path) -> None:
    simulate(tiny(rounds={"total": 2, "evaluate_every": 1}), tmp_path / "whole")
    shutil.copytree(tmp_path / "whole", tmp_path / "part")
    (tmp_path / "part" / "result.json").unlink()
    whole, part = raysim.load(tmp_path / "whole"), raysim.load(tmp_path / "part")
    assert "final numbers" not in summarise(compare([whole])).sentence
    assert summarise(compare([whole, part])).sentence.endswith(
        "Of 2 runs, 1 stopped before the end: these are not the final numbers."
    )


def test_an_area_that_is_not_defined_says_why(tmp_path: Path) -> None:
    data = {"name": {"synthetic": {"samples": 80, "shape": [1, 8, 8], "classes": 1}}, "partition": {"iid_equal": 8}}
    simulate(tiny(data=data | {"client_test_frac": 0.25}, evaluate={"personal": "after_init"}), tmp_path)
    result = json.loads((tmp_path / "result.json").read_text(), parse_constant=pytest.fail)  # JSON knows no NaN
    assert result["personal"]["auc"] is None
    assert "AUC - (it compares" in among_clients(result["personal"])
    personal = {"macro": 1.0, "std": 0.0, "worst10": 1.0, "auc": math.nan}
    assert among_clients(personal).endswith(
        "AUC - (it compares the scores of right and wrong classes, and there is one class)"
    )
    assert among_clients(personal | {"auc": 0.5}).endswith("AUC 0.5000")


@pytest.mark.parametrize("name", ["manifest.json", "result.json"])
def test_a_damaged_file_is_named_with_its_key(name: str, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    simulate(tiny(rounds={"total": 1}), folder)
    found = json.loads((folder / name).read_text())
    key = "versions" if name == "manifest.json" else "rounds"
    write_json(folder / name, found | {key: ["a"]})
    for command in (["report", str(folder), "--out", str(tmp_path / "r.html")], ["resume", str(folder)]):
        done = CliRunner().invoke(app, command)
        assert done.exit_code in (1, 2), command
        assert isinstance(done.exception, SystemExit)
        assert f"{name} is damaged: {key}: " in done.stderr, command


# What a browser would run, if it were not escaped: with quotes, without, and out of a script.
HARM = "document.documentElement.className='harmed'"
EVIL = f'<img src=x onerror="{HARM}"></script></style><script>{HARM}</script>$\\frac$'


@pytest.fixture(scope="module")
def evil_page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The report on a run whose classes, method, and folder have such names."""
    root = tmp_path_factory.mktemp("evil")
    names = [f"{EVIL}{i}" for i in range(4)]
    features = {"info": {"features": {"label": {"names": names}}}}
    rng = np.random.default_rng(0)

    def image() -> dict[str, object]:
        stream = io.BytesIO()
        Image.fromarray(rng.integers(0, 255, (8, 8), np.uint8)).save(stream, "PNG")
        return {"bytes": stream.getvalue(), "path": ""}

    table = pa.table({"image": [image() for _ in range(80)], "label": [i % 4 for i in range(80)]})
    table = table.replace_schema_metadata({"huggingface": json.dumps(features)})
    for split in ("train", "test"):
        (root / "data").mkdir(exist_ok=True)
        pq.write_table(table, root / "data" / f"{split}.parquet")
    step = STEPS["fedlws"]
    REGISTRY.register("server", EVIL, type("Evil", (step,), {"__module__": __name__}))
    try:
        folder = root / EVIL.replace("/", "∕")
        config = tiny(
            data={"name": {"parquet": {"path": str(root / "data")}}, "partition": {"iid_equal": {"clients": 4}}},
            rounds={"total": 2, "participation": 1.0, "evaluate_every": 1}, server=[EVIL],
        )  # fmt: skip
        simulate(config, folder)
        simulate(tiny(**{**to_dict(config), "seed": 4, "server": []}), root / "plain")
    finally:
        del STEPS[EVIL]
    page = root / "report.html"
    write([raysim.load(folder), raysim.load(root / "plain")], page)
    return page


def test_a_page_escapes_what_it_shows(evil_page: Path) -> None:
    text = evil_page.read_text(encoding="utf-8")
    assert "&lt;img src=x onerror=" in text
    assert "<img" not in text
    assert text.count("<script") == 2  # the numbers of charts, and the page's own
    [policy] = re.findall(r'Content-Security-Policy" content="([^"]*)"', text)
    assert "default-src 'none'" in policy
    script = text.rpartition("<script>")[2].partition("</script>")[0]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'; " in policy
    assert HARM not in script
    assert text.index("Content-Security-Policy") < text.index("<title>")


@needs_chromium
def test_a_browser_runs_nothing_of_it(evil_page: Path, tmp_path: Path) -> None:
    """Also without the page's policy; and a name that is not escaped would run, unless the policy forbids it."""

    def harmed(text: str) -> bool:
        (tmp_path / "page.html").write_text(text, encoding="utf-8")
        command = [str(CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking"]
        command += [f"--user-data-dir={tmp_path / 'profile'}", "--dump-dom", (tmp_path / "page.html").as_uri()]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        assert "raysim plot" in done.stdout
        return 'class="harmed"' in done.stdout[:300]

    page = evil_page.read_text(encoding="utf-8")
    open_page = re.sub(r"<meta http-equiv=[^>]*>", "", page)
    assert open_page != page
    assert not harmed(page)
    assert not harmed(open_page)
    assert harmed(open_page.replace("<body>", f"<body>{EVIL}"))
    assert not harmed(page.replace("<body>", f"<body>{EVIL}"))


def test_nothing_of_the_environment_is_written_down(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    secret = "hunter2-7f3a9c"
    names = ("AWS_SECRET_ACCESS_KEY", "HF_TOKEN", "HTTP_PROXY", "RAYSIM_DATA", "RAYSIM_TOKEN", "RAY_AUTH_TOKEN", "USER")
    for name in names:
        monkeypatch.setenv(name, secret)
    (tmp_path / "c.yaml").write_text(to_yaml(tiny(rounds={"total": 2}, record={"traces": "rounds"})))
    for command in (
        ["run", str(tmp_path / "c.yaml"), "--out", str(tmp_path / "run")],
        ["resume", str(tmp_path / "run"), "--set", "rounds.total=3"],
        ["sweep", str(tmp_path / "c.yaml"), "--out", str(tmp_path / "sweep"), "--seeds", "1,2"],
        ["report", str(tmp_path / "run"), "--out", str(tmp_path / "report.html")],
        ["measure", "histogram", str(tmp_path / "run")],
    ):
        done = CliRunner().invoke(app, command)
        assert done.exit_code == 0, done.output
    written = dict(contents(tmp_path))
    assert len(written) > 40
    assert not [path for path, content in written.items() if secret.encode() in content]


# ------------------------------------------------------------------------------------------------------------ terminals

STEERING = "\x1b[2J\x1b]0;gone\x07 a\rb\nraysim: all is well\x7f\x85\x9b31m\u061c\u200e\u202ed\u2066e\u2028f"
SHOWN = r"\x1b[2J\x1b]0;gone\x07 a\rb\nraysim: all is well\x7f\x85\x9b31m\u061c\u200e\u202ed\u2066e\u2028f"


def steers(text: str) -> set[str]:
    """The characters of `text` that a terminal would obey or that turn a line around, but for the ends of lines."""
    return {c for c in text if (c != "\n" and (unicodedata.category(c) in ("Cc", "Zl", "Zp", "Cs") or c in "\u061c\u200e\u200f"))
            or unicodedata.bidirectional(c) in ("LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI")}  # fmt: skip


def test_every_character_that_steers_is_written_as_an_escape() -> None:
    everything = "".join(map(chr, range(sys.maxunicode + 1)))
    assert steers(everything) > set(STEERING) - set("\n") - set(string.printable)
    made = printable(everything)
    assert not steers(made) and "\n" not in made
    for c in steers(everything) | {"\n"}:
        assert printable(f"a{c}b") == f"a{ascii(c)[1:-1]}b"
    for kept in (" ", "ü", "日本", "\N{ZERO WIDTH JOINER}", "😀", "\\"):
        assert printable(kept) == kept
    assert printable("a\nb\r", lines=True) == "a\nb\\r"
    assert aligned([(STEERING, "x"), ("y", "z")])[0] == f"{SHOWN}  x"


@pytest.fixture
def steering(tmp_path: Path) -> Path:
    """Two runs that steer wherever somebody can write: the folder, tags, note, table, result, the mistakes of others."""
    for name in ("one", STEERING):
        simulate(tiny(rounds={"total": 1}), tmp_path / name)
        run = raysim.load(tmp_path / name)
        run.label(add=[f"t{STEERING}"], note=f"first{STEERING}\nsecond")
        write_json(run.folder / "result.json", {**run.result, "ended": f"e{STEERING}"})
        with Recorder(run.folder, 1) as recorder:
            recorder.add("events", round=0, of=["run"], client=[None], node=[None], message=[f"m{STEERING}"])
    return tmp_path


def test_no_command_prints_what_steers_a_terminal(steering: Path, tmp_path: Path) -> None:
    evil = steering / STEERING

    def ask(*words: object, code: int = 0) -> str:
        done = CliRunner().invoke(app, [*map(str, words)], input="n\n")
        assert done.exit_code == code, done.output
        assert not steers(done.output), (words, done.output)
        return done.output

    listed = ask("runs", steering)
    assert f"first{SHOWN}".partition(r"\n")[0] in listed and f"#t{SHOWN}" in listed
    assert len(listed.splitlines()) == 3
    assert ask("tag", evil) == f"t{SHOWN}\n"
    assert ask("note", evil).startswith("first") and "\nsecond\n" in ask("note", evil)
    assert SHOWN in ask("compare", steering)
    assert f"m{SHOWN}" in ask("table", evil, "events")
    assert f"e{SHOWN}" in ask("resume", evil)
    assert SHOWN in ask("rm", evil)
    for form in ("markdown", "latex", "html"):
        ask("report", evil, "--format", form)
    ask("report", steering, "--out", tmp_path / "page.html")
    exact = CliRunner().invoke(app, ["table", str(evil), "events", "--csv"]).stdout
    assert f"m{STEERING}" in exact

    (evil / "manifest.json").write_text("{")
    (tmp_path / "set" / "train" / "a").mkdir(parents=True)
    (tmp_path / "set" / "train" / "a" / f"{STEERING}.png").write_bytes(b"none")
    base = tmp_path / "base.yaml"
    base.write_text(yaml.safe_dump({**to_dict(tiny()), "data": {"name": {"images": str(tmp_path / "set")},
                    "partition": {"iid_equal": {"clients": 2}}}}))  # fmt: skip
    for words, code in ((("resume", evil), 2), (("run", base, "--out", tmp_path / "out"), 1)):
        refused = ask(*words, code=code)
        name = SHOWN.replace(r"b\n", "b\n  ")  # no line of a name passes for a sentence
        assert name in refused, refused
