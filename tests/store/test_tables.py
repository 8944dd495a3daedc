"""Tables that can be read while they grow, and lose nothing in a crash."""

import math
import os
import shutil
from collections.abc import Callable
from itertools import combinations, pairwise
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch
from clocks import ManualClock

from raysim.store import parts
from raysim.store.parts import MERGE, DamagedTable
from raysim.store.tables import FLUSH_SECONDS, PHASES, TABLES, Recorder, read, schema, write_table


def ran(recorder: Recorder, t: int, clients: int = 3) -> None:
    """A round's rows, recognisable by their round."""
    recorder.add("clients", round=t, client=range(clients), samples=np.full(clients, t), status="ok")
    recorder.add("notes", round=t, method="m", name="tau", layer=["a", "b"], value=np.array([t, -t], np.float32))
    recorder.add(
        "rounds", round=t, clients_ok=clients, clients_failed=0, bytes_up=1, bytes_down=2, seconds=0.5, wall=float(t)
    )


def rounds_of(folder: Path, table: str) -> list[int]:
    return read(folder, table)["round"].to_pylist()


def test_rows_come_back(tmp_path):
    run = tmp_path / "alpha=0.1"  # a name that Arrow's data sets would turn into a column
    weights = np.array([0.25, np.nan, 0.5], np.float32)
    with Recorder(run) as recorder:
        recorder.add("clients", round=0, client=[3, 5, 8], weight=weights, steps=[4, None, 6], status="ok", node="n0")
        weights[:] = 7  # the caller may use its buffer again
        recorder.add("clients", round=1, client=torch.tensor([9]), status=np.array(["lost"]))
        recorder.add("clients", round=1, client=[], status="ok")
        assert read(run, "clients").num_rows == 0
    rows = read(run, "clients")
    assert rows.schema.equals(TABLES["clients"], check_metadata=True)
    assert rows["client"].to_pylist() == [3, 5, 8, 9]
    assert rows["status"].to_pylist() == ["ok", "ok", "ok", "lost"]
    assert rows["steps"].to_pylist() == [4, None, 6, None]
    weight = rows["weight"].to_pylist()
    assert weight[0] == 0.25
    assert math.isnan(weight[1])
    assert weight[3] is None


def test_layers_take_what_methods_report(tmp_path):
    layer = {"layer": [0, 1], "name": ["conv", "head"], "parameters": [10, 5], "norm": 1.0, "update_norm": 0.1}
    recorder = Recorder(tmp_path)
    recorder.add("layers", round=0, **layer)
    recorder.flush()
    recorder.add("layers", round=1, **layer, **{"fedlws.gamma": torch.tensor([0.9, 0.8], dtype=torch.float64)})
    recorder.add("layers", round=2, **layer, uploaders=[3, 4])
    recorder.flush()
    for _ in ("parts", "merged"):
        rows = read(tmp_path, "layers")
        assert rows["fedlws.gamma"].to_pylist() == [None, None, 0.9, 0.8, None, None]
        assert rows["uploaders"].to_pylist() == [None] * 4 + [3.0, 4.0]
        assert rows.schema.field("layer").metadata[b"unit"] == b"index"
        recorder.close()


def test_rounds_take_metrics_of_the_task(tmp_path):
    row = {"clients_ok": 3, "clients_failed": 0, "bytes_up": 1, "bytes_down": 2, "seconds": 0.5, "wall": 1.0}
    with Recorder(tmp_path) as recorder:
        recorder.add("rounds", round=0, **row)
        recorder.add("rounds", round=1, **row, **{"metric.mae": 0.25})
    rows = read(tmp_path, "rounds")
    assert rows["metric.mae"].to_pylist() == [None, 0.25]
    assert rows.schema.field("metric.mae").type == pa.float64()


def test_a_table_needs_its_schema_alone(tmp_path, monkeypatch):
    mine = schema(("round", "int", "round", "global round"), ("heat", "float?", "K", "temperature of the machine"))
    monkeypatch.setitem(TABLES, "mine", mine)
    with Recorder(tmp_path) as recorder:
        recorder.add("mine", round=[0, 1], heat=[300.5, None])
    assert read(tmp_path, "mine").equals(pa.table([[0, 1], [300.5, None]], schema=mine))
    Recorder(tmp_path, 1)
    assert rounds_of(tmp_path, "mine") == [0]


def test_every_phase_has_a_column():
    described = {field.name: field.metadata[b"description"].decode() for field in TABLES["rounds"]}
    named = {name.removeprefix("seconds_"): about for name, about in described.items() if name.startswith("seconds_")}
    assert list(named.items()) == list(PHASES.items())


