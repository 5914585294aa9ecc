"""What a model says to an input that is not a batch of pictures it can work on."""

from torch import Tensor


def check_pictures(x: Tensor, channels: int, *, multiple: int = 1, side: int | None = None) -> None:
    """Refuse, in one sentence, what is not (batch, channels, height, width) with sides that fit."""
    if not isinstance(x, Tensor) or not x.is_floating_point():
        got = x.dtype if isinstance(x, Tensor) else type(x).__name__
        raise TypeError(f"The pictures must be a floating-point tensor, got {got}: scale the pixels first.")
    fit = x.dim() == 4 and x.shape[1] == channels and 0 not in x.shape[2:]
    if side is None:
        wanted = f" and sides that are multiples of {multiple}" if multiple > 1 else ""
        fit = fit and x.shape[2] % multiple == 0 and x.shape[3] % multiple == 0
    else:
        wanted = f" and sides of {side}"
        fit = fit and tuple(x.shape[2:]) == (side, side)
    if not fit:
        raise ValueError(
            f"The input must be pictures (batch, channels, height, width) with {channels} channels{wanted}, "
            f"got {tuple(x.shape)}."
        )
