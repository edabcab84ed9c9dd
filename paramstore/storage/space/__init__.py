"""Which bytes of the volumes may be written next: free extents, free note slots, volumes that take nothing more."""
