"""Edits of archives: one transaction each, and recovery from interrupted ones.

`transaction` has `edit` and what it shows; `placeholders` makes messages of assigned models.
`commit` decides how the changes are written and writes them; `recovery` rolls back an edit that a
crash interrupted. This room may import the room `archive` and the rooms below `archive`.
"""
