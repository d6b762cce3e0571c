"""
Measure decode and prefill of a public shape, with random weights on the device, or of a checkpoint.

    python scripts/benchmark.py llama-2-7b
    python scripts/benchmark.py llama-3.1-8b --context 32768 --batch 4 --against eager,cublas
    python scripts/benchmark.py checkpoints/tiny --device cpu
    python scripts/benchmark.py --markdown results.jsonl

A configuration is one JSON object on one line of stdout; the progress bar is on stderr. Everything that is compared is
measured in the same run: the GPU's read bandwidth, its matrix rate, and the plain references of --against.
"""
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, replace
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
from tqdm import tqdm  # noqa: E402

from checkpoint import UserError, find_checkpoint, load_config, load_model, report_errors  # noqa: E402
from generate import DTYPES, GIB, Generator, Parser, check_memory, find_device, within  # noqa: E402
from kernels import read_bandwidth  # noqa: E402
from model import Config, Sampling, Transformer  # noqa: E402

LLAMA3_ROPE = dict(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192)
SHAPES = {  # dim, layers, heads, kv heads, head dim, ffn dim, vocabulary, context
    "llama-2-7b": Config(4096, 32, 32, 32, 128, 11008, 32000, 4096),
    "llama-2-13b": Config(5120, 40, 40, 40, 128, 13824, 32000, 4096),
    "llama-2-70b": Config(8192, 80, 64, 8, 128, 28672, 32000, 4096),
    "llama-3.1-8b": Config(4096, 32, 32, 8, 128, 14336, 128256, 131072, rope_theta=5e5, rope_scaling=LLAMA3_ROPE),
    "llama-3.1-70b": Config(8192, 80, 64, 8, 128, 28672, 128256, 131072, rope_theta=5e5, rope_scaling=LLAMA3_ROPE),
    "llama-3.2-1b": Config(2048, 16, 32, 8, 64, 8192, 128256, 131072, rope_theta=5e5,
                           rope_scaling=LLAMA3_ROPE | dict(factor=32.0), tied=True),
    "qwen3-8b": Config(4096, 36, 32, 8, 128, 12288, 151936, 40960, norm_eps=1e-6, rope_theta=1e6, qk_norm=True),
    "mistral-7b": Config(4096, 32, 32, 8, 128, 14336, 32000, 32768, window=4096),
    "smollm2-135m": Config(576, 30, 9, 3, 64, 1536, 49152, 8192, rope_theta=1e5, tied=True),
}


def random_model(config: Config, device: torch.device, dtype: torch.dtype) -> Transformer:
    """Normal weights of a scale that keeps activations near 1; norms are 1."""
    with torch.device("meta"):
        model = Transformer(config)
    model = model.to(dtype).to_empty(device=device).requires_grad_(False)
    if config.tied:
        model.head.weight = model.embed.weight
    for weight in model.parameters():
        weight.fill_(1) if weight.dim() == 1 else weight.normal_(std=0.02)
    return model
