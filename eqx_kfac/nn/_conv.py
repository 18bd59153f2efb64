from typing import Any

import equinox as eqx

from ._base import TaggedOutputs


class Conv(TaggedOutputs, eqx.nn.Conv):
    """`equinox.nn.Conv`, with a tag."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)


class Conv1d(TaggedOutputs, eqx.nn.Conv1d):
    """`equinox.nn.Conv1d`, with a tag."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)


class Conv2d(TaggedOutputs, eqx.nn.Conv2d):
    """`equinox.nn.Conv2d`, with a tag."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)


class Conv3d(TaggedOutputs, eqx.nn.Conv3d):
    """`equinox.nn.Conv3d`, with a tag."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)


class ConvTranspose(TaggedOutputs, eqx.nn.ConvTranspose):
    """`equinox.nn.ConvTranspose`, with a tag."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)


class ConvTranspose1d(TaggedOutputs, eqx.nn.ConvTranspose1d):
    """`equinox.nn.ConvTranspose1d`, with a tag."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)


class ConvTranspose2d(TaggedOutputs, eqx.nn.ConvTranspose2d):
    """`equinox.nn.ConvTranspose2d`, with a tag."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)


class ConvTranspose3d(TaggedOutputs, eqx.nn.ConvTranspose3d):
    """`equinox.nn.ConvTranspose3d`, with a tag."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
