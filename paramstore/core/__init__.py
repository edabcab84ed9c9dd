"""Values and rules: keys, schemas, places, slots, residency tables, optimizer options. Without await, files and torch."""
