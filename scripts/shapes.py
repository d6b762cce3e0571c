"""
The shapes of public models: what benchmark.py measures with random weights, and tune.py chooses kernels for.
"""
import sys
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from model import Config, LayerConfig, Rope, RopeScaling  # noqa: E402

LLAMA31 = RopeScaling(8.0, 1.0, 4.0, 8192)


def layers(n: int, theta: float = 1e4, scaling: RopeScaling | None = None, window: int | None = None) -> tuple:
    return (LayerConfig(window, Rope(theta, scaling)),) * n


SHAPES = {  # dim, layers, heads, kv heads, head dim, ffn dim, vocabulary, context
    "llama-2-7b": Config(4096, layers(32), 32, 32, 128, 11008, 32000, 4096),
    "llama-2-13b": Config(5120, layers(40), 40, 40, 128, 13824, 32000, 4096),
    "llama-2-70b": Config(8192, layers(80), 64, 8, 128, 28672, 32000, 4096),
    "llama-3.1-8b": Config(4096, layers(32, 5e5, LLAMA31), 32, 8, 128, 14336, 128256, 131072),
    "llama-3.1-70b": Config(8192, layers(80, 5e5, LLAMA31), 64, 8, 128, 28672, 128256, 131072),
    "llama-3.2-1b": Config(2048, layers(16, 5e5, replace(LLAMA31, factor=32.0)), 32, 8, 64, 8192, 128256, 131072,
                           tied=True),
    "qwen3-8b": Config(4096, layers(36, 1e6), 32, 8, 128, 12288, 151936, 40960, norm_eps=1e-6, qk_norm=True),
    "mistral-7b": Config(4096, layers(32, window=4096), 32, 8, 128, 14336, 32000, 32768),
    "smollm2-135m": Config(576, layers(30, 1e5), 9, 3, 64, 1536, 49152, 8192, tied=True),
}
