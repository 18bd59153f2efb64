from ._factorise import (
    damping_of as damping_of,
    factorise as factorise,
    for_each as for_each,
    refactorise as refactorise,
)
from ._precondition import precondition as precondition
from ._through_rows import precondition_through_rows as precondition_through_rows
