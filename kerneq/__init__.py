"""kerneq: kernel equilibrium models."""
