"""What is done to records, for those who wait for it: access, updates, write-back, reading."""
