"""
Multi-token prediction: the layer that Qwen3.5 to 3.8 and Qwen3-Next bring in their own files
(`mtp.*`), and that was trained to predict the token after the next one (arXiv 2412.19437, section
2.2). --draft mtp drafts with it.

heads.py says what it reads when, and drafts with it. The target's feature is its last hidden state
behind its final norm. With the next token's embedding it goes, both normed, through fc into a layer
like the target's attention layers. The embedding and the output head are the target's. To draft more
than one token the layer runs again, on its own output behind mtp.norm.

Shapes: as in heads.py.
"""

from dataclasses import replace

import torch
import torch.nn as nn

from drafts.heads import DraftHead
from hub.checkpoint import Checkpoint, Place, Weight, borrowing_weights
from hub.families import EXPERTS, value_of
from model import Config, RMSNorm, Transformer

PREFIX = "mtp."


class MtpHead(DraftHead):
    norm_output = True

    def __init__(self, config: Config, n_layer: int):
        """n_layer: the target's."""
        super().__init__(config)
        D = config.dim
        self.target_places, self.head_size = (n_layer,), config.vocab_size
        self.embedding_norm, self.state_norm = RMSNorm(D, config), RMSNorm(D, config)
        self.fc = nn.Linear(2 * D, D, bias=False)
        self.target_norm = None

    def share(self, target: Transformer):
        self.embed, self.head, self.target_norm = target.embed, target.head, target.norm

    def project(self, features):
        return self.target_norm(features)

    def inputs(self, tokens, states):
        pair = self.embedding_norm(self.embedded(tokens)), self.state_norm(states)
        return self.fc(torch.cat(pair, dim=-1))


class MtpCheckpoint(Checkpoint):
    """Of the target's Checkpoint, the tensors that draft. ValueError where there are none."""

    told_by_tensors = True  # those who quantize a model leave it out, and do not always say so

    def __init__(self, target: Checkpoint):
        vars(self).update(vars(target))
        vars(self).pop("weights", None)  # the target's
        files = self.files()
        if "fc.weight" not in files:
            raise ValueError(
                f"draft=mtp: {self.directory} has no {PREFIX}fc.weight: want a checkpoint that "
                "brings its own draft, as Qwen3.5 does, or another draft"
            )
        # transformers has no such layers, and drops the keys. Qwen3-Next's files say nothing.
        n = value_of(self.hf, "mtp_num_hidden_layers", int, 1)
        own = value_of(self.hf, "mtp_use_dedicated_embeddings", bool, False)
        if n != 1 or own:
            raise ValueError(
                f"draft=mtp: {self.directory}: mtp_num_hidden_layers={n}, "
                f"mtp_use_dedicated_embeddings={own}: want 1 and false"
            )
        config = target.config
        layer = next((layer for layer in reversed(config.layers) if not layer.delta), None)
        if not layer:
            raise ValueError(
                f"draft=mtp: {self.directory} has no attention layer, and its draft is one"
            )
        experts = config.expert_files
        if experts:  # in one tensor or each its own, as the target's or not
            in_one = any(name.endswith(".gate_up_proj") for name in files)
            experts = EXPERTS[: 2 if in_one else None]
        self.n_layer, self.places = config.n_layer, (config.n_layer,)
        self.config = replace(config, layers=(layer,), tied=False, expert_files=experts)

    def files(self) -> dict[str, Place]:
        places = {
            name.removeprefix("model."): place for name, place in self.of_text(self.paths).items()
        }
        return {
            name.removeprefix(PREFIX): place
            for name, place in places.items()
            if name.startswith(PREFIX)
        }

    def counted(self) -> Config:
        """Embedding and head are the target's, and count there."""
        return replace(self.config, vocab_size=0, tied=True)

    def make_model(self, config: Config) -> MtpHead:
        return MtpHead(config, self.n_layer)

    def weights_of(self, config: Config) -> dict[str, Weight]:
        D = config.dim
        return borrowing_weights(config) | {
            "fc.weight": Weight("fc.weight", 0, (D, 2 * D)),
            "pre_fc_norm_embedding.weight": Weight("embedding_norm.weight", 0, (D,), norm=True),
            "pre_fc_norm_hidden.weight": Weight("state_norm.weight", 0, (D,), norm=True),
        }
