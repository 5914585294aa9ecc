"""The paper's experiments, each a dataclass of settings and a function that runs it."""
