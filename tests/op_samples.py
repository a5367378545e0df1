"""Samples of every op and composite in every dtype it takes; no test runner is needed to use them."""

from treadle.verify.retyped import (
    COMPUTED as COMPUTED,
)
from treadle.verify.retyped import (
    agreement as agreement,
)
from treadle.verify.retyped import (
    prepared as prepared,
)
from treadle.verify.retyped import (
    retyped as retyped,
)
from treadle.verify.retyped import (
    samples_in as samples_in,
)
from treadle.verify.retyped import (
    spread as spread,
)
