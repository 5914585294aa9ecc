"""The theory of the papers as functions, published and corrected side by side, and `kerneq verify`, which checks it."""

from .constants import Constants as Constants
from .constants import measure as measure
from .propositions import Bound as Bound
from .propositions import Comparison as Comparison
from .propositions import Expansion as Expansion
from .propositions import estimate_similarity as estimate_similarity
from .propositions import feature_map as feature_map
from .propositions import input_lipschitz as input_lipschitz
from .propositions import lemma1 as lemma1
from .propositions import lemma2 as lemma2
from .propositions import lemma3 as lemma3
from .propositions import margin_loss as margin_loss
from .propositions import perturbation as perturbation
from .propositions import proposition1 as proposition1
from .propositions import proposition2 as proposition2
from .propositions import proposition3 as proposition3
from .propositions import proposition4 as proposition4
from .propositions import remark1 as remark1
from .propositions import remark2 as remark2
from .propositions import remark3 as remark3
from .propositions import theorem1 as theorem1
from .propositions import theorem2 as theorem2
from .propositions import theorem3 as theorem3
