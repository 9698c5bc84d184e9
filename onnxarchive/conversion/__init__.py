"""Archives from other files and into them, one or many, and what two archives differ in.

`sources` opens what can be converted, `converting` has `convert`, `export` and `extract`, `batch`
many conversions at once, `differences` the comparison. This room imports archive and below.
"""
