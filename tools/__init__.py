"""What develops, measures and attacks the library; `dev.py` sets up and runs it."""
