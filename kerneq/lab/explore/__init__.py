"""`kerneq explore`: a page on which one watches the equilibria of a trained model being found."""

from .page import choose_run as choose_run
from .page import export as export
from .server import Server as Server
