"""stem → branches → fusion → head: the models of the papers and their baselines."""

from .classifier import Classifier as Classifier
from .config import ClassifierConfig as ClassifierConfig
from .dense import DenseClassifier as DenseClassifier
from .multiscale import MDEQ as MDEQ
from .resnet import ResNet as ResNet
from .zoo import MODELS as MODELS
from .zoo import Entry as Entry
from .zoo import build as build
from .zoo import parameters as parameters
