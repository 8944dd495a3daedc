"""A federation: built from a configuration, played round by round, saved so that it can be resumed to the same bits."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from raysim.config import (
    STACKS,
    Config,
    ConfigError,
    LocalEngineConfig,
    decisive,
    fingerprint,
    name_in,
    to_dict,
    to_yaml,
)
from raysim.core.layers import GroupingError, LayerMap
from raysim.core.local_run import LocalSettings, RoundInfo
from raysim.core.note import Note
from raysim.core.optim import OptimizerSpec
from raysim.core.rng import SERVER, generator, stream_seed
from raysim.core.score import Score
from raysim.core.server import Aggregator, DownlinkRule, Population, ProxyData, Server
from raysim.core.state import pack, unpack
from raysim.data import Dataset, Partition, make_partition
from raysim.engine.engine import Engine, StateLost
from raysim.engine.local import LocalEngine
from raysim.engine.traffic import ledger
from raysim.federation.checkpoint import Checkpoints
from raysim.federation.round import Round, RoundFailed, run_round, summary
from raysim.host.messages import Arrays, ClientResult, HostSpec
from raysim.models import Inputs
from raysim.store import atomic, manifest, tables, traces
from raysim.store.sinks import Sinks

MakeEngine = Callable[[Config, HostSpec, Dataset, Partition, int], Engine]


def local_engine(config: Config, spec: HostSpec, data: Dataset, partition: Partition, cohort: int) -> Engine:
    assert isinstance(config.engine, LocalEngineConfig)
    local = config.engine
    return LocalEngine(
        replace(spec, device=local.device), data, partition,
        gather_bytes=local.gather_bytes, state_bytes=local.state_bytes,
    )  # fmt: skip


class Federation:
    """Everything of one run. `step` plays a round; the same configuration gives the same bits on any engine."""

    def __init__(
        self, config: Config, out: Path, resume: bool = False, make_engine: MakeEngine = local_engine,
        dealt: tuple[Dataset, Partition] | None = None,
    ):  # fmt: skip
        """Build the model and the engine, and write what is known before the first round. `dealt` is what `prepare`
        returned, if it was called before.

        With `resume`, go on from the last checkpoint in `out`. Raises what `prepare` raises, and `PlacementError` for
        what only the cluster can tell.
        """
        torch.set_num_threads(config.engine.threads)
        self.config, self.folder = config, Path(out)
        self.data, self.partition = dealt or prepare(config)
        if resume:
            self._check_samples()
        self.cohort_size = config.rounds.cohort_size(self.partition.clients)
        self.spec = host_spec(config, self.data)
        layers = self.spec.network()[1]
        self.aggregator = aggregator(config, self.spec)
        self.server = Server(
            initial_value(config, self.spec, layers), layers, config.seed, config.rounds.total,
            Population(*map(torch.from_numpy, (self.partition.sizes, self.partition.label_counts(self.data)))),
            proxy=ProxyData(
                self.partition.proxy, self.data.y[self.partition.proxy], config.data.proxy.balanced_sampling
            ),
        )  # fmt: skip
        for step in self.aggregator.steps:
            step.prepare(self.server)
        # Tables have the names of the configuration.
        stacks = ((STACKS[stack].entries, getattr(config, stack)) for stack in STACKS)
        self._names = {type(m).__name__.lower(): name_in(entries, m) for entries, methods in stacks for m in methods}
        self.engine = make_engine(config, self.spec, self.data, self.partition, self.cohort_size)
        self.engine.begin(self.server.value)
        self.trace = traces.Trace(self.folder, config.record.trace)
        self.checkpoints = Checkpoints(self.folder)
        self.t = 0  # the next round
        self._changed: set[int] = set()  # clients whose state is newer than the last checkpoint
        self._unwritten: Callable[[], None] | None = None  # records of the last round
        self._wall = 0.0  # seconds played before this process took over
        if resume:
            self._restore()
        if not resume or not (self.folder / "manifest.json").exists():  # stopped while it was being described
            self._describe()
        self.recorder = tables.Recorder(self.folder, self.t)
        self.sinks = Sinks(config.record.sinks, self.folder, config.name, to_dict(config), self.t)
        self._begun = time.time() - self._wall
        self.engine.publish(self.server.value, self.server.shared)

    def _check_samples(self) -> None:
        """Raises `ConfigError` where the data are not those that the run in the folder began with."""
        begun = manifest.read_manifest(self.folder)
        for name, now in (("data", self.data.sha256()), ("partition", self.partition.sha256())):
            if begun and begun.get(f"{name}_sha256") != now:
                raise ConfigError(
                    f"{name}: not what the run in {self.folder} began with. Put it back, or start another run."
                )

    # Playing.

    def step(self) -> dict[str, Any] | None:
        """Play one round and return its summary, or None where the run is complete."""
        if self.t >= self.server.rounds:
            return None
        try:
            return self._play()
        except StateLost:
            self._go_back()
            return self.step()

    def _go_back(self) -> None:
        """Client states died with a node: the rounds since the last checkpoint are played again, to the same bits."""
        self._unwritten = None
        self._restore()
        self.recorder = tables.Recorder(self.folder, self.t)
        self.engine.publish(self.server.value, self.server.shared)

    def _play(self) -> dict[str, Any]:
        started = time.perf_counter()
        if self.trace.wants(self.t):
            self._trace_server()
        done = run_round(self, self.t)
        shown = summary(self, done) | personal_scores(done.personal)
        statuses = [outcome.status for outcome in done.cohort.outcomes.values()]
        if statuses and all("Traceback" in status for status in statuses):
            raise RoundFailed(f"every client of round {self.t + 1} failed:\n{shown['failures'][0]}")
        self._changed |= {*done.cohort.clients, *done.cohort.new_kept}
        if self.trace.wants(self.t):
            self._write_trace(done)
        shown["failures"] += [
            f"round {self.t + 1}: a client actor on node {node} died; its clients were trained again, to the same bits"
            for node in self.engine.lost
        ]
        self.engine.lost.clear()
        shown["failures"] += self.sinks.complaints()
        shown["seconds"] = time.perf_counter() - started
        wall = time.time() - self._begun
        self._unwritten = partial(self._record, done, replace(self.server), shown, wall, done.cohort.close())
        self.t += 1
        if self.t % self.config.rounds.checkpoint_every == 0 or self.t == self.server.rounds:
            self.checkpoint()
        return shown

    def write_down(self) -> None:
        """Record the last round, if that has not been done: while the hosts train the next one there is time for it."""
        write, self._unwritten = self._unwritten, None  # first: what fails is not to be written again as the run closes
        if write is not None:
            write()
            self.recorder.maybe_flush()

    def evaluates(self, t: int) -> bool:
        return (t + 1) % self.config.rounds.evaluate_every == 0 or t + 1 == self.server.rounds

    def tests_after_training(self, t: int) -> bool:
        return self.config.evaluate.personal == "after_train" and self.evaluates(t)

    def evaluate_personal(self, t: int) -> dict[int, Score]:
        """Test the model that every client, or each of a sample, would be given in round t on its own test samples."""
        clients = [c for c, rows in enumerate(self.partition.test) if len(rows) and len(self.partition.train[c])]
        order = torch.randperm(len(clients), generator=generator(self.server.seed, t, SERVER, "evaluate"))
        clients = sorted(clients[i] for i in order[: self.config.evaluate.clients].tolist())
        samples = int(self.partition.sizes.sum())
        round_info = RoundInfo(self.server.seed, t, self.server.rounds, self.partition.clients, self.server.lr, samples)
        server = replace(self.server, t=t, notes=[])  # what is measured here is not part of a round
        return self.engine.personal(
            round_info, clients, self.aggregator.rule.downlink(clients, self.engine.models, server)
        )

    def finish(self) -> dict[str, Any]:
        """Write the final model and say how the run went."""
        from safetensors.torch import save_file

        try:
            digest = self.sha256()
        except StateLost:
            self._go_back()  # to the end: a complete run has a checkpoint there
            digest = self.sha256()
        self.recorder.close()
        self.sinks.close(finished=True)
        state = self.server.layers.state_dict(self.server.value)
        with atomic.replacing(self.folder / "model.safetensors") as path:
            save_file(state, path)
        rounds = tables.read(self.folder, "rounds")
        result = course(rounds["accuracy"].to_pylist()) | {
            "personal": personal_course(rounds),
            "bytes_up": sum(rounds["bytes_up"].to_pylist()),
            "bytes_down": sum(rounds["bytes_down"].to_pylist()),
            "sha256": digest,
            "rounds": self.server.rounds,
            "seconds": time.time() - self._begun,
        }
        atomic.write_json(self.folder / "result.json", result)
        return result | {"folder": str(self.folder)}

    def sha256(self) -> str:
        """Hash of the model's tensors under their names, of all that clients keep, and of the models in the bank."""
        digest = hashlib.sha256()

        def update(tensors: dict[str, Tensor]) -> None:
            for name, tensor in tensors.items():
                digest.update(name.encode())
                digest.update(tensor.contiguous().numpy().tobytes())

        update(self.server.layers.state_dict(self.server.value))
        for place, handles in (("", self.engine.kept), ("bank.", self.engine.bank)):
            for client in sorted(handles):
                arrays = self.engine.value_of(handles[client])
                update({f"{place}{client}.{name}": torch.from_numpy(a) for name, a in sorted(arrays.items())})
        return digest.hexdigest()

    def close(self) -> None:
        """Stop the engine; what was recorded is written."""
        self.write_down()
        self.recorder.flush()
        self.engine.close()
        self.sinks.close(finished=False)

    # Saving.

    def checkpoint(self) -> int:
        """Save all that the next round depends on; returns that round. Where some of it is lost, go back instead."""
        try:
            self._save()
        except StateLost:
            self._go_back()
        return self.t

    def _save(self) -> None:
        self.write_down()
        self.recorder.flush()
        server = pack({"value": self.server.value, "shared": self.server.shared, "memory": self.server.memory})
        info = {"round": self.t, "wall": time.time() - self._begun, "config": fingerprint(self.config)}
        self.checkpoints.save(self.t, server, info, self._states())
        self._changed.clear()

    def _states(self) -> Iterator[tuple[int, Arrays]]:
        """Of the clients whose state has changed, one by one."""
        for client in sorted(self._changed):
            if state := self._export(client):
                yield client, state

    def _export(self, client: int) -> Arrays:
        parts = {"kept": self.engine.kept.get(client), "bank": self.engine.bank.get(client)}
        return {
            f"{part}.{name}": array
            for part, handle in parts.items()
            if handle is not None
            for name, array in self.engine.value_of(handle).items()
        }

    def _restore(self) -> None:
        """Go back to the last checkpoint, or to the start where there is none."""
        self.engine.kept.clear()
        self.engine.bank.clear()
        self._changed.clear()
        latest = self.checkpoints.latest()
        if latest is None:
            self.server.value = initial_value(self.config, self.spec, self.server.layers)
            self.server.shared, self.server.memory, self.t = {}, {}, 0
            for step in self.aggregator.steps:
                step.prepare(self.server)
            return
        saved = self.checkpoints.load(latest)
        server = unpack(None, saved.server)
        self.server.value = server["value"]
        self.server.shared, self.server.memory = server.get("shared", {}), server.get("memory", {})
        self.t, self._wall = latest, saved.info["wall"]
        for client, path in saved.clients.items():
            parts: dict[str, Arrays] = {"kept": {}, "bank": {}}
            for name, tensor in self.checkpoints.load_client(path).items():
                part, _, key = name.partition(".")
                parts[part][key] = tensor.numpy()
            if parts["kept"]:
                self.engine.kept[client] = self.engine.park(parts["kept"])
            if parts["bank"]:
                self.engine.bank[client] = self.engine.park(parts["bank"])

    # Writing down.

    def _describe(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        with atomic.replacing(self.folder / "config.yaml") as path:
            path.write_text(to_yaml(self.config), encoding="utf-8")
        tables.write_table(self.folder, "partition", self.partition.to_table(self.data))
        extra = {
            "data_sha256": self.data.sha256(),
            "partition_sha256": self.partition.sha256(),
            "parameters": self.server.layers.P,
            "settings": decisive(self.config),
        }
        atomic.write_json(
            self.folder / "manifest.json", manifest.manifest(fingerprint(self.config), self.config.seed, extra)
        )

    def _record(
        self, done: Round, server: Server, shown: dict[str, Any], wall: float, collect_logs: Callable[[], None]
    ) -> None:
        """`server` is as the round left it."""
        done = replace(
            done, notes=[replace(note, method=self._names.get(note.method, note.method)) for note in done.notes]
        )
        cohort, add, t = done.cohort, self.recorder.add, done.t
        nodes, buffers_stay = self.engine.nodes, self.spec.settings.local_buffers
        traffic = ledger(cohort, done.mixture, done.downlink, server, self.aggregator, buffers_stay)
        up = sum(int(column.sum()) for name, column in traffic.items() if name.startswith("up_"))
        down = sum(int(column.sum()) for name, column in traffic.items() if name.startswith("down_"))
        row = {name: value for name, value in shown.items() if name not in ("round", "rounds", "failures")}
        row |= {"bytes_up": up, "bytes_down": down, "wall": wall}
        row |= {f"seconds_{phase}": value for phase, value in done.seconds.items()}
        add("rounds", round=t, **row)
        self.sinks.write(t, row | {f"{n.method}.{n.name}": n.value.item() for n in done.notes if not n.axes})
        weights = done.mixture.lam / done.mixture.lam.sum() if done.mixture is not None else torch.empty(0)
        ok = {c: i for i, c in enumerate(cohort.clients)}
        held = {c: i for i, clients in cohort.held.items() for c in clients}
        empty = ClientResult("has no training samples")
        outcomes = [cohort.outcomes.get(c, empty) for c in done.drawn]
        tests = [outcome.test for outcome in outcomes]

        def of(field: str) -> list[Any]:
            return [getattr(outcome, field) if outcome.status == "ok" else None for outcome in outcomes]

        add(
            "clients", round=t, client=done.drawn, samples=[len(self.partition.train[c]) for c in done.drawn],
            steps=of("steps"), loss_first=of("first_loss"), loss_last=of("last_loss"), seconds=of("seconds"),
            weight=[float(weights[ok[c]]) if c in ok else None for c in done.drawn],
            status=[outcome.status for outcome in outcomes],
            host=[held.get(c) for c in done.drawn], node=[nodes[held[c]] if c in held else None for c in done.drawn],
            test_correct=[test and test.correct for test in tests],
            test_samples=[test and test.samples for test in tests],
            test_loss=[test.loss / test.samples if test and test.samples else None for test in tests],
        )  # fmt: skip
        self._record_layers(done)
        for note in done.notes:
            add("notes", round=t, **note_rows(note, note.clients or cohort.clients, self.server.layers))
        if done.personal:
            ids = sorted(done.personal)
            correct, samples, losses, auc = zip(*(done.personal[c] for c in ids), strict=True)
            mean = [loss / n if n else None for loss, n in zip(losses, samples, strict=True)]
            add("personal", round=t, client=ids, correct=correct, samples=samples, loss=mean, auc=auc)
        collect_logs()
        transport = dict.fromkeys(cohort.asked)
        for span in cohort.spans:
            if span.phase == "reduce" and len(cohort.held.get(span.host, ())) == 1:
                client = cohort.held[span.host][0]
                transport[client] = (transport[client] or 0) + span.sent
        add("traffic", round=t, client=cohort.asked, **traffic, transport_up=list(transport.values()))
        spans = cohort.spans
        add(
            "timeline", round=t, host=[s.host for s in spans], node=[nodes[s.host] for s in spans],
            phase=[s.phase for s in spans], start=[s.start - self._begun for s in spans],
            stop=[s.stop - self._begun for s in spans],
        )  # fmt: skip

    def _record_layers(self, done: Round) -> None:
        layers, P = self.server.layers, self.server.layers.P
        reported = {f"{n.method}.{n.name}": n.value.numpy() for n in done.notes if n.axes == ("layer",)}
        self.recorder.add(
            "layers", round=done.t, layer=np.arange(layers.L), name=layers.names, parameters=layers.counts.numpy(),
            norm=layers.norms(done.after[:P]).numpy(),
            update_norm=layers.norms(done.after[:P] - done.before[:P]).numpy(), **reported,
        )  # fmt: skip

    def _trace_server(self) -> None:
        """What the server shares and remembers as the round begins."""
        remembered = pack({"shared": self.server.shared, "memory": self.server.memory})
        arrays = {name.replace("/", "."): tensor.numpy() for name, tensor in remembered.items() if tensor.numel()}
        if arrays:
            self.trace.write(self.t, "server", by_tensor(arrays, self.server.layers))

    def _write_trace(self, done: Round) -> None:
        """Everything a reader needs to compute the round by hand."""
        layers, t = self.server.layers, done.t
        self.trace.write(t, "before", layers.state_dict(done.before))
        self.trace.write(t, "after", layers.state_dict(done.after))
        if self.server.batches:
            self.trace.write_arrays(t, "server.samples", self.server.batches)
        for client, handle in done.cohort.traces.items():
            trace = self.engine.value_of(handle)
            name = f"client-{client:04d}"
            self.trace.write(t, name, layers.state_dict(torch.from_numpy(trace["model"])))
            self.trace.write(t, f"{name}.init", layers.state_dict(torch.from_numpy(trace["init"])))
            for part in ("state.before", "state.after", "upload"):
                arrays = {k.removeprefix(f"{part}."): v for k, v in trace.items() if k.startswith(f"{part}.")}
                if arrays:
                    self.trace.write(t, f"{name}.{part}", by_tensor(arrays, layers))
            batches = [trace[k] for k in sorted(trace) if k.startswith("samples.")]
            self.trace.write_arrays(t, f"{name}.samples", batches)


def deal(config: Config) -> tuple[Dataset, Partition]:
    """Read the data and deal them to the clients. Raises `DataError`."""
    wanted = config.data
    data = wanted.name.load(wanted.folder)
    partition = make_partition(
        data, wanted.partition, seed=config.seed, client_test_frac=wanted.client_test_frac,
        client_val_frac=wanted.client_val_frac, proxy=wanted.proxy if wanted.proxy.samples else None,
    )  # fmt: skip
    return data, partition


def prepare(config: Config) -> tuple[Dataset, Partition]:
    """`deal`, and find what only the data can tell of the configuration, before anything else is started.

    Raises `ConfigError`, `DataError` and `ModelError`.
    """
    data, partition = deal(config)
    faults = []
    empty = np.flatnonzero(partition.sizes == 0)
    if len(empty) == partition.clients:
        faults.append("data.partition: no client has a training sample")
    elif len(empty) and not config.data.allow_empty_clients:
        names = ", ".join(map(str, empty[:10])) + (", ..." if len(empty) > 10 else "")
        faults.append(
            f"data.partition: {len(empty)} clients have no training samples ({names}). Ask for fewer clients or, where the "
            "partition has it, a min_size; data.allow_empty_clients: true leaves them out of their rounds"
        )
    if config.evaluate.personal and not any(len(rows) for rows in partition.test):
        faults.append(
            "evaluate.personal: no client has test samples; set data.client_test_frac, or name clients in the test rows as well"
        )
    faults += [f"record.sinks: {sink.missing}" for sink in config.record.sinks if sink.missing]
    if faults:
        raise ConfigError(faults)
    _check_network(config, data)
    return data, partition


def _check_network(config: Config, data: Dataset) -> None:
    """Raises `ModelError`, and `ConfigError` where layers or methods do not go with the network or the data."""
    try:
        model, layers = host_spec(config, data).network()
    except GroupingError as error:
        raise ConfigError(str(error)) from None
    faults = []
    for stack in ("weighting", "server"):
        for i, method in enumerate(getattr(config, stack)):
            if problem := method.fits(model, layers, data.num_classes):
                faults.append(f"{stack}.{i}.{name_in(STACKS[stack].entries, method)}: {problem}")
    if faults:
        raise ConfigError(faults)


def host_spec(config: Config, data: Dataset) -> HostSpec:
    """What the hosts need to know of the configuration."""
    local = config.local
    optimizer = OptimizerSpec(local.optimizer, local.momentum, local.nesterov, local.weight_decay, local.betas)
    settings = LocalSettings(
        local.epochs, local.batch_size, local.drop_last, optimizer, local.grad_clip, local.state == "persist",
        config.model.bn_stats in ("local", "proxy"),
    )  # fmt: skip
    # On CPUs channels-last convolutions are a third faster; the layout is part of the bits, so it is never measured.
    channels_last = config.model.memory_format != "contiguous" and len(data.sample_shape) == 3
    companions = [step for method in config.client for step in method.server_steps()]
    watchers = (*config.weighting, *config.client, *config.server, *companions, *config.record.instruments)
    probes = [probe for watcher in watchers for probe in watcher.probes]
    return HostSpec(
        config.model.name, Inputs(data.sample_shape, data.num_classes, data.vocab), config.model.options,
        config.model.layer_by, config.model.blocks, channels_last, settings, tuple(config.client),
        tuple(dict.fromkeys(probes)), config.evaluate.batch_size, config.engine.threads,
    )  # fmt: skip


def aggregator(config: Config, spec: HostSpec) -> Aggregator:
    """The server's side of the configuration: companions of client methods first, then the configured steps."""
    companions = [step for method in config.client for step in method.server_steps()]
    rules = [rule for method in config.client if (rule := method.downlink_rule()) is not None]
    weights = next((w.base_weights for w in config.weighting if w.base_weights), spec.stack.base_weights)
    return Aggregator(
        weights, tuple(config.weighting), (*companions, *config.server), rules[0] if rules else DownlinkRule(),
        spec.stack.personal_layers, config.model.bn_stats,
    )  # fmt: skip


def initial_value(config: Config, spec: HostSpec, layers: LayerMap) -> Tensor:
    """The model every method starts from: drawn from the seed, or read from `model.init`."""
    if config.model.init:
        from safetensors.torch import load_file

        try:
            return layers.flatten(load_file(config.model.init))
        except (KeyError, ValueError) as error:
            raise ConfigError(f"model.init: {config.model.init}: {error.args[0]}") from None
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(stream_seed(config.seed, 0, SERVER, "initial model"))
        model, _ = spec.network()
    return layers.flatten(model.state_dict())


def personal_scores(personal: dict[int, Score]) -> dict[str, float]:
    """Micro and macro accuracy, spread over clients, the mean of the worst tenth, and the AUC."""
    tested = [score for score in personal.values() if score.samples]
    if not tested:
        return {}
    shares, total = np.sort([score.correct / score.samples for score in tested]), sum(s.samples for s in tested)
    return {
        "personal_accuracy_micro": sum(s.correct for s in tested) / total,
        "personal_accuracy_macro": float(shares.mean()),
        "personal_accuracy_std": float(shares.std()),
        "personal_accuracy_worst10": float(shares[: max(1, len(shares) // 10)].mean()),
        "personal_auc": sum(s.auc * s.samples for s in tested) / total,
    }


def course(accuracies: Sequence[float | None]) -> dict[str, float | None]:
    """The last, the best, and the mean of the last ten of those that were measured."""
    known = [a for a in accuracies if a is not None]
    last10 = sum(known[-10:]) / len(known[-10:]) if known else None
    return {"final": known[-1] if known else None, "best": max(known, default=None), "last10": last10}


def personal_course(rounds: pa.Table) -> dict[str, float | None] | None:
    """The course of the clients' own accuracy (micro), and what else is known of it at its end; None if not measured."""
    last = next((row for row in reversed(rounds.to_pylist()) if row["personal_accuracy_micro"] is not None), None)
    if last is None:
        return None
    columns = ("personal_accuracy_macro", "personal_accuracy_std", "personal_accuracy_worst10", "personal_auc")
    ends = {name.removeprefix("personal_").removeprefix("accuracy_"): last[name] for name in columns}
    return course(rounds["personal_accuracy_micro"].to_pylist()) | ends


def by_tensor(arrays: Arrays, layers: LayerMap) -> dict[str, Tensor]:
    """Arrays of the model's size, split under the names of its tensors; the others as they are."""
    named: dict[str, Tensor] = {}
    for name, array in arrays.items():
        tensor = torch.from_numpy(array)
        if array.shape in ((layers.P,), (layers.S,)):
            named |= {f"{name}.{inner}": part for inner, part in layers.state_dict(tensor).items()}
        else:
            named[name] = tensor
    return named


def note_rows(note: Note, clients: tuple[int, ...], layers: LayerMap) -> dict[str, Any]:
    """A note's values as rows: one for each element."""
    labels = {"client": clients, "layer": layers.names}
    columns: dict[str, Any] = {"method": note.method, "name": note.name, "value": note.value.flatten().tolist()}
    places = np.unravel_index(np.arange(note.value.numel()), note.value.shape) if note.axes else ()
    for axis, place in zip(note.axes, places, strict=True):
        names = labels.get(axis)
        columns[axis if names else "index"] = [names[i] for i in place] if names else place.tolist()
    return columns
