"""The clients' last models, as rules for the downlink see them."""

from __future__ import annotations
