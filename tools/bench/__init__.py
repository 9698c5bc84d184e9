"""The benchmark (`run.py`), and smaller measurements."""
