"""FedAvgM and FedOpt, and server state that outlives an interruption."""

import torch
from toy import ToyCohort, applied, toy_server

from raysim.methods.fedavgm import FedAvgM
from raysim.methods.fedopt import FedAdagrad, FedAdam, FedYogi

D = torch.tensor([0.25, -0.75]).double()  # the mean update of the toy problem


def steps(method, rounds: int = 2, lrs=(0.1, 0.1), updates=None) -> list[torch.Tensor]:
    """How far the server moves in each of some rounds with the same update D."""
    server, moves = toy_server(), []
    for _, lr in zip(range(rounds), lrs, strict=False):
        server.scratch.lr = lr
        cohort = ToyCohort(server, updates) if updates else ToyCohort(server)
        after = applied(method, cohort)
        moves.append(after - server.value)
        server.value = after
    return moves


def same(a: torch.Tensor, b: torch.Tensor) -> None:
    torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_fedavgm_by_hand():
    first, second = steps(FedAvgM(0.9))
    same(first, D)
    same(second, 1.9 * D)
    same(steps(FedAvgM(0.9, eta=0.5))[1], 0.5 * 1.9 * D)
    same(steps(FedAvgM(0.9, damped=True))[1], 0.19 * D)
    same(steps(FedAvgM(0.0))[1], D)


def test_novas_momentum_follows_the_learning_rate():
    """v ← γ v + (w − ŵ)/η, w ← w − η v: with a lower η what was gathered before counts less."""
    same(steps(FedAvgM(0.9, scale_by_lr=True), lrs=(0.1, 0.05))[1], (1 + 0.9 * 0.5) * D)
    same(steps(FedAvgM(0.9, scale_by_lr=True))[1], 1.9 * D)


def test_fedopt_by_hand():
    epsilon, eta = 1e-3, 0.1
    s0, m1, m2 = epsilon**2, 0.1 * D, 0.19 * D

    def move(m, s):
        return eta * m / (s.sqrt() + epsilon)

    adagrad = steps(FedAdagrad(eta))
    same(adagrad[0], move(D, s0 + D**2))
    same(adagrad[1], move(D, s0 + 2 * D**2))
    same(steps(FedAdagrad(eta, beta1=0.9))[1], move(m2, s0 + 2 * D**2))
    adam, s1 = steps(FedAdam(eta)), 0.99 * s0 + 0.01 * D**2
    same(adam[0], move(m1, s1))
    same(adam[1], move(m2, 0.99 * s1 + 0.01 * D**2))
    yogi, s1 = steps(FedYogi(eta)), s0 + 0.01 * D**2  # s is below d², so it grows by all of it
    same(yogi[0], move(m1, s1))
    same(yogi[1], move(m2, s1 + 0.01 * D**2))
    same(steps(FedYogi(eta, initial=4.0))[0], move(m1, 4 - 0.01 * D**2))
    same(steps(FedAdam(eta, initial=0.0))[0], move(m1, 0.01 * D**2))
    assert not torch.allclose(steps(FedAdam(eta, beta2=0.5))[0], adam[0])
    assert not torch.allclose(steps(FedAdam(eta, epsilon=0.1))[0], adam[0])


def test_without_an_update_nothing_moves():
    for method in (FedAvgM(), FedAdagrad(), FedAdam(), FedYogi(), FedAdam(initial=0.0)):
        same(steps(method, updates=[[0.0, 0.0]] * 3)[1], torch.zeros(2).double())
