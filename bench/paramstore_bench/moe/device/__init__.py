"""A layer in parts on one device and on several: what it takes of time and memory there, by what it keeps."""
