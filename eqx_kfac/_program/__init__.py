from ._flow import opened as opened, scan_counts as scan_counts
from ._found import bypassed as bypassed
from ._program import look as look, prepared as prepared, Program as Program
from ._run import example_weights as example_weights, run as run
from ._uses import (
    contains as contains,
    depends as depends,
    part_of as part_of,
    Uses as Uses,
    uses as uses,
)
