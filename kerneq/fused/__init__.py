"""GPU programs and their dispatch: X_triton.py has the Triton programs of an operation, X.py decides when they run.

X.py imports X_triton.py only where a program runs (`device` says what a GPU can run), so that Triton is optional.
"""
