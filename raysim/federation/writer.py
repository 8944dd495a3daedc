"""What a run writes into its folder: itself before the first round, then rows, notes and traces of every round."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from raysim.config import decisive, fingerprint, to_dict, to_yaml
from raysim.core.event import Event
from raysim.core.layers import LayerMap
from raysim.core.note import Note
from raysim.core.score import Score
from raysim.core.server import Server
from raysim.core.state import pack
from raysim.engine.base import Span
from raysim.engine.traffic import ledger
from raysim.federation.builder import RunParts
from raysim.federation.code import definitions_of
from raysim.federation.given import given_sha256
from raysim.federation.round import Round
from raysim.federation.scoreboard import Scoreboard
from raysim.federation.scores import fallen_back, personal_summary, run_summary
from raysim.federation.simulated_time import asked_for_losses, taken, until_lost
from raysim.federation.unused import add_dropped, add_lost
from raysim.host.messages import ClientResult
from raysim.lazy import Tensor, torch
from raysim.store.atomic import replacing, write_json, write_tensors
from raysim.store.code import record
from raysim.store.documents import about_tensors
from raysim.store.manifest import DATA, manifest
from raysim.store.sinks import Sinks
from raysim.store.tables import Recorder, check_complete, read, write_table
from raysim.store.traces import Trace

Rows = dict[str, Any]  # columns of a table
BEST = "best.safetensors"


def describe(run: RunParts, folder: Path, numerics: Mapping[str, Any]) -> None:
    """Write what is known before the first round: configuration, partition, the user's code, what a model of the
    data is given, and the manifest with the hosts' `numerics`."""
    folder.mkdir(parents=True, exist_ok=True)
    with replacing(folder / "config.yaml") as path:
        path.write_text(to_yaml(run.config), encoding="utf-8")
    write_table(folder, "partition", run.partition.to_table(run.data))
    write_json(folder / DATA, run.data.form())
    extra = {
        "data_sha256": run.data.sha256(),
        "files_sha256": run.data.files and run.data.files.times_sha256,  # of names, sizes and times
        "partition_sha256": run.partition.sha256(),
        "given_sha256": given_sha256(run.config),
        "samples": len(run.data.y),
        "unused_samples": len(run.partition.unused(run.data)),  # by no client, and not by the server
        "parameters": run.server.layers.P,
        "device": run.engine.device(),
        "numerics": dict(numerics),
        "loss_unit": run.spec.task.loss_unit,
        "inputs": asdict(run.spec.inputs),  # what the model is built for
        "settings": decisive(run.config),
        "code": record(folder, definitions_of(run.config, run.data.task)),
    }
    write_json(folder / "manifest.json", manifest(fingerprint(run.config), run.config.seed, extra))


@dataclass(frozen=True)
class Finished:
    """A finished round, and what is known of it besides."""

    done: Round
    server: Server  # as the round left it
    shown: Mapping[str, Any]  # its summary
    events: Sequence[Event]
    wall: float  # seconds of the run until then
    clock: float  # what the hosts' clocks said then, in seconds since 1970


