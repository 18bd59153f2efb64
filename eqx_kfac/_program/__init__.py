from ._program import look as look, prepared as prepared, Program as Program
from ._run import example_weights as example_weights, run as run
from ._uses import contains as contains, depends as depends, Uses as Uses, uses as uses
