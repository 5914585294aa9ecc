"""The command line: the arguments of every command, and what it calls; results are computed and drawn elsewhere.

torch, and all that imports it, is imported inside the commands, so that `kerneq --help` does not wait for it.
"""

from .app import app as app
from .app import main as main
