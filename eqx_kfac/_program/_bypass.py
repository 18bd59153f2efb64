"""Parameters that reach the losses by another way than through the tag of their layer:
such layers, and layers that no loss uses, are named in an error."""

from .._misc import names
from .._tag import Tag, TaggedLayer
from ..nn._convert import has_own_tag, is_followed
from ._interpreter import all_sources
from ._trace import misused_bit, parameter_bit, Trace, unseen_bit


def check_uses(trace: Trace, trains: bool) -> None:
    """Raises if parameters bypass their tag, or, with `trains`, if a layer is not used.
    Names all such layers, each with the first of these reasons that applies."""
    outputs = all_sources(trace.outputs)
    unseen, outside, uncalled, penalised, unused, bypassed = [], [], [], [], [], []
    misused = []
    for number, tagged in enumerate(trace.layers):
        uses = trace.uses_of(number)
        allowed = trace.may_bypass(number)
        bypassing = outputs & parameter_bit(number)
        # A derivative of the layer that its tag does not see.
        if outputs & unseen_bit(number):
            unseen.append(tagged)
        # A layer that is called with something else in the place of its parameters.
        elif outputs & misused_bit(number):
            misused.append(tagged)
        # Arrays of any module, which the program also uses where no tag follows them.
        elif bypassing and is_followed(tagged.layer) and not allowed:
            outside.append(tagged)
        # Parameters that are used, but never by a call of their layer.
        elif not uses and bypassing:
            uncalled.append(tagged)
        # A layer that is called, but not for any output of a loss.
        elif not uses and trains and number in trace.penalised:
            penalised.append(tagged)
        # A layer that is not used at all. (One that is called for nothing is no mistake,
        # and operations that cannot be interpreted may call any layer.)
        elif not uses and trains and not trace.opaque and number not in trace.dead:
            unused.append(tagged)
        # A layer that is called, and whose parameters are used in another way, too.
        elif bypassing and not allowed:
            bypassed.append(tagged)
    if unseen:
        raise ValueError(_through_derivatives(unseen))
    reasons = (
        (misused, _MISUSED),
        (outside, _OUTSIDE),
        (uncalled, _UNCALLED),
        (bypassed, _BYPASSED),
        (penalised, _PENALISED),
        (unused, _UNUSED),
    )
    messages = [_about(layers, text) for layers, text in reasons if layers]
    if messages:
        raise ValueError(" ".join(messages))


_MISUSED = (
    "The {layers} {are} called with something else in the place of {parameters}: what is "
    "computed of them (masked, scaled, normalised), so that {a_tag} would see another "
    "gradient than theirs. Use the array in a method of a module of your own instead of "
    "changing the layer; or {otherwise}"
)
_OUTSIDE = (
    "Arrays of the {layers} reach the losses in a way that no tag follows: {parameters} "
    "are used outside of the methods of their module, or in another way than "
    "`kfac.convert` saw with an `example`. Use them in a method, which is called inside "
    "of the `vmap` over the examples; convert the model with the method that the loss "
    "function calls, `kfac.convert(model, example=x[0], method=...)`; or leave them "
    "untagged, `kfac.convert(model, example=x[0], blocks={blocks})`, with a `fallback`."
)
_UNCALLED = (
    "The {layers} {are} trained, but the loss function never calls {them}: {parameters} "
    "are used in another way, of which no curvature is collected. Call {them}; or "
    "{otherwise}"
)
_BYPASSED = (
    "Parameters of the {layers} reach the losses by another way than through {a_tag}, "
    "and no curvature would be collected of that: {parameters} are used outside of the "
    "layer, or a derivative of the layer in its parameters is. Call the layer instead; "
    "tie weights with `eqx.nn.Shared`; or {otherwise}"
)
_PENALISED = (
    "The {layers} {are} trained, but no loss depends on {them}: only scalars beside the "
    "losses do, which have a gradient, but no curvature. Make a loss of what {they} "
    "{return_}; or leave {them} untagged, `kfac.convert(kfac.revert(model), "
    "blocks={blocks})`, with a `fallback`."
)
_UNUSED = (
    "The {layers} {are} trained, but the loss function never calls {them}, and does "
    "nothing else with {parameters}. Freeze what is not used (`eqx.partition` it out of "
    "the model that is trained), or remove it."
)
_FOLLOWED = (
    "take gradients within the loss with respect to `kfac.revert(model)`; or have tags "
    "follow the arrays, whatever is done with them: `kfac.convert(kfac.revert(model), "
    "example=x[0])`, with what one call of the model gets; or leave {them} untagged, "
    "`kfac.convert(kfac.revert(model), blocks={blocks})`, with a `fallback`."
)
_OWN = (
    "write {them} without a tag of {its} own (an array in the place of a "
    "`kfac.Parameter`), so that tags can follow the arrays, whatever methods do with "
    "them: `kfac.convert(model, example=x[0])`, with what one call of the model gets. "
    "(A tag that a class was written with stays, whatever is converted.)"
)


