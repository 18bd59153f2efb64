from ._jaxpr import (
    contains as contains,
    count_uses as count_uses,
    depends as depends,
    opened as opened,
    replaced as replaced,
    scan_counts as scan_counts,
    SlotUses as SlotUses,
)
from ._program import analyse as analyse, Program as Program, with_labels as with_labels
from ._run import example_weights as example_weights, run as run
from ._tracing import bypassed as bypassed
