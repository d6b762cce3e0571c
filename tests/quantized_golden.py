"""Quantized checkpoints that other packages made: see makers/make_quantized_golden.py."""

import json
from pathlib import Path

from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from helpers import ROOT, change_tensors, put

FILES, CONFIGS = {}, {}  # of each setting
for path in sorted((ROOT / "tests").glob("quantized_golden*.safetensors")):
    with safe_open(path, framework="pt") as file:
        for setting, config in sorted(file.metadata().items()):
            FILES[setting], CONFIGS[setting] = path, json.loads(config)


def unfold(
    setting: str, directory: Path, settings: dict = {}, **tensors: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Writes a setting's checkpoint -> its tokens [T] and logits [T, V].

    settings: other keys of quantization_config; tensors: other tensors, None for one that is to be
    missing."""
    directory.mkdir(exist_ok=True)
    held, config = load_file(FILES[setting]), dict(CONFIGS[setting])
    own = {
        name.partition("/")[2]: tensor
        for name, tensor in held.items()
        if name in config["shared"] or name.startswith(setting + "/")
    }
    golden = own.pop("golden tokens"), own.pop("golden logits")
    config["quantization_config"] = config["quantization_config"] | settings
    put(directory / "config.json", config)
    save_file(own, directory / "model.safetensors")
    change_tensors(directory, **tensors)
    return golden
