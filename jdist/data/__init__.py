"""Data: which replica gets which example, in which order, ahead of the step that takes it."""

from jdist.data.dataset import DistributedDataset as DistributedDataset
from jdist.data.dataset import DistributedIterator as DistributedIterator
from jdist.data.dataset import stats as stats
from jdist.data.files import Files as Files
from jdist.data.sharding import AutoShardPolicy as AutoShardPolicy
from jdist.data.sharding import InputContext as InputContext
from jdist.data.timing import Stats as Stats