class Writer:
    """Tables and sinks of a run in `folder`, from round `t` on."""

    def __init__(self, run: RunParts, folder: Path, t: int):
        self.run, self.folder = run, folder
        self.recorder = Recorder(folder, t, run.spec.clock)
        check_complete(folder, t)
        self.sinks = Sinks(run.config.record.sinks, folder, run.config.name, to_dict(run.config), t)
        self.sim_clock = self._clock_at(t)  # simulated seconds, of the rounds that are written

    def go_back(self, t: int) -> None:
        """Rounds from `t` on are repeated: drop their rows."""
        self.recorder = Recorder(self.folder, t, self.run.spec.clock)
        self.sinks.go_back(t)
        self.sim_clock = self._clock_at(t)

    def _clock_at(self, t: int) -> float:
        """The simulated clock before round t."""
        if not t or not self.run.config.clock.runs:
            return 0.0
        return float(read(self.folder, "rounds")["sim_clock"][t - 1].as_py() or 0.0)

    def add_events(self, t: int, events: Sequence[Event]) -> None:
        """Record the events of round t."""
        if events:
            columns = {name: [getattr(event, name) for event in events] for name in ("of", "client", "node", "message")}
            self.recorder.add("events", round=t, **columns)

    def write(self, finished: Finished) -> None:
        """Record a round."""
        done, add, t = finished.done, self.recorder.add, finished.done.t
        cohort, run = done.cohort, self.run
        others = done.others
        traffic = ledger(
            cohort.trained, done.mixture, done.downlink, finished.server, run.aggregator, run.spec, others,
            done.started.downlink, done.delivered, run.config.rounds.selection,
        )  # fmt: skip
        add_lost(traffic, done.asked)
        rows, passed = client_rows(done, run), dict[str, float]()
        if run.config.clock.runs:
            passed, of_clients = clock_columns(finished, run, self.sim_clock, traffic)
            self.sim_clock, rows = passed["sim_clock"], {**rows, **of_clients}
        if done.asked.dropped:
            rows, traffic = add_dropped(run, done.asked, rows, traffic)
        row = self._round_row(finished, traffic) | passed
        add("rounds", round=t, **row)
        self.add_events(t, finished.events)
        self.sinks.write(t, row | {f"{n.method}.{n.name}": n.value.item() for n in done.notes if not n.axes})
        add("clients", round=t, **rows)
        add("layers", round=t, **layer_rows(done, done.notes, run.server.layers))
        for note in done.notes:
            if "peer" not in note.axes or run.config.record.pairs:
                add("notes", round=t, **note_rows(note, note.clients or cohort.clients, run.server.layers))
        if done.personal:
            add("personal", round=t, **personal_rows(done.personal))
        spans, began = done.dispatcher.spans, finished.clock - finished.wall
        others = *others, *(each.client for each in done.asked.dropped)
        sent = [*transport(done, spans), *[None] * len(others)]
        add("traffic", round=t, client=[*cohort.trained.asked, *others], **traffic, transport_up=sent)
        add(
            "timeline", round=t, host=[s.host for s in spans], node=[run.engine.nodes[s.host] for s in spans],
            phase=[s.phase for s in spans], start=[s.start - began for s in spans], stop=[s.stop - began for s in spans],
        )  # fmt: skip
        self.recorder.maybe_flush()

    def scoreboard(self, t: int) -> Scoreboard:
        """The evaluations of the first t rounds, which are on disk. The last round of a run that was extended may have been
        tested as the last; it does not count where it is one no longer."""
        board = Scoreboard(self.run.config, self.run.spec.task)
        for row in read(self.folder, "rounds").to_pylist():
            if row["round"] < t:
                board.add(row["round"], row, row["wall"], counts=self.run.evaluates(row["round"]))
        return board

    def keep_best(self, t: int) -> None:
        """Write the global model, as that of round t is the best so far."""
        self._write_model(BEST, {"round": str(t)})

    def missing_best(self, t: int, board: Scoreboard) -> list[Event]:
        """What to say before round t where the best round is known, but ran without `keep_best`. What is saved of a
        round from t on is that of a run that died, and is made again."""
        if board.best is None or not self.run.config.record.keep_best:
            return []
        best, saved = board.best[0], about_tensors(self.folder / BEST).get("round", "")
        if saved.isdecimal() and (int(saved) == best or int(saved) >= t):
            return []
        missing = f"the model of round {best + 1}, the best so far, was not saved"
        return [Event("run", f"record.keep_best: {missing}; that of the next better round will be")]

    def _write_model(self, name: str, about: Mapping[str, str] | None = None) -> None:
        write_tensors(self.folder / name, self.run.server.layers.state_dict(self.run.server.value), about)

    def finish(self, sha256: str, wall: float, rounds_done: int, board: Scoreboard) -> dict[str, Any]:
        """Write the final model and say how the run, of so many seconds and rounds, went."""
        self.recorder.flush()
        check_complete(self.folder, rounds_done)
        complaints = self.close(rounds_done, finished=True)
        self.recorder.close()
        rounds, task = read(self.folder, "rounds"), self.run.spec.task
        self._write_model("model.safetensors")
        result = run_summary(rounds, task, self.run.evaluates) | {
            "personal": personal_summary(rounds, task, self.run.evaluates),
            "fell_back": fallen_back(read(self.folder, "notes")),
            "sim_seconds": self.sim_clock if self.run.config.clock.runs else None,
            "bytes_up": sum(rounds["bytes_up"].to_pylist()),
            "bytes_down": sum(rounds["bytes_down"].to_pylist()),
            "sha256": sha256,
            "rounds": rounds_done,
            "ended": board.ended,
            "best_round": board.best and board.best[0],
            "seconds": wall,
        }
        write_json(self.folder / "result.json", result)
        return result | {"folder": str(self.folder), "complaints": complaints}

    def close(self, rounds_done: int, finished: bool = False) -> list[str]:
        """Write what was recorded. Returns what no round can show any more: of sinks that failed in the last one, or now."""
        self.recorder.flush()
        complaints = self.sinks.close(finished)
        self.add_events(max(0, rounds_done - 1), [Event("run", complaint) for complaint in complaints])
        self.recorder.flush()
        return complaints

    @staticmethod
    def _round_row(finished: Finished, traffic: Mapping[str, np.ndarray]) -> Rows:
        def total(direction: str) -> int:
            return sum(int(column.sum()) for name, column in traffic.items() if name.startswith(direction))

        shown = finished.shown
        row = {name: value for name, value in shown.items() if name not in ("round", "rounds", "headline", "messages")}
        row |= {"bytes_up": total("up_"), "bytes_down": total("down_"), "wall": finished.wall}
        row |= {f"seconds_{phase}": value for phase, value in finished.done.seconds.items()}
        return {**row, **finished.done.columns}


