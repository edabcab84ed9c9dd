"""Values and rules: keys, schemas, places, slots, residency tables, optimizer options. No await, file or torch."""
