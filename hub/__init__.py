"""
What others publish: checkpoints in Hugging Face layout.

    checkpoint.py   files, and weights by their names
    families.py     what config.json means, family by family
    formats.py      quantized checkpoints
    tokenizer.py    text to tokens and back, the chat template
    vet.py          finds and downloads a checkpoint, and says in one line what is wrong with it
    write.py        writes quantized checkpoints
"""
