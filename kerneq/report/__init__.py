"""Run folders → one self-contained HTML page."""

from .page import gather as gather
from .page import render as render
