"""Input data: distributed data sets and their iterators, sources of files, and sharding policies."""

from jdist._src.data.dataset import DistributedDataset as DistributedDataset
from jdist._src.data.dataset import DistributedIterator as DistributedIterator
from jdist._src.data.dataset import stats as stats
from jdist._src.data.files import Files as Files
from jdist._src.data.shards import AutoShardPolicy as AutoShardPolicy
from jdist._src.data.shards import InputContext as InputContext
from jdist._src.data.stats import Stats as Stats
