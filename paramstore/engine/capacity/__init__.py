"""Who gets how much: host memory, upload areas, room on the volumes."""
