"""Bytes on volumes and the durable map that names them: formats, volumes, extents, catalog, recovery."""
