"""Edits of archives: one transaction each, and recovery from interrupted ones.

Data flows from `transaction` (lock, roll back, read, the block) by `changes` (what was assigned)
and `models` (what differs) to `commit` (how it is written).
"""
