from .._custom_types import Model
from .._misc import names
from .._tag import tagged_layers
from ._exact import Exact


class Centred(Exact):
    r"""The covariance of gradients, instead of their second moment: for every cotangent
    that [`eqx_kfac.Exact`][] pulls back, the mean over the batch is subtracted,

    $$\frac1N \sum_n \nabla_n \nabla_n^\top - \bar\nabla \bar\nabla^\top, \qquad
    \bar\nabla = \frac1N \sum_n \nabla_n$$

    This is the Fisher of a density whose norm is not known, such as
    $\lvert \psi \rvert^2$ (see [`eqx_kfac.Energy`][]). It is for blocks that are built
    from single examples' gradients, `TNT`, `Full`, `Diagonal` and `Identity`, and
    `Kronecker` where positions are taken jointly; and for `Kronecker` with `Expand`,
    whose $G \otimes A$ becomes

    $$\left(G - \frac{M M^\top}{R \operatorname{tr} A}\right) \otimes A$$

    with $M$ the layer's mean gradient, and $R$ the rows of an example: the Kronecker
    product with the same $A$ that has the trace over inputs of $G \otimes A$ less those
    of $R$ independent parts of the mean. It supports one loss, without weights, and
    uses the whole batch, because a part has another mean.

    ??? cite "Reference"

        D. Pfau, J. Spencer, A. Matthews, W. Foulkes, *Ab initio solution of the
        many-electron Schrödinger equation with deep neural networks*, Physical Review
        Research 2, 2020, for the covariance.
    """

    centred = True

    def check(self, model: Model) -> None:
        super().check(model)
        layers = tagged_layers(model)
        # The mean of masked gradients may be larger than their moments without a mask.
        knows = lambda tag: tag.block.subtracts_means and tag.form.mask is None
        others = [path for path, tag, _ in layers if not knows(tag)]
        if others:
            raise ValueError(
                "`kfac.Centred` takes the mean of examples' gradients away, which the "
                f"blocks of {names(others)} do not know. Use `kfac.TNT()`, "
                "`kfac.Full()`, `kfac.Diagonal()`, `kfac.Identity()`, or (where the "
                "weight is neither masked nor used transposed) `kfac.Kronecker()`; or "
                "`kfac.Exact()`."
            )
        is_rounded = lambda p: p is not None and p.dtype.itemsize < 4
        rounded = [
            path
            for path, tag, layer in layers
            if any(map(is_rounded, tag.form.parameters(layer)))
        ]
        if rounded:
            raise ValueError(
                "`kfac.Centred` subtracts the mean of gradients, which the layers "
                f"{names(rounded)} round to 16 bits: what is left "
                "would be rounding. Train them in float32, `kfac.cast(model, "
                "jnp.float32)`, or use `kfac.Exact()`."
            )

    def number(self, losses):
        if len(losses) != 1 or losses[0].weights is not None:
            raise ValueError(
                "`kfac.Centred` is of one loss without weights. Use `kfac.Exact()`."
            )
        return super().number(losses)
