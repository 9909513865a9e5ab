"""Writes big files on Linux without ever building a backlog of dirty pages."""

from __future__ import annotations

from pacedio.exceptions import SourceError, WritebackError
from pacedio.files import open, wrap
from pacedio.pacing import BALANCED, POLITE, RECIPE, Pacing, format_size, parse_rate, parse_size
from pacedio.reader import PacedReader
from pacedio.writer import PacedRandom, PacedTextWriter, PacedWriter, WriteStats

__version__ = "0.1.0"

__all__ = [
    "BALANCED",
    "POLITE",
    "RECIPE",
    "PacedRandom",
    "PacedReader",
    "PacedTextWriter",
    "PacedWriter",
    "Pacing",
    "SourceError",
    "WriteStats",
    "WritebackError",
    "format_size",
    "open",
    "parse_rate",
    "parse_size",
    "wrap",
]
