"""Data: files to images, images to batches.

`load(name, split)` gives Images, in memory or in files that are decoded when needed; `Batches` makes normalised,
augmented batches of them on the device; `describe` says which data sets are there."""

from .batches import Augment as Augment
from .batches import Batches as Batches
from .batches import normalise as normalise
from .batches import rank_in_class as rank_in_class
from .batches import split_fold as split_fold
from .batches import split_validation as split_validation
from .datasets import DATA_SETS as DATA_SETS
from .datasets import OWN as OWN
from .datasets import SUFFIXES as SUFFIXES
from .datasets import data_root as data_root
from .datasets import describe as describe
from .datasets import find as find
from .datasets import fingerprint as fingerprint
from .datasets import is_cut as is_cut
from .datasets import load as load
from .datasets import pictures_in as pictures_in
from .images import DataError as DataError
from .images import ImageFiles as ImageFiles
from .images import Images as Images
from .images import decode as decode
from .operations import grey as grey
