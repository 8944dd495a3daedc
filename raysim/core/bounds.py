"""Numbers that a setting or a method's option may be; a configuration is held to them."""

from typing import Annotated

from annotated_types import Ge, Gt, Le, Lt

GREATEST_INT = 2**63 - 1
"""No setting goes beyond it, in either sign: arrays hold int64."""
GREATEST_FLOAT = 1e18
"""No setting goes beyond it, in either sign: models compute in float32, which holds the product of two such numbers."""
MOST = 10**7
"""Clients, samples that are made up, or units side by side; a process has a list or an array of them."""

Positive = Annotated[float, Gt(0)]
AboveOne = Annotated[float, Gt(1)]
NonNegative = Annotated[float, Ge(0)]
Fraction = Annotated[float, Ge(0), Lt(1)]
OpenFraction = Annotated[float, Gt(0), Lt(1)]
BelowHalf = Annotated[float, Ge(0), Lt(0.5)]
Share = Annotated[float, Gt(0), Le(1)]
Probability = Annotated[float, Ge(0), Le(1)]
PositiveInt = Annotated[int, Gt(0)]
NonNegativeInt = Annotated[int, Ge(0)]
Count = Annotated[int, Gt(0), Le(MOST)]
CountOrZero = Annotated[int, Ge(0), Le(MOST)]
Bits = Annotated[int, Ge(1), Le(16)]
Seed = Annotated[int, Ge(0), Lt(2**32)]
