from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from jaxtyping import Array, ArrayLike, Float, Int, PRNGKeyArray, Shaped


Scalar: TypeAlias = Shaped[ArrayLike, ""]
FloatScalar: TypeAlias = Float[Array, ""]
IntScalar: TypeAlias = Int[Array, ""]
Key: TypeAlias = PRNGKeyArray | Shaped[Array, "2"]
# A number, or a schedule: a function of the step.
Numeric: TypeAlias = ArrayLike | Callable[[IntScalar], ArrayLike]
# The arguments of `eqx_kfac.KFAC`, by name: numbers, schedules, rules, other objects.
Choices: TypeAlias = Mapping[str, Any]
# What a loss function takes beside the model.
Args: TypeAlias = Sequence[Any]
Kwargs: TypeAlias = dict[str, Any]
# What is passed to a lineax solver as its options.
Options: TypeAlias = dict[str, Any]
# A PyTree shaped like the user's model. (Spelled out because every level uses it.)
Model: TypeAlias = Any
# A tagged layer, or the part of a model-shaped tree (gradients, say) in its place.
Layer: TypeAlias = Any
# A number, or a model-shaped tree with one (on its stack) for every layer.
PerLayer: TypeAlias = Any
# What an array is to be like: something with its shape, type and sharding.
Like: TypeAlias = Any
# How much the examples of a batch count, on their axes; `None`: all count alike.
Weights: TypeAlias = Array | None
