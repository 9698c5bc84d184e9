"""Where bytes are: in files, at URLs, in stores. Objects are read by range and written whole."""
