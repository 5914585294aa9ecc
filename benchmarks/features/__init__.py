"""What libraries for equilibrium models can do: a table whose every cell is what a run has found."""
