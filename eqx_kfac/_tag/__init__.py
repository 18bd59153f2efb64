from ._collector import (
    row_shapes_p as row_shapes_p,
    RowCollector as RowCollector,
    RowShapes as RowShapes,
)
from ._partition import (
    partition_tagged as partition_tagged,
)
from ._primitive import (
    covered_p as covered_p,
    Label as Label,
    label_of as label_of,
    statistic_p as statistic_p,
    tag_p as tag_p,
    unseen_p as unseen_p,
)
from ._tag import is_trainable as is_trainable, Tag as Tag
from ._tagged import (
    blank as blank,
    check_order as check_order,
    check_tagged as check_tagged,
    empty_tags as empty_tags,
    fill_rows as fill_rows,
    fill_tags as fill_tags,
    flatten_tags as flatten_tags,
    is_code as is_code,
    is_tagged as is_tagged,
    LayerError as LayerError,
    map_at_once as map_at_once,
    map_tags as map_tags,
    naming_layers as naming_layers,
    only_rows as only_rows,
    tagged_layers as tagged_layers,
    TaggedLayer as TaggedLayer,
    trained_layers as trained_layers,
    update_layers as update_layers,
    with_tags as with_tags,
)
from ._weights import row_weights as row_weights
