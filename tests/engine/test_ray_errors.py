"""Every exception of Ray's has one meaning for a run, which decides what raysim does."""

import inspect
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import ray
import ray.exceptions
from ray.exceptions import RayError, RayTaskError

from raysim.api.errors import faults_of
from raysim.engine.base import HostLost, MachineFailure, StateLost
from raysim.engine.ray import deaths
from raysim.engine.ray.driver import stored
from raysim.engine.ray.engine import RayEngine

LOST = ("ab", None, "")  # an object's number, its owner, and where it was made
MADE = {  # where a text alone does not make one
    **dict.fromkeys(("ActorDiedError", "LocalRayletDiedError"), ()),
    **dict.fromkeys(("ActorPlacementGroupRemoved", "TaskPlacementGroupRemoved"), ()),
    **dict.fromkeys(("ObjectLostError", "ObjectFetchTimedOutError", "OwnerDiedError", "ObjectFreedError"), LOST),
    "ReferenceCountingAssertionError": LOST,
    "ActorUnavailableError": ("gone", None),
    "RayTaskError": ("train", "a traceback", ValueError("wrong")),
    "CrossLanguageError": (SimpleNamespace(language=0, formatted_exception_string="wrong"),),
}


def of_ray() -> Iterator[type[BaseException]]:
    """All of Ray's exceptions."""
    for one in vars(ray.exceptions).values():
        if inspect.isclass(one) and issubclass(one, BaseException):
            yield one


def unsorted() -> dict[str, int]:
    """Exceptions of Ray's that are not in exactly one list, by name, with the number of lists that they are in."""
    counts = {one.__name__: sum(kind.count(one) for kind in deaths.KINDS) for one in of_ray()}
    return {name: count for name, count in counts.items() if count != 1}


def test_each_is_in_one_list(monkeypatch):
    assert not unsorted()
    monkeypatch.setattr(ray.exceptions, "AnotherError", type("AnotherError", (RayError,), {}), raising=False)
    assert unsorted() == {"AnotherError": 0}


def test_who_catches_a_list_catches_nothing_else(subtests):
    """A list holds the subclasses of what it holds; but for the class of all."""
    for kind in deaths.KINDS:
        for one in of_ray():
            with subtests.test(one.__name__):
                assert (one in kind) == issubclass(one, tuple({*kind} - {RayError})) or one is RayError


def made(one: type[BaseException]) -> BaseException:
    """An error of this class, as Ray would make it."""
    return one(*MADE.get(one.__name__, ("no words",)))


@pytest.fixture
def engine(monkeypatch) -> RayEngine:
    """One that has a single host, without any process."""
    engine = object.__new__(RayEngine)
    monkeypatch.setattr(RayEngine, "_least_timeout", 1.0)
    engine._actors, engine.nodes = [SimpleNamespace(_actor_id=b"a")], ["node"]
    return engine


def raising(error: BaseException):
    def call(*_, **__):
        raise error

    return call


def test_what_ends_a_run_is_said(engine, monkeypatch, subtests):
    """Where something is put or fetched; also where it was raised in a host, which Ray reports as an error of its task."""
    words = {
        "ObjectStoreFullError": "Ray's object store is full, and what it holds is in use. Raise engine.ray.state_bytes",
        "OutOfDiskError": "so is the disk of a node to which it spills (Ray uses 95 % of one). Free some space there",
        "AuthenticationError": "the Ray cluster refuses the run: no words",
        "RuntimeEnvSetupError": "the Ray cluster refuses the run: Failed to set up runtime environment",
        "RaySystemError": "Ray has failed: System error: no words",
        "LocalRayletDiedError": "Ray has failed: The task's local raylet died",
    }
    for one in (*deaths.FULL, *deaths.BROKEN, *deaths.REFUSALS):
        error = made(one)
        in_host = RayTaskError("train", "a traceback", error).as_instanceof_cause()
        for raised in (error, in_host):
            monkeypatch.setattr(ray, "put", raising(raised))
            monkeypatch.setattr(ray, "get", raising(raised))
            for call in (
                lambda: engine.put(1),
                lambda: engine.value_of(1),
                lambda: engine.fetch([(0, 1)]),
                lambda: stored([1]),
            ):
                with subtests.test(one.__name__), pytest.raises(MachineFailure) as failure:
                    call()
                assert words.get(one.__name__, "Ray has failed: ") in str(failure.value) or raised is in_host
                assert len(faults_of(failure.value)) == 1


def test_deaths_are_losses(engine, monkeypatch, subtests):
    """Of the host; or, where no host is dead, of what it held."""
    for one in deaths.DEATHS:
        monkeypatch.setattr(ray, "get", raising(made(one)))
        for dead, loss in (
            ({0}, HostLost),
            (set(), StateLost if issubclass(one, ray.exceptions.ObjectLostError) else HostLost),
        ):
            monkeypatch.setattr(RayEngine, "_dead", lambda *_, dead=dead: dead)
            with subtests.test(one.__name__), pytest.raises(loss):
                engine.fetch([(0, 1)])


def test_bugs_and_errors_of_code_stay_what_they_are(engine, monkeypatch, subtests):
    for one in (*deaths.UNEXPECTED, *deaths.CODE):
        error = made(one)
        monkeypatch.setattr(ray, "get", raising(error))
        with subtests.test(one.__name__), pytest.raises(ValueError if one is RayTaskError else one) as raised:
            engine.fetch([(0, 1)])
        assert faults_of(raised.value) is None  # it is shown with its traceback


def test_what_is_not_there_yet_is_asked_for_again(engine, monkeypatch):
    answers = iter([*map(made, deaths.PENDING), 7])

    def get(*_, **__):
        answer = next(answers)
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(ray, "get", get)
    monkeypatch.setattr(RayEngine, "_hanging", lambda *_: set())
    assert engine.fetch([(0, 1)]) == [7]
