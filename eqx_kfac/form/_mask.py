import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float


class Mask:
    """Which entries of a weight are used, as static data: compared and hashed by what it
    says.

    **Fields:**

    - `entries`: true where an entry is used: `[d_out, d_in]`, or (while a program is
        looked at) of the shape of the weight.
    """

    def __init__(self, entries: Bool[np.ndarray, "..."]):
        self.entries = entries
        self.entries.flags.writeable = False
        self._hash = hash((entries.shape, np.packbits(entries).tobytes()))

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        return isinstance(other, Mask) and np.array_equal(self.entries, other.entries)

    def __repr__(self) -> str:
        used = np.mean(self.entries) if self.entries.size else 1
        return f"{used:.0%} of {' x '.join(map(str, self.entries.shape))}"

    @property
    def is_repeated(self) -> bool:
        """Whether it is the same everywhere along its first axis."""
        return bool(np.all(self.entries == self.entries[:1]))

    def project(
        self, matrices: Float[Array, "*lead d_out columns"]
    ) -> Float[Array, "*lead d_out columns"]:
        """Canonical matrices with zeros where entries are not used."""
        return jnp.where(self.of_columns(matrices.shape[-1]), matrices, 0)

    def of_columns(self, columns: int) -> Bool[Array, "d_out columns"]:
        """Which entries of a canonical matrix of so many columns are used. A bias is not
        masked, and may be all that there is."""
        d_out, d_in = self.entries.shape
        if columns < d_in:
            return jnp.ones((d_out, columns), bool)
        widths = (0, 0), (0, columns - d_in)
        return jnp.asarray(np.pad(self.entries, widths, constant_values=True))
