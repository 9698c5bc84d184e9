"""What runs the model of an archive; each runtime is imported when it is asked for."""
