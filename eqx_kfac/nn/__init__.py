from ._base import AbstractTagged as AbstractTagged
from ._composite import MLP as MLP, MultiheadAttention as MultiheadAttention
from ._conv import (
    Conv as Conv,
    Conv1d as Conv1d,
    Conv2d as Conv2d,
    Conv3d as Conv3d,
    ConvTranspose as ConvTranspose,
    ConvTranspose1d as ConvTranspose1d,
    ConvTranspose2d as ConvTranspose2d,
    ConvTranspose3d as ConvTranspose3d,
)
from ._convert import (
    Blocks as Blocks,
    cast as cast,
    Choice as Choice,
    convert_layers as convert_layers,
    Derived as Derived,
    revert_layers as revert_layers,
)
from ._elementwise import (
    BatchNorm as BatchNorm,
    GroupNorm as GroupNorm,
    LayerNorm as LayerNorm,
    Parameter as Parameter,
    PReLU as PReLU,
    RMSNorm as RMSNorm,
)
from ._embedding import Embedding as Embedding
from ._linear import Linear as Linear
from ._reparametrised import SpectralNorm as SpectralNorm, WeightNorm as WeightNorm
from ._rnn import GRUCell as GRUCell, LSTMCell as LSTMCell, scan_cell as scan_cell
from ._shared import Shared as Shared
