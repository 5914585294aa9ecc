"""Coordinates of many samples: tensors, arrays and files that do not fit in memory, read block by block."""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

Rows = Tensor | np.ndarray  # coordinates (n, d); an array may be a memmap


def read_rows(X: Rows, rows: slice | Tensor, like: Tensor) -> Tensor:
    """Return some rows of a tensor, an array or a memmap, on the device and in the dtype of `like`."""
    if isinstance(X, Tensor):
        found = X[rows.to(X.device) if isinstance(rows, Tensor) else rows]
    else:
        found = torch.from_numpy(np.array(X[rows if isinstance(rows, slice) else rows.cpu().numpy()]))
    return found.to(like)


def save_rows(path: str | Path, chunks: Iterable[Any], dtype: Any = np.float64) -> np.memmap:
    """Write chunks of rows, (k, d) each, to one .npy file, and return it as a memmap (n, d) to fit a kernel GLM to.

    For data that do not fit: a chunk is whatever `np.asarray` understands, such as those of `read_table`.
    """
    target = Path(path)
    part = target.with_name(f".{target.name}.part")
    rows, width = 0, None
    with part.open("wb") as file:

        def write_header() -> None:  # NumPy leaves room in it for any number of rows
            facts = {"descr": np.dtype(dtype).str, "fortran_order": False, "shape": (rows, width or 0)}
            np.lib.format.write_array_header_1_0(file, facts)

        for chunk in chunks:
            block = np.ascontiguousarray(chunk, dtype=dtype)
            if block.ndim != 2 or block.shape[1] != (width or block.shape[1]):
                raise ValueError(f"Chunks must be (k, {width or 'd'}), got shape {block.shape}.")
            if width is None:
                width = block.shape[1]
                write_header()
            block.tofile(file)
            rows += len(block)
        if width is None:
            raise ValueError("There must be one chunk of rows at least.")
        file.seek(0)
        write_header()
    part.replace(target)
    return np.load(target, mmap_mode="r")


def read_table(path: str | Path, columns: Sequence[str] | None = None) -> Iterator[np.ndarray]:
    """Give the rows of a Parquet or an Arrow file (IPC, Feather) in chunks (k, d) of float64; needs pyarrow.

    >>> X = save_rows("rows.npy", read_table("trips.parquet", ["distance", "hour"]))
    >>> y = np.concatenate(list(read_table("trips.parquet", ["riders"])))[:, 0]

    Missing numbers are NaN, which a fit refuses.
    """
    try:
        import pyarrow
        import pyarrow.parquet
    except ModuleNotFoundError as error:
        words = "`read_table` needs pyarrow: install it by `pip install 'kerneq[arrow]'`."
        raise ModuleNotFoundError(words, name=error.name) from None
    chosen = None if columns is None else list(columns)
    with pyarrow.memory_map(str(path)) as file:
        if Path(path).suffix == ".parquet":
            batches = pyarrow.parquet.ParquetFile(file).iter_batches(columns=chosen)
        else:
            reader = pyarrow.ipc.open_file(file)
            batches = map(reader.get_batch, range(reader.num_record_batches))
        for batch in batches:
            names = chosen or batch.schema.names
            yield np.column_stack([_read_column(name, batch.column(name)) for name in names])


def _read_column(name: str, column: Any) -> np.ndarray:
    try:
        return np.asarray(column.to_numpy(zero_copy_only=False), dtype=np.float64)
    except (ValueError, TypeError):
        raise ValueError(f"The column {name!r} has no numbers ({column.type}): name others in `columns`.") from None
