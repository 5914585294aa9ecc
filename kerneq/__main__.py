"""`python -m kerneq`, also what torchrun starts: `torchrun --nproc-per-node N -m kerneq train …`."""

from .cli import main

if __name__ == "__main__":
    main()
