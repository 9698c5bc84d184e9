"""Comparison of two archives: their models, weights and assets."""