@pytest.mark.parametrize(
    ("table", "columns", "says"),
    [
        ("round", {}, "unknown table 'round'"),
        ("clients", {"round": 0, "client": 1}, "missing status"),
        ("clients", {"round": 0, "client": 1, "status": "ok", "lost": 1.0}, "no column lost"),
        ("rounds", dict.fromkeys(TABLES["rounds"].names, 0) | {"mae": 0.5}, "no column mae"),
        ("clients", {"round": 0, "client": [1, 2], "status": ["ok"]}, "unequal length"),
        ("clients", {"round": 0, "client": np.ones((2, 2)), "status": "ok"}, "one dimension"),
        ("clients", {"round": 0, "client": 1, "status": "ok", "steps": 2.5}, "column steps"),
        ("clients", {"round": 0, "client": None, "status": "ok"}, "column client"),
        ("clients", {"round": 0, "client": 1, "status": "ok", "weight": "much"}, "column weight"),
        ("clients", {"round": -1, "client": 1, "status": "ok"}, "count from 0"),
    ],
)
def test_wrong_rows_are_named(tmp_path, table, columns, says):
    def record() -> None:
        recorder = Recorder(tmp_path)
        recorder.add(table, **columns)
        recorder.flush()

    with pytest.raises(ValueError, match=says):
        record()


def test_many_rows(tmp_path):
    with Recorder(tmp_path) as recorder:
        for t in range(1000):
            recorder.add("personal", round=t, client=np.arange(100), correct=np.arange(100) * t, samples=200)
    rows = read(tmp_path, "personal")
    assert rows["correct"].to_numpy().reshape(1000, 100).tolist() == np.outer(range(1000), range(100)).tolist()
    assert rows["loss"].null_count == rows.num_rows == 100_000


def test_parts_stay_few_and_end_as_one(tmp_path):
    flushes = MERGE * MERGE + MERGE + 1
    recorder = Recorder(tmp_path)
    for t in range(flushes):
        recorder.add("personal", round=t, client=[2, 1], correct=t, samples=t)
        recorder.flush()
    assert sorted(path.name for path in (tmp_path / "personal").iterdir()) == [
        "part-000000-000255-000000-000255.parquet",
        "part-000256-000271-000256-000271.parquet",
        "part-000272-000272-000272.parquet",
    ]
    recorder.close()
    assert len(list((tmp_path / "personal").iterdir())) == 1
    rows = read(tmp_path, "personal")
    assert rows["correct"].to_pylist() == [t for t in range(flushes) for _ in range(2)]
    assert rows["client"].to_pylist() == [2, 1] * flushes  # within a round, as added


def test_flushes_wait_for_their_time(tmp_path):
    clock = ManualClock()
    recorder = Recorder(tmp_path, clock=clock)
    ran(recorder, 0)
    clock.sleep(FLUSH_SECONDS - 1)
    recorder.maybe_flush()
    assert rounds_of(tmp_path, "rounds") == []
    clock.sleep(1)
    recorder.maybe_flush()
    assert rounds_of(tmp_path, "rounds") == [0]


def moments(run: Path, write: Callable[[], None]) -> list[Path]:
    """Copies of the folder `run` from before each file operation by which `write` changes it, and from the end."""
    copies: list[Path] = []

    def copy() -> None:
        copies.append(shutil.copytree(run, run.with_name(f"moment{len(copies)}"), copy_function=os.link))

    def after_a_copy(action):
        def call(*arguments, **named):
            copy()
            return action(*arguments, **named)

        return call

    with pytest.MonkeyPatch.context() as patch:
        for owner, name in ((os, "replace"), (Path, "rename"), (Path, "unlink"), (Path, "mkdir")):
            patch.setattr(owner, name, after_a_copy(getattr(owner, name)))
        write()
    copy()
    return copies


@pytest.fixture
def writing(tmp_path, monkeypatch):
    """The moments of a run that flushes each of three rounds, with a merge after the second, and closes."""
    monkeypatch.setattr(parts, "MERGE", 2)
    recorder = Recorder(tmp_path / "run")

    def write() -> None:
        for t in range(3):
            ran(recorder, t)
            recorder.flush()
        recorder.close()

    copies = moments(tmp_path / "run", write)
    files = [{path.relative_to(copy) for path in copy.rglob("*.parquet")} for copy in copies]
    assert all(len(before ^ after) <= 1 for before, after in pairwise(files)), (
        "there are operations of which none is seen"
    )
    return copies


def test_a_listed_round_has_all_its_rows_at_every_moment(writing):
    rounds, clients = ([rounds_of(moment, table) for moment in writing] for table in ("rounds", "clients"))
    assert rounds[-1] == [0, 1, 2]
    for found in (rounds, clients):
        assert all(earlier == later[: len(earlier)] for earlier, later in pairwise(found))
    for listed, rows in zip(rounds, clients, strict=True):
        assert listed == list(range(len(listed)))
        assert rows[: 3 * len(listed)] == [t for t in listed for _ in range(3)]


