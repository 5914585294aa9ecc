"""`kerneq bench`: what things cost, measured side by side."""
