"""Numbers that a setting or a method's option may be; a configuration is held to them."""

from typing import Annotated

from annotated_types import Ge, Gt, Lt

Positive = Annotated[float, Gt(0)]
NonNegative = Annotated[float, Ge(0)]
Fraction = Annotated[float, Ge(0), Lt(1)]
PositiveInt = Annotated[int, Gt(0)]
NonNegativeInt = Annotated[int, Ge(0)]
