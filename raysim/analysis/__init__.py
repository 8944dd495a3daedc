"""The papers' instruments: observers of finished rounds, and measures of runs that lie on disk.

An observer is named in `record.instruments`; what it sees goes to the table `notes`.
"""

from raysim.analysis.balance import Balance
from raysim.analysis.coherence import Coherence
from raysim.analysis.heterogeneity import Heterogeneity
from raysim.analysis.instrument import Instrument
from raysim.analysis.similarity import Similarity

INSTRUMENTS: dict[str, type[Instrument]] = {
    "coherence": Coherence,
    "heterogeneity": Heterogeneity,
    "balance": Balance,
    "similarity": Similarity,
}
