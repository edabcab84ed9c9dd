"""What a volume is, and its kinds: byte ranges of a file or of persistent memory, read, written and flushed."""