def client_rows(done: Round, run: RunParts) -> Rows:
    """One row for each client drawn, those without training samples too, which were not asked; then for each candidate that was
    not chosen."""
    cohort, trained, nodes = done.cohort, done.cohort.trained, run.engine.nodes
    weights = {}
    if (mixture := done.mixture) is not None:
        counted = zip(cohort.clients, mixture.shares.tolist(), mixture.sent.any(1).tolist(), strict=True)
        weights = {client: share for client, share, sends in counted if sends}
    host_of = {c: i for i, clients in done.dispatcher.held.items() for c in clients}
    asked, clients = done.asked, [*done.drawn, *done.asked.not_chosen]
    left_out = {c: ClientResult(why) for c, why in asked.lost.items()}
    left_out |= dict.fromkeys(asked.not_chosen, ClientResult("asked"))
    empty = ClientResult("has no training samples")
    results = [trained.results.get(c) or left_out.get(c, empty) for c in clients]
    tests = [result.test for result in results]

    def of(field: str) -> list[Any]:
        return [getattr(result, field) if result.status == "ok" else None for result in results]

    return {
        "client": clients, "samples": [len(run.partition.train[c]) for c in clients],
        "steps": of("steps"), "loss_first": of("first_loss"), "loss_last": of("last_loss"), "seconds": of("seconds"),
        "weight": [weights.get(c) for c in clients],
        "status": [result.status for result in results],
        "attack": [run.attackers.names_of(c) for c in clients],
        "utility": [asked.utility.get(c) for c in clients],
        "selected_by": [asked.selected_by.get(c) for c in clients],
        "version": [*asked.versions, *[None] * (len(clients) - len(asked.versions))],
        "host": [host_of.get(c) for c in clients],
        "node": [nodes[host_of[c]] if c in host_of else None for c in clients],
        "test_correct": [test and test.correct for test in tests],
        "test_samples": [test and test.samples for test in tests],
        "test_loss": [test and test.mean_loss for test in tests],
    }  # fmt: skip


def clock_columns(
    finished: Finished, run: RunParts, before: float, traffic: Mapping[str, np.ndarray]
) -> tuple[dict[str, float], Rows]:  # fmt: skip
    """Simulated seconds: of the round, which began at `before`, and of its clients."""
    done = finished.done
    trained, candidates = done.cohort.trained, done.asked.candidates
    asked, came = [*trained.asked], [client in trained.clients for client in trained.asked]
    sent_in = np.array([done.asked.version(client) if done.asked.versions else done.t for client in asked], np.int64)
    phases, began = taken(run, sent_in, asked, traffic, candidates), before + done.asked.idle
    ends = began + sum(float(phase.total[came].max()) for phase in phases if any(came))
    spent = [(asked, phase) for phase in phases]
    if candidates:
        everyone = [*asked, *done.others]
        first = asked_for_losses(run, done.t, everyone, traffic, candidates)
        ends += float(first.total.max())
        spent.append((everyone, first))
    if done.asked.lost:
        spent.append(([*done.asked.lost], until_lost(run, done.t, done.asked, began)))
    ends = began + done.asked.lasts if done.asked.lasts is not None else ends
    ends = ends if done.asked.ends is None else done.asked.ends
    ends += run.config.clock.of_server(finished.server.trained)
    of: dict[int, np.ndarray] = {}  # client -> its seconds to receive, to train and to send
    for clients, phase in spent:
        for client, *parts in zip(clients, phase.latency + phase.down, phase.train, phase.up, strict=True):
            if client in asked or client in candidates or client in done.asked.lost:
                of[client] = of.get(client, 0.0) + np.array(parts)
    shown = [of.get(client) for client in (*done.drawn, *done.asked.not_chosen)]
    rows: Rows = {
        name: [None if parts is None else float(parts[i]) for parts in shown]
        for i, name in enumerate(("sim_down", "sim_train", "sim_up"))
    }
    idle = done.asked.idle
    sent = {c: before + idle + done.asked.after.get(c, 0.0) for c in (*asked, *done.asked.lost, *candidates)}
    sent |= zip(done.asked.clients, done.asked.starts, strict=False)
    rows["sim_start"] = [sent.get(client) for client in (*done.drawn, *done.asked.not_chosen)]
    return {"sim_seconds": ends - before - idle, "sim_idle": idle, "sim_clock": ends}, rows


