"""Every rule table filled: importing this gives ops their meaning, gradients and definitions."""

from treadle.autodiff import composites as composites
from treadle.autodiff import control as control
from treadle.autodiff import elementwise as elementwise
from treadle.autodiff import structure as structure
from treadle.batching import bodies as bodies
from treadle.batching import folding as folding
from treadle.batching import primitives as primitives
from treadle.domains import meaning as meaning
from treadle.domains import residues as residues
from treadle.domains import tangents as tangents
from treadle.frontend import definitions as definitions
from treadle.frontend import methods as methods
