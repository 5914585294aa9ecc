"""Data: files to tensors, tensors to batches."""

from .augment import Augment as Augment
from .batches import Batches as Batches
from .catalogue import DATA_SETS as DATA_SETS
from .catalogue import DataSet as DataSet
from .errors import DataError as DataError
from .folder import Folder as Folder
from .images import Images as Images
from .load import data_root as data_root
from .load import load as load
from .validation import split_validation as split_validation
