"""What a trained run says about pictures that are not in its data set."""

from .prediction import Prediction as Prediction
from .predictor import BATCH as BATCH
from .predictor import Predictor as Predictor
from .predictor import predict as predict
