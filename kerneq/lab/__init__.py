"""The laboratory: data, training, evaluation, reports and the command line, for the models of the library.

It needs more than the library does: `pip install kerneq[lab]`. The library never imports it.
"""
