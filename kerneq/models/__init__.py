"""stem → branches → fusion → head: the models of the papers and their baselines.

`build(name)` makes one, `names()` lists them, and `kerneq models` shows them with their sizes and accuracies.
"""

from .baselines import MDEQ as MDEQ
from .baselines import MDEQConfig as MDEQConfig
from .baselines import ResNet as ResNet
from .baselines import ResNetConfig as ResNetConfig
from .certified import CertifiedClassifier as CertifiedClassifier
from .certified import CertifiedConfig as CertifiedConfig
from .classifier import AbstractModel as AbstractModel
from .classifier import Classifier as Classifier
from .classifier import ClassifierConfig as ClassifierConfig
from .classifier import DenseClassifier as DenseClassifier
from .classifier import DenseConfig as DenseConfig
from .classifier import KernelConfig as KernelConfig
from .lipschitz import LipschitzClassifier as LipschitzClassifier
from .zoo import MODELS as MODELS
from .zoo import Entry as Entry
from .zoo import Measured as Measured
from .zoo import ModelConfig as ModelConfig
from .zoo import Published as Published
from .zoo import build as build
from .zoo import find as find
from .zoo import from_config as from_config
from .zoo import names as names
from .zoo import our_accuracies as our_accuracies
from .zoo import parameters as parameters
from .zoo import task as task
