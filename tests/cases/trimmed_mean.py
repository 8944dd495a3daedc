from case import Case
from cases.fedavg import UNIFORM
from cases.median import among

ALL = {"rounds": {"participation": 1.0}}  # eight clients, of which beta 0.2 cuts one on each side
TRIMMED = Case(
    "trimmed_mean", {"weighting": [{"trimmed_mean": 0.2}], **ALL}, {"weighting": [{"trimmed_mean": 0}], **ALL},
    {"weighting": [{"trimmed_mean": 0.2}], **ALL}, equals={**UNIFORM, **ALL}, recompute=lambda round_: among(round_, 1),
)  # fmt: skip