def layer_rows(done: Round, notes: Sequence[Note], layers: LayerMap) -> Rows:
    """One row for each layer, with what methods noted of it."""
    noted = {f"{n.method}.{n.name}": n.value.numpy() for n in done.notes if n.axes == ("layer",)}
    before, after = done.before[: layers.P], done.after[: layers.P]
    return {
        "layer": np.arange(layers.L), "name": layers.names, "parameters": layers.counts.numpy(),
        "norm": layers.norms(after).numpy(), "update_norm": layers.norms(after - before).numpy(), **noted,
    }  # fmt: skip


def note_rows(note: Note, clients: tuple[int, ...], layers: LayerMap) -> Rows:
    """A note's values as rows: one for each element, or for each that is there."""
    labels, value = {"client": clients, "layer": layers.names}, note.value
    if value.is_sparse:
        places, value = tuple(value.indices().numpy()), value.values()
    else:
        places = np.unravel_index(np.arange(value.numel()), value.shape) if note.axes else ()
    columns: Rows = {"method": note.method, "name": note.name, "value": value.flatten().tolist()}
    for axis, place in zip(note.axes, places, strict=True):
        names = labels.get(axis)
        columns[axis if names else "index"] = [names[i] for i in place] if names else place.tolist()
    return columns


def personal_rows(personal: Mapping[int, Score]) -> Rows:
    """One row for each client that was tested."""
    ids = sorted(personal)
    scores = [personal[c] for c in ids]
    return {
        "client": ids, "correct": [s.correct for s in scores], "samples": [s.samples for s in scores],
        "loss": [s.mean_loss for s in scores], "auc": [s.auc for s in scores],
    }  # fmt: skip


def transport(done: Round, spans: Sequence[Span]) -> list[int | None]:
    """For each client asked the bytes that its host serialised for sums; None where a host had several clients."""
    sent: dict[int, int | None] = dict.fromkeys(done.cohort.trained.asked)
    held = done.dispatcher.held
    for span in spans:
        if span.phase == "reduce" and len(held.get(span.host, ())) == 1:
            client = held[span.host][0]
            sent[client] = (sent[client] or 0) + span.sent
    return list(sent.values())


class Tracer:
    """Writes everything that a reader needs to compute a traced round by hand."""

    def __init__(self, run: RunParts, folder: Path):
        self.run = run
        self._trace = Trace(folder, run.config.record.traces)

    def wants(self, t: int) -> bool:
        """Whether round t is traced."""
        return self._trace.wants(t)

    def begin(self, t: int) -> None:
        """What the server shares and remembers as the round begins."""
        server = self.run.server
        packed = pack({"shared": server.shared, "memory": server.memory})
        arrays = {name.replace("/", "."): tensor.numpy() for name, tensor in packed.items() if tensor.numel()}
        if arrays:
            self._trace.write(t, "server", by_tensor(arrays, server.layers))

    def write(self, done: Round) -> None:
        """Models before and after, the server's batches, and what each client started from, drew and made."""
        server, layers, t, write = self.run.server, self.run.server.layers, done.t, self._trace.write
        write(t, "before", layers.state_dict(done.before))
        write(t, "after", layers.state_dict(done.after))
        if server.scratch.batches:
            self._trace.write_arrays(t, "server.samples", server.scratch.batches)
        for client, handle in done.dispatcher.traces.items():
            trace = self.run.engine.value_of(handle)
            name = f"client-{client:04d}"
            write(t, name, layers.state_dict(torch.from_numpy(trace["model"])))
            write(t, f"{name}.init", layers.state_dict(torch.from_numpy(trace["init"])))
            for part in ("state.before", "state.after", "upload"):
                arrays = {k.removeprefix(f"{part}."): v for k, v in trace.items() if k.startswith(f"{part}.")}
                if arrays:
                    write(t, f"{name}.{part}", by_tensor(arrays, layers))
            batches = [trace[k] for k in sorted(trace) if k.startswith("samples.")]
            self._trace.write_arrays(t, f"{name}.samples", batches)


def by_tensor(arrays: Mapping[str, np.ndarray], layers: LayerMap) -> dict[str, Tensor]:
    """Arrays of the model's size, split under the names of its tensors; the others as they are."""
    named: dict[str, Tensor] = {}
    for name, array in arrays.items():
        tensor = torch.from_numpy(array)
        if array.shape in ((layers.P,), (layers.S,)):
            named |= {f"{name}.{inner}": part for inner, part in layers.state_dict(tensor).items()}
        else:
            named[name] = tensor
    return named
