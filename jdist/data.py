"""Input pipelines: distributed data sets, sharding policies, files as sources, and statistics of the input pipeline."""

from jdist._src.core.public_names import set_public_module as _set_public_module
from jdist._src.data.buckets import Buckets as Buckets
from jdist._src.data.dataset import DistributedDataset as DistributedDataset
from jdist._src.data.dataset import DistributedIterator as DistributedIterator
from jdist._src.data.dataset import stats as stats
from jdist._src.data.files import Files as Files
from jdist._src.data.ragged import join_rows as join_rows
from jdist._src.data.ragged import pad_rows as pad_rows
from jdist._src.data.shards import AutoShardPolicy as AutoShardPolicy
from jdist._src.data.shards import InputContext as InputContext
from jdist._src.data.stats import Stats as Stats

_set_public_module(globals(), __name__)


def __dir__() -> list[str]:
    return sorted(name for name in globals() if not name.startswith("_"))
