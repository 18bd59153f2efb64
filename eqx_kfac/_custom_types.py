from typing import Any, TypeAlias

from jaxtyping import Array, ArrayLike, Float, Int, PRNGKeyArray, Shaped


Scalar: TypeAlias = Shaped[ArrayLike, ""]
FloatScalar: TypeAlias = Float[Array, ""]
IntScalar: TypeAlias = Int[Array, ""]
Key: TypeAlias = PRNGKeyArray | Shaped[Array, "2"]
# A PyTree shaped like the user's model. (Spelled out because every level uses it.)
Model: TypeAlias = Any
