"""
model.py and generate.py alone: an engine with random weights.
"""

import torch
from generate import Engine, Sampling, generate
from model import Config, LayerConfig, Rope, Transformer

rope = Rope(tuple(1e4 ** (-i / 8) for i in range(0, 8, 2)))
layers = (LayerConfig(rope=rope),) * 2
model = Transformer(Config(32, layers, 4, 2, 8, 64, vocab_size=50, context=64))
for parameter in model.parameters():
    torch.nn.init.normal_(parameter, std=0.1)
engine = Engine(model.requires_grad_(False), 40, 2, Sampling(0))
for step in generate(engine, [[1, 2, 3], [4]], 5):
    print(len(step))
