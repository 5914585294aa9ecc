"""Run folders → one self-contained HTML page."""

from kerneq.report.page import render as render
from kerneq.report.runs import gather as gather
