"""The one error that bad, missing or foreign data give."""

from typing import final


@final
class DataError(Exception):
    """Data could not be read; the message says which file, what was wrong and what to do."""
