"""torchdl_ray: an ordinary PyTorch training loop on every GPU of a Ray cluster, with the loop on the driver.

from torchdl_ray import DataParallel

model = DataParallel(MyModel(), num_workers=4)
"""

from . import errors
from .containers import replicate
from .data_parallel import DataParallel
from .launch import spawn
from .remote_tensor import RemoteTensor
from .tree import gather, scatter

__version__ = "0.1.0"
__all__ = ["DataParallel", "RemoteTensor", "errors", "gather", "replicate", "scatter", "spawn"]
