"""
What others publish: checkpoints in Hugging Face layout.

    checkpoint.py   files, and weights by their names
    families.py     what config.json means, family by family
    formats.py      quantized checkpoints
    tokenizer.py    text to tokens and back, the chat template
    generation.py   what generation_config.json says of how tokens are drawn
    vet.py          finds and downloads a checkpoint, and says in one line what is wrong with it
    write.py        writes quantized checkpoints

What is read, and what it means, stands for weights in checkpoint.py, for quantization_config in
formats.py, for texts, templates and what ends a text in tokenizer.py, for sampling in
generation.py, and for config.json here (as in transformers 5.24, whose class or function stands
behind):

- config.json: a missing key stands for the family's default (families.DEFAULTS; the family's
  configuration class). null is no value: no window, as many key as query heads, heads of
  hidden_size / num_attention_heads, an untied head. Where a model needs one, null is refused.
- config.json of a model that also sees: text_config alone describes the language model; what
  concerns the whole, families.OF_THE_WHOLE, is that of the level above, or without it of
  text_config (PreTrainedConfig.get_text_config, GenerationConfig.from_model_config).
- model_type mistral beside layer_types: ministral's, where layers differ in the window (AutoConfig).
- tie_word_embeddings: of a model that also sees, the level above, whose default is that of its
  class; llava's is true if either level says so (Mistral3Config, Gemma3Config, LlavaConfig).
- the output head: tied only if the files lack it, or hold the embedding as it; a tied file may have
  the one matrix by either name (PreTrainedModel.tie_weights).
- rope: rope_scaling, unless it is null or {}; else rope_parameters, unless null; else the family's
  default. In OLMo 3 and Gemma 3 rope_scaling goes into rope_parameters' full_attention
  (RotaryEmbeddingConfigMixin.convert_rope_params_to_dict and the families' own).
- rope_theta: the one beside the type, then that of config.json, then the family's; for layers with
  a window rope_local_base_freq, or OLMo 3's 500,000 (the same functions).
- original_max_position_embeddings: that of config.json before the one beside the rope's type, but
  not in OLMo 3 and Gemma 3 (standardize_rope_params). 0 in mscale, mscale_all_dim, beta_fast or
  beta_slow is a missing value (_compute_yarn_parameters).
- the context: max_position_embeddings, or with YaRN its original times its factor, if that is more;
  where no original is named, and with linear stretch, more only if max_seq_length asks for it (the
  model cards of those that publish; transformers has no such limit).
"""
