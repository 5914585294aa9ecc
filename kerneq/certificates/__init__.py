"""What is proved about a trained model: unique equilibria, the error of a computed one, a radius around each input.

Not named `certify`: importing a package binds its name in `kerneq`, where `kerneq.certify` is the function.
"""

from .bounds import LayerBound as LayerBound
from .certificate import Certificate as Certificate
from .certificate import certify as certify
from .norms import conv_norm as conv_norm
from .norms import matrix_norm as matrix_norm
