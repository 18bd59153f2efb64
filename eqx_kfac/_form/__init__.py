from ._base import AbstractForm as AbstractForm
from ._dense import Dense as Dense
