"""From the originals' raw files to Parquet with a ready recipe."""

from .avazu import import_avazu
from .criteo import import_criteo
from .events import import_events
from .movielens import import_movielens

__all__ = ["import_avazu", "import_criteo", "import_events", "import_movielens"]
