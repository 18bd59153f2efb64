import equinox as eqx

from ._base import TaggedOutputs


class Conv(TaggedOutputs, eqx.nn.Conv):
    """`equinox.nn.Conv`, with a tag."""

    __init__ = TaggedOutputs.__init__


class Conv1d(TaggedOutputs, eqx.nn.Conv1d):
    """`equinox.nn.Conv1d`, with a tag."""

    __init__ = TaggedOutputs.__init__


class Conv2d(TaggedOutputs, eqx.nn.Conv2d):
    """`equinox.nn.Conv2d`, with a tag."""

    __init__ = TaggedOutputs.__init__


class Conv3d(TaggedOutputs, eqx.nn.Conv3d):
    """`equinox.nn.Conv3d`, with a tag."""

    __init__ = TaggedOutputs.__init__


class ConvTranspose(TaggedOutputs, eqx.nn.ConvTranspose):
    """`equinox.nn.ConvTranspose`, with a tag."""

    __init__ = TaggedOutputs.__init__


class ConvTranspose1d(TaggedOutputs, eqx.nn.ConvTranspose1d):
    """`equinox.nn.ConvTranspose1d`, with a tag."""

    __init__ = TaggedOutputs.__init__


class ConvTranspose2d(TaggedOutputs, eqx.nn.ConvTranspose2d):
    """`equinox.nn.ConvTranspose2d`, with a tag."""

    __init__ = TaggedOutputs.__init__


class ConvTranspose3d(TaggedOutputs, eqx.nn.ConvTranspose3d):
    """`equinox.nn.ConvTranspose3d`, with a tag."""

    __init__ = TaggedOutputs.__init__
