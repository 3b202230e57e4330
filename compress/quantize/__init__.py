"""Quantization: of a weight, of a model layer after layer, and as a stage."""
