"""An independent reader of volumes: what lies there, what is wrong with it, and the catalog that follows from it."""
