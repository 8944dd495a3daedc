"""The papers' instruments: observers of finished rounds, and measures of runs that lie on disk.

An observer is named in `record.instruments`, and what it sees goes to the table `notes`. A measure is taken with
`raysim measure NAME RUN`, and what it finds is the table `measures/NAME`.
"""

from raysim.analysis.balance import Balance
from raysim.analysis.coherence import Coherence
from raysim.analysis.confusion import Confusion, Personalization
from raysim.analysis.heterogeneity import Heterogeneity
from raysim.analysis.instrument import Instrument
from raysim.analysis.landscape import Hessian, Histogram, Rescaling, Simplex, Slice
from raysim.analysis.measure import Measure
from raysim.analysis.objective import Objective
from raysim.analysis.similarity import Similarity
from raysim.analysis.trajectory import Trajectory
from raysim.analysis.transport import Transport
from raysim.analysis.weights import Correlation
from raysim.registry import REGISTRY, Table

INSTRUMENTS: Table[type[Instrument]] = REGISTRY.table("instrument").fill(
    {
        "coherence": Coherence,
        "heterogeneity": Heterogeneity,
        "balance": Balance,
        "similarity": Similarity,
        "objective": Objective,
    }
)

MEASURES: Table[type[Measure]] = REGISTRY.table("measure").fill(
    {
        "correlation": Correlation,
        "histogram": Histogram,
        "rescaling": Rescaling,
        "hessian": Hessian,
        "slice": Slice,
        "simplex": Simplex,
        "transport": Transport,
        "trajectory": Trajectory,
        "confusion": Confusion,
        "personalization": Personalization,
    }
)
