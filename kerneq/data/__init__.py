"""Data: files to tensors, tensors to batches."""

from .augment import Augment as Augment
from .batches import Batches as Batches
from .catalogue import DATA_SETS as DATA_SETS
from .dataset import AbstractDataSet as AbstractDataSet
from .dataset import data_root as data_root
from .errors import DataError as DataError
from .folder import Folder as Folder
from .images import Images as Images
from .load import Description as Description
from .load import describe as describe
from .load import load as load
from .validation import split_validation as split_validation
