"""Writes archives: options, plan, sharing of equal tensors, `save`, `Writer`.

A model or source becomes a plan, which lists entries and their data; `write` writes a plan.
"""
