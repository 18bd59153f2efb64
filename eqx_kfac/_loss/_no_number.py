"""What a loss object does not do, although a number would."""

import equinox as eqx


def _refused(self: eqx.Module, *_, **__):
    raise TypeError(
        f"`{type(self).__name__}` is a loss that knows its predictive distribution, and "
        "not a number. Its number is `loss.value`. (Losses add up, and can be multiplied "
        "by numbers that are not negative.)"
    )


def _not_negated(self: eqx.Module, *_):
    raise TypeError(
        f"`{type(self).__name__}` cannot be negated or subtracted: its curvature would "
        "not be positive semidefinite. To maximise a scalar, subtract it, as `loss - "
        "bonus`. The number of a loss is `loss.value`."
    )


class NoNumber(eqx.Module):
    """Says what to do instead, wherever Python asks the object itself. (Functions of
    `jax.numpy` do not.)"""

    # So that `np.float32(2) * loss` is not an array of losses.
    __array_ufunc__ = None

    __neg__ = _not_negated
    __rsub__ = _not_negated
    __float__ = _refused
    __int__ = _refused
    __abs__ = _refused
    __array__ = _refused
    __lt__ = _refused
    __le__ = _refused
    __gt__ = _refused
    __ge__ = _refused
    __pow__ = _refused
    __rtruediv__ = _refused

    def __format__(self, spec: str) -> str:
        return _refused(self) if spec else str(self)