def test_reading_while_writing(writing, tmp_path):
    """Wherever a reader is when the writer gets on, and however far it gets: the reader finds the table as it was at a moment
    in between. A listing that the writer overtakes may lack what came or went meanwhile, or have it."""
    now, cases = tmp_path / "now", 0
    of_table = [sorted(path.name for path in (moment / "clients").rglob("*")) for moment in writing]
    writing = [moment for i, moment in enumerate(writing) if i == 0 or of_table[i] != of_table[i - 1]]
    rows = [rounds_of(moment, "clients") for moment in writing]

    def reach(moment: Path) -> None:
        now.unlink(missing_ok=True)
        now.symlink_to(moment)

    def overtaken(first: int, last: int, at: int, torn: Callable[[set, set], set] | None) -> bool:
        """Read from the moment `first` on, and reach `last` before the operation number `at`, or while it lists the folder.
        False where the reader has no such operation."""
        reach(writing[first])
        calls = 0

        def counted(action):
            def call(*arguments, **named):
                nonlocal calls
                calls += 1
                if calls != at:
                    return action(*arguments, **named)
                before = {*action(*arguments, **named)} if torn else None
                reach(writing[last])
                return torn(before, {*action(*arguments, **named)}) if torn else action(*arguments, **named)

            return call

        with pytest.MonkeyPatch.context() as patch:
            for owner, name in ((Path, "glob"), *(() if torn else ((Path, "stat"), (parts.pq, "ParquetFile")))):
                patch.setattr(owner, name, counted(getattr(owner, name)))
            found = rounds_of(now, "clients")
        assert found in rows[first : last + 1], (first, last, at, torn)
        return calls >= at

    for first, last in combinations(range(len(writing)), 2):
        for torn in (None, set.intersection, set.union):
            at = 1
            while overtaken(first, last, at, torn):
                at, cases = at + 1, cases + 1
    assert cases > 500


def written(folder: Path) -> None:
    """Rounds 0 to 19 in parts 0-3, 4-7, ..., 16-19, as an interrupted run leaves them."""
    recorder = Recorder(folder)
    for t in range(20):
        ran(recorder, t)
        if t % 4 == 3:
            recorder.flush()


@pytest.mark.parametrize("merged", [False, True])
@pytest.mark.parametrize("start", [0, 1, 8, 10, 19, 20])
def test_resuming_removes_later_rounds(tmp_path, start, merged):
    written(tmp_path)
    if merged:
        Recorder(tmp_path, 20).close()
    partition = pa.table({"client": [0, 1], "label": [1, 0]})
    write_table(tmp_path, "partition", partition)
    recorder = Recorder(tmp_path, start)
    assert rounds_of(tmp_path, "rounds") == list(range(start))
    assert rounds_of(tmp_path, "notes") == [t for t in range(start) for _ in range(2)]
    last = [path.name.split("-")[2] for path in (tmp_path / "rounds").iterdir()]
    assert max(last, default="") == (f"{start - 1:06d}" if start else "")
    ran(recorder, start)
    recorder.close()
    assert rounds_of(tmp_path, "clients") == [t for t in range(start + 1) for _ in range(3)]
    assert read(tmp_path, "partition").equals(partition)


class Crash(BaseException):
    pass


@pytest.mark.parametrize("doing", ["trim", "close"])
def test_a_crash_loses_and_doubles_nothing(tmp_path, monkeypatch, doing):
    """Dies at every rename and removal in turn: from then on no file changes any more."""
    for moment in range(1000):
        run = tmp_path / str(moment)
        written(run)
        recorder = Recorder(run, 20)
        calls = 0

        def dying(action):
            def call(*arguments, **named):
                nonlocal calls
                calls += 1
                if calls > moment:  # noqa: B023
                    raise Crash
                return action(*arguments, **named)

            return call

        with monkeypatch.context() as patch:
            for owner, name in ((os, "replace"), (Path, "rename"), (Path, "unlink")):
                patch.setattr(owner, name, dying(getattr(owner, name)))
            try:
                Recorder(run, 10) if doing == "trim" else recorder.close()
                finished = True
            except Crash:
                finished = False
        everything = rounds_of(run, "rounds")
        assert everything[:10] == list(range(10))
        assert len(set(everything)) == len(everything)
        assert doing == "trim" or everything == list(range(20))
        Recorder(run, 10).close()
        assert rounds_of(run, "rounds") == list(range(10))
        assert rounds_of(run, "clients") == [t for t in range(10) for _ in range(3)]
        assert len(list((run / "rounds").iterdir())) == 1
        if finished:
            break
    assert moment > 5


def test_a_link_to_nothing_is_named(tmp_path):
    """To whoever reads, and to whoever goes on writing."""
    written(tmp_path)
    link = tmp_path / "rounds" / "part-000020-000023-000005.parquet"
    link.symlink_to(tmp_path / "nothing")
    for use in (lambda: read(tmp_path, "rounds"), lambda: Recorder(tmp_path, 24)):
        with pytest.raises(DamagedTable, match=f"{link} is not a regular file"):
            use()


def test_unknown_table(tmp_path):
    with pytest.raises(FileNotFoundError, match="partition"):
        read(tmp_path, "partition")
