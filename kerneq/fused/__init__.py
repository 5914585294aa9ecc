"""All Triton code: one chapter an operation, its plain PyTorch form in X.py and its Triton programs in X_triton.py.

X.py decides which form runs (`device` says what a card can run) and imports X_triton.py only then: Triton is optional.
"""
