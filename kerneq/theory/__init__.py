"""Theory you can run: what is certain about a trained model."""

from .certificates import Certificate as Certificate
from .certificates import LayerBound as LayerBound
from .certificates import certify as certify
from .norms import conv_norm as conv_norm
from .norms import matrix_norm as matrix_norm
