"""A run as a noun: its configuration, folder, checkpoints and environment."""
