"""
A layer's parts, and its products, plain and with what fast/ makes of it: python recipe_layers.py TINY ROWS8 OUT
"""

import sys
from functools import partial
from pathlib import Path
import torch
from safetensors.torch import save_file
from fast import optimize
from hub import formats
from hub.checkpoint import Checkpoint
from tp import Shard

Shard.parallelize = lambda self, model: None  # a rank's part is loaded without the other ranks
tiny, rows8, out = sys.argv[1:]
load = partial(formats.load, device=torch.device("cpu"), dtype=torch.float32)
held = {}
for kind, directory, how in (
    ("int2", tiny, dict(quantize="int2")),
    ("rows8", rows8, {}),
    ("rank 0", rows8, dict(split=partial(Shard, rank=0, ranks=2))),
    ("rank 1", rows8, dict(split=partial(Shard, rank=1, ranks=2))),
):
    model = load(Checkpoint(Path(directory)), **how)
    layer = model.layers[0].attn.wo
    x = torch.randn(5, layer.in_features)
    held |= {f"{kind} {name}": tensor for name, tensor in layer.named_parameters()}
    held |= {f"{kind} x": x, f"{kind} y": layer(x)}
    optimize(model)
    held[f"{kind} fast"] = model.layers[0].attn.wo(x)
save_file({name: tensor.contiguous() for name, tensor in held.items()}, out)
