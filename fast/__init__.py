"""
The speed layer: whatever makes a step faster than plain PyTorch does, and nothing that a text depends on. generate.py
asks it for swap_in() and read_bandwidth(); without this folder it decodes with the plain model.
"""
from fast.bandwidth import read_bandwidth
from fast.decoder import swap_in
