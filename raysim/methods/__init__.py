"""The catalogue: every method by its name in a configuration. A new method is one file and one line here."""

from raysim.core.attack import Attack
from raysim.core.client import ClientMethod
from raysim.core.message import Transform
from raysim.core.selection import Selection, UniformSelection
from raysim.core.server import ServerStep, Weighting
from raysim.methods.adadecay import AdaDecay
from raysim.methods.alie import ALIE
from raysim.methods.apple import APPLE
from raysim.methods.awd import AWD
from raysim.methods.by_size import BySize
from raysim.methods.cast import BF16, FP16
from raysim.methods.ccn import CCN
from raysim.methods.ditto import Ditto
from raysim.methods.error_feedback import ErrorFeedback
from raysim.methods.fedadp import FedADP
from raysim.methods.fedala import FedALA
from raysim.methods.fedamp import FedAMP
from raysim.methods.fedasync import FedAsync
from raysim.methods.fedavg import FedAvg, StepSize
from raysim.methods.fedavgm import FedAvgM
from raysim.methods.fedbabu import FedBABU
from raysim.methods.fedbe import FedBE
from raysim.methods.fedbuff import FedBuff
from raysim.methods.feddf import FedDF
from raysim.methods.feddisco import FedDisco
from raysim.methods.feddyn import FedDyn
from raysim.methods.fedfomo import FedFomo
from raysim.methods.fedlaw import AdaptiveGWS, AttentiveLAW, FedLAW
from raysim.methods.fedldf import FedLDF
from raysim.methods.fedlws import FedLWS
from raysim.methods.fednova import FedNova
from raysim.methods.fedopt import FedAdagrad, FedAdam, FedYogi
from raysim.methods.fedphp import FedPHP
from raysim.methods.fedprox import FedProx
from raysim.methods.fedrep import FedRep
from raysim.methods.finetune import FineTune
from raysim.methods.fixed_shrink import FixedShrink
from raysim.methods.hdfl import HDFL
from raysim.methods.ldawa import LDAWA
from raysim.methods.median import Median
from raysim.methods.moon import MOON
from raysim.methods.multi_krum import MultiKrum
from raysim.methods.oort import Oort
from raysim.methods.partialfed import PartialFed
from raysim.methods.perfedavg import PerFedAvg
from raysim.methods.pfedme import pFedMe
from raysim.methods.poisson import Poisson
from raysim.methods.power_of_choice import PowerOfChoice
from raysim.methods.powersgd import PowerSGD
from raysim.methods.qsgd import QSGD
from raysim.methods.rand_k import RandK
from raysim.methods.random_layer import RandomLayer
from raysim.methods.round_robin import RoundRobin
from raysim.methods.scaffold import SCAFFOLD
from raysim.methods.server_ft import ServerFT
from raysim.methods.sgdm import SGDM
from raysim.methods.sign import Sign
from raysim.methods.sign_flip import SignFlip
from raysim.methods.terngrad import TernGrad
from raysim.methods.top_k import TopK
from raysim.methods.trimmed_mean import TrimmedMean
from raysim.methods.uniform import Uniform
from raysim.registry import REGISTRY, Table

CLIENTS: Table[type[ClientMethod]] = REGISTRY.table("client").fill(
    {
        "fedala": FedALA,
        "fedprox": FedProx,
        "feddyn": FedDyn,
        "sgdm": SGDM,
        "fedbabu": FedBABU,
        "moon": MOON,
        "finetune": FineTune,
        "perfedavg": PerFedAvg,
        "fedrep": FedRep,
        "scaffold": SCAFFOLD,
        "pfedme": pFedMe,
        "ditto": Ditto,
        "fedamp": FedAMP,
        "fedphp": FedPHP,
        "fedfomo": FedFomo,
        "apple": APPLE,
        "partialfed": PartialFed,
        "fedadp": FedADP,
    }
)

WEIGHTINGS: Table[type[Weighting]] = REGISTRY.table("weighting").fill(
    {
        "fedavg": FedAvg,
        "feddisco": FedDisco,
        "ldawa": LDAWA,
        "fednova": FedNova,
        "ccn": CCN,
        "fedldf": FedLDF,
        "random_layer": RandomLayer,
        "hdfl": HDFL,
        "fedlaw": FedLAW,
        "attentive_law": AttentiveLAW,
        "adaptive_gws": AdaptiveGWS,
        "median": Median,
        "trimmed_mean": TrimmedMean,
        "multi_krum": MultiKrum,
    }
)

STEPS: Table[type[ServerStep]] = REGISTRY.table("server").fill(
    {
        "step_size": StepSize,
        "fedavgm": FedAvgM,
        "fedadagrad": FedAdagrad,
        "fedadam": FedAdam,
        "fedyogi": FedYogi,
        "fedlws": FedLWS,
        "fixed_shrink": FixedShrink,
        "awd": AWD,
        "adadecay": AdaDecay,
        "server_ft": ServerFT,
        "feddf": FedDF,
        "fedbe": FedBE,
    }
)

TRANSFORMS: Table[type[Transform]] = REGISTRY.table("transform").fill(
    {
        "error_feedback": ErrorFeedback,
        "top_k": TopK,
        "rand_k": RandK,
        "qsgd": QSGD,
        "uniform": Uniform,
        "bf16": BF16,
        "fp16": FP16,
        "sign": Sign,
        "terngrad": TernGrad,
        "powersgd": PowerSGD,
    }
)

ATTACKS: Table[type[Attack]] = REGISTRY.table("attack").fill({"sign_flip": SignFlip, "alie": ALIE})

SELECTIONS: Table[type[Selection]] = REGISTRY.table("selection").fill(
    {
        "uniform": UniformSelection,
        "poisson": Poisson,
        "round_robin": RoundRobin,
        "by_size": BySize,
        "power_of_choice": PowerOfChoice,
        "oort": Oort,
        "fedbuff": FedBuff,
        "fedasync": FedAsync,
    }
)
