"""Crashes of a store on simulated disks: a trainer's life, every state that a power cut may leave, what must hold in each."""