def _about(layers: list[TaggedLayer], text: str) -> str:
    """The message `text` about some layers. There is one way out for layers whose tag
    `kfac.convert` has put there, and another for layers whose class has a tag."""
    written = [tagged for tagged in layers if has_own_tag(tagged.layer)]
    converted = [tagged for tagged in layers if not has_own_tag(tagged.layer)]
    both = (converted, _FOLLOWED), (written, _OWN)
    return " ".join(_about_alike(alike, text, way) for alike, way in both if alike)


def _about_alike(layers: list[TaggedLayer], text: str, otherwise: str) -> str:
    """The message `text` about layers for which there is the same way `otherwise`."""
    paths = [path for path, _, _ in layers]
    one = len(paths) == 1
    parameters = [n for _, tag, _ in layers for n in tag.form.names]
    words = dict(
        layers=("layer " if one else "layers ") + names(paths),
        are="is" if one else "are",
        them="it" if one else "them",
        they="it" if one else "they",
        return_="returns" if one else "return",
        its="its" if one else "their",
        a_tag="the layer's tag" if one else "the layers' tags",
        parameters=("its" if one else "their")
        + " parameters "
        + names(_once(parameters)),
        blocks=_no_blocks(paths),
    )
    return text.format(**words, otherwise=otherwise.format(**words))


def _no_blocks(paths: list[str]) -> str:
    """The argument `blocks` of `kfac.convert` that leaves some layers untagged."""
    return "{" + ", ".join(f"{path!r}: None" for path in paths[:8]) + "}"


def _once(words: list[str]) -> list[str]:
    return list(dict.fromkeys(words))


def _through_derivatives(layers: list[TaggedLayer]) -> str:
    """The message about layers whose derivatives the losses depend on, unseen by tags."""
    paths = [path for path, _, _ in layers]
    which = "layer" if len(layers) == 1 else "layers"
    whose = "its" if len(layers) == 1 else "their"
    last = f"leave the {which} untagged, `kfac.convert(kfac.revert(model), blocks="
    last += f"{_no_blocks(paths)})`"
    if any(has_own_tag(layer) for _, _, layer in layers):
        last = f"write the {which} without a tag"
    return (
        f"The losses are trained through a derivative of the {which} {names(paths)} in "
        f"{whose} input, of which no curvature would be collected: "
        f"{_why_unseen(layers[0].tag)}. If no gradient is to flow through it, stop it "
        f"(`jax.lax.stop_gradient`). As a last resort, {last}, with a `fallback`."
    )


def _why_unseen(tag: Tag) -> str:
    """Why a tag does not see a derivative, and what to do."""
    form, block = tag.form.label, type(tag.block).__name__
    if not tag.form.linear:
        return (
            f"its form, `{form}`, does not say that the layer is linear in its input "
            "(`linear = True`), up to a bias"
        )
    if not tag.block.derivatives:
        return (
            f"its block, `{block}`, does not say that it knows of rows without a bias "
            "(`derivatives = True`); `kfac.Kronecker()` does"
        )
    if not tag.block.reverse_derivatives:
        return (
            f"it is taken in reverse mode, and its block, `{block}`, does not say that "
            "it knows of that (`reverse_derivatives = True`); `kfac.Kronecker()` does. "
            "Or take it forward, which gives the same numbers: `jax.jacfwd(u)` in the "
            "place of `jax.grad(u)` or `jax.jacrev(u)`, `jax.jacfwd(jax.jacfwd(u))` in "
            "that of `jax.hessian(u)`"
        )
    return (
        "it is the transpose of the layer itself (`jax.linear_transpose`). Take that of "
        "its derivative, `jax.vjp`, which is the same"
    )
