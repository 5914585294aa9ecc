"""What is proved about a trained model: unique equilibria, the error of a computed one, a radius around each input."""

from ..kernels.radial import input_lipschitz as input_lipschitz
from .certificate import Certificate as Certificate
from .certificate import LayerBound as LayerBound
from .certificate import certify as certify
from .norms import conv_norm as conv_norm
from .norms import matrix_norm as matrix_norm
