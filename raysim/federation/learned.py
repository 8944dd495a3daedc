"""What is learned: the task, how it is scored, and the loss that clients train on."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from raysim.config import Config
from raysim.config.messages import nearest
from raysim.core.task import TASKS, Task, task_of
from raysim.data import DataError, Dataset, Partition
from raysim.registry import REGISTRY
from raysim.store.tables import TABLES


def task(config: Config, data: Dataset) -> Task:
    """The task of the data set or of the configuration, with the metrics that the latter adds. Raises `DataError` where no
    task has the name that the data set gives."""
    metrics, named = [REGISTRY.table("metric")[name] for name in config.evaluate.metrics], config.data.task or data.task
    if isinstance(named, str) and named not in TASKS:
        raise DataError(
            f"{data.name}: there is no task {named!r}.{nearest(named, TASKS)} One of your own goes under @raysim.task()"
        )
    return task_of(named).with_metrics(metrics)


def class_weights(config: Config, data: Dataset, partition: Partition) -> tuple[float, ...]:
    """A weight for each of C classes, or none. Balanced ones are those of scikit-learn: n / (C nᶜ) for nᶜ of the n samples
    that clients train on, where C counts the classes that occur, as clients see them; 0 for the others."""
    weights = config.local.class_weights
    if weights != "balanced":
        return weights
    counts = np.bincount(partition.seen_labels(data), minlength=data.outputs)
    return tuple((counts.sum() / (np.count_nonzero(counts) * np.maximum(counts, 1)) * (counts > 0)).tolist())


def misfits(config: Config, data: Dataset) -> Iterator[str]:
    """What is wrong with the settings of the task, and with instruments that do not go with it, as far as the data tell."""
    learned, local = task(config, data), config.local
    if config.rounds.until.accuracy is not None and (not learned.headline or learned.headline.name != "accuracy"):
        yield f"rounds.until.accuracy: {learned.name} is not judged by it; rounds.until.loss goes with any task"
    names = [metric.name for metric in learned.metrics]
    for name in sorted({name for name in names if names.count(name) > 1}):
        yield (
            f"evaluate.metrics: there are two scores {name!r}, of {learned.name} or your own. Give yours another name, as in "
            f'metrics={{"my_{name}": ...}}'
        )
    if config.evaluate.personal is not None:
        own = {f"personal_{name}" for name in names if name != "accuracy"}
        own |= {name for name in TABLES["rounds"].names if name.startswith("personal_")}
        for name in sorted(own & {*names}):
            yield (
                f"evaluate.metrics: {name!r} is what evaluate.personal calls a score of the clients' own models. Give yours "
                f'another name, as in metrics={{"my_{name}": ...}}'
            )
    for i, instrument in enumerate(config.record.instruments):
        if instrument.needs_classes and not data.has_classes:
            yield (
                f"record.instruments.{i}.{instrument.name}: compares data class by class, but the task is {learned.name}. "
                "Leave it out"
            )
    given = [key for key in ("class_weights", "label_smoothing") if getattr(local, key)]
    if given and not learned.takes_weights:
        yield (
            f"local.{given[0]}: goes with the cross-entropy of one class a sample, but the task is {learned.name}. Leave it "
            "out, or write it into a task of your own: @raysim.task()"
        )
    elif local.class_weights not in ((), "balanced") and len(local.class_weights) != data.outputs:
        yield f"local.class_weights: has {len(local.class_weights)} weights, but {data.name} has {data.outputs} classes"
