"""Where bytes are: on this machine, at URLs, in stores. Objects are read by range, written whole."""
