"""
What generation_config.json says of how tokens are drawn: the values of Sampling's fields that a
checkpoint recommends.

What is read, and what it means (judged by transformers 5.24's GenerationConfig and what its
generate() makes of it):

    an option that is given       wins over the file, and the file over Sampling's defaults, field by
                                  field; null is as if the key were not there
    do_sample: false              greedy, unless a temperature is given; without the key we draw, at
                                  the file's temperature or Sampling's
    top_k: 0 or -1                off; -1 is vLLM's word, which transformers refuses
    top_p: 0                      greedy: one token makes up more than 0
    top_k: 50.0                   50
    presence_penalty,             as vLLM reads them; transformers has neither
    frequency_penalty
    eos_token_id                  read by hub/tokenizer.py: if it is there, config.json's is not. Where
                                  the file is there without the key, transformers would not end at all
    sampling keys in config.json  not read; transformers takes them where this file is missing
    INERT's keys                  one line names those that would change a text and do nothing here
    any other key                 is of no matter to a text, or unknown to transformers
"""

from dataclasses import fields

from generate import Sampling
from hub.checkpoint import Checkpoint, reading
from hub.families import value_of

# Keys that change a text in transformers, and not here -> the value that changes nothing, beside
# null. max_length is left out: it is 20 wherever nobody thought of it.
INERT = {
    "num_beams": 1,
    "num_beam_groups": 1,
    "diversity_penalty": 0,
    "constraints": None,
    "force_words_ids": None,
    "penalty_alpha": 0,
    "dola_layers": None,
    "typical_p": 1,
    "top_h": None,
    "epsilon_cutoff": 0,
    "eta_cutoff": 0,
    "no_repeat_ngram_size": 0,
    "encoder_no_repeat_ngram_size": 0,
    "encoder_repetition_penalty": 1,
    "bad_words_ids": [],
    "suppress_tokens": [],
    "begin_suppress_tokens": [],
    "sequence_bias": {},
    "forced_bos_token_id": None,
    "forced_eos_token_id": None,
    "exponential_decay_length_penalty": None,
    "guidance_scale": 1,
    "watermarking_config": None,
    "token_healing": False,
    "stop_strings": [],
    "min_length": 0,
    "min_new_tokens": 0,
    "max_new_tokens": None,
    "max_time": None,
    "num_return_sequences": 1,
}


def read_sampling(checkpoint: Checkpoint) -> tuple[dict, str]:
    """The values of Sampling's fields, and a line that says what was taken in another way than it
    stands there, and what does nothing; "": there is nothing to say. ValueError for a value beyond
    its limits."""
    path, file = checkpoint.directory / "generation_config.json", checkpoint.generation
    found, taken = {}, []
    with reading(path):
        for each in fields(Sampling):
            value = file.get(each.name)
            if value is None:
                continue
            found[each.name] = value
            if each.type is int and isinstance(value, float) and value.is_integer():
                found[each.name] = int(value)
                taken.append(f"{each.name}={value} as {int(value)}")
        Sampling(**found)
        if found.get("top_k") in (0, -1):
            taken.append(f"top_k={found['top_k']} as off")
        if found.get("top_p") == 0:
            taken.append(f"top_p={found['top_p']} as greedy")
        if not value_of(file, "do_sample", bool, True):
            found["temperature"] = 0.0
    said = [f"taken: {', '.join(taken)}"] if taken else []
    if without_effect := inert(file):
        said.append(f"does nothing here: {', '.join(without_effect)}")
    return found, f"{path}: {'; '.join(said)}" if said else ""


def inert(settings: dict) -> list[str]:
    """Which of the settings would change a text in transformers and do nothing here."""
    return [
        f"{key}={settings[key]!r:.60}"
        for key, neutral in INERT.items()
        if settings.get(key) not in (None, neutral)
    ]
