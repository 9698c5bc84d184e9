"""Edits of archives: one transaction each, and recovery from interrupted ones.

Data flows from `edit` (lock, roll back, read, the block) by `state` (what was assigned) and
`comparison` (what differs) to `commit` (how it is written).
"""
