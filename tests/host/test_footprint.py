"""What training takes is what algebra says of a perceptron, and grows as it should."""

from conftest import tiny

from raysim.federation import host_spec, prepare
from raysim.host.footprint import VECTORS, training_bytes


def needed(samples: int = 1000, together: int = 1, batch: int = 50) -> int:
    model = {"name": "mlp", "options": {"hidden": [30]}}
    engine = {"local": {"batch_clients": together}}
    config = tiny(model=model, local={"batch_size": batch}, engine=engine)
    spec = host_spec(config, *prepare(config))
    assert spec.inputs.shape == (1, 8, 8)
    return training_bytes(spec, spec.network()[0], samples)


def test_a_perceptron_keeps_its_input_and_its_hidden_units() -> None:
    parameters = 64 * 30 + 30 + 30 * 4 + 4
    assert needed() == 4 * (VECTORS * parameters + 50 * (64 + 30))
    assert needed(samples=7) == 4 * (VECTORS * parameters + 7 * (64 + 30)), "no batch is larger than a client"
    assert needed(together=3) == 3 * needed()
